"""The search for the largest row that fits in memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.tiny_recipe import load

from dpo_pack.recipe.load import Recipe
from dpo_pack.reference.fill import largest_token_budget, remember_budget, remembered_budget
from dpo_pack.run.setup import Setup


@pytest.mark.parametrize(
    ("limit", "start", "most", "found", "tried"),
    [
        (100, 8, 1000, 64, [8, 16, 32, 64, 128]),  # grows on success until it fails
        (100, 512, 1000, 64, [512, 256, 128, 64]),  # halves on failure until it fits
        (100, 8, 40, 40, [8, 16, 32, 40]),  # no further than there is use for
        (100, 512, 40, 40, [40]),
        (0, 8, 1000, 1, [8, 4, 2, 1]),  # the pass itself will name the pair that is too large
    ],
)
def test_the_budget_grows_on_success_and_halves_on_failure(
    limit: int, start: int, most: int, found: int, tried: list[int]
) -> None:
    asked: list[int] = []

    def fits(token_budget: int) -> bool:
        asked.append(token_budget)
        return token_budget <= limit

    assert largest_token_budget(fits, start=start, most=most) == found
    assert asked == tried


def test_a_budget_is_remembered_beside_others_and_damage_forgets(tmp_path: Path) -> None:
    memo = tmp_path / "cache" / "reference_budgets.json"
    assert remembered_budget(memo, "a") is None
    remember_budget(memo, "a", 4096)
    remember_budget(memo, "b", 512)
    assert (remembered_budget(memo, "a"), remembered_budget(memo, "b")) == (4096, 512)
    memo.write_text('{"a": "many", "b"')
    assert remembered_budget(memo, "a") is None
    for content in ('{"a": "many"}', "[1]", "[" * 10**5):
        memo.write_text(content)
        assert remembered_budget(memo, "a") is None


def budget(recipe: Recipe, device: torch.device) -> int:
    return Setup.reference_token_budget.fget(SimpleNamespace(recipe=recipe, device=device))  # type: ignore[attr-defined, no-any-return]


def test_on_cpu_auto_is_a_constant_and_a_number_is_taken_as_it_is() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert budget(load("packing.token_budget=99999"), cpu) == 4096
    assert budget(load("packing.token_budget=1000"), cuda) == 4000  # where the search begins
    for device in (cpu, cuda):
        assert budget(load("reference.token_budget=777"), device) == 777
