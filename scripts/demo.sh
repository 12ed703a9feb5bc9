#!/usr/bin/env bash
# A small real model finds a fact in a document, alone and with its KV cache over four ranks.
# Usage: demo.sh [BUILD FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
exe=$build/dcp-attn

scripts/setup.sh --quiet
[ -x "$exe" ] || {
    echo "demo: there is no $exe; run make first" >&2
    exit 1
}
model=$(scripts/fetch-model.sh smollm2-135m | tail -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/ledger.sh 60 >"$work/document.txt"

echo "A document of $(wc -l <"$work/document.txt") lines; in one of them:"
grep 'code of the vault is' "$work/document.txt" | sed 's/^/  /'
echo "Its last line asks:"
tail -n 1 "$work/document.txt" | sed 's/^/  /'

for n in 1 4; do
    echo
    echo "== $n rank$([ $n = 1 ] || echo s): $exe generate -m smollm2-135m -n $n -f document.txt --max-tokens 32"
    "$exe" generate -m "$model" -n $n -f "$work/document.txt" --temp 0 --max-tokens 32 | tee "$work/$n.txt"
done
echo
if cmp -s "$work/1.txt" "$work/4.txt"; then
    echo "Both texts are the same, and each of the four ranks held a quarter of the keys."
    [ "$(nproc)" -ge 4 ] || echo "(Four ranks share $(nproc) cores here: their times are those of ranks that wait for a core.)"
else
    echo "The texts differ: for this model and prompt that is a fault." >&2
    exit 1
fi
# Open MPI wants to be told where there are fewer cores than ranks, and that root is meant.
mpirun="mpirun"
if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    [ "$(nproc)" -ge 4 ] || mpirun="$mpirun --oversubscribe"
    [ "$(id -u)" != 0 ] || mpirun="$mpirun --allow-run-as-root"
fi
cat <<END

Try next:
  $exe generate -m smollm2-135m -n 4 -p "Name three rivers in Europe." --temp 0.7 --seed 1
  scripts/ledger.sh 60 > document.txt     # the document above
  $exe generate -m smollm2-135m -n 3 -f document.txt --max-tokens 32 --json
  $mpirun -n 4 $exe generate -m smollm2-135m -f document.txt --max-tokens 32
  scripts/fetch-model.sh gemma3-270m      # one KV head: a split by heads cannot shard it at all
  $exe generate -m gemma3-270m -n 4 --raw -p "The planets of the solar system are"
  $exe info
  make check
END
