"""The sources of the reference log-probs of a step's pairs, and the check of cached ones against the policy.

- `CachedReference`: the rows already have log-probs from the run's reference.parquet, or the loss needs none.
- `LiveReference`: a reference model scores the rows of each step, as online runs need it. It can also follow
  the policy (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656): every `follow_every` steps,

      reference <- mixup * policy + (1 - mixup) * reference.

Legend: P pairs of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpo_pack.data.store import PairTable
from dpo_pack.model.config import routes_tokens
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.logps import sequence_sums
from dpo_pack.model.lora import plain_name
from dpo_pack.model.parallel import is_sharded, local_part
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.system.errors import ModelError, RunError
from dpo_pack.system.ranks import every_rank_says, first_goes_first
from dpo_pack.training.batches import GlobalBatch, PairRow, RowBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedReference:
    """A reference whose log-probs the run has before its first step; with the methods of LiveReference."""

    # The log-probs of a table's pairs; raises CacheError if one is missing. None: no loss needs them.
    lookup: Callable[[PairTable], FloatArray] | None
    moving: None = None
    exact: Reference | None = None  # the reference of an evaluation in fp32, if the run computes in less

    def known(self, table: PairTable) -> FloatArray | None:
        return None if self.lookup is None else self.lookup(table)

    def score(self, row: PairRow) -> PairRow:
        return row

    def score_batch(self, batch: GlobalBatch) -> GlobalBatch:
        return batch

    def follow(self, policy: CompletionLogps, *, step: int) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReference:
    """A model that computes log-probs in each step: a second model, or the policy without its new adapter."""

    model: LoadedModel
    device: torch.device
    is_offloaded: bool = False  # between steps, the model is in host memory; only for a second model
    follow_every: int | None = None  # None: it does not follow; only for a second model without an adapter
    mixup: float = 1.0  # the factor of the policy's weights in the new reference

    @property
    def moving(self) -> CompletionLogps | None:
        """The model, for checkpoints, if its weights follow the policy; None if they do not."""
        return None if self.follow_every is None else self.model.scorer

    @property
    def exact(self) -> Reference | None:
        scorer = self.model.scorer
        return None if scorer.compute_dtype == torch.float32 or is_sharded(scorer.model) else self

    def known(self, table: PairTable) -> FloatArray | None:
        """Returns [P, (chosen, rejected)] sums of held-out or online pairs, in nats; None: `score` adds them,
        or none are needed. (The builder of offline training rows has them from the beginning.)"""
        return None

    @torch.no_grad()
    def score(self, row: PairRow) -> PairRow:
        """Returns the row with the reference's log-probs in it."""
        with self.model.as_reference():
            return replace(row, reference=self.model.scorer(row.row).sums.view(-1, 2))

    @torch.no_grad()
    def score_batch(self, batch: GlobalBatch) -> GlobalBatch:
        """Returns the batch with the reference's log-probs in all rows. Every rank must call this method."""
        if self.is_offloaded:
            self.model.scorer.to(self.device)
        rows = [self.score(row) for row in batch.rows]
        with self.model.as_reference():
            for idle_row in batch.idle_rows:  # a sharded model computes on all ranks or on none
                self.model.scorer(idle_row)
        if self.is_offloaded:
            self.model.scorer.to("cpu")
        return replace(batch, rows=rows)

    @torch.no_grad()
    def follow(self, policy: CompletionLogps, *, step: int) -> None:
        """Updates the reference's weights with the policy's, if an update is due after `step`."""
        if self.follow_every is None or step % self.follow_every:
            return
        weights = dict(self.model.scorer.model.named_parameters())
        for name, weight in merged_weights(policy):
            weights[name].lerp_(weight.to(weights[name].dtype), self.mixup)


Reference = CachedReference | LiveReference


