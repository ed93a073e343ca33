#!/usr/bin/env bash
# Installs the development environment and runs every check: ruff, mypy, pytest.
#   scripts/test.sh [--quick] [pytest arguments]
#   --quick  leaves out the slow tests
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

markers=""
if [[ ${1:-} == --quick ]]; then
    markers="not slow"
    shift
fi
setup_env "[dev,benchmark]"
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device: tests that need one are left out"
    markers="${markers:+$markers and }not gpu"
fi

"$venv/bin/ruff" check
"$venv/bin/ruff" format --check
"$venv/bin/mypy"
"$venv/bin/python" -m pytest -m "$markers" "$@"
