"""Two processes take the steps of TRL on the conformance pairs, whether they copy the model or shard it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.conformance import CASES, CONFORMANCE, assert_steps_equal_trl, conformance_recipe, steps_of
from support.two_ranks import run_on_ranks
from torch.distributed.tensor import DTensor

from dpo_pack.recipe.load import parse_recipe
from dpo_pack.system import ranks
from dpo_pack.trainer import Trainer, train

Run = tuple[str, str, str]  # strategy, case, layout
# Neither layout nor strategy changes what a loss makes of log-probs: a few losses meet all of them. One is
# plain, one has other gradients where pairs are few, one couples the pairs of all ranks.
FEW = ("sigmoid", "ipo", "aot")
LAYOUT = "shared, budget 512"  # several rows for each rank


def _steps_of_runs(directory: Path, tmp_path: Path, runs: list[Run]) -> dict[Run, list[dict[str, Any]]]:
    """metrics.jsonl of each run, by two processes; their caches are one, so proofs and reference are too."""
    steps: dict[Run, list[dict[str, Any]]] = {}
    kinds: set[type] = set()
    strategy = ""

    def look(trainer: Trainer) -> None:
        parameters = list(trainer.state.scorer.parameters())
        kinds.update(type(parameter.data) for parameter in parameters)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if strategy == "ddp":  # they stay in its buckets
            assert len(grads) == len(parameters) and not any(grad.any() for grad in grads)
        else:
            assert grads == []

    for number, run in enumerate(runs):
        strategy, case, layout = run
        tree = conformance_recipe(directory, tmp_path, case, layout).model_dump(mode="json")
        tree |= {"distributed": {"strategy": strategy}, "output_dir": str(tmp_path / f"run-{number}")}
        kinds.clear()
        recipe = parse_recipe(tree)
        train(recipe, Console(quiet=True), after_step=look)
        assert kinds == {DTensor if strategy == "fsdp2" else torch.Tensor}
        ranks.wait_for_all()
        steps[run] = steps_of(recipe)
    return steps


def assert_runs_equal_trl(directory: Path, tmp_path: Path, runs: list[Run]) -> None:
    for steps in run_on_ranks(_steps_of_runs, directory, tmp_path, runs):
        assert steps.keys() == set(runs)
        for run, lines in steps.items():
            assert_steps_equal_trl(directory, run[1], lines)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_take_trls_steps(tmp_path: Path) -> None:
    runs = [("ddp", "sigmoid", LAYOUT), ("fsdp2", "aot", LAYOUT)]
    assert_runs_equal_trl(CONFORMANCE, tmp_path, runs)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_take_trls_steps_for_every_loss(strategy: str, tmp_path: Path) -> None:
    assert_runs_equal_trl(CONFORMANCE, tmp_path, [(strategy, case, LAYOUT) for case in CASES])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_take_trls_steps_on_the_second_set(shared_dir: Path, tmp_path: Path) -> None:
    directory = shared_dir / "conformance" / "llama"
    runs = [(strategy, case, LAYOUT) for strategy in ("ddp", "fsdp2") for case in FEW]
    assert_runs_equal_trl(directory, tmp_path, runs)
