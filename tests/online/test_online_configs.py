"""The online recipes in configs/: judged by a function and by a reward model, scores rise beyond doubt."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from dpo_pack.recipe.load import load_recipe
from dpo_pack.trainer import train

REPOSITORY = Path(__file__).resolve().parents[2]
HELD_OUT_PROMPTS = 150


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(REPOSITORY))
    try:
        return importlib.import_module(f"scripts.{name}")
    finally:
        sys.path.remove(str(REPOSITORY))


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("repository") / "runs" / "quickstart" / "assets"
    script("make_quickstart").make_quickstart(directory)
    return directory


def run(name: str, assets: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The last evaluation of configs/`name`."""
    working_directory = assets.parents[2]
    monkeypatch.chdir(working_directory)
    script("online_judge")  # found from the repository's root, where recipes are run from
    recipe = load_recipe(REPOSITORY / "configs" / name, ["logging.every_steps=10"])
    train(recipe, Console(quiet=True))
    lines = (working_directory / recipe.output_dir / "metrics.jsonl").read_text().splitlines()
    record: dict[str, Any] = json.loads(lines[-1])
    assert record["split"] == "eval" and record["prompts"] == HELD_OUT_PROMPTS
    return record


def test_the_judge_counts_courteous_words() -> None:
    judge = script("online_judge").courtesy
    assert judge(prompts=["?"] * 3, completions=["", "Thanks, I am happy to.", "goodness"]) == [0, 2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["function", "reward_model"])
def test_scores_rise_significantly_against_the_starting_policy(
    judge: str, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if judge == "reward_model":
        assert script("make_reward_model").make_reward_model(assets) > 0.9
    record = run(f"online_{judge}.yaml", assets, monkeypatch)
    intervals = record["intervals"]
    assert intervals["online/score_gain"][0] > 0.3  # the lower end of 95 %
    assert intervals["online/win_rate"][0] > 0.5
