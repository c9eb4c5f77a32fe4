#!/usr/bin/env bash
# Caches by turns, as on a card (CARD=rtx4090) or on the GPU as it is (CARD=none): 8B, 7B with 32 KV heads, Qwen2.5-Coder-1.5B.
# In kind the module must be built with the arguments that `bench/gpu/consumer.py rtx4090 --cmake-args` prints, and be first on PYTHONPATH.
# QWEN: a folder with qwen.gguf and what convert makes of it, qwen-28.gguf, qwen-14.gguf and qwen-8.5.gguf. CONSUMER_CHOICE=48,0: so many readers
# beside which rows are read little faster than the card's memory is (an H200; beside 36 f16 rows are read at 1.17 TB/s, beside 48 at 1.00).
# 13 minutes of an H200, 9 with CARD=none.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
CARD=${CARD:-rtx4090} M=$WORK/models QWEN=${QWEN:-$WORK}
mkdir -p "$M"
made() { [ -f "$M/$2.gguf" ] || { $PY bench/inputs/random_model.py "$1" "$M/$2.part" "${@:3}" >>"$OUT/models.log" 2>&1 && mv "$M/$2.part" "$M/$2.gguf"; }; }
made 8b 8b & made 7b 7b & made 7b 7b-14 --plan 14 --scales group &
for plan in 28 14 8.5; do made 8b 8b-$plan --plan $plan --scales group & done
wait
beside() { # NAME SECONDS DEPTHS CACHE…
    local name=$1 limit=$2 depths=$3 prefix=()
    shift 3
    [ "$CARD" = none ] || prefix=("$PY" bench/gpu/consumer.py "$CARD" --report "$OUT/$name.report.json" --)
    step "$name" "$limit" "${prefix[@]}" "$PY" bench/gpu/beside.py "$@" --depths "$depths" --turns 3 --steps 12 --json "$OUT/$name.json"
}
all=0,4096,16384,65536,131072
beside 8b 200 $all "$M/8b.gguf=f16" "$M/8b-14.gguf" "$M/8b.gguf=q8_0" "$M/8b.gguf=small"
beside 8b-more 200 $all "$M/8b.gguf=f16" "$M/8b-28.gguf" "$M/8b-8.5.gguf" "$M/8b.gguf=q4_0"
[ ! -f "$QWEN/qwen.gguf" ] || beside qwen 120 $all "$QWEN"/qwen.gguf={f16,q8_0,q4_0,small} "$QWEN"/qwen-{28,14,8.5}.gguf
beside 7b 300 0,4096,16384,65536 "$M/7b.gguf=f16" "$M/7b-14.gguf" "$M/7b.gguf=q8_0"
[ "$CARD" = none ] || step times 400 $PY bench/gpu/consumer.py "$CARD" --no-readers -- $PY bench/attention_times.py "$OUT/$CARD.json" \
    --gpu "an RTX 4090, from parts" --capabilities 8.6,8.9 --shared-kb 99 --gb-per-s 937
table() { step "table-$1" 60 $PY bench/gpu/card_table.py "$1-${CARD/none/gpu}" --folder "$OUT/cards" --of "$2" "${@:3}"; }
table 8b "Llama-3.1-8B's shape, random Q4_0 weights, rows with four scales" "$OUT/8b.json" "$OUT/8b-more.json"
table 7b "Llama-2-7B's shape, random Q4_0 weights, rows with four scales" "$OUT/7b.json"
[ ! -f "$OUT/qwen.json" ] || table qwen "Qwen2.5-Coder-1.5B, Q4_K_M, files of convert's defaults" "$OUT/qwen.json"
