#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone, public ones as C++ too. Templates (*_tpl.h) are text, not headers.
set -uo pipefail
cd "$(dirname "$0")/.."
bad=0
n=0
# Headers of MPI compile with any MPI's flags; without one they are left out.
mpi=()
if command -v mpicc.openmpi >/dev/null; then
    for flag in $(mpicc.openmpi --showme:compile); do [[ $flag == -I* ]] && mpi+=(-isystem "${flag#-I}"); done
fi
flags=("${mpi[@]}" -DDCP_SOURCE_DIR='"."' -DDCP_BINARY_DIR='"."' -std=c11 -D_GNU_SOURCE -DDCP_BUILD_AVX2=1 -DDCP_BUILD_AVX512=1 -Iinclude -Isrc -I. -Itests
    -Wall -Wextra -Wno-unused-function -Werror -fsyntax-only)

# Headers of vector code get what the .c files of their suffix get.
isa_flags() {
    [ "$(uname -m)" = x86_64 ] || return 0
    case $1 in
    *avx512*) echo -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx512cd -mavx2 -mfma -mf16c ;;
    *_amx.h) echo -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx512cd -mavx512bf16 -mavx2 -mfma -mf16c ;;
    *avx2*) echo -mavx2 -mfma -mf16c ;;
    esac
}
for h in $(find include src engine cli tests bench -name '*.h' ! -name '*_tpl.h' 2>/dev/null | sort); do
    [ "$h" = include/dcpattn/mpi.h ] && [ ${#mpi[@]} = 0 ] && continue
    n=$((n + 1))
    # shellcheck disable=SC2046
    printf '#include "%s"\nextern int only_this;\n' "$(realpath "$h")" \
        | gcc "${flags[@]}" $(isa_flags "$h") -x c - || { bad=$((bad + 1)); echo "$h does not compile alone"; }
done
for h in include/dcpattn/*.h; do
    [ "$h" = include/dcpattn/mpi.h ] && [ ${#mpi[@]} = 0 ] && continue
    n=$((n + 1))
    printf '#include "%s"\n' "$(realpath "$h")" | g++ "${mpi[@]}" -std=c++11 -Wall -Wextra -Werror -Iinclude -fsyntax-only -x c++ - \
        || { bad=$((bad + 1)); echo "$h does not compile alone as C++"; }
done
echo "check_alone: $n headers, $bad faults"
[ $bad = 0 ]
