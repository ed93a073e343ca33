#!/usr/bin/env bash
# From a fresh clone to a trained model: makes an environment, a tiny model and pairs, trains with DPO, and shows
# what the model learned. A second start continues where the first one stopped. All files are in .venv and
# runs/quickstart.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

dpopack=${venv#"$repo/"}/bin/dpopack # as a user types it in the repository's root
(($# == 0)) || fail "quickstart.sh takes no arguments; to change the recipe, once it has run:" \
    "$dpopack train configs/quickstart.yaml output_dir=runs/quickstart/other loss.beta=0.5"
setup_env ""
export HF_HUB_OFFLINE=1 # nothing is downloaded
# Such a small model gains little from a second thread. On a busy machine it loses much, because the threads wait
# for each other at every matrix product.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

assets=runs/quickstart/assets
if [[ ! $assets/train.jsonl -nt scripts/make_quickstart.py ]]; then # train.jsonl is written last
    echo "Making a tiny Llama, its tokenizer and preference pairs in $assets"
    "$venv/bin/python" scripts/make_quickstart.py "$assets"
fi
"$dpopack" train configs/quickstart.yaml
"$venv/bin/python" scripts/show_quickstart.py --dpopack "$dpopack"
