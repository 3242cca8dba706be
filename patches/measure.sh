#!/usr/bin/env bash
# What the patches change on a CUDA card, from programs that are built already (nothing is built, nothing is fetched):
#
#     patches/measure.sh BIN MODEL.gguf OUT [PART...]
#
# BIN has libraries and programs of a build with all patches of llama.cpp/ (and next/, if any) and with switches.patch, and
# mul-mat-speed and held-speed (their sources lie beside this script). PARTs, in this order by default:
#
#     operators   test-backend-ops of the changed operators, eager and in CUDA graphs           about 100 s
#     products    which kernel is fastest for which number of columns, by type and shape         about  60 s
#     waterfall   llama-batched-bench, patch by patch (by switches): 1, 8, 64 sequences          about 120 s
#     prompt      llama-batched-bench, prompts of 2,048 and 8,192 tokens (the first warm up)      about  60 s
#     held        steps of 1, 8, 64 sequences beside 128k cells that others hold                  about  60 s
#     crossover   llama-batched-bench, 1 to 64 sequences by kernel                               about  90 s
#     logits      rows.py: logits with all switches off and on, compared (needs llama-cpp-python)
#
# SECONDS_MAX (default 520) is when parts that have not begun are left out. ROUNDS (default 3) is for the waterfall.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$(cd "$1" && pwd) model=$(realpath "$2") out=$3
shift 3
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(operators products waterfall prompt held crossover)
rounds=${ROUNDS:-3} limit=${SECONDS_MAX:-520}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export LD_LIBRARY_PATH=$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# The switches of each step: all patches up to that one. 0001 to 0003 have none.
off_0004=GGML_CUDA_REFUSE=gdn_ids,conv_ids
off_0005=GGML_CUDA_REFUSE=conv_ids
off_0006=GGML_CUDA_DEQUANT_MIN_BATCH=1000000000
off_0007=GGML_CUDA_GDN_CHUNKED=0
off_0008=GGML_CUDA_MMQ_THIN_MAX=0
off_0009=GGML_CUDA_FA_DENSE=1
off_0010=LLAMA_N_KV_PAD_256=1
off_0011=GGML_CUDA_MMVQ_ONE_ROW=1
off_0012=GGML_CUDA_QUANTIZE_ALWAYS=1
off_0013=GGML_CUDA_MMQ_MID_MAX=0
off_after_0010="$off_0011 $off_0012 $off_0013"
steps=(0003 0004 0005 0006 0007 0008 0009 0010 0011 0012 0013)
declare -A switches=(
    [0003]="$off_0004 $off_0006 $off_0007 $off_0008 $off_0009 $off_0010 $off_after_0010"
    [0004]="$off_0005 $off_0006 $off_0007 $off_0008 $off_0009 $off_0010 $off_after_0010"
    [0005]="$off_0006 $off_0007 $off_0008 $off_0009 $off_0010 $off_after_0010"
    [0006]="$off_0007 $off_0008 $off_0009 $off_0010 $off_after_0010"
    [0007]="$off_0008 $off_0009 $off_0010 $off_after_0010"
    [0008]="$off_0009 $off_0010 $off_after_0010"
    [0009]="$off_0010 $off_after_0010"
    [0010]="$off_after_0010"
    [0011]="$off_0012 $off_0013"
    [0012]="$off_0013"
    [0013]=""
)

bench() { # bench LABEL SWITCHES OPTION...: JSON lines
    local label=$1 set=$2
    shift 2
    # shellcheck disable=SC2086
    env $set "$bin/llama-batched-bench" -m "$model" -ngl 99 -fa on -kvu -b 8192 -ub 2048 "$@" --output-format jsonl \
        2>"$out/bench.log" | sed -n "s/^{/{\"label\": \"$label\", /p"
    [ "${PIPESTATUS[0]}" = 0 ] || { echo "$label failed:" >&2; tail -5 "$out/bench.log" >&2; }
}

