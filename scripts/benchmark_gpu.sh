#!/usr/bin/env bash
# Measures everything on one GPU in one command: the benchmarks at 0.5B, 1.5B and 8B, the start-up proofs on real
# kernels, and the tests that need CUDA.
#   scripts/benchmark_gpu.sh [--minutes N] OUTPUT [hh.jsonl.gz]
#   scripts/benchmark_gpu.sh --quick [--minutes N] OUTPUT
#   --quick         only the most important parts, in at most N minutes (default: 9); at most eight small files
#   --minutes N     stop after N minutes; to continue, run the same command again
#   OUTPUT          a directory for the results: *.md, *.json, *.txt
#   hh.jsonl.gz     HH-RLHF's transcript rows; without this file, random tokens with HH's lengths
#   PYTHON          an interpreter with dpo-pack and its extras [dev,benchmark] (default: python)
#   BENCHMARK_WORK  a directory for random models: 40 GB, with --quick 9 GB (default: OUTPUT/work; with --quick a
#                   temporary directory, removed at the end)
# Each measurement is written at once, and finished parts are not repeated: after an interruption, run the same
# command again. A part that fails is reported, and the others still run. Failed tests are not repeated; to repeat
# them, remove OUTPUT/tests.txt.
set -uo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
# --call FUNCTION ARGUMENTS...: one part, in a process that `timeout` can end.
quick="" minutes="" call=()
[[ ${1:-} != --call ]] || { call=("${@:2}") && set -- "$BENCHMARK_OUTPUT"; }
while [[ ${1:-} == --* ]]; do
    case $1 in
    --quick) quick=1 ;;
    --minutes) minutes=${2:-} && shift ;;
    *) set -- ;;
    esac
    shift || break
