"""`loss.type: module:function`: found, tried out, and refused in one line."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from support.loss_options import loss_options, pair_logps

from dpo_pack.losses.preference import make_objective
from dpo_pack.system.errors import RecipeError

OPTIONS = loss_options(beta=0.5)

MODULE = """
import torch

def good(policy, reference, options):
    margin = policy.chosen - reference.chosen - policy.rejected + reference.rejected
    return torch.nn.functional.softplus(-options.beta * margin)

def scalar(policy, reference, options):
    return good(policy, reference, options).mean()

def number(policy, reference, options):
    return 1.0

def detached(policy, reference, options):
    return good(policy, reference, options).detach()

def coupled(policy, reference, options):
    return good(policy, reference, options) - policy.chosen.mean()

def two_arguments(policy, reference):
    return policy.chosen

def fails(policy, reference, options):
    raise ValueError("of two\\nlines")

constant = 3
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses_of_mine.py").write_text(MODULE)
    (tmp_path / "broken_losses.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "losses.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    for name in ("losses_of_mine", "broken_losses", "package_of_mine", "package_of_mine.losses"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    "name", ["losses_of_mine:good", "package_of_mine.losses:good", "dpo_pack.losses.preference:sigmoid"]
)
def test_a_function_of_the_working_directory_or_installed_becomes_a_loss(name: str) -> None:
    path = list(sys.path)
    objective = make_objective([(name, 2.0)], asdict(OPTIONS))
    assert objective.needs_reference and sys.path == path
    pair = pair_logps(-1.0, -2.0)
    assert objective(pair, pair, mean_chosen_tokens=1.0).tolist() == pytest.approx([2 * 0.6931471805599453])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_losses:good", "ModuleNotFoundError"),
        ("broken_losses:good", "no_such_module_anywhere"),
        ("losses_of_mine:bad", "no attribute 'bad'"),
        ("losses_of_mine:constant", "is int, not a function"),
        ("losses_of_mine:scalar", "not shape ()"),
        ("losses_of_mine:number", "not float"),
        ("losses_of_mine:detached", "differentiable"),
        ("losses_of_mine:coupled", "does not depend on the other"),
        ("losses_of_mine:two_arguments", "TypeError"),
        ("losses_of_mine:fails", "ValueError: of two;"),
    ],
)
def test_what_cannot_be_used_is_one_line_that_names_the_key(name: str, reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_objective([(name, 1.0)], asdict(OPTIONS))
    message = str(caught.value)
    assert message.startswith("loss.type: ") and message.isprintable() and reason in message
