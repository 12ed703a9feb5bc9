#!/usr/bin/env bash
# Tokens per second side by side with llama.cpp: same weights, same cores, turns taken in one run.
# llama.cpp comes as the source that PyPI's llama-cpp-python carries and is built outside this tree,
# in ${DCP_ATTN_CACHE:-${XDG_CACHE_HOME:-~/.cache}/dcp-attn}/llama.
# Usage: bench-llama.sh [BUILD FOLDER] [threads] [repetitions] [depths]      (build 2 3 0,4096)
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
threads=${2:-2}
reps=${3:-3}
depths=${4:-0,4096}
version=0.3.36
cache=${DCP_ATTN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dcp-attn}
home=$cache/llama
bench=$home/build/bin/llama-bench

if [ ! -x "$bench" ]; then
    echo "bench-llama: building llama.cpp in $home" >&2
    mkdir -p "$home"
    python3 -m pip download --quiet --no-deps --no-binary :all: -d "$home" \
        "llama-cpp-python==$version" >&2
    tar -C "$home" -xzf "$home/llama_cpp_python-$version.tar.gz"
    # Level by level instead of "native": what the CPU has, with AMX left out where gcc 12 or the
    # kernel does not give it.
    flags=()
    has() { grep -qw "$1" /proc/cpuinfo; }
    has avx2 && flags+=(-DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON)
    has avx512f && flags+=(-DGGML_AVX512=ON)
    has avx512_vnni && flags+=(-DGGML_AVX512_VNNI=ON)
    has avx512_bf16 && flags+=(-DGGML_AVX512_BF16=ON)
    has amx_tile && flags+=(-DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON)
    cmake -S "$home/llama_cpp_python-$version/vendor/llama.cpp" -B "$home/build" \
        -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
        "${flags[@]}" >"$home/configure.log"
    cmake --build "$home/build" --target llama-bench -j "$(nproc)" >"$home/build.log"
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for model in smollm2-135m gemma3-270m; do
    path=$(scripts/fetch-model.sh "$model" | tail -n 1)
    for round in $(seq "$reps"); do
        for fa in 0 1; do
            "$bench" -m "$path" -t "$threads" -fa $fa -p 512 -n 32 -d "$depths" -r 1 -o json \
                >"$out/llama.$model.$fa.$round.json" 2>/dev/null
        done
        "$build/dcp-attn" bench generate -m "$path" -n 1 -t "$threads" -d "$depths" -r 1 --json \
            >"$out/one.$model.0.$round.json"
        "$build/dcp-attn" bench generate -m "$path" -n "$threads" -t 1 -d "$depths" -r 1 --json \
            >"$out/many.$model.0.$round.json"
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
    med = lambda who: statistics.median(rates[model, test, who])
    llama = max(med("llama0"), med("llama1"))
    print(f"| {model} | {test} | {llama:.1f} | {med('one'):.1f} | {med('one') / llama:.2f} | {med('many'):.1f} | {med('many') / med('one'):.2f} |")
E2
