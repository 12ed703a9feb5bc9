#!/usr/bin/env bash
# Install the Debian packages that building, testing and the demo need. Says nothing to apt when all
# are there. Options: --quiet (print only when something is done), --check (install nothing; exit 1
# and name what is missing).
set -euo pipefail

quiet=0
check=0
for arg in "$@"; do
    case $arg in
    --quiet) quiet=1 ;;
    --check) check=1 ;;
    *)
        echo "setup.sh: '$arg' is no option; there are --quiet and --check" >&2
        exit 2
        ;;
    esac
done

# Package, and how to see without dpkg that what it brings is there: c:COMMAND, p:PKG-CONFIG MODULE,
# h:HEADER, m:PYTHON MODULE.
needs="
build-essential|c:gcc c:g++ c:make
cmake|c:cmake
ninja-build|c:ninja
pkg-config|c:pkg-config
git|c:git
clang|c:clang
clang-format|c:clang-format
libdnnl-dev|h:oneapi/dnnl/dnnl.h
libhwloc-dev|p:hwloc
libpcre2-dev|p:libpcre2-8
libutf8proc-dev|p:libutf8proc
libjansson-dev|p:jansson
libcmocka-dev|p:cmocka
openmpi-bin|c:mpirun.openmpi
libopenmpi-dev|c:mpicc.openmpi
mpich|c:mpirun.mpich
libmpich-dev|c:mpicc.mpich
python3|c:python3
python3-numpy|m:numpy
python3-pip|m:pip
python3-venv|m:ensurepip
"
# Debian's python3 sees its own packages, whatever other python3 comes first in PATH.
python=/usr/bin/python3
[ -x "$python" ] || python=python3

is_there() {
    case $1 in
    c:*) command -v "${1#c:}" >/dev/null 2>&1 ;;
    p:*) pkg-config --exists "${1#p:}" 2>/dev/null ;;
    h:*) [ -e "/usr/include/${1#h:}" ] || ls /usr/include/*/"${1#h:}" >/dev/null 2>&1 ;;
    m:*) "$python" -c "import ${1#m:}" >/dev/null 2>&1 ;;
    esac
}

missing_packages() {
    local line package signs sign
    while IFS= read -r line; do
        [ -n "$line" ] || continue
        package=${line%%|*}
        signs=${line#*|}
        for sign in $signs; do
            if ! is_there "$sign"; then
                echo "$package"
                break
            fi
        done
    done <<<"$needs"
    # The sanitizers of clang come in a package named by clang's version.
    if command -v clang >/dev/null 2>&1; then
        local major runtime
        major=$(clang -dumpversion | cut -d. -f1)
        runtime=$(clang -print-file-name=libclang_rt.asan-x86_64.a)
        [ -e "$runtime" ] || [ "$(uname -m)" != x86_64 ] || echo "libclang-rt-$major-dev"
    fi
}

missing=$(missing_packages)
if [ -z "$missing" ]; then
    [ $quiet = 1 ] || echo "setup: everything is there"
    exit 0
fi
names=$(echo "$missing" | tr '\n' ' ')
if [ $check = 1 ]; then
    echo "setup: missing: $names" >&2
    exit 1
fi

cannot() {
    {
        echo "setup: missing: $names"
        echo "setup: $1"
        echo "setup: as root: apt-get update && apt-get install -y --no-install-recommends $names"
    } >&2
    exit 1
}
command -v apt-get >/dev/null 2>&1 || cannot "there is no apt-get here; install what brings the same"
as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null 2>&1 || cannot "this needs root, and there is no sudo"
    sudo -n true 2>/dev/null || [ -t 0 ] || cannot "this needs root, and sudo asks for a password"
    as_root=(sudo)
fi

install_packages() {
    # shellcheck disable=SC2086
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends $1 >"$log" 2>&1
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "setup: installing $names" >&2
"${as_root[@]}" apt-get update -qq >"$log" 2>&1 || {
    tail -5 "$log" >&2
    cannot "apt-get update failed"
}
install_packages "$names" || {
    tail -5 "$log" >&2
    cannot "apt-get install failed"
}
# clang, now there, may name one more package (its sanitizers).
left=$(missing_packages | tr '\n' ' ')
if [ -n "$left" ]; then
    install_packages "$left" || true
    left=$(missing_packages | tr '\n' ' ')
    if [ -n "$left" ]; then
        names=$left
        cannot "still missing after installing"
    fi
fi
[ $quiet = 1 ] || echo "setup: done"
