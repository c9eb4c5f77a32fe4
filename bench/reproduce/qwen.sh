#!/usr/bin/env bash
# Ladder of Qwen2.5-Coder-1.5B at 4096 and 32768 tokens, with published methods and llama.cpp's own caches, then its tasks. Most wanted first.
# LLAMA_WINDOWS: the program of bench/ladder/llama_cpp. Up to 'readme' 14 minutes of an H200; RULER's qa_2 is left out, as its package lacks the texts.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
LADDER="$PY bench/ladder.py qwen-coder --device cuda --jobs 3 -t 8 --work $WORK/ladder --llama-cpp ${LLAMA_WINDOWS:-llama-windows} --answers 0"
at_4k="$LADDER -c 4096 --chunks 4 --samples 8 --out $OUT/ladder-qwen-coder.json"
at_32k="$LADDER -c 32768 --chunks 1 --scored 4096 --samples 0 --out $OUT/ladder-qwen-coder-32k.json"
TASK="--device cuda --work $WORK/tasks -t 8"
step ours 420 $at_4k --only 'full K and V (q8_0|q4_0)$|small,|waterfill, speed (14|8.5|28)%'
step at-32k 300 $at_32k --only 'full K and V q8_0$|small,|waterfill, speed (28|14|8.5)%'
step llama.cpp 240 $at_4k --only 'llama.cpp'
step published 400 $at_4k --only 'OSCAR|palu.*q6|zack.*q5|lorc.*q5|eigen.*q5|tale.*q8 |window q4_0'
step size 300 $at_4k --only 'waterfill, size (28|14|8.5)%'
step readme 300 $PY bench/tasks/divergence.py qwen-coder --device cuda --weights f16 -c 4096 --work "$WORK/readme" -t 8 --jobs 2 \
    --caches f16,q8_0,q4_0,small,28%,14%,8.5% --out "$OUT/divergence-f16-qwen-coder.json"
step published-14 400 $at_4k --only 'palu --group all --keep 0.49|zack.*0.65|lorc.*0.65|eigen.*0.58|tale.*0.82'
kinds=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,niah_multivalue,niah_multiquery,vt,cwe,fwe,qa_1
step ruler 600 $PY bench/tasks/ruler.py qwen-coder $TASK --caches f16,28%,14%,8.5%,q8_0 --groups 4K,8K,16K,32K --kinds $kinds --samples 4 \
    --parallel 4 --seconds 85 --out "$OUT/ruler-qwen-coder.json"
step bfcl 240 $PY bench/tasks/bfcl.py qwen-coder $TASK --caches f16,28%,14%,8.5%,q8_0,q4_0 --groups simple,multiple,parallel --problems 60 --parallel 8 \
    --seconds 40 --out "$OUT/bfcl-qwen-coder.json"
step conversation 400 $PY bench/tasks/conversation.py qwen-coder $TASK --caches f16,28%,14%,8.5%,q8_0 --problems 4 --turns 30 --parallel 4 \
    --seconds 80 --out "$OUT/conversation-qwen-coder.json"
step rest 900 $at_4k --only 'waterfill, (speed|size) [0-9]|balanced|smaller|smallest|window'
