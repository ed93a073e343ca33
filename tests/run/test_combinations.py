"""What a recipe can combine, two by two: each run equals a plain loop in float64, or is refused in one line.

support/combinations.py has the factors and the rules, support/plain_steps.py the loop. Not among the factors:
dropout of adapters, which draws numbers that no other code draws; what needs CUDA (flash_attn,
adamw_8bit); `model.compile`, which takes a minute a run (tests/model/test_compiling.py).
"""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from support.combinations import (
    FACTORS,
    LATER,
    LOSSES,
    RULES,
    assert_plain_steps,
    make_assets,
    overrides_of,
    plan,
    recipe_of,
    refusal_of,
    train_and_watch,
    whole,
)
from support.loss_options import loss_options
from support.pairwise import Combination
from support.plain_steps import Logps, plain_loss
from support.two_ranks import run_on_ranks

from dpo_pack.recipe.load import Recipe, check_environment
from dpo_pack.recipe.training import LOSSES as REGISTERED
from dpo_pack.system.errors import DpoPackError, RecipeError

pytest.importorskip("peft")

PLAN = plan()
PAIRS = [
    {one: a, other: b}
    for one, other in combinations(FACTORS, 2)
    for a, b in product(FACTORS[one], FACTORS[other])
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("combinations"))


def name_of(combination: Combination) -> str:
    """What differs from the first value of each factor."""
    values = [
        value for factor, value in combination.items() if value != next(iter(FACTORS.get(factor, ("",))))
    ]
    return ", ".join(values) or "plain"


def refusal(assets: Path, run: Path, combination: Combination) -> str | None:
    """The message of the recipe and its environment; None if they refuse nothing."""
    try:
        check_environment(recipe_of(assets, run, overrides_of(combination)))
    except RecipeError as error:
        assert str(error).isprintable()
        return str(error)
    return None


def test_each_two_values_meet_in_a_run_or_are_refused() -> None:
    forbidden = [pair for pair in PAIRS if not any(pair.items() <= each.items() for each, _ in PLAN)]
    later = [pair for pair in forbidden if refusal_of(whole(pair)) is None]
    assert later == [
        {"reference": "copied", "adapter": "saved"},
        {"optimizer": "adafactor", "processes": "two with shards"},
    ]
    assert len(PLAN) <= 40


def test_every_loss_is_trained_in_some_combination_and_the_plain_loop_knows_it() -> None:
    chosen = {
        option.removeprefix("loss=") for _, overrides in PLAN for option in overrides if option[:5] == "loss="
    }
    assert chosen == {loss for family in LOSSES.values() for loss in family}
    missing = REGISTERED.keys() - re.findall(r"type: (\w+)", " ".join(chosen))
    assert not missing, f"add {missing} to LOSSES in tests/support/combinations.py"
    one = torch.ones(1, dtype=torch.float64)
    logps = Logps(chosen=-one, rejected=-one, chosen_tokens=one, rejected_tokens=one)
    for name in REGISTERED:
        plain_loss(name, logps, logps, one, loss_options(beta=0.5, label_smoothing=0.1))


@pytest.mark.slow
def test_of_all_pairs_of_values_recipes_refuse_those_of_the_rules_and_no_others(
    assets: Path, tmp_path: Path
) -> None:
    for pair in PAIRS:
        words, message = refusal_of(whole(pair)), refusal(assets, tmp_path / "run", whole(pair))
        assert (message is None) == (words is None), f"{pair}: {message}"
        assert words is None or re.search(words, str(message)), f"{pair}: {message}"


def test_every_rule_refuses_all_that_it_names_in_its_words(assets: Path, tmp_path: Path) -> None:
    for where, words in RULES:
        for values in product(*where.values()):
            message = refusal(assets, tmp_path / "run", whole(dict(zip(where, values, strict=True))))
            assert re.search(words, str(message)), f"{values}: {message}"


@pytest.mark.parametrize(("where", "words"), LATER)
def test_what_only_the_files_or_the_ranks_show_is_refused_before_the_first_step(
    where: dict[str, tuple[str, ...]], words: str, assets: Path, tmp_path: Path
) -> None:
    for values in product(*where.values()):
        combination = whole(dict(zip(where, values, strict=True)))
        recipe = recipe_of(assets, tmp_path / "run", overrides_of(combination))
        has_ranks = combination["processes"] != "one"
        for message in run_on_ranks(_refusal_of_run, recipe) if has_ranks else [_refusal_of_run(recipe)]:
            assert re.search(words, message) and message.isprintable()
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def _refusal_of_run(recipe: Recipe) -> str:
    with pytest.raises(DpoPackError) as refused:
        train_and_watch(recipe)
    return str(refused.value)


# The quick tests train every sixth run on one process; only all of the runs have each two values together.
ON_ONE = [number for number, (combination, _) in enumerate(PLAN) if combination["processes"] == "one"]
QUICK = ON_ONE[::6]


@pytest.mark.parametrize(
    ("combination", "overrides"),
    [
        pytest.param(*run, id=name_of(run[0]), marks=() if number in QUICK else pytest.mark.slow)
        for number, run in enumerate(PLAN)
    ],
)
def test_a_combination_takes_the_steps_of_a_plain_loop(
    combination: Combination, overrides: tuple[str, ...], assets: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(assets, tmp_path / "run", overrides)
    steps = train_and_watch(recipe, combination["processes"])
    assert_plain_steps(recipe, steps, combination["precision"])
