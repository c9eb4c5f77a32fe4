#!/usr/bin/env bash
# Ladders of SmolLM2 and Gemma 3 270M, side by side on one GPU: 5 minutes of an H200 without published methods.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ladder() { # MODEL TOKENS ONLY
    $PY bench/ladder.py "$1" --device cuda --jobs 2 -t 8 --work "$WORK/ladder-$1" --llama-cpp "${LLAMA_WINDOWS:-llama-windows}" -c "$2" --chunks 4 \
        --samples 8 --answers 32 --tokens 256 --out "$OUT/ladder-$1.json" --only "$3"
}
export -f ladder
export PY OUT WORK LLAMA_WINDOWS
first='full K and V (q8_0|q4_0)$|window q4_0|small,|waterfill, (speed|size) (28|14|8.5)%|llama.cpp'
published='OSCAR|palu.*q6|zack.*q5|lorc.*q5|eigen.*q5|tale.*q8 '
for only in first published; do
    step smollm2-$only 400 bash -c "ladder smollm2 4096 '${!only}'" &
    step gemma3-270m-$only 400 bash -c "ladder gemma3-270m 2048 '${!only}'" &
    wait
done
