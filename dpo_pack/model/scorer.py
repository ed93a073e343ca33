"""The scorer: a row -> hidden states -> scored positions -> log-probs of target tokens -> sums of sequences.

Legend: B, L batch and length (a packed row has B = 1), T tokens of a row (padding included), N scored
completion tokens, S sequences, D hidden size, V vocabulary, E experts, R layers with a router.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dpo_pack.model.attention import BACKENDS, AttentionBackend, BackendChoice
from dpo_pack.model.config import head_transform
from dpo_pack.model.fast_layers import outermost_layers
from dpo_pack.model.layout import Row
from dpo_pack.model.logps import HEAD_BOUNDS, HeadPasses, WantedStatistics, sequence_sums, token_logps
from dpo_pack.model.lora import Adapter
from dpo_pack.model.recurrence import RecurrentCall, torch_recurrences
from dpo_pack.model.vision import VisionInputs

Value = TypeVar("Value")


class RowLogps(NamedTuple):
    """The scorer's results for one row: a NamedTuple, because sharding hooks look for tensors in outputs."""

    sums: Tensor  # [S] float64, differentiable
    num_tokens: Tensor  # [S] int64
    token_logps: Tensor  # [N] fp32, differentiable, sequence by sequence: the terms of `sums`
    statistics: Tensor  # [S, 5] float64, detached: sums of the five of `WantedStatistics`; NaN: not wanted
    # See `CompletionLogps._routing_sums`; [0] without `Row.token_copies`.
    expert_counts: Tensor  # [R, E] float64
    expert_probs: Tensor  # [E] float64, differentiable


