"""The per-step numbers of TRL 1.16 on the same models and pairs: packed, shared, padded, on two processes.

Tolerances: loss 5e-5 (relative above 1), grad_norm 3e-4 relative, rewards 1e-4, logps 1e-3. Where TRL is
further than that from a plain loop in float64, we compare with the loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from support.conformance import (
    CASES,
    COARSE_CASES,
    CONFORMANCE,
    FLOAT64_OF_SHARED,
    LAYOUTS,
    SETTINGS,
    assert_steps_equal_trl,
    conformance_recipe,
    read_cases,
    steps_in_float64,
    steps_of,
)
from support.marks import slow
from support.two_ranks import run_on_ranks
from torch.distributed.tensor import DTensor

from dpo_pack.recipe.load import load_recipe, parse_recipe
from dpo_pack.recipe.peers.translate import translate
from dpo_pack.run.setup import prepare_data, prepare_tokenizer
from dpo_pack.system import ranks
from dpo_pack.trainer import Trainer, train

# Several rows a step. Every case meets it.
COMMON = "shared, budget 512"
# A layout changes log-probs and never what a loss makes of them. So one case of each kind meets every layout:
# a sum of log-probs, a mean over tokens, weights by the policy.
IN_EVERY_LAYOUT = ("sigmoid", "sigmoid_norm", "wpo")
# Of expected.json, what earlier releases had.
GONE = {"aot", "aot_unpaired", "ld_alpha"}
# Quick tests have them and one divergence. Every loss by hand, quick: tests/losses/test_losses.py.
QUICK = (*IN_EVERY_LAYOUT, "alpha_divergence")
# And on two ranks these, of which one divides by tokens of the whole step. Each kind of loss on two ranks:
# tests/run/test_combinations.py.
ON_TWO_RANKS = (*IN_EVERY_LAYOUT, "sigmoid_plus_sft")
OTHERS = [(case, layout) for layout in LAYOUTS for case in IN_EVERY_LAYOUT if layout != COMMON]


@pytest.fixture(scope="session")
def second_set(shared_dir: Path) -> Path:
    """Numbers of TRL on HH pairs, by another hand, where somebody has put them beside the repository."""
    return shared_dir / "conformance" / "llama"


def test_the_repository_has_pairs_models_and_numbers_of_every_case() -> None:
    expected = json.loads((CONFORMANCE / "expected.json").read_text())
    assert set(CASES) == set(expected["cases"]) - GONE and len(CASES) == 18
    assert expected["made_with"].keys() == {"trl", "torch", "transformers"}
    files = [path for path in CONFORMANCE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000


def test_where_the_loop_in_float64_stands_in_for_trl_it_takes_the_same_steps() -> None:
    cases = read_cases(CONFORMANCE)
    assert {case for case, entry in cases.items() if "float64" in entry} == set(COARSE_CASES)
    for case in COARSE_CASES:
        for plain, trl in zip(cases[case]["float64"], cases[case]["steps"], strict=True):
            for name, value in plain.items():
                assert value == pytest.approx(trl[name], rel=1e-3, abs=1e-3), f"{case}: {name}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids, log-probs of the reference and proofs, which all runs in this file share."""
    return tmp_path_factory.mktemp("cache")


def assert_run_takes_trls_steps(
    directory: Path, case: str, layout: str, tmp_path: Path, cache: Path, console: Console
) -> None:
    recipe = conformance_recipe(directory, tmp_path, case, layout, cache=cache)
    assert SETTINGS[case] == read_cases(directory)[case]["settings"]
    train(recipe, console)
    assert_steps_equal_trl(directory, case, steps_of(recipe))


@pytest.mark.parametrize("case", [*QUICK, *slow(*(case for case in CASES if case not in QUICK))])
def test_the_steps_of_each_setting_equal_trl_s(
    case: str, tmp_path: Path, cache: Path, console: Console
) -> None:
    assert_run_takes_trls_steps(CONFORMANCE, case, COMMON, tmp_path, cache, console)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), OTHERS)
def test_steps_equal_trl_s_in_every_layout(
    case: str, layout: str, tmp_path: Path, cache: Path, console: Console
) -> None:
    assert_run_takes_trls_steps(CONFORMANCE, case, layout, tmp_path, cache, console)