operators() {
    local eager operator failed=0
    for eager in 1 ""; do
        for operator in GATED_DELTA_NET GATED_DELTA_NET_CACHE_FUSION SSM_CONV_IDS SSM_CONV "FLASH_ATTN_EXT -p n_kv_max=[1-9]" \
            "MUL_MAT -p type_a=q[456]_K.*n=[0-9]+,k=(512|2560|9216)" MUL_MAT_SHARED \
            "MUL_MAT -p type_a=(q8_0|q4_0|q[456]_K),type_b=f32.*n=1," "MUL_MAT_VEC_FUSION -p type=(q8_0|q4_0|q[456]_K)"; do
            # GGML_CUDA_DISABLE_GRAPHS counts as set when it is there at all
            # shellcheck disable=SC2086
            env ${eager:+GGML_CUDA_DISABLE_GRAPHS=1} timeout 150 "$bin/test-backend-ops" test -b CUDA0 -o $operator \
                >"$out/operators.log" 2>&1 || { failed=1; grep -aE "FAIL|error|ERR|ASSERT" "$out/operators.log" | head -15; tail -3 "$out/operators.log"; }
            echo "${eager:+eager }$operator: $(grep -aE "tests passed" "$out/operators.log" | head -1 || true)"
        done
    done
    if [ -x "$bin/test-kv-mask" ]; then "$bin/test-kv-mask" | tail -1; fi
    # what a chunked delta net and one kernel for the short convolution take
    for set in "$off_0007" "X=0"; do
        env "$set" timeout 60 "$bin/test-backend-ops" perf -b CUDA0 -o GATED_DELTA_NET \
            -p "head_count=16,head_size=128,n_seq_tokens=(512|2048)" 2>/dev/null | grep -a "us/run" | sed "s/^/$set /"
    done
    return $failed
}

products() {
    local types=q4_K,q6_K columns=1,2,3,4,6,8,16,32,64 rest=9216x2560,2560x9216,4096x2560,1024x2560
    : >"$out/products.jsonl"
    # a product by itself, with its quantization
    export GGML_CUDA_QUANTIZE_ALWAYS=1
    env GGML_CUDA_MMQ_MID_MIN=17 "$bin/mul-mat-speed" mid $types 24,32,48,64 $rest >>"$out/products.jsonl" 2>"$out/products.log"
    export GGML_CUDA_MMQ_MID_MAX=0
    env GGML_CUDA_MMQ_THIN_MIN=1 GGML_CUDA_MMQ_THIN_MAX=64 "$bin/mul-mat-speed" thin $types $columns $rest >>"$out/products.jsonl" 2>"$out/products.log"
    env GGML_CUDA_MMQ_THIN_MAX=0 "$bin/mul-mat-speed" mmvq $types 1,2,3,4,6,8 $rest >>"$out/products.jsonl" 2>"$out/products.log"
    env GGML_CUDA_MMQ_THIN_MAX=0 GGML_CUDA_MMVQ_MAX_BATCH=0 "$bin/mul-mat-speed" mmq $types $columns $rest >>"$out/products.jsonl" 2>"$out/products.log"
    env $off_0006 "$bin/mul-mat-speed" mmq $types 256,512,1024,2048 $rest >>"$out/products.jsonl" 2>"$out/products.log"
    env GGML_CUDA_DEQUANT_MIN_BATCH=1 "$bin/mul-mat-speed" dequant $types 256,512,1024,2048 $rest >>"$out/products.jsonl" 2>"$out/products.log"
    unset GGML_CUDA_QUANTIZE_ALWAYS GGML_CUDA_MMQ_MID_MAX
    python3 - "$out/products.jsonl" <<'PY'
import collections, json, sys
rows = collections.defaultdict(dict)
for line in open(sys.argv[1]):
    row = json.loads(line)
    rows[row["type"], f'{row["rows"]}x{row["length"]}', row["columns"]][row["label"]] = row["us"]
labels = ["thin", "mid", "mmvq", "mmq", "dequant"]
print("| type | matrix | columns |", " | ".join(f"{label}, us" for label in labels), "| fastest |")
print("|---|---|--:|" + "--:|" * len(labels) + "---|")
for key, found in sorted(rows.items()):
    cells = " | ".join(f"{found[label]:.1f}" if label in found else "" for label in labels)
    print("|", " | ".join(map(str, key)), "|", cells, "|", min(found, key=found.get), "|")
PY
}