def merged_weights(policy: CompletionLogps) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of each weight that the policy has once its adapter, if any, is merged."""
    if policy.adapter is None:
        yield from policy.model.named_parameters()
        return
    from peft.tuners.lora import LoraLayer

    layers = {
        f"{name}.weight": module
        for name, module in policy.model.named_modules()
        if isinstance(module, LoraLayer)
    }
    for name, parameter in policy.model.named_parameters():
        plain = plain_name(name)
        if plain in layers:
            (adapter,) = layers[plain].active_adapters
            # Each subclass has `get_delta_weight`, but the common base class does not declare it.
            yield plain, parameter + layers[plain].get_delta_weight(adapter)  # type: ignore[attr-defined]
        elif plain is not None:
            yield plain, parameter


def check_followable(policy: CompletionLogps, reference: CompletionLogps) -> None:
    """Raises ModelError if the reference cannot follow the policy: training changes what `merged_weights`
    does not yield, or the models differ in names or shapes of weights."""
    weights = list(policy.model.named_parameters())
    if policy.adapter is not None:
        from peft.tuners.lora import Embedding, Linear

        # A plain LoRA layer adds the product B A to its weight. A variant (DoRA) adds more, and the weights
        # of other layers (quantised, experts) have another form.
        plain = {
            name
            for name, module in policy.model.named_modules()
            if isinstance(module, Linear | Embedding) and not module.lora_variant
        }
        for name, parameter in weights:
            layer, _, part = name.partition(".lora_")
            is_low_rank = layer in plain and part != "" and not part.endswith("bias")
            if parameter.requires_grad and not is_low_rank and ".modules_to_save." not in name:
                raise ModelError(
                    f"reference.sync: a reference cannot follow {name}, only plain LoRA (no DoRA, no biases) "
                    "and modules_to_save; merge the adapter first (dpopack merge) or leave reference.sync out"
                )
    named = [(name if policy.adapter is None else plain_name(name), weight) for name, weight in weights]
    ours = {name: weight.shape for name, weight in named if name is not None}
    theirs = {name: weight.shape for name, weight in reference.model.named_parameters()}
    if unlike := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
        raise ModelError(
            "reference.sync: a reference can follow only a policy of its own architecture, and the two "
            f"models differ in the shape of {unlike[0]}; leave reference.path or reference.sync out"
        )


# ------------------------------------------------------------------------------------ before the first step

# A log-prob may differ by so many standard deviations of its rounding, and a row's root mean square by so
# many; that of few sequences may be larger by chance.
_EACH, _ROW = 6.0, 2.0
# Measured rounding is at most so many times that of the logits; more is a fault. Routers are exempt: rounding
# can send a token to other experts.
_MOST_MEASURED = 4.0


@torch.no_grad()
def check_start(scorer: CompletionLogps, facts: ModelFacts, builder: RowBuilder, pairs: IntArray) -> None:
    """Proves that the policy is its cached reference, by its weights, and by the log-probs of one row of
    `pairs`, [P] positions. Raises RunError. Every rank must call it.

    How much log-probs may differ is first taken from the size of the logits. If they differ more, it is
    measured: how much they change in rows of another length, for which matrix products may take other
    kernels, and, for a model in 16 bits, in fp32. Then the reference must be as near to fp32 as the policy.
    Leaks and wrong positions, which policy and reference share, are found by the proofs."""
    with first_goes_first():
        found = facts.read_fingerprints()
    if any(facts.namespace[name] != fingerprint for name, fingerprint in found.items()):
        raise RunError(f"{facts.label} changed on disk while it was read; start the run again")
    for name, weight in scorer.model.named_parameters() if scorer.adapter and scorer.adapter.is_new else ():
        if re.search(r"\.lora_(embedding_)?B\.", name) and bool(local_part(weight).any()):
            raise RunError(f"the new adapter's {name} is not zero, so the policy is not its reference")
    row = builder.build(pairs)
    output, reference = scorer(row.row), row.reference.flatten()  # [S] sequences
    rounding = output.statistics[:, 4].sqrt()
    # A sharded policy computes on all ranks or on none, so all ranks continue if one finds a difference.
    if all(every_rank_says(_excess(output.sums - reference, rounding) <= 1)):
        return
    change = (scorer(row.row).sums - output.sums).nan_to_num(0.0)  # NaN is not caused by dropout
    others = np.array_split(pairs, 2) if len(pairs) > 1 else [pairs.repeat(2)]
    in_others = torch.cat([scorer(builder.build(other).row).token_logps for other in others])
    if _excess(change, rounding) > 1:
        raise RunError(
            f"the policy is not repeatable: a log-prob of the first row differs by "
            f"{float(change.abs().max()):.3g} nats when it is computed again; dropout or router noise is on: "
            "set it to zero in the model's config.json"
        )
    most = math.inf if routes_tokens(scorer.model.config) else _MOST_MEASURED
    measured = _measured(in_others[: len(output.token_logps)] - output.token_logps, output.num_tokens)
    allowed = rounding.maximum(measured.minimum(most * rounding))
    excess = _excess(output.sums - reference, allowed)
    if not excess <= 1 and scorer.compute_dtype.itemsize < 4 and not is_sharded(scorer.model):
        with scorer.in_float32():
            exact = scorer(row.row)
        measured = _measured(exact.token_logps - output.token_logps, output.num_tokens)
        allowed = allowed.maximum(measured.minimum(most * rounding))
        excess = _excess(exact.sums - reference, allowed)
        if excess <= 1:
            excess = _excess(exact.sums - output.sums, allowed)
    if not excess <= 1:
        largest = float((output.sums - reference).abs().max())
        raise RunError(
            f"the policy at step 0 is not its cached reference: a log-prob differs by {largest:.3g} nats, "
            f"and the first row's differ {excess:.2g} times as much as rounding explains; likely causes: "
            "policy and reference ran in different dtypes or autocast, or another release filled the cache "
            "(set another reference.cache_dir to compute the reference again)"
        )


def _excess(errors: Tensor, rounding: Tensor) -> float:
    """Returns how many times errors, [S], are what rounding, [S] standard deviations, explains; or NaN."""
    parts = errors / rounding
    together = parts.square().mean().sqrt() / max(_ROW, _EACH / math.sqrt(len(parts)))
    return float(torch.maximum(parts.abs().max() / _EACH, together))


def _measured(changes: Tensor, num_tokens: Tensor) -> Tensor:
    """Returns the rounding of log-probs, [S] standard deviations, from changes of their tokens, [N]: from
    those of tokens, and of sequences, whose tokens may change together."""
    of_sequences = sequence_sums(changes, num_tokens) / num_tokens.sqrt()
    deviation = torch.maximum(changes.double().square().mean(), of_sequences.square().mean()).sqrt()
    return deviation * num_tokens.sqrt()
