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

# Compiled files are kept: else every process, and tests start many, compiles the package and the tests anew.
unset PYTHONDONTWRITEBYTECODE

# A failure does not keep the later tests from running. pytest's status 5: no test of that kind was asked for.
failed=""
run_pytest() {
    "$venv/bin/python" -m pytest "$@" || [[ $? == 5 ]] || failed=1
}

if [[ -z $oldest ]]; then
    "$venv/bin/ruff" check
    "$venv/bin/ruff" format --check
    "$venv/bin/mypy"
else
    set -- -o filterwarnings=default "$@" # older releases warn of each other
fi
# They expect a CPU, of the runs they start too, and would share one device.
CUDA_VISIBLE_DEVICES="" run_pytest -n auto --dist loadfile -m "not slow and not gpu" "$@"
if [[ -z $quick ]]; then
    # Long files are shared out, too: no fixture of a file costs as much as a core that waits.
    CUDA_VISIBLE_DEVICES="" run_pytest -n auto --dist worksteal -m "slow and not alone and not gpu" "$@"
    CUDA_VISIBLE_DEVICES="" run_pytest -m "slow and alone and not gpu" "$@"
fi
[[ -z $device ]] || run_pytest -m gpu "$@"
[[ -z $failed ]]
