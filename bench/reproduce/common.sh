# Sourced by the scripts beside it. OUT: results and logs; WORK: files on the way; GPU: its number.
# A step is done once: a second call goes on where the first was cut off. Its last line is printed when it ends.
OUT=${OUT:-build/reproduce} WORK=${WORK:-build/reproduce-work} PY=${PY:-python3}
mkdir -p "$OUT" "$WORK"
export CUDA_VISIBLE_DEVICES=${GPU:-0} PYTHONUNBUFFERED=1

# step NAME SECONDS COMMAND…
step() {
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    [ -f "$OUT/$name.done" ] && return 0
    timeout -k 5 "$limit" "$@" >>"$OUT/$name.log" 2>&1 || status=$?
    [ $status -eq 0 ] && touch "$OUT/$name.done"
    echo "$(date +%T) $name: status $status, $((SECONDS - begin)) s; $(grep -v '^$' "$OUT/$name.log" | tail -1 | cut -c1-150)"
}