done
[[ -z $quick || -n $minutes ]] || minutes=9
[[ $# -ge 1 && $minutes =~ ^[0-9]*$ ]] || {
    sed -n '2,16s/^# \?//p' "$script" >&2
    exit 2
}
[[ -z $minutes ]] || minutes=$((10#$minutes))
# Paths are the caller's, and the parts run in the repository.
output=$(realpath -m -- "$1")
hh=(--workload hh-like)
[[ $# -lt 2 ]] || hh=(--workload hh --pairs "$(realpath -m -- "$2")")
python=${PYTHON:-python}
[[ $python != */* ]] || python=$(realpath -s -- "$python") # -s: an environment's interpreter is a link
work=$(realpath -m -- "${BENCHMARK_WORK:-$output/work}")
cd "$(dirname "$script")/.."
export PYTHONPATH=$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}
# As dpopack itself sets it, before torch is imported.
[[ -n ${PYTORCH_CUDA_ALLOC_CONF:-} ]] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# A stand-in for machines without a GPU: the quick parts on the CPU, with a tiny model.
device=${BENCHMARK_DEVICE:-cuda}
((${#call[@]})) || [[ $device == cpu ]] ||
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: no CUDA device" >&2
    exit 2
}
if [[ -n $quick && -z ${BENCHMARK_WORK:-} ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$output" "$work"
export BENCHMARK_OUTPUT=$output BENCHMARK_WORK=$work PYTHON=$python
shape=0.5b larger=1.5b
[[ $device == cuda ]] || shape=tiny larger=tiny
failed=() with_failures=()
# A script that was started in the background ignores SIGINT, and so would its parts.
reset=()
! env --default-signal=INT true 2>/dev/null || reset=(env --default-signal=INT)

# left: prints the seconds that are left, or the most for a part, ${most}; nothing if neither is limited.
# in_time COMMAND...: runs the command, and ends it with ${signal} when they are over.
left() {
    local seconds=${most:-}
    [[ -z $minutes ]] || seconds=$((minutes * 60 - SECONDS))
    [[ -z ${most:-} ]] || ((seconds <= most)) || seconds=$most
    echo "$seconds"
}

in_time() {
    local seconds
    seconds=$(left)
    if [[ -z $seconds ]]; then
        "$@"
    elif ((seconds > 10)); then
        timeout --signal="${signal:-TERM}" --kill-after=10 "$seconds" "${reset[@]}" "$@"
    else
        echo "no time left for this part"
        return 124
    fi
}

# part FILE TITLE COMMAND...: runs the command and appends its output to OUTPUT/FILE while it runs.
part() {
    local file=$output/$1 title=$2 begun=$SECONDS seconds
    shift 2
    seconds=$(left)
    grep -sq "^== $title: done" "$file" && return
    echo "== $title${seconds:+ (at most $seconds s)}" | tee -a "$file"
    in_time "$@" 2>&1 | tee -a "$file"
    status=${PIPESTATUS[0]}
    if [[ $status == 0 ]]; then
        echo "== $title: done after $((SECONDS - begun)) s" | tee -a "$file"
    else
        echo "== $title: ended with status $status after $((SECONDS - begun)) s" | tee -a "$file"
        failed+=("$title")
    fi
}

# tests MOST TITLE FILES...: runs tests that need a GPU. The part is over, too, if tests fail or take longer than MOST
# seconds: run again, they would do the same and leave no time for the benchmarks.
tests() {
    local most=$1 title=$2 signal=INT seconds # when pytest is interrupted, it still tells what failed
    shift 2
    if ! grep -sqxF "== $title: done, with failures" "$output/tests.txt"; then
        seconds=$(left) status=0
        part tests.txt "$title" "$python" -m pytest -v --tb=short -m gpu -p no:cacheprovider \
            --continue-on-collection-errors -o faulthandler_timeout=60 "$@"
        # 1: tests failed; 124 and 137: time was up.
        ((status == 1 || (status == 124 || status == 137) && seconds == most && most > 10)) || return 0
        unset "failed[-1]"
        echo "== $title: done, with failures" | tee -a "$output/tests.txt"
    fi
    with_failures+=("$title")
}

# end: says what was not done, and ends the script.
end() {
    ((${#with_failures[@]} == 0)) || echo "failures, see $output/tests.txt: $(list "${with_failures[@]}")"
    ((${#failed[@]} == 0)) || echo "not done: $(list "${failed[@]}"); run the same command again"
    exit $((${#failed[@]} + ${#with_failures[@]} > 0))
}

list() {
    local all
    all=$(printf ', %s' "$@")
    echo "${all:2}"
}

# in_minutes SECONDS: prints them as minutes, at least 0.
in_minutes() {
    local seconds=$(($1 > 0 ? $1 : 0))
    printf '%d.%02d' $((seconds / 60)) $((seconds % 60 * 100 / 60))
}

# proofs_at_head_dimensions: the start-up proofs on small random models, with plain and compiled layers.
proofs_at_head_dimensions() {
    "$python" - "$work" <<'END'
import sys
from pathlib import Path
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.reports.doctor_tables import proofs
from dpo_pack.run.models import load_and_prove, resolve_model
work, failed = Path(sys.argv[1]), False
(work / "none.jsonl").touch()
for compiled in (False, True):
    for head_dim in (64, 128, 256):
        path = work / f"head-{head_dim}"
        if not path.is_dir():
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(
                vocab_size=1000, hidden_size=4 * head_dim, intermediate_size=8 * head_dim, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
            )).save_pretrained(path)
        print(f"head dimension {head_dim}, {'compiled' if compiled else 'eager'}", flush=True)
        try:
            recipe = parse_recipe({
                "output_dir": str(work / "doctor"),
                "model": {"path": str(path), "autocast": "bfloat16", "compile": compiled},
                "data": {"train": str(work / "none.jsonl")},
            }, [])
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            _, outcome = load_and_prove(resolve_model(recipe, device), device=device, again=True)
            proofs(outcome, {}, Console(width=160))
            failed |= not all(proof.passed for proof in outcome.proofs)
        except Exception as error:  # the others are still to be tried
            failed = True
            print(f"{type(error).__name__}: {error}", flush=True)
sys.exit(failed)
END
}

quick_parts() {
    export HF_HUB_OFFLINE=1 TQDM_DISABLE=1
    tests $((minutes * 15)) "tests that need a GPU" "${files[@]}"
    most=$((minutes * 12)) part doctor.txt "proofs at head dimensions 64, 128 and 256, eager and compiled" \
        "$BASH" "$script" --call proofs_at_head_dimensions
    local sizes=(--num-pairs 160 --sweep-pairs 160 --pairs-per-step 32 --token-budgets 16384 --microbatches 2,4)
    [[ $device == cuda ]] ||
        sizes=(--num-pairs 10 --sweep-pairs 10 --pairs-per-step 2 --token-budgets 4096 --microbatches 1,2)
    # Some seconds stay for each benchmark to end by itself. The smallest model alone says little: there the host
    # limits a GPU.
    local seconds=$(left) model file
    for model in "$shape" "$larger"; do
        [[ $model == "$larger" ]] && seconds=$(left) || seconds=$((seconds * 11 / 20))
        file=speed-$model
        most=$seconds part speed.txt "$model at Tulu 3 lengths, one turn, with a profile" \
            "$python" scripts/benchmark.py --device "$device" --output "$output/$file" --work "$work" \
            --workload tulu3 --model "$model" --quick --minutes "$(in_minutes $((seconds - 15)))" --repeats 1 \
            --reference-batches 2 "${sizes[@]}" --no-ablations --also model.compile=true
    done
}

# measure NAME ARGUMENTS...: runs one benchmark, unless its page is there, whole, and its contenders agree.
measure() {
    local name=$1 limit=()
    shift
    [[ -f $output/$name.md ]] &&
        ! grep -qE "These times cannot be compared|Not everything is measured" "$output/$name.md" && return
    echo "== $name"
    # A setting that compiles for longer than a piece of N minutes must not be begun again in each piece.
    [[ -z $minutes ]] || limit=(
        --minutes "$(in_minutes $(($(left) - 15)))" --compiled-seconds $((minutes < 20 ? minutes * 30 : 600))
    )
    in_time "$python" scripts/benchmark.py --device cuda --output "$output/$name" --work "$work" \
        --pairs-per-step 64 --warmup-steps 2 "${limit[@]}" "$@" || failed+=("$name")
}

# model NAME DTYPE: writes a random model of this shape into $work, unless it is there.
model() {
    [[ -d $work/model-$1-$2 ]] || "$python" -c "
from pathlib import Path
from benchmarking.process import save_model
save_model('$1', Path('$work/model-$1-$2'), parameters='$2', device='cuda')"
}

# prove NAME DTYPE: runs the start-up proofs on the kernels of this GPU.
prove() {
    model "$1" "$2" || return
    : >"$work/none.jsonl" # a recipe names pairs, and doctor reads none
    "$python" -m dpo_pack doctor /dev/stdin <<END
output_dir: $work/doctor
model: {path: $work/model-$1-$2, dtype: $2, autocast: bfloat16}
data: {train: $work/none.jsonl}
END
}

if ((${#call[@]})); then
    "${call[@]}"
    exit
fi
# Whole models come first.
mapfile -t files < <(grep -rlF "mark.gpu" tests/model/test_on_cuda.py tests --include="test_*.py" | awk '!seen[$0]++')
if [[ -n $quick ]]; then
    quick_parts
    echo "in $output after $SECONDS s: $(cd "$output" && list *)"
    end
fi

# First the tests and proofs, then the benchmarks, the most important first. Each file of tests has a process of its
# own: after some CUDA errors all later tests of a process fail.
most_tests=600
[[ -z $minutes ]] || ((minutes >= 30)) || most_tests=$((minutes * 20))
for file in "${files[@]}"; do
    tests $most_tests "$file" "$file"
done
most=$most_tests part proofs-0.5b.txt "proofs at 0.5b" "$BASH" "$script" --call prove 0.5b float32

# TRL's micro-batches are pairs. Two steps are not timed, and in the sweeps four are.
budgets=8192,16384,32768,65536
also=(--also model.compile=true)
measure hh-0.5b "${hh[@]}" --model 0.5b --num-pairs 512 --sweep-pairs 384 --repeats 3 \
    --microbatches 1,2,4,8,16 --token-budgets $budgets "${also[@]}"
measure tulu3-0.5b --workload tulu3 --model 0.5b --num-pairs 512 --sweep-pairs 384 --repeats 3 \
    --microbatches 1,2,4,8 --token-budgets $budgets
measure tulu3-1.5b --workload tulu3 --model 1.5b --num-pairs 384 --sweep-pairs 384 --repeats 3 \
    --microbatches 1,2,4,8 --token-budgets $budgets --no-ablations "${also[@]}"
measure hh-1.5b "${hh[@]}" --model 1.5b --num-pairs 512 --sweep-pairs 384 --repeats 3 \
    --microbatches 1,2,4,8,16 --token-budgets $budgets --no-ablations
measure tulu3-8b-lora --workload tulu3 --model 8b --parameters bfloat16 --lora --num-pairs 384 \
    --sweep-pairs 384 --repeats 2 --microbatches 1,2,4 --token-budgets 4096,8192 --no-ablations
if "$python" -c 'import sys, torch; sys.exit(torch.cuda.mem_get_info()[1] < 130 * 2**30)'; then
    measure tulu3-8b-full --workload tulu3 --model 8b --parameters bfloat16 --gradient-checkpointing \
        --num-pairs 384 --sweep-pairs 384 --repeats 2 --microbatches 1,2,4 --token-budgets 8192,16384 \
        --no-ablations
else
    echo "== tulu3-8b-full left out: weights, gradients and moments of 8B in full take 112 GB, more than this GPU has"
fi
measure ultrafeedback-0.5b --workload ultrafeedback --model 0.5b --num-pairs 512 --sweep-pairs 384 --repeats 3 \
    --microbatches 1,2,4,8 --token-budgets $budgets --no-ablations
measure long16k-0.5b --workload long16k --model 0.5b --num-pairs 384 --sweep-pairs 384 --repeats 2 \
    --microbatches 1,2,4 --token-budgets 16384,32768 --no-ablations
part proofs-1.5b.txt "proofs at 1.5b" "$BASH" "$script" --call prove 1.5b float32
part proofs-8b.txt "proofs at 8b" "$BASH" "$script" --call prove 8b bfloat16
echo "in $output after $SECONDS s: $(cd "$output" && list *)"
end
