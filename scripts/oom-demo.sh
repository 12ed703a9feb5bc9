#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The published out-of-memory case under a memory cap per rank, three ways: two ranks at the full shape, eight ranks at 2,048
# tokens, eight ranks at the full shape by formula. Usage: oom-demo.sh [BUILD FOLDER] [more options of `bench oom`]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
shift || true
exe=$build/dcp-attn

# Two ranks hold q, result, keys and 64 MiB of workspace each: 6.6 GiB together. The published forms are refused before they touch
# what they ask for.
available=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
if [ "$available" -ge 8 ]; then
    "$exe" bench oom -n 2 --tokens 16384 --formula-ranks 8 "$@"
else
    echo "oom-demo: $available GiB are free and the full shape on two ranks needs 8: a quarter of its tokens instead" >&2
    "$exe" bench oom -n 2 --tokens 4096 "$@"
fi
echo
"$exe" bench oom -n 8 --tokens 2048 "$@"
