#!/bin/bash
# The comparison that bench/README.md reads: our server and llama-server on the synthetic 4B, on one card.
#
#   bench/record.sh MODELS BINARIES OUT [PART...]
#
# MODELS   holds what bench/synthetic.py and llama-quantize made:
#            python bench/synthetic.py --out MODELS/F16.gguf --mtp-acceptance 1.0,0.8,0.7,0.6,0.3 --words 150000
#            llama-quantize MODELS/F16.gguf MODELS/Q4_K_M.gguf Q4_K_M   (and Q8_0)
# BINARIES holds llama-server, llama-bench, llama-batched-bench (python bench/llama_cpp_build.py ...)
# OUT      gets one JSON and one picture for each part; a part whose JSON is there is not run again
# PART     which of the parts below, all by default
#
# Each part says how many seconds it needs on an H200. SECONDS_LEFT=500 leaves out what would not fit into that
# time; WITHOUT='llama-plain llama-cache' leaves out peers; RUNS=50 sets the timed requests of every category,
# which are 3 to 5 by themselves to keep the whole record near 20 minutes; THREADS is for machines without a
# card; EXTRA='--categories short --levels 2' are flags of bench/peers.py for a rehearsal; AFTER is a command to
# run after each part.
set -u
cd "$(dirname "$0")/.." || exit 1
models=$1 binaries=$2 out=$3
shift 3
wanted=" $* "
python=${PYTHON:-python3}
mkdir -p "$out"

# One at a time, our server runs as it does by itself: 8 sequences of 16k tokens. Beside it with drafts from the
# text alone, without speculation, and "plain", without its prompt cache too. What llama-server's set-ups mean
# is told by bench/peers.py --help.
defaults="--parallel 8 --ctx-size 131072"
ngram="--speculation ngram"
no_spec="--speculation off"
plain="--no-prefix-cache $no_spec"

measure() { # NAME SECONDS COMMAND that writes $out/NAME.json
    local name=$1 seconds=$2
    shift 2
    [ "$wanted" != "  " ] && [[ $wanted != *" $name "* ]] && return
    [ -e "$out/$name.json" ] && { echo "$name: is there"; return; }
    if [ -n "${SECONDS_LEFT:-}" ] && [ $((SECONDS + seconds)) -gt "$SECONDS_LEFT" ]; then
        echo "$name: LEFT OUT, $((SECONDS_LEFT - SECONDS)) s are left of the $seconds it needs"
        return
    fi
    local from=$SECONDS status=0 limit=$((seconds * 3 / 2 + 20))
    [ -n "${SECONDS_LEFT:-}" ] && [ $((SECONDS_LEFT - SECONDS)) -lt $limit ] && limit=$((SECONDS_LEFT - SECONDS))
    timeout -s TERM -k 20 $limit "$python" "$@" > "$out/$name.txt" 2> "$out/$name.err" ||
        { status=$?; tail -n 4 "$out/$name.err"; }
    [ $status -gt 1 ] && [ -e "$out/$name.json" ] && mv "$out/$name.json" "$out/$name.partial.json"
    echo "$name: status $status, $((SECONDS - from)) s"
    [ -z "${AFTER:-}" ] || eval "$AFTER"
}

