"""What a row costs in operations, casts and bytes: counted on fake tensors, which compute nothing.

The tensors say that they are on the CPU, because only there autocast works without a device. The layers call
the kernel that is used on CUDA, and the head has the chunks that it has there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import dpo_pack.model.scorer as scorer_module
from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.model.fast_layers import trim_last_layer
from dpo_pack.model.logps import HEAD_BOUNDS, WantedStatistics
from dpo_pack.model.scorer import CompletionLogps
from support.groups import make_row, random_groups
from support.tiny_models import tiny_config

_CASTS = ("aten::_to_copy", "prims::convert_element_type")


class Costs(NamedTuple):
    """How many operations (not views), casts among them, and bytes that they read and write."""

    operations: int
    casts: int
    num_bytes: int

    def __sub__(self, other: Costs) -> Costs:
        return Costs(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def __floordiv__(self, number: int) -> Costs:
        return Costs(*(value // number for value in self))


class Counting(TorchDispatchMode):
    """Counts what runs. A host that reads a number gets an error from the fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        memory = {leaf.untyped_storage()._cdata for leaf in inputs}
        is_view = all(leaf.untyped_storage()._cdata in memory for leaf in outputs)
        writes = func._schema.is_mutable
        if writes or not is_view:
            self.names[func.name().partition(".")[0]] += 1
            self.num_bytes += sum(leaf.nbytes for leaf in (*inputs, *outputs))
        return result

    def costs(self) -> Costs:
        casts = sum(self.names[name] for name in _CASTS)
        return Costs(self.names.total(), casts, self.num_bytes)


def row_costs(
    family: str, *, num_layers: int, dtype: torch.dtype, autocast: torch.dtype | None, measures: bool = False
) -> tuple[Costs, Costs]:
    """(forward, backward) of one row of 69 tokens on a tiny model of the family with so many layers."""
    register_attention()
    with FakeTensorMode(), as_on_cuda():
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, num_hidden_layers=num_layers), attn_implementation=ATTENTION_NAME, dtype=dtype
        )
        trim_last_layer(model)
        scorer = CompletionLogps(
            model,
            backend=BACKENDS["torch_varlen"],
            autocast=autocast,
            wanted=WantedStatistics(metrics=measures),
        ).eval()
        row = make_row(random_groups(*[(9, 5, 9)] * 3))
        with Counting() as forward:
            sums = scorer(row).sums
        with Counting() as backward:
            sums.backward(gradient=torch.ones_like(sums))
        return forward.costs(), backward.costs()


def layer_costs(family: str, *, dtype: torch.dtype, autocast: torch.dtype | None) -> tuple[Costs, Costs]:
    """(forward, backward) of one layer: what two more layers cost, halved."""
    few, many = (row_costs(family, num_layers=number, dtype=dtype, autocast=autocast) for number in (2, 4))
    forward, backward = (more - less for more, less in zip(many, few, strict=True))
    return forward // 2, backward // 2


@contextmanager
def as_on_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer_module, "HEAD_BOUNDS", {"cpu": HEAD_BOUNDS["cuda"]})
        patch.setattr("dpo_pack.model.fast_layers._onednn_product", lambda: None)
        yield
