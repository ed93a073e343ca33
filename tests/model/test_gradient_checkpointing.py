"""Less memory, the same gradients: layers that compute again, inputs on the host, blocks in tiles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.gradients import assert_same, gradients, proof_rows
from support.loading import load_usual
from support.marks import slow
from support.tiny_models import tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dpo_pack.model.fast_layers as fast_layers
from dpo_pack.model.fast_layers import compile_layers, tile_feed_forwards
from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.system.errors import UnsupportedModelError

Checkpointing = bool | Literal["selective"]


def load(
    path: Path, *, packed: bool, checkpointing: Checkpointing, lora: LoraRecipe | None = None
) -> LoadedModel:
    return load_usual(path, packed=packed, gradient_checkpointing=checkpointing, adapter=lora)


def gradients_of(loaded: LoadedModel, rows: list[Row]) -> tuple[Tensor, dict[str, Tensor]]:
    sums, grads = gradients(loaded.scorer, *rows)
    assert len(grads) == sum(parameter.requires_grad for parameter in loaded.model.parameters())
    return sums, grads


ADAPTERS = {
    "full": None,
    "LoRA": LoraRecipe(r=4, alpha=8.0),
    "LoRA with dropout": LoraRecipe(r=4, alpha=8.0, dropout=0.5),
}


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
        ("gemma3_text", True),  # with a sliding window
        ("llama", False),
        ("qwen3_5_text", True),  # with gated delta nets
        *slow(("falcon_h1", True)),  # with Mamba 2 beside attention
        *slow(("lfm2", True), ("llama", True), ("gemma2", True)),
    ],
)
def test_both_kinds_of_checkpointing_change_no_gradient_and_the_selective_one_computes_no_product_again(
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
            {name: count for name, count in seen.counts.items() if name in fast_layers._KEPT_OPERATIONS}
        )
    assert counts[False] and counts["selective"] < counts[True]
    if adapter == "full":  # with an adapter the first layer's input needs a gradient where layers recompute
        assert counts["selective"] == counts[False]
    (full_sums, full), (sums, grads) = results[True], results["selective"]
    torch.testing.assert_close(sums, results[False][0], atol=1e-6, rtol=1e-7)
    assert_same(grads, results[False][1])
    assert torch.equal(sums, full_sums) and grads.keys() == full.keys()
    assert all(torch.equal(grad, full[name]) for name, grad in grads.items())


# ------------------------------------------------------------------------------------------------- Long pairs


OFFLOAD: dict[str, Any] = {"gradient_checkpointing": True, "activation_offload": True}
TILES: dict[str, Any] = {"mlp_tile_tokens": 16}
SETTINGS = {"offload": OFFLOAD, "tiles": TILES, "both": OFFLOAD | TILES}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_compiled_layers_take_rows_of_all_lengths_without_a_new_graph(kind: str, tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    first, *others = proof_rows()
    _, expected = gradients(load_usual(tmp_path).scorer, first, *others)
    scorer = load_usual(tmp_path, **SETTINGS[kind]).scorer
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_layers(scorer.model, backend=keep)
    gradients(scorer, first)
    num_graphs = len(graphs)
    _, found = gradients(scorer, first, *others)
    assert len(graphs) == num_graphs > 0
    assert_same(found, expected)


def test_the_host_keeps_one_input_of_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    scorer, row = load_usual(tmp_path, **OFFLOAD).scorer, proof_rows()[0]
    kept: list[torch.Size] = []
    plain = torch.autograd.graph.saved_tensors_hooks

    def spied(to_host: Any, back: Any) -> Any:
        def seen(tensor: Tensor) -> Any:
            kept.append(tensor.shape)
            return to_host(tensor)

        return plain(seen, back)

    monkeypatch.setattr("torch.autograd.graph.saved_tensors_hooks", spied)
    scorer(row)
    width = scorer.model.config.hidden_size
    assert kept == 3 * [torch.Size([1, row.num_tokens, width])]


# BLOOM's block gets the residual, too, and RWKV's also reads the token before; OPT's layers have no block.
@pytest.mark.parametrize("family", ["qwen3_moe", "bloom", "rwkv", "opt"])
def test_blocks_that_need_more_than_a_token_are_not_computed_in_tiles(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(UnsupportedModelError, match=r"^model\.mlp_tile_tokens: .* has a .*leave it out"):
        tile_feed_forwards(model, 16, has_experts=family == "qwen3_moe")
