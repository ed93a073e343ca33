"""How far each row layout of a tiny model is from each sequence alone: log-probs and gradients.

The truth to compare with is the model's own, one sequence at a time under stock eager attention. The noise
floor is what fp32 itself is worth there: how far those numbers are from the same ones in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dpo_pack.model.attention import ATTENTION_NAME, register_attention
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.config import check_packs
from dpo_pack.model.fast_layers import trim_last_layer
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import Proof
from dpo_pack.proofs.start_up import prove
from dpo_pack.system.errors import UnsupportedModelError
from support.groups import CPU, make_row
from support.loading import load_usual
from support.oracle import completion_logps_one_by_one, gradients
from support.tiny_models import VOCABULARY, tiny_config, tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of one mode: log-probs in nats a sequence, gradients relative."""

    max_logp: float
    mean_logp: float
    max_gradient: float  # relative to the largest entry
    gradient: float  # norm of the difference, relative


def packs(family: str) -> bool:
    """Also false for a family that an older transformers lacks or cannot pack."""
    if family not in CONFIG_MAPPING:
        return False
    try:
        check_packs(tiny_config(family))
    except UnsupportedModelError:
        return False
    return True


def skip_unless_packed(family: str) -> None:
    if not packs(family):
        pytest.skip(f"transformers {transformers.__version__} cannot pack {family}")


def _make_groups() -> list[Group]:
    """Long and one-token prompts and completions, common beginnings, prefixes, rankings."""
    random = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return random.integers(3, VOCABULARY, count)

    def group(context: int, common: int, *tails: int) -> Group:
        beginning = ids(common)
        completions = tuple(np.concatenate((beginning, ids(tail))) for tail in tails)
        return Group(context=ids(context), completions=completions)

    return [
        group(20, 0, 9, 13),
        group(5, 0, 1, 1),
        group(12, 2, 8, 3),
        group(1, 0, 4, 6),
        group(30, 1, 15, 2),
        group(6, 4, 0, 3),  # chosen is how rejected begins
        group(6, 4, 3, 0),
        group(9, 0, 3, 5, 4),
        group(9, 0, 3),
    ]


GROUPS = _make_groups()
SEQUENCES = [(g.context.tolist(), c.tolist()) for g in GROUPS for c in g.completions]


def measure(family: str, directory: Path) -> tuple[dict[str, Errors], Errors]:
    """(errors of each mode the family can run in, the noise floor); writes the model into `directory`."""
    plain = tiny_model(family)
    plain.save_pretrained(directory)
    weights = torch.randn(len(SEQUENCES), generator=torch.Generator().manual_seed(1))
    alone = completion_logps_one_by_one(plain, SEQUENCES)
    (alone * weights).sum().backward()
    truth = alone.detach(), gradients(plain)

    exact = tiny_model(family, experts="eager").double()
    exact_alone = completion_logps_one_by_one(exact, SEQUENCES)
    (exact_alone * weights).sum().backward()
    noise = _errors(truth, (exact_alone.detach(), gradients(exact)))

    errors = {}
    for packed in (True, False) if packs(family) else (False,):
        scorer = load_usual(directory, packed=packed).scorer
        for mode in ("shared", "unshared") if packed else ("padded",):
            scorer.zero_grad()
            sums = scorer(make_row(GROUPS, mode)).sums
            (sums * weights).sum().backward()
            errors[mode] = _errors((sums.detach(), gradients(scorer.model)), truth)
    return errors, noise


def prove_under_autocast(family: str) -> list[Proof]:
    """The start-up proofs of packed rows, in fp32 parameters under bf16 autocast."""
    register_attention()
    model = tiny_model(family, attention=ATTENTION_NAME)
    wrap_recurrent_layers(model)
    trim_last_layer(model)
    return prove(CompletionLogps(model, backend=sdpa_attention, autocast=torch.bfloat16), CPU)


def bfloat16_cells(proofs: Sequence[Proof]) -> tuple[str, str]:
    """Of the equivalence proof in bf16: its error a token, and what rounding does to the plain answer."""
    numbers = next(proof.numbers for proof in proofs if proof.name == "equivalence")
    return f"{numbers['mean error a token']:.0e}", f"{numbers['rounding a token']:.0e}"


def _errors(ours: tuple[Tensor, dict[str, Tensor]], truth: tuple[Tensor, dict[str, Tensor]]) -> Errors:
    logps = (ours[0] - truth[0]).abs()
    assert ours[1].keys() == truth[1].keys()
    whole = torch.cat([grad.flatten().double() for grad in truth[1].values()])
    difference = torch.cat([(ours[1][name].double() - truth[1][name]).flatten() for name in truth[1]])
    return Errors(
        max_logp=float(logps.max()),
        mean_logp=float(logps.mean()),
        max_gradient=float(difference.abs().max() / whole.abs().max()),
        gradient=float(difference.norm() / whole.norm()),
    )