@pytest.mark.parametrize("case", CASES)
def test_every_setting_of_trl_translates_to_the_loss_that_takes_trl_s_steps(
    case: str, tmp_path: Path
) -> None:
    settings = {
        "model_name_or_path": "a/b",
        "dataset_name": "a/c",
        **read_cases(CONFORMANCE)[case]["settings"],
    }
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "recipe.yaml").write_text(translate("trl", tmp_path / "dpo.yaml"))
    ours = conformance_recipe(CONFORMANCE, tmp_path, case, COMMON).loss
    assert load_recipe(tmp_path / "recipe.yaml").loss == ours


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_trl_s_on_the_second_set(
    case: str, second_set: Path, tmp_path: Path, cache: Path, console: Console
) -> None:
    assert_run_takes_trls_steps(second_set, case, COMMON, tmp_path, cache, console)


def assert_run_takes_the_steps_of_the_loop(
    directory: Path, case: str, tmp_path: Path, console: Console
) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Ours and the loop's metrics of each step."""
    recipe = conformance_recipe(directory, tmp_path, case, "shared, budget 8192")
    train(recipe, console)
    pairs = prepare_data(recipe, prepare_tokenizer(recipe), console).train
    token_ids = [
        tuple(ids.tolist() for ids in (group.context, *group.completions))
        for group in map(pairs.group, range(pairs.num_pairs))
    ]
    steps = list(zip(steps_of(recipe), steps_in_float64(recipe, token_ids), strict=True))
    # The first step: a fifth of the tolerances against TRL. Later ones: those tolerances, because AdamW makes
    # the rounding of one step that of the next, and how far float32 is from float64 then is each CPU's own.
    for ours, plain in steps:
        share = 0.2 if ours["step"] == 1 else 1.0
        assert ours["loss"] == pytest.approx(plain["loss"], abs=share * 5e-5)
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=share * 3e-4)
        assert ours["rewards/margins"] == pytest.approx(plain["rewards/margins"], abs=share * 1e-4)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("case", COARSE_CASES)
def test_where_float32_is_too_coarse_for_trl_we_take_the_steps_of_a_plain_loop_in_float64(
    case: str, tmp_path: Path, console: Console
) -> None:
    written = read_cases(CONFORMANCE)[case]["float64"]
    steps = assert_run_takes_the_steps_of_the_loop(CONFORMANCE, case, tmp_path, console)
    for (_, plain), numbers in zip(steps, written, strict=True):
        assert numbers == pytest.approx({name: plain[name] for name in numbers}, rel=1e-6, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", COARSE_CASES)
def test_on_the_second_set_we_are_nearer_to_the_loop_in_float64_than_trl_is(
    case: str, second_set: Path, tmp_path: Path, console: Console
) -> None:
    trl = read_cases(second_set)[case]["steps"]
    for ours, plain in assert_run_takes_the_steps_of_the_loop(second_set, case, tmp_path, console):
        for name, value in plain.items():
            key = (case, ours["step"], name)
            if key not in FLOAT64_OF_SHARED:
                continue
            assert FLOAT64_OF_SHARED[key] == pytest.approx(value, rel=1e-6)
            error_of_trl = abs(trl[ours["step"] - 1][name] - value)
            assert abs(ours[name] - value) < error_of_trl / 2, key  # or nothing would excuse us


# ---------------------------------------------------------------------------------------------- Two processes


def _steps_of_runs(tmp_path: Path, strategy: str) -> dict[str, list[dict[str, Any]]]:
    """metrics.jsonl of each case, by two processes; their caches are one, so proofs and reference are too."""
    steps: dict[str, list[dict[str, Any]]] = {}
    kinds: set[type] = set()

    def look(trainer: Trainer) -> None:
        parameters = list(trainer.state.scorer.parameters())
        kinds.update(type(parameter.data) for parameter in parameters)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if strategy == "ddp":  # they stay in its buckets
            assert len(grads) == len(parameters) and not any(grad.any() for grad in grads)
        else:
            assert grads == []

    for case in ON_TWO_RANKS:
        tree = conformance_recipe(CONFORMANCE, tmp_path, case, COMMON).model_dump(mode="json")
        tree |= {"distributed": {"strategy": strategy}, "output_dir": str(tmp_path / case)}
        recipe = parse_recipe(tree)
        train(recipe, Console(quiet=True), after_step=look)
        ranks.wait_for_all()
        steps[case] = steps_of(recipe)
    assert kinds == {DTensor if strategy == "fsdp2" else torch.Tensor}
    return steps


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_take_trls_steps(strategy: str, tmp_path: Path) -> None:
    for steps in run_on_ranks(_steps_of_runs, tmp_path, strategy):
        assert steps.keys() == set(ON_TWO_RANKS)
        for case, lines in steps.items():
            assert_steps_equal_trl(CONFORMANCE, case, lines)