class CompletionLogps(nn.Module):
    """A causal LM that computes the log-probs of rows' completions: layers and head in one forward, so that
    sharding gathers the head's weight for it, too."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: AttentionBackend | None,
        autocast: torch.dtype | None,
        gather_dtype: torch.dtype | None = None,
        adapter: Adapter | None = None,
        wanted: WantedStatistics | None = None,
        vision: VisionInputs | None = None,
    ) -> None:
        """If `backend` is None, rows are padded batches and the model computes its own attention."""
        super().__init__()
        self.model = model
        self.adapter = adapter
        self.backend = backend
        self.autocast = autocast
        self.gather_dtype = gather_dtype
        self.wanted = wanted or WantedStatistics()
        self.vision = vision
        self.head_passes = HeadPasses()
        self.is_compiled = False  # whether torch.compile has compiled the layers and `head_passes`
        self.transform = head_transform(model.config)
        # Computes the calls of recurrent layers' functions. Proofs set another.
        self.recurrence: Callable[[RecurrentCall], Any] = RecurrentCall.run
        # Functions of other packages for recurrent layers, by names in `KERNELS`. A proof adds them.
        self.recurrent_kernels: dict[str, Callable[..., Any]] = {}

    def forward(self, row: Row) -> RowLogps:
        device, lengths = row.input_ids.device, row.completion_lengths
        if self.adapter is not None:
            self.adapter.set_dropout(torch.is_grad_enabled())
        with self.autocasting(device):
            outputs = self._run_layers(row)
            expert_counts = expert_probs = torch.zeros(0, dtype=torch.float64, device=device)
            if row.token_copies is not None:
                expert_counts, expert_probs = self._routing_sums(outputs.router_logits, row.token_copies)
        scored = outputs.last_hidden_state.flatten(0, 1).index_select(0, row.logit_index)  # [N, D]
        head = self.model.get_output_embeddings()
        weight, bias = (head.weight, head.bias) if self.adapter is None else self.adapter.head_weights(head)
        logps, statistics = token_logps(  # [N], [N, 5]
            scored,
            weight,
            bias,
            row.targets,
            transform=self.transform,
            compute_dtype=self.compute_dtype,
            bounds=HEAD_BOUNDS[device.type],
            wanted=self.wanted,
            passes=self.head_passes,
        )
        return RowLogps(
            sums=sequence_sums(logps, lengths),
            num_tokens=lengths,
            token_logps=logps,
            statistics=sequence_sums(statistics, lengths),
            expert_counts=expert_counts,
            expert_probs=expert_probs,
        )

    @torch.no_grad()
    def expert_counts(self, row: Row) -> Tensor:
        """Returns how often the row's tokens choose each expert, [R, E] float64. Needs `row.token_copies`."""
        assert row.token_copies is not None
        with self.autocasting(row.input_ids.device):
            return self._routing_sums(self._run_layers(row).router_logits, row.token_copies)[0]

    def _routing_sums(self, router_logits: Sequence[Tensor], token_copies: Tensor) -> tuple[Tensor, Tensor]:
        """Adds up the choices of R routers for the load-balancing loss, see model/facts.py.

        R tensors [T, E] of logits, [T] times that a token counts -> [R, E] float64, how many times each
        expert was chosen, and [E] float64, the sums of probabilities over all layers, differentiable."""
        top_k: Any = self.model.num_experts_per_tok
        counts, probabilities = [], []
        copies = token_copies.double()
        for logits in router_logits:
            wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
            chances = wide.softmax(dim=-1)
            chosen = chances.detach().topk(top_k, dim=-1).indices  # [T, top_k]
            count = copies.new_zeros(chances.shape[-1])
            counts.append(count.index_add(0, chosen.flatten(), copies.repeat_interleave(top_k)))
            probabilities.append((chances * token_copies[:, None]).sum(dim=0, dtype=torch.float64))
        return torch.stack(counts), torch.stack(probabilities).sum(dim=0)

    def _run_layers(self, row: Row) -> Any:
        arguments: dict[str, Any] = {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "attention_mask": row.attention_mask,
            # The default is True: transformers would build a cache, and because of the cache also masks.
            "use_cache": False,
        }
        segments = row.segments
        if row.token_copies is not None:
            arguments["output_router_logits"] = True
            if segments is not None:  # the last layer's router must see all tokens
                segments = replace(segments, scored_positions=None)
        if segments is not None:
            arguments |= {"row_segments": segments, "row_backend": self.backend}
            arguments |= {"row_recurrence": self.recurrence, "row_kernels": self.recurrent_kernels}
        if any(group.images for group in row.prompts):
            assert self.vision is not None
            arguments |= self.vision.of_row(self.model, row.prompts, row.prompt_tokens, row.position_ids)
        # Llama 4's `base_model` is the whole model, head included.
        model, base = self.model, self.model.base_model
        outputs = (base if base is not model else model.get_submodule("model"))(**arguments)
        if segments is not None and outputs.last_hidden_state.requires_grad:
            # Compiled code keeps the number of the row's segments only; so the graph keeps them alive.
            outputs.last_hidden_state.register_hook(lambda _, segments=segments: None)
        return outputs

    def with_own_weights(self, compute: Callable[[], Value]) -> Value:
        """Returns `compute()`, which calls the model without this scorer's `forward`: of a sharded model,
        with the weights outside of the layers gathered; every rank must call it."""
        return compute()

    @contextlib.contextmanager
    def replaced(self, **attributes: Any) -> Iterator[None]:
        """In this context the scorer has the given attributes."""
        before = {name: vars(self)[name] for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)

    def measuring(self, metrics: bool) -> AbstractContextManager[None]:
        """In this context the scorer computes the statistics of the metrics only if `metrics` is true."""
        return self.replaced(wanted=replace(self.wanted, metrics=metrics))

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """In this context the scorer computes in fp32: no autocast, no TF32, no kernels that round more.
        Parameters in 16 bits, but not quantised ones, are cast while they are needed. The weights must not be
        in shards."""
        exact = self.replaced(
            autocast=None,
            gather_dtype=torch.float32,
            backend=self.backend and BACKENDS["sdpa"],
            recurrent_kernels={},
        )
        layers = outermost_layers(self.model)
        inner = {module for layer in layers for module in layer.modules()}
        swapped: dict[nn.Module, dict[str, nn.Parameter]] = {}

        # Modules get other parameters. (With other `data`, parameters would lose the hooks by which DDP sums
        # their gradients over ranks.)
        def widen(modules: Iterable[nn.Module]) -> None:
            copies: dict[nn.Parameter, nn.Parameter] = {}  # tied weights have one
            for module in modules:
                own = ((name, p) for name, p in module._parameters.items() if p is not None)
                narrow = {name: p for name, p in own if p.is_floating_point() and p.itemsize == 2}
                for p in narrow.values():
                    if p not in copies:
                        copies[p] = nn.Parameter(p.detach().float(), requires_grad=False)
                swapped[module] = narrow
                module._parameters.update({name: copies[p] for name, p in narrow.items()})

        def restore(modules: Iterable[nn.Module]) -> None:
            for module in modules:
                module._parameters.update(swapped.pop(module, {}))

        with contextlib.ExitStack() as stack, torch_recurrences(self.model), exact:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            stack.callback(restore, list(self.model.modules()))
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
            for layer in layers:
                before = layer.register_forward_pre_hook(lambda layer, _: widen(layer.modules()))
                behind = layer.register_forward_hook(
                    lambda layer, *_: restore(layer.modules()), always_call=True
                )
                stack.callback(before.remove)
                stack.callback(behind.remove)
            widen([module for module in self.model.modules() if module not in inner])
            yield

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return self.autocast or self.gather_dtype or next(self.model.parameters()).dtype

    def autocasting(self, device: torch.device, *, keeps_casts: bool = False) -> AbstractContextManager[Any]:
        """Context of autocast, if the recipe has it. `keeps_casts`: weights are cast once, for many forwards;
        one forward casts each weight once."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=keeps_casts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM (policy or reference) in its scorer, with the choice of its attention backend."""

    scorer: CompletionLogps
    attention: BackendChoice
    replaced: dict[str, Any]  # the config's own values of keys that training changes
    notes: list[str] = field(default_factory=list)  # for the user: lines about the load
    kernels: list[str] = field(default_factory=list)  # for the user: a line for each recurrent kernel
    not_compiled: str | None = None  # for the user: why `model.compile: auto` does not compile

    @property
    def model(self) -> PreTrainedModel:
        return self.scorer.model

    @property
    def adapter(self) -> Adapter | None:
        return self.scorer.adapter

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Context in which an untrained policy computes the reference's log-probs, without statistics."""
        adapter = contextlib.nullcontext() if self.adapter is None else self.adapter.as_reference()
        with self.scorer.measuring(False), adapter:
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of parameters and of autocast (None: no autocast), the same for policy and reference.
    `gathered`: in which FSDP2 gathers weights and computes, or a copy of 16-bit weights computes; None: the
    parameters'."""

    parameters: torch.dtype
    autocast: torch.dtype | None
    gathered: torch.dtype | None = None

    @property
    def activations(self) -> torch.dtype:
        return self.autocast or self.gathered or self.parameters

    @property
    def in_float32(self) -> Precision:
        """The precision of `CompletionLogps.in_float32`."""
        is_wide = self.parameters == torch.float32
        return Precision(
            parameters=self.parameters, autocast=None, gathered=None if is_wide else torch.float32
        )

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts weights for matrix products. A backward pass needs these casts again."""
        return self.autocast is not None and self.autocast != self.parameters


def resolve_precision(
    dtype: str, autocast: str, device: torch.device, *, gather_dtype: str | None, trains_adapter: bool
) -> Precision:
    """Resolves `model.dtype` (auto: fp32) and `model.autocast` (auto: bf16 on CUDA, if parameters are fp32
    and the GPU has bf16). Adapters are always fp32. `gather_dtype` (`distributed.gather_dtype`) replaces
    autocast."""
    parameters: torch.dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    if gather_dtype is not None:
        return Precision(parameters=parameters, autocast=None, gathered=getattr(torch, gather_dtype))
    if autocast == "auto":
        has_fp32 = parameters == torch.float32 or (trains_adapter and parameters == torch.bfloat16)
        helps = device.type == "cuda" and has_fp32
        if helps and torch.cuda.is_available():
            helps = torch.cuda.is_bf16_supported(including_emulation=False)
        autocast = "bfloat16" if helps else "none"
    return Precision(parameters=parameters, autocast=None if autocast == "none" else getattr(torch, autocast))
