"""What makes reference log-probs be computed again, and what does not: one test a row of the table in
docs/reference-cache.md.

Each goes through the recipe: a filled cache, one change, and how many sequences the next pass computes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_run import tiny_run
from transformers.utils import logging as transformers_logging

from dpo_pack.model import fingerprint
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.pairs import prepare_reference
from dpo_pack.run.setup import prepare
from dpo_pack.system.console import make_console

NUM_SEQUENCES = 44
Change = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory whose cache is full."""
    directory = tmp_path_factory.mktemp("filled")
    assert num_computed(tiny_run(directory)) == NUM_SEQUENCES
    return directory


def num_computed(recipe: Path, *overrides: str) -> int:
    """Sequences the reference pass computes."""
    prepared = prepare(load_recipe(recipe, overrides), make_console(quiet=True))
    return prepare_reference(prepared).num_computed


def one_element(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_file(work / "model" / "model.safetensors")
    weight = weights["model.layers.0.self_attn.q_proj.weight"]
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(1.0))
    save_file(weights, work / "model" / "model.safetensors", metadata={"format": "pt"})


def numerics_version(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpo_pack.model.facts.NUMERICS_VERSION", fingerprint.NUMERICS_VERSION + 1)


def modelling_source(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["transformers.models.llama.modeling_llama"]
    assert module.__file__ is not None
    changed = work / "modeling_llama.py"
    changed.write_bytes(Path(module.__file__).read_bytes() + b"# a fix upstream\n")
    monkeypatch.setattr(module, "__file__", str(changed))


def head_config(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((work / "model" / "config.json").read_text())
    (work / "model" / "config.json").write_text(json.dumps({**config, "logit_scale": 1.0}))


@pytest.mark.parametrize(
    "change",
    [one_element, numerics_version, modelling_source, head_config],
    ids=lambda change: change.__name__,
)
def test_what_changes_log_probs_computes_all_of_them_again(
    change: Change, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Path(shutil.copytree(filled, tmp_path / "work"))
    change(work, monkeypatch)
    assert num_computed(work / "recipe.yaml") == NUM_SEQUENCES


def test_another_type_of_parameters_computes_all_of_them_again(filled: Path, tmp_path: Path) -> None:
    work = Path(shutil.copytree(filled, tmp_path / "work"))
    assert num_computed(work / "recipe.yaml", "model.dtype=bfloat16") == NUM_SEQUENCES


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=3e-6", "loss.type=ipo", "loss.beta=0.5", "data.shuffle=false", "seed=7",
        "packing.pairs_per_step=4", "packing.token_budget=64", "reference.token_budget=100",
        "packing.mode=padded", "packing.share_prompt=false", "model.attention=sdpa",
        "model.gradient_checkpointing=true", "output_dir=${recipe_dir}/another",
        "data.train=[{path: '${recipe_dir}/pairs.jsonl', weight: 2.5}, '${recipe_dir}/heldout.jsonl']",
        "data.train={path: '${recipe_dir}/pairs.jsonl', max_pairs: 5}", "data.eval={fraction: 0.2}",
    ],
    ids=lambda override: override.replace("${recipe_dir}", ""),
)  # fmt: skip
def test_what_changes_no_log_prob_is_cached(override: str, filled: Path) -> None:
    assert num_computed(filled / "recipe.yaml", override) == 0
