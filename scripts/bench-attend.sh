#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time attention, products and generation and write their tables and plots into docs/. Usage: bench-attend.sh [BUILD FOLDER]
# BENCH_SECONDS: for a line of the tables (2). BENCH_ONLY=1: run, leave docs/ alone. BENCH_MODELS=0: no generation (it needs the
# models of scripts/fetch-model.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
exe=$build/dcp-attn
out=$build/bench-attend
seconds=${BENCH_SECONDS:-2}
cpus=$(nproc)
mkdir -p "$out"
rm -f "$out"/*.json

bench() { # NAME OPTIONS...: a run that fails is left out, and said
    local name=$1
    shift
    echo "bench-attend: $name" >&2
    "$exe" bench "$@" --json >"$out/$name.json" || {
        echo "bench-attend: $name failed, left out" >&2
        rm -f "$out/$name.json"
    }
}
common=(--time "$seconds")
bench 10-attend attend "${common[@]}" -n 1 -t "$cpus"
bench 11-attend-ranks attend "${common[@]}" -n "$cpus" -t 1
bench 12-extend extend "${common[@]}" -n 1 -t "$cpus"
bench 20-context attend "${common[@]}" --case gqa-decode,mla-decode --tokens 1 --keys 1K..128K --factor 2 -n 1 -t "$cpus"
bench 21-context-extend extend "${common[@]}" --case gqa-extend --keys 1K..32K --factor 2 -n 1 -t "$cpus"
bench 30-ranks attend "${common[@]}" --case gqa-decode,mla-decode --tokens 1 -n 1,2,4,8 -t 1
bench 40-types attend "${common[@]}" --case gqa-decode,mla-decode --tokens 1 --dtype f32,f16,bf16,int8,fp8 -n 1 -t "$cpus"
# Tiles are in the list where the machine has them: the first runs have asked.
levels=scalar,avx2,avx512
grep -q '"isa": "amx"' "$out/10-attend.json" && levels+=,amx
grep -q '"isa": "avx2"' "$out/10-attend.json" && levels=scalar,avx2
bench 41-isa attend "${common[@]}" --case gqa-decode --keys 8K --isa "$levels" -n 1 -t "$cpus"
bench 50-products product "${common[@]}" --types Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q4_K,Q5_K,Q6_K,F16,BF16,F32 -n 1 -t "$cpus"
bench 51-products-exact product "${common[@]}" --exact -n 1 -t "$cpus"
if [ "${BENCH_MODELS:-1}" = 1 ]; then
    for model in smollm2-135m gemma3-270m; do
        path=$(scripts/fetch-model.sh "$model" | tail -n 1) || continue
        depths=0,4096
        [ "$model" = gemma3-270m ] && depths=0,4096,32256
        bench "60-generate-$model-1" generate -m "$path" -n 1 -t "$cpus" -g 128 -d "$depths"
        bench "61-generate-$model-$cpus" generate -m "$path" -n "$cpus" -t 1 -g 128 -d "$depths"
    done
fi
[ "${BENCH_ONLY:-0}" = 1 ] && exit 0
python=/usr/bin/python3
[ -x "$python" ] || python=python3
exec "$python" scripts/bench_attend.py docs "$out"/*.json
