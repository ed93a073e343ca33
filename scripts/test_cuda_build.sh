#!/usr/bin/env bash
# Runs the tests that need a CUDA build of torch, but no GPU: they use fake CUDA tensors.
#   scripts/test_cuda_build.sh [pytest arguments]
#   CUDA_TORCH  a directory with that build; it is installed there if it is missing, 4.5 GB (default: .cuda-torch)
# Run it after each change of dpo_pack/model, and commit docs/dev/cuda-build.md, where it writes the result.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
[[ -n ${PYTHON:-} ]] || { setup_env "[dev,benchmark]" && PYTHON=$venv/bin/python; }
target=${CUDA_TORCH:-.cuda-torch}
if [[ ! -d $target/torch ]]; then
    # On Linux the package index has the CUDA build. Other places may have a build for CPUs, which pip prefers.
    version=$("$PYTHON" -c 'import torch; print(torch.__version__.partition("+")[0])')
    env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null \
        "$PYTHON" -m pip install --quiet --no-compile --target "$target" "torch==$version"
fi
export PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH}
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.backends.cuda.is_built())' ||
    fail "$target has no CUDA build of torch; remove it and run again"
log=$(mktemp)
driver=$(mktemp -d)
trap 'rm -rf "$log" "$driver"' EXIT
# With this stub in place of a driver, autograd takes fake CUDA tensors.
cc -shared -fPIC -Wl,-soname,libcuda.so.1 tests/support/fake_driver.c -o "$driver/libcuda.so.1"
LD_PRELOAD=$driver/libcuda.so.1 "$PYTHON" -m pytest -m cuda_build "$@" | tee "$log"
{
    echo "# The tests that need a CUDA build of torch"
    echo
    echo "Written by \`scripts/test_cuda_build.sh\`: \`pytest -m cuda_build${*:+ $*}\`, on fake CUDA tensors, without a device."
    echo
    "$PYTHON" -c 'import platform, torch, transformers
print(f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}")'
    echo "- code of dpo_pack/model: \`$(git rev-parse --short HEAD:dpo_pack/model)\` (\`git rev-parse --short HEAD:dpo_pack/model\`)"
    echo "- $(sed -nE 's/^[= ]*([0-9]+ (passed|failed).*) in .*/\1/p' "$log")"
} >docs/dev/cuda-build.md
