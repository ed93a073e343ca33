"""A loaded model, the precision it computes in, and the module that turns a row into log-probs.

Legend: B, L batch and length (a packed row is B = 1), T tokens, N scored completion tokens, S sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)

from dpo_pack.attention import AttentionBackend, SeamCalls
from dpo_pack.attention.select import BackendChoice
from dpo_pack.errors import UnsupportedModelError
from dpo_pack.head_logits import Asked, HeadPasses
from dpo_pack.layout import Row
from dpo_pack.logps import HEAD_BOUNDS, sequence_sums, token_logps
from dpo_pack.lora import Adapter
from dpo_pack.model_config import head_transform


class RowLogps(NamedTuple):
    """What a model says of one row. A NamedTuple, because sharding hooks look for tensors inside outputs."""

    sums: Tensor  # [S] float64, differentiable
    num_tokens: Tensor  # [S] int64
    entropy_sums: Tensor  # [S] float64, detached, as are the following; NaN where they were not asked for
    top1_sums: Tensor  # [S]
    mean_logit_sums: Tensor  # [S]
    log_square_sums: Tensor  # [S] of log sum_v p(v)^2, nats
    token_logps: Tensor  # [N] fp32, differentiable, sequence by sequence: what `sums` are the sums of


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtype of the parameters, and of autocast (None: off). The same for policy and reference.

    `gathered` is what shards are gathered and computed in, where that is not the parameters' dtype.
    """

    parameters: torch.dtype
    autocast: torch.dtype | None
    gathered: torch.dtype | None = None

    @property
    def activations(self) -> torch.dtype:
        return self.autocast or self.gathered or self.parameters

    @property
    def casts_weights(self) -> bool:
        """Whether matrix products take casts of weights, which a backward pass needs again."""
        return self.autocast is not None and self.autocast != self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM as `CompletionLogps` runs it, and how its attention is computed."""

    scorer: CompletionLogps
    attention: BackendChoice
    replaced: dict[str, Any]  # the config's own values where training has others, see training_settings

    @property
    def model(self) -> PreTrainedModel:
        return self.scorer.model

    @property
    def adapter(self) -> Adapter | None:
        return self.scorer.adapter

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """A policy that has not been trained yet is its reference meanwhile: log-probs, no statistics."""
        asked, self.scorer.asked = self.scorer.asked, Asked(metrics=False)
        try:
            with contextlib.nullcontext() if self.adapter is None else self.adapter.as_reference():
                yield
        finally:
            self.scorer.asked = asked


class CompletionLogps(nn.Module):
    """A causal LM whose forward is: backbone, the scored positions through the head, sums per sequence.

    All of it is inside one module's forward so that sharding wrappers gather the head's weight for it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: AttentionBackend | None,
        autocast: torch.dtype | None,
        gather_dtype: torch.dtype | None = None,
        adapter: Adapter | None = None,
        asked: Asked | None = None,
    ) -> None:
        """`backend` None means padded batches on the model's own attention; `adapter` is in `model`.

        With `gather_dtype`, whoever shards the model gathers its weights in that dtype. `asked`: statistics
        beside the log-probs, None: those of the metrics.
        """
        super().__init__()
        self.model = model
        self.adapter = adapter
        self.backend = backend
        self.autocast = autocast
        self.gather_dtype = gather_dtype
        self.asked = asked or Asked()
        self.head_passes = HeadPasses()
        self.transform = head_transform(model.config)
        self.num_attention_layers: int = model.config.get_text_config().num_hidden_layers
        self.is_wired = False

    def forward(self, row: Row) -> RowLogps:
        device = row.input_ids.device
        if self.adapter is not None:
            self.adapter.set_dropout(torch.is_grad_enabled())
        with self.autocasting(device):
            hidden = self.hidden_states(row)  # [B, L, D]
        hidden = hidden.flatten(0, 1).index_select(0, row.logit_index)  # [N, D]
        head = self.model.get_output_embeddings()
        weight, bias = (head.weight, head.bias) if self.adapter is None else self.adapter.head_weights(head)
        logps, statistics = token_logps(
            hidden,
            weight,
            bias,
            row.targets,
            transform=self.transform,
            compute_dtype=self.compute_dtype,
            bounds=HEAD_BOUNDS[device.type],
            asked=self.asked,
            passes=self.head_passes,
        )
        lengths = row.completion_lengths
        return RowLogps(
            sums=sequence_sums(logps, lengths),
            num_tokens=lengths,
            entropy_sums=sequence_sums(statistics.entropy, lengths),
            top1_sums=sequence_sums(statistics.is_top1, lengths),
            mean_logit_sums=sequence_sums(statistics.mean_logit, lengths),
            log_square_sums=sequence_sums(statistics.log_sum_squares, lengths),
            token_logps=logps,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrix products are computed in."""
        return self.autocast or self.gather_dtype or next(self.model.parameters()).dtype

    def autocasting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        # A weight is cast once in a forward. A cache of casts would hold a second model, gathered from shards
        # as it may be, until the forward ends.
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)

    def full_logits(self, **inputs: Any) -> Tensor:
        """[B, L, V] logits of the model's own forward: for proofs, training never makes them."""
        with self.autocasting(inputs["input_ids"].device):
            logits: Tensor = self.model(use_cache=False, **inputs).logits
        return logits

    def hidden_states(self, row: Row) -> Tensor:
        """[B, L, D]: what the layers make of a row, before the output head."""
        backbone = _backbone(self.model)
        arguments: dict[str, Any] = {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "attention_mask": row.attention_mask,
            # With its default of True, transformers would build a cache, and with a cache its masks.
            "use_cache": False,
        }
        if row.segments is None:
            hidden: Tensor = backbone(**arguments).last_hidden_state
            return hidden
        calls = SeamCalls()
        hidden = backbone(
            **arguments, row_segments=row.segments, row_backend=self.backend, seam_calls=calls
        ).last_hidden_state
        if not self.is_wired:
            self._check_wiring(calls.count)
        return hidden

    def _check_wiring(self, num_calls: int) -> None:
        """Every layer must mix tokens through the seam, or sequences of a row leak into each other."""
        if num_calls != self.num_attention_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has {self.num_attention_layers} layers, but {num_calls} of "
                "them went through packed attention; the others would mix the sequences of a row. "
                "Use packing.mode: padded"
            )
        self.is_wired = True


def _backbone(model: PreTrainedModel) -> nn.Module:
    """The model without its head. Llama 4's own `base_model` is the whole model."""
    return model.base_model if model.base_model is not model else model.get_submodule("model")


def resolve_precision(
    dtype: str, autocast: str, device: torch.device, *, gather_dtype: str | None = None
) -> Precision:
    """A recipe's `model.dtype` and `model.autocast`; auto: fp32 parameters, bf16 autocast on CUDA.

    `gather_dtype` is the recipe's `distributed.gather_dtype`, which takes the place of autocast.
    """
    parameters: torch.dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    if gather_dtype is not None:
        return Precision(parameters=parameters, autocast=None, gathered=getattr(torch, gather_dtype))
    if autocast == "auto":
        use_bfloat16 = device.type == "cuda" and parameters == torch.float32
        return Precision(parameters=parameters, autocast=torch.bfloat16 if use_bfloat16 else None)
    return Precision(parameters=parameters, autocast=None if autocast == "none" else getattr(torch, autocast))
