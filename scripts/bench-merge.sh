#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time the merge and write the table and the plot of docs/. Usage: bench-merge.sh [BUILD FOLDER]
# BENCH_SECONDS: for each shape, all algorithms together (2). BENCH_ONLY=1: run, leave docs/ alone. BENCH_LARGE=0 or 1: whether
# the published form with temporaries runs at 16,384 x 96 x 512 (18 GiB; default: where they are free), or only says its bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
exe=$build/dcp-attn
out=$build/bench-merge
seconds=${BENCH_SECONDS:-2}
shapes='1,96,512;8,96,512;64,128,512;512,96,512;1,64,128;64,64,128'
mkdir -p "$out"
rm -f "$out"/*.json

say() { echo "bench-merge: $*" >&2; }
bench() { # NAME COMMAND...: a run that fails is left out, and said
    local name=$1
    shift
    say "$name"
    "$@" --json >"$out/$name.json" || {
        say "$name failed, left out"
        rm -f "$out/$name.json"
    }
}
common=(bench merge --time "$seconds")
mpi=
for candidate in mpirun.openmpi mpirun; do
    if command -v $candidate >/dev/null && $candidate --version 2>/dev/null | grep -q "Open MPI"; then
        mpi=$candidate
        break
    fi
done
if [ -n "$mpi" ]; then
    # Open MPI refuses root without these.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    bench 10-mpi-2 "$mpi" -n 2 "$exe" "${common[@]}" --shape "$shapes"
    bench 11-mpi-2-private env DCP_ATTN_MPI_SHARED=0 "$mpi" -n 2 "$exe" "${common[@]}" --shape "$shapes"
else
    say "no Open MPI: no comparison with it"
fi
bench 20-shm-2 "$exe" "${common[@]}" -n 2 --shape "$shapes"
bench 30-shm-2-in-place "$exe" "${common[@]}" -n 2 --in-place --dtype f32,bf16 --shape "$shapes"
bench 40-shm-4 "$exe" "${common[@]}" -n 4 --shape "$shapes"
bench 50-shm-8 "$exe" "${common[@]}" -n 8 --shape "$shapes"
# The memory of one large chunk. The published form with temporaries needs 9 GiB a rank: it runs where that fits, else create
# alone says its bytes.
available=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
iters=0
[ "$available" -lt 21 ] || iters=1
iters=${BENCH_LARGE:-$iters}
bench 60-large "$exe" bench merge -n 2 --in-place --shape 16384,96,512 --iters $iters --deadline 300
[ "${BENCH_ONLY:-0}" = 1 ] && exit 0
python=/usr/bin/python3
[ -x "$python" ] || python=python3
exec "$python" scripts/bench_merge.py docs "$out"/*.json
