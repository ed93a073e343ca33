"""Layers that compute again in the backward pass see the row's layout again, and give the same gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.gradients import assert_same, gradients, proof_rows
from support.loading import load_usual
from support.tiny_models import tiny_model
from support.tiny_recipe import load as load_overrides
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dpo_pack.model.compiling as compiling
from dpo_pack.model.layout import Row
from dpo_pack.model.lora import LoraSettings
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.system.errors import RecipeError

Checkpointing = bool | Literal["selective"]


def load(
    path: Path, *, packed: bool, checkpointing: Checkpointing, lora: LoraSettings | None = None
) -> LoadedModel:
    return load_usual(path, packed=packed, gradient_checkpointing=checkpointing, adapter=lora)


def gradients_of(loaded: LoadedModel, rows: list[Row]) -> tuple[Tensor, dict[str, Tensor]]:
    sums, grads = gradients(loaded.scorer, *rows)
    assert len(grads) == sum(parameter.requires_grad for parameter in loaded.model.parameters())
    return sums, grads


ADAPTERS = {
    "full": None,
    "LoRA": LoraSettings(r=4, alpha=8.0, dropout=0.0, target_modules="all-linear", seed=0),
    "LoRA with dropout": LoraSettings(r=4, alpha=8.0, dropout=0.5, target_modules="all-linear", seed=0),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("gemma3_text", True),  # with a sliding window
        ("llama", False),
        ("qwen3_5_text", True),  # with gated delta nets
        pytest.param("lfm2", True, marks=pytest.mark.slow),
        pytest.param("falcon_h1", True, marks=pytest.mark.slow),  # with Mamba 2 beside attention
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gemma3_text", False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same_with_and_without_checkpointing(
    family: str, packed: bool, adapter: str, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    rows = proof_rows("shared" if packed else "padded")[:2]
    num_calls = 0
    plain_sums, plain = gradients_of(
        load(tmp_path, packed=packed, checkpointing=False, lora=ADAPTERS[adapter]), rows
    )
    loaded = load(tmp_path, packed=packed, checkpointing=True, lora=ADAPTERS[adapter])
    backend = loaded.scorer.backend
    if backend is not None:

        def counting(*inputs: Any) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return backend(*inputs)

        loaded.scorer.backend = counting
    sums, grads = gradients_of(loaded, rows)
    if backend is not None:
        assert num_calls == 4 * loaded.scorer.num_attention_layers, "nothing was computed again"
    torch.testing.assert_close(sums, plain_sums, atol=1e-6, rtol=1e-7)
    assert_same(grads, plain)


class Operations(TorchDispatchMode):
    """Counts operations by name. It sees what really runs, also below torch's selective checkpointing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("gemma3_text", True),
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gemma2", True, marks=pytest.mark.slow),
    ],
)
def test_selective_checkpointing_gives_the_bits_of_the_full_kind_and_computes_no_product_again(
    family: str, packed: bool, adapter: str, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    rows, counts, results = proof_rows("shared" if packed else "padded")[:2], {}, {}
    kinds: tuple[Checkpointing, ...] = (False, True, "selective")
    for kind in kinds:
        loaded = load(tmp_path, packed=packed, checkpointing=kind, lora=ADAPTERS[adapter])
        with Operations() as seen:
            results[kind] = gradients_of(loaded, rows)
        counts[kind] = Counter(
            {name: count for name, count in seen.counts.items() if name in compiling._KEPT_OPERATIONS}
        )
    assert counts[False] and counts["selective"] < counts[True]
    if adapter == "full":  # with an adapter the first layer's input needs a gradient where layers recompute
        assert counts["selective"] == counts[False]
    (full_sums, full), (sums, grads) = results[True], results["selective"]
    assert torch.equal(sums, full_sums) and grads.keys() == full.keys()
    assert all(torch.equal(grad, full[name]) for name, grad in grads.items())


def test_selective_checkpointing_goes_with_uncompiled_layers_alone() -> None:
    assert load_overrides("model.gradient_checkpointing=selective").model.compile == "auto"
    with pytest.raises(RecipeError, match=r"^model\.compile: .*selective"):
        load_overrides("model.gradient_checkpointing=selective", "model.compile=true")
