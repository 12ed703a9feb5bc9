#!/usr/bin/env bash
# clang-format every C source and header. --check changes nothing and fails if anything would change.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run --Werror)
find include src engine cli tests bench fuzz examples \( -name '*.c' -o -name '*.h' \) -print0 2>/dev/null \
    | xargs -0 -r clang-format "${mode[@]}"
