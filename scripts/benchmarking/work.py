"""The work of a benchmark, the same for every contender: tokens and FLOPs of its pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpo_pack.packing.lengths import ADAPTER_PASSES, TRAINING_PASSES, ModelShape, PairLengths, pair_flops

REFERENCE_PASSES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Means over the pairs."""

    shared_tokens: float  # of a pair, with its common prefix once
    unshared_tokens: float  # of a pair, with both sequences whole
    scored_tokens: float
    training_flops: float  # of a pair: common prefix once, the head only at completion positions
    reference_flops: float

    @property
    def flops(self) -> float:
        """Of a pair, reference included: the numerator of every contender's MFU."""
        return self.training_flops + self.reference_flops


def work_of(shape: ModelShape, lengths: PairLengths, *, lora: bool) -> Work:
    """What DPO on these pairs has to compute at the least."""
    passes = ADAPTER_PASSES if lora else TRAINING_PASSES
    forward = pair_flops(shape, lengths, share_prompt=True, passes=REFERENCE_PASSES)
    return Work(
        shared_tokens=float(lengths.row_tokens(share_prompt=True).mean()),
        unshared_tokens=float(lengths.row_tokens(share_prompt=False).mean()),
        scored_tokens=float(lengths.completion_tokens().mean()),
        training_flops=float(forward.mean()) * passes,
        reference_flops=float(forward.mean()),
    )


def forward_parts(shape: ModelShape, lengths: PairLengths) -> dict[str, float]:
    """FLOPs of one forward pass over all of these packed pairs, by where they are spent."""
    none = replace(shape, token_weights=0.0, head_weights=0, last_block_weights=0.0, state_products=0.0)

    def flops(of: ModelShape) -> float:
        return float(pair_flops(of, lengths, share_prompt=True, passes=1.0).sum())

    head, attention = flops(replace(none, head_weights=shape.head_weights, attention=())), flops(none)
    return {"layers": flops(shape) - head - attention, "head": head, "attention": attention}
