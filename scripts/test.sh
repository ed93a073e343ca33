#!/usr/bin/env bash
# Installs the development environment and runs every check: ruff, mypy, pytest.
#   scripts/test.sh [--quick] [--oldest] [pytest arguments]
#   --quick   leaves out the slow tests
#   --oldest  tests with the oldest supported releases (constraints-oldest.txt) in .venv-oldest; no lint, no types
set -euo pipefail
quick="" oldest=""
while [[ ${1:-} == --quick || ${1:-} == --oldest ]]; do
    [[ $1 == --quick ]] && quick=1 || oldest=1
    shift
done
extras="[dev,benchmark]"
if [[ -n $oldest ]]; then
    constraints=constraints-oldest.txt default_venv=.venv-oldest
    extras="[dev]" # TRL needs newer ones
fi
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

setup_env "$extras"
device=1
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device: tests that need one are left out"
    device=""
fi

# Python keeps compiled files. Otherwise every process (tests start many) would compile the package again.
unset PYTHONDONTWRITEBYTECODE

# After a failure the later tests still run. pytest's status 5: the arguments choose no test of this kind.
failed=""
run_pytest() {
    "$venv/bin/python" -m pytest "$@" || [[ $? == 5 ]] || failed=1
}

if [[ -z $oldest ]]; then
    "$venv/bin/ruff" check
    "$venv/bin/ruff" format --check
    "$venv/bin/mypy"
else
    set -- -o filterwarnings=default "$@" # older releases warn about each other
fi
# These tests, and the runs that they start, expect a CPU. On a GPU they would share one device.
CUDA_VISIBLE_DEVICES="" run_pytest -n auto --dist loadfile -m "not slow and not gpu" "$@"
if [[ -z $quick ]]; then
    # The tests of one file also run on several cores: a waiting core costs more than any fixture of a file.
    CUDA_VISIBLE_DEVICES="" run_pytest -n auto --dist worksteal -m "slow and not alone and not gpu" "$@"
    CUDA_VISIBLE_DEVICES="" run_pytest -m "slow and alone and not gpu" "$@"
fi
[[ -z $device ]] || run_pytest -m gpu "$@"
[[ -z $failed ]]
