#!/usr/bin/env bash
# Installs the development environment and runs every check: ruff, mypy, pytest.
#   scripts/test.sh [--quick] [pytest arguments]
#   --quick  leaves out the slow tests
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

quick=""
if [[ ${1:-} == --quick ]]; then
    quick=1
    shift
fi
setup_env "[dev,benchmark]"
device=""
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device: tests that need one are left out"
    device=" and not gpu"
fi

# pytest's status 5: no test of that kind among those asked for.
run_pytest() {
    "$venv/bin/python" -m pytest "$@" || [[ $? == 5 ]]
}

"$venv/bin/ruff" check
"$venv/bin/ruff" format --check
"$venv/bin/mypy"
run_pytest -n auto --dist loadfile -m "not slow$device" "$@"
# One at a time: these measure memory and time, and kill processes at moments of their own.
[[ -n $quick ]] || run_pytest -m "slow$device" "$@"
