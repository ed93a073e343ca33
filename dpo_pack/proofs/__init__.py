"""Proofs, before the first step, that packed rows are exact on this model and machine. What they share: their
bounds, a proof's result, four random pairs, and the row of these pairs' tokens.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpo_pack.model.layout import Row, packed_row, padded_row
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.system.errors import UnsupportedModelError

# The bounds of all proofs. Log-probs, in nats. In fp32 a sequence's error may be this large.
FLOAT32_BOUND = 1e-4
# Else the mean error of a token may be so many times the error that rounding alone causes in transformers.
ROUNDINGS = 3.0
# In a mixture of experts, log-probs that no leak may change can change by so many times the noise (the change
# of those that no leak can reach), or by so many epsilons of the dtype. In other models they keep every bit.
LEAK_NOISES, LEAK_EPSILONS = 3.0, 4.0
# Exchanged images must change log-probs by more than so many times the error in fp32.
IMAGE_CHANGES = 3.0
# Functions of layers: relative errors of outputs and gradients that are always allowed. We measured in fp32
# 2e-7 to 6e-7 of attention; of recurrences 1e-6, and 5e-5 where all heads forget fast.
ATTENTION_BOUND, RECURRENCE_BOUND = 1e-5, 1e-4
# Errors may also be so many times those of the plain function, but in fp32 at most this.
PLAIN_ERRORS, PLAIN_BOUND = 2.0, 1e-2
# Of another package's recurrent kernel in 16 bits, in epsilons of the dtype: its products round keys, values,
# scores and states to the dtype. flash-linear-attention's own tests allow five.
KERNEL_EPSILONS = 4.0

_BEGINNING = 6  # tokens

PADDED_REMEDY = "use packing.mode: padded, and report the model's family"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of one proof."""

    name: str
    passed: bool
    numbers: dict[str, float]  # the measured numbers, by name; log-probs in nats
    bound: str  # the limits of the numbers, in words
    remedy: str  # the advice to the user when the proof fails


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOutcome:
    """All proofs of one model on this machine."""

    what: str  # "packed rows" or "padded batches"
    proofs: tuple[Proof, ...]
    seconds: float
    is_remembered: bool  # loaded from an earlier start with the same model, versions, backend, device
    dtype: str = "float32"  # of training's matrix products

    def sentences(self) -> tuple[str, str]:
        """Returns what the proofs show, and which of them passed when."""
        numbers = next(proof.numbers for proof in self.proofs if proof.name == "equivalence")
        exact, rounding = numbers.get("max error, in float32"), numbers.get("rounding")
        equal = f"{self.what} are exact on this model: they equal each sequence alone to "
        if exact is None:
            equal += f"{numbers['max error']:.1e} nats in {self.dtype}"
        else:
            equal += f"{exact:.1e} nats in float32; training computes in {self.dtype}"
        if rounding is not None and self.dtype != "float32":
            equal += f", whose own rounding is {rounding:.2g} nats here, packed or not"
        names = ", ".join(proof.name for proof in self.proofs if proof.passed)
        return equal, f"passed {'before' if self.is_remembered else f'now, in {self.seconds:.1f} s'}: {names}"

    def raise_failure(self) -> None:
        """Raises UnsupportedModelError for the first proof that failed."""
        for proof in self.proofs:
            if not proof.passed:
                numbers = ", ".join(f"{name} {value:.3g}" for name, value in proof.numbers.items())
                remedy = proof.remedy
                if any(map(math.isnan, proof.numbers.values())):
                    remedy = "the weights, or what they compute, are not finite: give other weights"
                raise UnsupportedModelError(
                    f"{self.what} are not exact on this model: the {proof.name} proof measured {numbers}; "
                    f"required: {proof.bound}; {remedy}"
                )


def proof_groups(vocabulary: int) -> list[Group]:
    """Returns 4 random pairs: 2 with a common beginning, 1 whose completions begin alike, 1 with one-token
    completions."""
    ids = functools.partial(torch.randint, 0, vocabulary)
    alike = ids((3,))
    one, other = torch.randperm(vocabulary)[:2].split(1)  # two equal tokens would make equal sequences
    beginning = ids((_BEGINNING,))
    return [
        Group(context=context.numpy(), completions=(chosen.numpy(), rejected.numpy()), beginning=common)
        for common, context, chosen, rejected in (
            (_BEGINNING, torch.cat((beginning, ids((18,)))), ids((11,)), ids((8,))),
            (_BEGINNING, torch.cat((beginning, ids((10,)))), ids((7,)), ids((12,))),
            (0, ids((9,)), torch.cat((alike, ids((6,)))), torch.cat((alike, ids((13,))))),
            (0, ids((5,)), one, other),
        )
    ]


@contextlib.contextmanager
def random_groups(scorer: CompletionLogps, device: torch.device) -> Iterator[list[Group]]:
    """Yields `proof_groups` for the scorer's model. In the `with` block torch's random numbers are those of
    seed 0; after it they go on as if there had been no block."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield proof_groups(int(scorer.model.config.get_text_config().vocab_size))


def image_groups(scorer: CompletionLogps) -> list[Group]:
    """Returns random pairs whose prompts have one image, two of one size, and none. An image is wide enough
    for two tokens on each side: of a single one, wrong positions would be right."""
    vision, config = scorer.vision, scorer.model.config
    assert vision is not None
    height, width = (84, 112) if vision.family.has_axes else (112, 112)  # a square has few tiles
    block = np.array(vision.processor.image_ids(width, height))
    groups = proof_groups(int(config.get_text_config().vocab_size))
    beginning = groups[0].context[:_BEGINNING]
    found = []
    for group, number in zip(groups, (1, 2, 0), strict=False):
        parts, images = [beginning], []
        for ids in (
            beginning,
            group.context,
            *group.completions,
        ):  # a text must not have the token of an image
            ids[ids == config.image_token_id] = 0
        for most in (256, 32)[:number]:  # a second image is dark, so that no model takes it for the first
            parts += [group.context[-3:], block]
            images.append(torch.randint(0, most, (height, width, 3), dtype=torch.uint8).numpy())
        context = np.concatenate([*parts, group.context])
        images_read = tuple(functools.partial(np.asarray, image) for image in images)
        found.append(replace(group, context=context, images=images_read, beginning=_BEGINNING))
    return found


def proof_row(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Row:
    """Puts all pairs into one row: packed with shared prompts, or padded if the scorer has no backend."""
    if scorer.backend is None:
        return padded_row(groups, device=device)
    return packed_row(groups, device, share_prompt=True)


def pair_sums(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Tensor:
    """Returns log-probs of chosen and rejected, [pairs, 2], computed with all pairs in one row."""
    sums: Tensor = scorer(proof_row(scorer, groups, device)).sums
    return sums.view(-1, 2)