part() { # NAME SECONDS flags of bench/peers.py
    local name=$1 seconds=$2 kept=() peers=0 gone=0
    shift 2
    while [ $# -gt 0 ]; do
        if [ "$1" = --peer ]; then
            peers=$((peers + 1))
            [[ " ${WITHOUT:-} " = *" ${2%%=*} "* ]] && { gone=$((gone + 1)); shift 2; continue; }
        fi
        kept+=("$1")
        shift
    done
    [ $gone -lt $peers ] || return 0 # WITHOUT names them all
    seconds=$((seconds * (peers - gone) / peers))
    measure "$name" "$seconds" bench/peers.py --binaries "$binaries" "${kept[@]}" --residency all --start-timeout 90 \
        --threads "${THREADS:-0}" ${RUNS:+--runs "$RUNS"} ${EXTRA:-} --logs "$out/logs/$name" --out "$out/$name.json"
}

words() { # ACCEPTANCE: the text whose words the MTP head drafts with that share of success
    echo "$models/F16.words-$1.txt"
}

# What every speed-up is against: F16, nothing reused, nothing drafted.
part baseline-F16 30 --gguf "$models/F16.gguf" --protocol official --warmup 1 --runs 5 --no-ceiling \
    --peer 'llama-plain=llama-server:plain'

# The same prompt again, one request at a time, with the protocol's five warm-ups; every MTP draft is right.
part official-Q4_K_M 230 --gguf "$models/Q4_K_M.gguf" --protocol official --warmup 5 --runs 5 \
    --baseline "$out/baseline-F16.json" \
    --peer 'llama-cache=llama-server:cache' --peer 'llama-plain=llama-server:plain' \
    --peer 'llama-device=llama-server:no-host-caches+backend-sampling' \
    --peer 'llama-mtp-4=llama-server:mtp-4+backend-sampling' \
    --peer 'llama-mtp-8=llama-server:mtp-8+backend-sampling' \
    --peer 'llama-ngram=llama-server:ngram-mod' \
    --peer 'llama-ngram-device=llama-server:ngram-mod+backend-sampling' \
    --peer 'llama-ngram-mtp-4=llama-server:ngram-mod+mtp-4+backend-sampling' \
    --peer "ours=server $defaults" --peer "ours-ngram=server $defaults $ngram" \
    --peer "ours-no-spec=server $defaults $no_spec"

# Many at once; the MTP head is right on 70% of the tokens.
part throughput-Q4_K_M 250 --gguf "$models/Q4_K_M.gguf" --workload random --input-tokens 512 \
    --output-tokens 128 --levels 1,8,64 --waves 2 --warmup 2 --text "$(words 0.7)" \
    --peer 'llama-cache=llama-server:cache' \
    --peer 'llama-device=llama-server:no-host-caches+backend-sampling' \
    --peer 'llama-device-mtp-4=llama-server:no-host-caches+backend-sampling+mtp-4' \
    --peer ours=server --peer "ours-ngram=server $ngram" --peer "ours-no-spec=server $no_spec"

# Drafts that are right less often: depths of llama-server's against our choice.
acceptance() { # SHARE
    part "acceptance-$1" 55 --gguf "$models/Q4_K_M.gguf" --protocol distinct --categories short,medium \
        --warmup 1 --runs 3 --no-ceiling --text "$(words "$1")" \
        --peer 'llama-device=llama-server:no-host-caches+backend-sampling' \
        --peer 'llama-device-mtp-2=llama-server:no-host-caches+backend-sampling+mtp-2' \
        --peer 'llama-device-mtp-4=llama-server:no-host-caches+backend-sampling+mtp-4' \
        --peer "ours=server $defaults" --peer "ours-ngram=server $defaults $ngram" \
        --peer "ours-no-spec=server $defaults $no_spec"
}
acceptance 0.3

# Another prompt every time; every MTP draft is right.
part distinct-Q4_K_M 195 --gguf "$models/Q4_K_M.gguf" --protocol distinct --warmup 1 --runs 3 \
    --text "$(words 1.0)" \
    --peer 'llama-cache=llama-server:cache' --peer 'llama-plain=llama-server:plain' \
    --peer 'llama-device=llama-server:no-host-caches+backend-sampling' \
    --peer 'llama-device-ub2048=llama-server:no-host-caches+backend-sampling --ubatch-size 2048' \
    --peer 'llama-mtp-4=llama-server:mtp-4+backend-sampling' \
    --peer 'llama-device-mtp-4=llama-server:no-host-caches+backend-sampling+mtp-4' \
    --peer 'llama-device-mtp-8=llama-server:no-host-caches+backend-sampling+mtp-8' \
    --peer 'llama-ngram-device=llama-server:ngram-mod+backend-sampling' \
    --peer "ours=server $defaults" --peer "ours-ngram=server $defaults $ngram" \
    --peer "ours-no-spec=server $defaults $no_spec" \
    --peer "ours-plain=server $defaults $plain"

# Few-shot questions: prefixes of 2,000 tokens.
part shared-prefix-Q4_K_M 200 --gguf "$models/Q4_K_M.gguf" --workload shared-prefix --input-tokens 100 \
    --prefix-tokens 2000 --output-tokens 64 --levels 8,64 --requests 64 --warmup 1 --text "$(words 0.7)" \
    --peer 'llama-cache-device=llama-server:cache+backend-sampling' \
    --peer 'llama-device=llama-server:no-host-caches+backend-sampling' \
    --peer ours=server --peer "ours-ngram=server $ngram" --peer "ours-plain=server $plain"

acceptance 0.8
acceptance 0.6

# What cached prompts cost a step that does not use them: one pool of cells, a stream each, the host's memory.
measure prefix-cost 12 -m server.engine.prefix_cache.cost "$models/Q4_K_M.gguf" --out "$out/prefix-cost.json"

# The larger files: ours and llama-server's best. The engine's ceiling at F16 calibrates bench/roofline.py.
larger() { # QUANT SECONDS flags
    local quant=$1 seconds=$2
    shift 2
    part "latency-$quant" "$seconds" --gguf "$models/$quant.gguf" --warmup 2 --runs 3 \
        --text "$(words 1.0)" --baseline "$out/baseline-F16.json" "$@" \
        --peer 'llama-ngram-device=llama-server:ngram-mod+backend-sampling' \
        --peer 'llama-device-mtp-8=llama-server:no-host-caches+backend-sampling+mtp-8' \
        --peer "ours=server $defaults" --peer "ours-ngram=server $defaults $ngram"
}
larger F16 95
larger Q8_0 75 --no-ceiling