waterfall() {
    : >"$out/waterfall.jsonl"
    for round in $(seq "$rounds"); do
        for step in "${steps[@]}"; do
            bench "$step" "${switches[$step]:-X=0}" -c 43008 -npp 512 -ntg 64 -npl 1,8,64 >>"$out/waterfall.jsonl"
        done
    done
    table "$out/waterfall.jsonl"
}

prompt() {
    : >"$out/prompt.jsonl"
    for round in $(seq "$rounds"); do
        for step in 0003 0004 0005 0006 0007; do
            bench "$step" "${switches[$step]:-X=0}" -c 20480 -npp 512,2048,2048,8192 -ntg 4 -npl 1 >>"$out/prompt.jsonl"
        done
    done
    table "$out/prompt.jsonl"
}

crossover() {
    : >"$out/crossover.jsonl"
    local columns=1,2,3,4,6,8,12,16,24,32,48,64 # the first one of a process warms it up
    bench default "X=0" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench thin "$off_0013 GGML_CUDA_MMQ_THIN_MIN=1 GGML_CUDA_MMQ_THIN_MAX=64" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench mmvq "$off_0008 $off_0013" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench mmq "$off_0008 $off_0013 GGML_CUDA_MMVQ_MAX_BATCH=0" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    table "$out/crossover.jsonl"
}

held() {
    : >"$out/held.jsonl"
    env $off_0009 $off_0010 "$bin/held-speed" 0008 "$model" 0,131072 1,8,64 >>"$out/held.jsonl" 2>"$out/held.log"
    env $off_0010 "$bin/held-speed" 0009 "$model" 0,131072 1,8,64 >>"$out/held.jsonl" 2>"$out/held.log"
    "$bin/held-speed" 0010 "$model" 0,131072 1,8,64 >>"$out/held.jsonl" 2>"$out/held.log"
    cat "$out/held.jsonl"
}

logits() {
    local step
    for step in 0003 0013; do
        # shellcheck disable=SC2086
        env ${switches[$step]} LLAMA_CPP_LIB_PATH="$bin" python3 "$here/../tests/patches/rows.py" --model "$model" --gpu \
            --flash --out "$out/rows-$step.npz" || return 1
    done
    python3 - "$out/rows-0003.npz" "$out/rows-0013.npz" <<'PY'
import sys
import numpy as np
a, b = (np.load(path)["rows"] for path in sys.argv[1:])
d = np.abs(a - b) / a.std()
print(f"logits of {len(a)} rows, in standard deviations: largest difference {d.max():.2e}, mean {d.mean():.2e}; "
      f"same greedy token in {(a.argmax(-1) == b.argmax(-1)).mean():.2%}")
PY
}

table() { # table FILE: medians by label, prompt and sequences
    python3 - "$1" <<'PY'
import collections, json, statistics, sys
rows = collections.defaultdict(list)
for line in open(sys.argv[1]):
    row = json.loads(line)
    rows[row["pp"], row["pl"], row["label"]].append((row["speed_pp"], row["speed_tg"], 1000 * row["t_tg"] / row["tg"]))
print("| prompt | sequences | which | prompt tok/s | generated tok/s (lowest to highest) | ms a step |")
print("|--:|--:|---|--:|--:|--:|")
for (length, sequences, label), found in sorted(rows.items()):
    pp, tg, step = zip(*found)
    print(f"| {length} | {sequences} | {label} | {statistics.median(pp):,.0f} | "
          f"{statistics.median(tg):,.0f} ({min(tg):,.0f} to {max(tg):,.0f}) | {statistics.median(step):.2f} |")
PY
}

for part in "${parts[@]}"; do
    if [ "$SECONDS" -gt "$limit" ]; then
        echo "== $part: left out after $SECONDS s"
        continue
    fi
    echo "== $part (at $SECONDS s)"
    "$part" || echo "== $part failed"
done
echo "== done at $SECONDS s"
