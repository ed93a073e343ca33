#!/usr/bin/env bash
# Everything that one GPU has to show, in one command: the benchmarks at 0.5B, 1.5B and 8B, the start-up proofs on
# real kernels, and the tests that need CUDA.
#   scripts/benchmark_gpu.sh OUTPUT [hh.jsonl.gz]
#   OUTPUT          a directory: OUTPUT/*.md, *.json, proofs-*.txt, tests.txt
#   hh.jsonl.gz     HH-RLHF's transcript rows; without them, pairs of HH's lengths
#   PYTHON          the interpreter dpo-pack is installed in, with [dev,benchmark] (default: python)
#   BENCHMARK_WORK  where random models are kept, 40 GB (default: OUTPUT/work)
# Every measurement is kept as soon as it is there, and every part that is done is left alone: after an
# interruption run it again. A part that fails is reported, and the others still run.
set -uo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
[[ $# -ge 1 ]] || {
    sed -n '2,11s/^# \?//p' "$script" >&2
    exit 2
}
cd "$(dirname "$script")/.."
output=$1
hh=(--workload hh-like)
[[ $# -lt 2 ]] || hh=(--workload hh --pairs "$2")
python=${PYTHON:-python}
work=${BENCHMARK_WORK:-$output/work}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: no CUDA device" >&2
    exit 2
}
mkdir -p "$output" "$work"
failed=()

# measure NAME ARGUMENTS...: one benchmark, unless its page is there and its contenders agree.
measure() {
    local name=$1
    shift
    [[ -f $output/$name.md ]] && ! grep -q "These times cannot be compared" "$output/$name.md" && return
    echo "== $name"
    "$python" scripts/benchmark.py --device cuda --output "$output/$name" --work "$work" \
        --pairs-per-step 64 --warmup-steps 2 "$@" || failed+=("$name")
}

# kept NAME COMMAND...: its output in OUTPUT/NAME, once it has succeeded.
kept() {
    local name=$1
    shift
    [[ -f $output/$name ]] && return
    echo "== $name"
    if "$@" 2>&1 | tee "$output/.$name"; then
        mv "$output/.$name" "$output/$name"
    else
        failed+=("$name")
    fi
}

# model NAME DTYPE: a random model of this shape in $work, unless it is there.
model() {
    [[ -d $work/model-$1-$2 ]] || PYTHONPATH=scripts "$python" -c "
from pathlib import Path
from benchmarking.process import save_model
save_model('$1', Path('$work/model-$1-$2'), parameters='$2', device='cuda')"
}

# prove NAME DTYPE: the start-up proofs, on the kernels of this GPU.
prove() {
    model "$1" "$2" || return
    : >"$work/none.jsonl" # a recipe names pairs, and doctor reads none
    "$python" -m dpo_pack doctor /dev/stdin <<END
output_dir: $work/doctor
model: {path: $work/model-$1-$2, dtype: $2, autocast: bfloat16}
data: {train: $work/none.jsonl}
END
}

# What breaks on this GPU first, then what is to be shown, the most telling first.
kept tests.txt "$python" -m pytest -q -m gpu --continue-on-collection-errors
kept proofs-0.5b.txt prove 0.5b float32

# TRL's micro-batches are pairs. Grouped by length it sorts each quarter of the pairs, the longest first: these
# counts make that two steps, which are the two that are not timed, so that what is timed is of average length.
budgets=8192,16384,32768,65536
also=(--also model.compile=true)
"$python" -c 'import liger_kernel' 2>/dev/null && also+=(--also model.kernels=liger)
measure hh-0.5b "${hh[@]}" --model 0.5b --num-pairs 512 --sweep-pairs 256 --repeats 3 \
    --microbatches 1,2,4,8,16 --token-budgets $budgets "${also[@]}"
measure tulu3-0.5b --workload tulu3 --model 0.5b --num-pairs 512 --sweep-pairs 256 --repeats 3 \
    --microbatches 1,2,4,8 --token-budgets $budgets
measure tulu3-1.5b --workload tulu3 --model 1.5b --num-pairs 384 --sweep-pairs 192 --repeats 3 \
    --microbatches 1,2,4,8 --token-budgets $budgets --no-ablations "${also[@]}"
measure hh-1.5b "${hh[@]}" --model 1.5b --num-pairs 512 --sweep-pairs 256 --repeats 3 \
    --microbatches 1,2,4,8,16 --token-budgets $budgets --no-ablations
measure tulu3-8b-lora --workload tulu3 --model 8b --parameters bfloat16 --lora --num-pairs 256 \
    --sweep-pairs 192 --repeats 2 --microbatches 1,2,4 --token-budgets 4096,8192 --no-ablations
if "$python" -c 'import sys, torch; sys.exit(torch.cuda.mem_get_info()[1] < 130 * 2**30)'; then
    measure tulu3-8b-full --workload tulu3 --model 8b --parameters bfloat16 --gradient-checkpointing \
        --num-pairs 256 --sweep-pairs 192 --repeats 2 --microbatches 1,2,4 --token-budgets 8192,16384 \
        --no-ablations
else
    echo "== tulu3-8b-full left out: weights, gradients and moments of 8B in full take 112 GB, more than this GPU has"
fi
measure ultrafeedback-0.5b --workload ultrafeedback --model 0.5b --num-pairs 512 --sweep-pairs 256 --repeats 3 \
    --microbatches 1,2,4,8 --token-budgets $budgets --no-ablations
measure long16k-0.5b --workload long16k --model 0.5b --num-pairs 256 --sweep-pairs 192 --repeats 2 \
    --microbatches 1,2,4 --token-budgets 16384,32768 --no-ablations
kept proofs-1.5b.txt prove 1.5b float32
kept proofs-8b.txt prove 8b bfloat16

if ((${#failed[@]})); then
    echo "not done: ${failed[*]}; run the same command again" >&2
    exit 1
fi
echo "all of it is in $output"
