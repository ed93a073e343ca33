#!/usr/bin/env bash
# From a fresh clone to a trained model: environment, tiny model and pairs made in code, DPO, what was learned.
# A second start goes on where the first one stopped. Everything it makes is in .venv and runs/quickstart.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

dpopack=${venv#"$repo/"}/bin/dpopack # as one would type it in the repository's root
(($# == 0)) || fail "quickstart.sh takes no arguments; to change the recipe, once it has run:" \
    "$dpopack train configs/quickstart.yaml output_dir=runs/quickstart/other loss.beta=0.5"
setup_env ""
export HF_HUB_OFFLINE=1 # everything is local
# So small a model gains little from a second thread, and loses much where cores are shared: threads wait for
# each other at every matrix product.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

assets=runs/quickstart/assets
if [[ ! $assets/train.jsonl -nt scripts/make_quickstart.py ]]; then # train.jsonl is written last
    echo "Making a tiny Llama, its tokenizer and preference pairs in $assets"
    "$venv/bin/python" scripts/make_quickstart.py "$assets"
fi
"$dpopack" train configs/quickstart.yaml
"$venv/bin/python" scripts/show_quickstart.py --dpopack "$dpopack"
