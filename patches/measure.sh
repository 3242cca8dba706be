#!/usr/bin/env bash
# What the patches change on a CUDA card: operators checked, then decode and prefill after each patch (a waterfall).
#
#     patches/measure.sh SOURCES MODEL.gguf OUT [ARCHITECTURES]
#
# SOURCES is llama.cpp's folder in the unpacked sdist (tests included), OUT a folder for the build and the results,
# ARCHITECTURES what to compile for (the card's; "80" runs an A10G's code on a newer card). NPL, NPP, NTG and ROUNDS
# choose what llama-batched-bench runs. Nothing is fetched.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sources=$(cd "$1" && pwd) model=$(realpath "$2") out=$3
architectures=${4:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)}
npl=${NPL:-1,8,64} npp=${NPP:-512} ntg=${NTG:-128} rounds=${ROUNDS:-3}
mkdir -p "$out"
out=$(cd "$out" && pwd)

build() { # build LAST TARGET...: the sources with the patches up to LAST
    local last=$1
    shift
    cmake -G Ninja -S "$sources" -B "$out/build" -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DGGML_NATIVE=OFF \
        "-DCMAKE_CUDA_ARCHITECTURES=$architectures" -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--exclude-libs,ALL \
        -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
        "-DCMAKE_PROJECT_INCLUDE=$here/apply.cmake" "-DLLAMA_PATCHES_LAST=$last" -DLLAMA_PATCHES_NEXT=ON >"$out/configure.log"
    grep "llama.cpp's patches" "$out/configure.log" || echo "-- stock llama.cpp"
    cmake --build "$out/build" --target "$@" >"$out/build.log" 2>&1 || { tail -30 "$out/build.log"; exit 1; }
    rm -rf "${out:?}/$last" && cp -a "$out/build/bin" "$out/$last"
}

steps=(0000)
for patch in "$here"/llama.cpp/*.patch "$here"/llama.cpp/next/*.patch; do
    name=$(basename "$patch")
    steps+=("${name%%-*}")
done
for step in "${steps[@]}"; do
    build "$step" llama-batched-bench
done
build 9999 llama-batched-bench test-backend-ops test-kv-mask

echo "== operators, eager and in CUDA graphs"
export LD_LIBRARY_PATH=$out/9999
for eager in 1 ""; do
    for operator in GATED_DELTA_NET GATED_DELTA_NET_CACHE_FUSION SSM_CONV_IDS SSM_CONV SSM_CONV_BIAS_SILU; do
        # GGML_CUDA_DISABLE_GRAPHS counts as set when it is there at all
        env ${eager:+GGML_CUDA_DISABLE_GRAPHS=1} "$out/9999/test-backend-ops" test -b CUDA0 -o "$operator" \
            >"$out/operators.log" 2>&1 || { grep -E "FAIL|error|not supported" "$out/operators.log" | head; }
        echo "${eager:+eager }$operator: $(grep -E "tests passed" "$out/operators.log" || echo failed)"
    done
done
"$out/9999/test-kv-mask"
"$out/9999/test-kv-mask" --perf
"$out/9999/test-backend-ops" perf -b CUDA0 -o GATED_DELTA_NET 2>/dev/null | grep GATED | tee "$out/perf.txt"
"$out/9999/test-backend-ops" perf -b CUDA0 -o SSM_CONV_IDS 2>/dev/null | grep SSM | tee -a "$out/perf.txt"

echo "== llama-batched-bench, $rounds rounds in turn: t/s of prompts (S_PP) and of generation (S_TG) by patch"
: >"$out/waterfall.jsonl"
for round in $(seq "$rounds"); do
    for step in "${steps[@]}"; do
        LD_LIBRARY_PATH=$out/$step "$out/$step/llama-batched-bench" -m "$model" -ngl 99 -fa on -kvu -b 8192 -ub 2048 \
            -c 49152 -npp "$npp" -ntg "$ntg" -npl "$npl" --output-format jsonl 2>/dev/null |
            sed -n "s/^{/{\"round\": $round, \"patches\": \"$step\", /p" >>"$out/waterfall.jsonl"
    done
done
python3 - "$out/waterfall.jsonl" <<'PY'
import collections, json, statistics, sys
rows = collections.defaultdict(list)
for line in open(sys.argv[1]):
    row = json.loads(line)
    rows[row["patches"], row["pl"]].append((row["speed_pp"], row["speed_tg"]))
print("| patches up to | sequences | prompt tok/s (median) | generated tok/s (median, lowest to highest) |")
print("|---|--:|--:|--:|")
for (patches, sequences), found in sorted(rows.items()):
    pp, tg = zip(*found)
    spread = f"{min(tg):,.0f} to {max(tg):,.0f}"
    print(f"| {patches} | {sequences} | {statistics.median(pp):,.0f} | {statistics.median(tg):,.0f} ({spread}) |")
PY
