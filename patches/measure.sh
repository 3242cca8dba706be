#!/usr/bin/env bash
# What the patches change on a CUDA card, from programs that are built already (nothing is built, nothing is fetched):
#
#     patches/measure.sh BIN MODEL.gguf OUT [PART...]
#
# BIN has libraries and programs of a build with all patches of llama.cpp/ and with switches.patch, and mul-mat-speed and
# held-speed (their sources lie beside this script). PARTs, in this order by default:
#
#     operators   test-backend-ops of the changed operators, eager and in CUDA graphs           about 160 s
#     products    which kernel is fastest for which number of columns, by type and shape         about  60 s
#     waterfall   llama-batched-bench, change by change (by switches): 1, 8, 64 sequences          about  40 s a round
#     prompt      llama-batched-bench, prompts of 2,048 and 8,192 tokens (the first warm up)     about  20 s a round
#     held        steps of 1, 8, 64 sequences beside 128k cells that others hold                 about  20 s a step
#     crossover   llama-batched-bench, 1 to 64 sequences by kernel                               about  90 s
#     drafts      qwen-bench engine drafts: the server's engine, by way to draft (needs the server's packages and
#                 DRAFT_MODEL, TEXT: a GGUF that drafts for MODEL and what prompts are cut from); not timed yet
#     logits      rows.py: logits with all switches off and on, compared (needs llama-cpp-python)
#
# A step is a change's name (the patches' headers list them), such as kv-window: all changes up to it. -kv-window is all
# changes but that one, none those without a switch alone, full all of them. Each part has the steps that it can tell apart: llama-batched-bench none of the
# drafters' and seq-own-cells, since it has no drafts and takes nothing back. STEPS="none kv-window full" names others for all
# parts, STEPS=all has every change one after the other, STEPS=each leaves one out at a time.
#
# SECONDS_MAX (default 520) is when parts that have not begun are left out. ROUNDS (default 3) are turns of each step in
# waterfall, prompt and drafts. DRAFT_OPTIONS are for `engine drafts` (default: --input-tokens 64,2048 --concurrency 1).
# PYTHON (default python3) is for drafts and logits.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$(cd "$1" && pwd) || exit 1
model=$(realpath "$2") out=$3
shift 3
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(operators products waterfall prompt held crossover drafts)
rounds=${ROUNDS:-3} limit=${SECONDS_MAX:-520} python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export LD_LIBRARY_PATH=$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# What takes each change away; amx-broadcast, kq-mask-own-cells, ssm-out-2d, batch-invariant, batch-lean, sampled-rows, next-tokens, graph-lean,
# row-sampler and operand-verification have no switch.
# Where two set the same variable, the older change's value takes the newer one away, too.
declare -A off=(
    [seq-own-cells]=LLAMA_SEQ_ALL_CELLS=1
    [n-kv-steps]=LLAMA_N_KV_PAD_256=1
    [attention-own-cells]=GGML_CUDA_FA_DENSE=1
    [kv-window]=LLAMA_KV_NO_WINDOW=1
    [kv-gather]=LLAMA_KV_NO_GATHER=1
    [kq-mask-bits]=LLAMA_KQ_MASK_BITS=0
    [gdn-state-ids]=GGML_CUDA_REFUSE=gdn_ids,conv_ids
    [zero-state-apart]=LLAMA_ZERO_STATE_NEAR=1
    [reserve-in-place]=LLAMA_RESERVE_GATHERED=1
    [ssm-conv-ids]=GGML_CUDA_REFUSE=conv_ids
    [dequantize-wide]=GGML_CUDA_DEQUANT_MIN_BATCH=1000000000
    [gdn-chunked]=GGML_CUDA_GDN_CHUNKED=0
    [gdn-hopper]=GGML_CUDA_GDN_HOPPER=0
    [mmq-thin]=GGML_CUDA_MMQ_THIN_MAX=0
    [mmvq-rows]=GGML_CUDA_MMVQ_ROWS=0
    [quantize-once]=GGML_CUDA_QUANTIZE_ALWAYS=1
    [mmq-mid]=GGML_CUDA_MMQ_MID_MAX=0
    [norm-chains]=GGML_CUDA_NORM_APART=1
    [norm-rope]=GGML_CUDA_ROPE_APART=1
    [moe-grouped]=GGML_CUDA_MMF_GROUPED_MIN=1000000000
    [mmq-experts]=GGML_CUDA_MMQ_BY_EXPERT=0
    [mmq-grouped]=GGML_CUDA_MMQ_GROUPED_MAX=0
    [moe-wgmma]=GGML_CUDA_MMF_WGMMA_MIN=1000000000
    [few-rows]=GGML_CUDA_FEW_ROWS_MMF=1
    [layer-inputs-ring]=LLAMA_PATCHES_HIDE=layer-inputs-ring,shared-snapshots
    [shared-snapshots]=LLAMA_PATCHES_HIDE=shared-snapshots
    [f16-copies]=LLAMA_F16_COPIES_OFF=1
    [f16-products]=GGML_CUDA_MMF_TMA_MAX=0
    [columns-only]=GGML_CUDA_COLUMNS_BESIDE=1
    [gate-up]=GGML_CUDA_GATE_UP_APART=1
    [gdn-head]=GGML_CUDA_GDN_HEAD=0
    [bf16-products]=GGML_CUDA_MMF_TMA_BF16=0
    [quantized-products]=GGML_CUDA_MMF_TMA_BLOCKS_MAX=0
    [inputs-queued]=LLAMA_INPUTS_WAIT=1
    [steps-apart]=LLAMA_ONE_SCHED=1
    [any-sequences]=LLAMA_SAME_SEQUENCES=1
    [step-padding]=LLAMA_STEP_PAD=0
    [shared-expert]=GGML_CUDA_SHARED_APART=1
    [repacked-weights]=LLAMA_REPACK_OFF=1
    [moe-router]=GGML_CUDA_ROUTER_APART=1
    [mmvq-experts]=GGML_CUDA_MMVQ_EXPERTS_MAX=0
    [mmq-stream]=GGML_CUDA_MMQ_STREAM_MAX=0
    [ragged-passes]=LLAMA_RAGGED_PASSES=0
)
drafting=(seq-own-cells layer-inputs-ring shared-snapshots) # of which only drafts tell
mapfile -t switched < <(
    for name in $(sed -n 's/^Changes: //p' "$here"/llama.cpp/*.patch); do
        [ -n "${off[$name]:-}" ] && echo "$name"
    done
)
# variables that the build reads, and the one that is the server's
known=$(LC_ALL=C grep -aohE '(GGML_CUDA|LLAMA)_[A-Z0-9_]+' "$bin"/lib*.so* | sort -u; echo LLAMA_PATCHES_HIDE)

steps() { # steps STEP...: those that STEPS names, or these
    case ${STEPS:-} in
    all) echo none "${switched[@]}" ;;
    each)
        echo full
        without none $([ "$part" = drafts ] || echo "${drafting[@]}") | sed 's/^/-/'
        ;;
    *) echo "${STEPS:-$*}" ;;
    esac
}

without() { # without CHANGE...: none and the changes with a switch, but for these
    printf '%s\n' none "${switched[@]}" | grep -vxFf <(printf '%s\n' "$@")
}

switches() { # switches STEP: what env(1) needs to take changes away, the oldest last; fails if the build cannot
    local taken patch i
    case " none full ${switched[*]} ${switched[*]/#/-} " in
    *" $1 "*) ;;
    *) echo "step $1 is left out: it is none of none, full, ${switched[*]}" >&2; return 1 ;;
    esac
    for ((i = ${#switched[@]} - 1; i >= 0; i--)); do
        patch=${switched[i]}
        case $1 in
        full) taken= ;;
        -*) [ "-$patch" = "$1" ] && taken=1 || taken= ;;
        *) [ "$patch" != "$1" ] || break
            taken=1 ;;
        esac
        [ -n "$taken" ] || continue
        grep -qx "${off[$patch]%%=*}" <<<"$known" || {
            echo "step $1 is left out: no library in $bin reads ${off[$patch]%%=*} (is it built with switches.patch?)" >&2
            return 1
        }
        echo "${off[$patch]}"
    done
}

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
        for operator in NORM_CHAIN NORM_FFN GATED_PRODUCT MUL_MAT_COPIES MUL_MAT_REPACKED MOE_ROUTER MOE_EXPERTS RMS_NORM_MUL_ADD RMS_NORM_MUL_ROPE GATED_DELTA_NET GATED_DELTA_NET_CACHE_FUSION GATED_DELTA_NET_ALONE GATED_DELTA_NET_CHAIN GATED_DELTA_NET_OFFSETS GATED_DELTA_NET_OFFSETS_ALONE SSM_CONV_IDS SSM_CONV_OFFSETS SSM_CONV "FLASH_ATTN_EXT -p n_kv_max=[1-9]" \
            "MUL_MAT -p type_a=q[456]_K.*n=[0-9]+,k=(512|2560|9216)" MUL_MAT_SHARED \
            "MUL_MAT -p type_a=(q8_0|q4_0|q[456]_K),type_b=f32.*n=1," "MUL_MAT_VEC_FUSION -p type=(q8_0|q4_0|q[456]_K)" \
            "MUL_MAT_ID -p type_a=(f16|bf16)," "MUL_MAT_ID -p n_mats=64," "MUL_MAT -p type_a=f32,type_b=f32"; do
            # GGML_CUDA_DISABLE_GRAPHS counts as set when it is there at all
            # shellcheck disable=SC2086
            env ${eager:+GGML_CUDA_DISABLE_GRAPHS=1} timeout 150 "$bin/test-backend-ops" test -b CUDA0 -o $operator \
                >"$out/operators.log" 2>&1 || { failed=1; grep -aE "FAIL|error|ERR|ASSERT" "$out/operators.log" | head -15; tail -3 "$out/operators.log"; }
            echo "${eager:+eager }$operator: $(grep -aE "tests passed" "$out/operators.log" | head -1 || true)"
        done
    done
    if [ -x "$bin/test-kv-mask" ]; then "$bin/test-kv-mask" | tail -1; fi
    # what a chunked delta net and one kernel for the short convolution take
    for set in "${off[gdn-chunked]}" "${off[gdn-hopper]}" "X=0"; do
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
    env ${off[dequantize-wide]} "$bin/mul-mat-speed" mmq $types 256,512,1024,2048 $rest >>"$out/products.jsonl" 2>"$out/products.log"
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
        for step in $(steps $(without "${drafting[@]}")); do
            set=$(switches "$step") || continue
            bench "$step" "$set" -c 43008 -npp 512 -ntg 64 -npl 1,8,64 >>"$out/waterfall.jsonl"
        done
    done
    table "$out/waterfall.jsonl"
}

prompt() {
    : >"$out/prompt.jsonl"
    for round in $(seq "$rounds"); do
        for step in $(steps none kv-window reserve-in-place dequantize-wide gdn-chunked gdn-hopper norm-rope); do
            set=$(switches "$step") || continue
            bench "$step" "$set" -c 20480 -npp 512,2048,2048,8192 -ntg 4 -npl 1 >>"$out/prompt.jsonl"
        done
    done
    table "$out/prompt.jsonl"
}

crossover() {
    : >"$out/crossover.jsonl"
    local columns=1,2,3,4,6,8,12,16,24,32,48,64 # the first one of a process warms it up
    local repacked=${off[f16-copies]} quantized="${off[f16-copies]} ${off[repacked-weights]}" copies=GGML_CUDA_F16_COPY_MIN_BATCH
    bench default "X=0" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench repacked "$repacked" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench quantized "$quantized" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench copies "$copies=2" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench thin "$quantized ${off[mmq-mid]} GGML_CUDA_MMQ_THIN_MIN=1 GGML_CUDA_MMQ_THIN_MAX=64" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench mmvq "$quantized ${off[mmq-thin]} ${off[mmq-mid]}" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    bench mmq "$quantized ${off[mmq-thin]} ${off[mmq-mid]} GGML_CUDA_MMVQ_MAX_BATCH=0" -c 20480 -npp 128 -ntg 32 -npl $columns >>"$out/crossover.jsonl"
    table "$out/crossover.jsonl"
}

held() {
    local step set
    : >"$out/held.jsonl"
    for step in $(steps none n-kv-steps attention-own-cells kv-window kq-mask-bits full); do
        set=$(switches "$step") || continue
        # shellcheck disable=SC2086
        env $set "$bin/held-speed" "$step" "$model" 0,131072 1,8,64 >>"$out/held.jsonl" 2>"$out/held.log" ||
            { echo "$step failed:" >&2; tail -5 "$out/held.log" >&2; }
    done
    cat "$out/held.jsonl"
}

# ctx_size: seq_rm of a pool as small as the requests need would not show seq-own-cells
drafts() {
    local round step set
    [ -n "${DRAFT_MODEL:-}" ] && [ -n "${TEXT:-}" ] || {
        echo "left out: it needs DRAFT_MODEL, a GGUF that drafts for MODEL, and TEXT, what prompts are cut from"
        return
    }
    rm -rf "$out/drafts"
    for round in $(seq "$rounds"); do
        for step in $(steps -seq-own-cells -ssm-conv-ids moe-grouped layer-inputs-ring shared-snapshots); do
            set=$(switches "$step") || continue
            # what a start measures of its steps, and keeps, is of this step
            # shellcheck disable=SC2086
            env $set PYTHONPATH="$here/.." LLAMA_CPP_LIB_PATH="$bin" QWEN_SERVE_CACHE="$out/cache-$step" \
                "$python" -m qwen_serve.bench engine drafts "$model" --draft-model "$DRAFT_MODEL" --text "$TEXT" --rounds 1 \
                --set ctx_size=98304 ${DRAFT_OPTIONS:---input-tokens 64,2048 --concurrency 1} \
                --out "$out/drafts/$step" --note "patches to $step: ${set//$'\n'/ }" >"$out/drafts.log" 2>&1 ||
                { echo "$step failed:" >&2; tail -5 "$out/drafts.log" >&2; }
        done
    done
    "$python" - "$out/drafts" <<'PY'
import collections, json, pathlib, statistics, sys
runs = collections.defaultdict(list)
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/*/rows.jsonl")):
    found = collections.defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["metric"] in ("ttft", "itl"):
            found[row["cell"], row["subject"], row["metric"]].append(row["value"])
    for (cell, way, metric), values in found.items():
        runs[cell, way, path.parts[-3], metric].append(statistics.median(values))
def shown(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
print("| requests | way to draft | which | ms to the first token, median of the runs' (lowest to highest) | ms a token after it |")
print("|---|---|---|--:|--:|")
for cell, way, step in sorted({key[:3] for key in runs}):
    print(f"| {cell} | {way} | {step} | {shown(runs[cell, way, step, 'ttft'])} | {shown(runs[cell, way, step, 'itl'])} |")
PY
}

logits() {
    local step set more
    for more in "" "--snapshots 4"; do
        for step in none full; do
            set=$(switches "$step") || return 1
            # shellcheck disable=SC2086
            env $set LLAMA_CPP_LIB_PATH="$bin" "$python" "$here/../tests/patches/rows.py" --model "$model" --gpu \
                --flash $more --out "$out/rows-$step.npz" || return 1
        done
        "$python" - "$out/rows-none.npz" "$out/rows-full.npz" <<'PY'
import sys
import numpy as np
a, b = (np.load(path)["rows"] for path in sys.argv[1:])
d = np.abs(a - b) / a.std()
print(f"logits of {len(a)} rows, in standard deviations: largest difference {d.max():.2e}, mean {d.mean():.2e}; "
      f"same greedy token in {(a.argmax(-1) == b.argmax(-1)).mean():.2%}")
PY
    done
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
for (length, sequences, label), found in sorted(rows.items(), key=lambda row: row[0][:2]):
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
