#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tokens per second side by side with llama.cpp: same weights, same cores, turns taken in one run.
# llama.cpp comes as the source that PyPI's llama-cpp-python carries and is built outside this tree,
# in ${DCP_ATTN_CACHE:-${XDG_CACHE_HOME:-~/.cache}/dcp-attn}/llama.
# Usage: bench-llama.sh [BUILD FOLDER] [threads] [repetitions] [depths] [isa] [models]
#                       (build 2 3 0,4096 auto "smollm2-135m gemma3-270m")
# isa avx512 holds both to AVX-512 with VNNI and BF16 dot products, without AMX: llama.cpp gets a
# build of its own for that. Where the CPU has no AMX it is the same as auto, and the output says so.
# BENCH_RUN holds a command that every run is put behind, as "taskset -c 0,1" or "nice -n -10".
# BENCH_RANKS=0 leaves out the runs with a rank per thread.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
threads=${2:-2}
reps=${3:-3}
depths=${4:-0,4096}
isa=${5:-auto}
models=${6:-smollm2-135m gemma3-270m}
read -ra run <<<"${BENCH_RUN:-}"
version=0.3.36
cache=${DCP_ATTN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dcp-attn}
home=$cache/llama
has() { grep -qw "$1" /proc/cpuinfo; }
case $isa in
auto) folder=build ;;
avx512)
    folder=build
    if has amx_tile; then
        folder=build-avx512
    else
        echo "bench-llama: no AMX here, so that avx512 is what auto takes as well" >&2
    fi
    ;;
*)
    echo "bench-llama: isa is $isa; auto and avx512 are possible" >&2
    exit 1
    ;;
esac
bench=$home/$folder/bin/llama-bench

if [ ! -x "$bench" ]; then
    echo "bench-llama: building llama.cpp in $home" >&2
    mkdir -p "$home"
    python3 -m pip download --quiet --no-deps --no-binary :all: -d "$home" \
        "llama-cpp-python==$version" >&2
    tar -C "$home" -xzf "$home/llama_cpp_python-$version.tar.gz"
    # Level by level instead of "native": what the CPU has, with AMX left out where gcc 12 or the
    # kernel does not give it.
    flags=()
    has avx2 && flags+=(-DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON)
    has avx512f && flags+=(-DGGML_AVX512=ON)
    has avx_vnni && flags+=(-DGGML_AVX_VNNI=ON)
    has avx512_vnni && flags+=(-DGGML_AVX512_VNNI=ON)
    has avx512_bf16 && flags+=(-DGGML_AVX512_BF16=ON)
    [ "$folder" = build ] && has amx_tile && flags+=(-DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON)
    cmake -S "$home/llama_cpp_python-$version/vendor/llama.cpp" -B "$home/$folder" \
        -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
        "${flags[@]}" >"$home/configure.log"
    cmake --build "$home/$folder" --target llama-bench -j "$(nproc)" >"$home/build.log"
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for model in $models; do
    path=$(scripts/fetch-model.sh "$model" | tail -n 1)
    for round in $(seq "$reps"); do
        for fa in 0 1; do
            "${run[@]}" "$bench" -m "$path" -t "$threads" -fa $fa -p 512 -n 32 -d "$depths" -r 1 -o json \
                >"$out/llama.$model.$fa.$round.json" 2>/dev/null
        done
        "${run[@]}" "$build/dcp-attn" bench generate -m "$path" -n 1 -t "$threads" -d "$depths" \
            --isa "$isa" -r 1 --json \
            >"$out/one.$model.0.$round.json"
        [ "${BENCH_RANKS:-1}" = 0 ] && continue
        "${run[@]}" "$build/dcp-attn" bench generate -m "$path" -n "$threads" -t 1 -d "$depths" \
            --isa "$isa" -r 1 --json >"$out/many.$model.0.$round.json"
    done
done
python3 - "$out" "$threads" <<'E2'
import collections, glob, json, os, statistics, sys
out, threads = sys.argv[1], int(sys.argv[2])
rates = collections.defaultdict(list)  # (model, test, who) -> tokens/s of each round
for path in sorted(glob.glob(out + "/*.json")):
    who, model, setting, _, _ = os.path.basename(path).split(".")
    data = json.load(open(path))
    if who == "llama":
        for row in data:
            n, kind = (row["n_prompt"], "pp") if row["n_prompt"] else (row["n_gen"], "tg")
            depth = row.get("n_depth", 0)
            test = f"{kind}{n}" + (f" @ d{depth}" if depth else "")
            rates[model, test, "llama" + setting].append(row["avg_ts"])
    else:
        for row in data["rows"]:
            rates[model, row["test"], who].append(row["tokens_per_s_median"])
print(f"| model | test | llama.cpp, better of -fa 0 and 1 | 1 rank x {threads} threads | ratio | {threads} ranks x 1 thread | ratio to 1 rank |")
print("|---|---|---|---|---|---|---|")
for model, test in dict.fromkeys((m, t) for m, t, w in rates):
    med = lambda who: statistics.median(rates[model, test, who] or [float("nan")])
    llama = max(med("llama0"), med("llama1"))
    many = f"{med('many'):.1f} | {med('many') / med('one'):.2f}" if rates[model, test, "many"] else "- | -"
    print(f"| {model} | {test} | {llama:.1f} | {med('one'):.1f} | {med('one') / llama:.2f} | {many} |")
E2
