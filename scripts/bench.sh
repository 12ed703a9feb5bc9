#!/usr/bin/env bash
# Build and run the benches. Usage: bench.sh [BUILD FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
cmake -S . -B "$build" -DDCP_BENCH=ON >/dev/null
cmake --build "$build" -j "$(nproc)"
for bench in "$build"/bench_*; do
    [ -x "$bench" ] && [ -f "$bench" ] || continue
    echo "== $(basename "$bench")"
    "$bench"
done
