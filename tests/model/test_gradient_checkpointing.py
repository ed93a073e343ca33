"""Less memory, the same gradients: layers that compute again, inputs on the host, blocks in tiles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.gradients import assert_same, gradients, proof_rows
from support.groups import CPU
from support.live_bytes import LiveBytes
from support.loading import load_usual
from support.operation_counts import as_on_cuda
from support.tiny_models import tiny_model
from support.tiny_recipe import load as load_overrides
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import dpo_pack.model.compiling as compiling
from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.model.building import checkpoint_activations
from dpo_pack.model.compiling import compile_layers, keep_inputs_on_host
from dpo_pack.model.config import layer_windows
from dpo_pack.model.fast_layers import tile_feed_forwards, trim_last_layer
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.lora import attach_adapter
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.packing.lengths import Group
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.system.errors import RecipeError, UnsupportedModelError

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
        assert num_calls == 4 * len(layer_windows(loaded.model.config)), "nothing was computed again"
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


# ------------------------------------------------------------------------------------------------- Long pairs


OFFLOAD: dict[str, Any] = {"gradient_checkpointing": True, "activation_offload": True}
TILES: dict[str, Any] = {"mlp_tile_tokens": 16}
SETTINGS = {"offload": OFFLOAD, "tiles": TILES, "both": OFFLOAD | TILES}
DROPOUT = LoraRecipe(r=4, alpha=8.0, dropout=0.5)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("adapter", [None, DROPOUT])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("llama", True),
        pytest.param("gemma3_text", False, marks=pytest.mark.slow),
        pytest.param("lfm2", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_whole_layers(
    family: str, packed: bool, kind: str, adapter: LoraRecipe | None, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"packed": packed, "adapter": adapter}
    if adapter is not None and "mlp_tile_tokens" in SETTINGS[kind]:  # dropout is drawn in another order
        settings["adapter"] = LoraRecipe(r=4, alpha=8.0)
    rows = proof_rows("shared" if packed else "padded")
    _, expected = gradients(load_usual(tmp_path, **settings).scorer, *rows)
    _, found = gradients(load_usual(tmp_path, **settings, **SETTINGS[kind]).scorer, *rows)
    assert_same(found, expected)


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


def test_options_of_a_checkpoint_reach_it() -> None:
    def checkpoint(layer: Any, hidden: Tensor, *, scale: float) -> Tensor:
        found: Tensor = layer(hidden * scale)
        return found

    found = keep_inputs_on_host(checkpoint, torch.neg, torch.ones(2), scale=3.0)
    assert found.tolist() == [-3.0, -3.0]


# ------------------------------------------------------------------------------------ counted on fake tensors


def count_bytes(
    num_layers: int, monkeypatch: pytest.MonkeyPatch, *, offloads: bool, tiles: bool
) -> tuple[int, int]:
    """(most bytes at a time, bytes moved to the host and back) of one row of one pair, forward and backward.

    As on CUDA, of an 8B Llama's layers with an adapter on a bf16 base, and of a prompt of 130,072 tokens and
    completions of 1,000.
    """
    register_attention()
    random = np.random.default_rng(0)
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda():
        config = LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=num_layers,
            num_attention_heads=32, num_key_value_heads=8,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
        )
        settings = LoraRecipe(r=16, alpha=32.0)
        monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)  # by swapping tensors
        adapter = attach_adapter(
            model, settings, base="a", revision=None, recipe_key="model.path", reads_weights=True
        )
        if tiles:
            tile_feed_forwards(model, 8192, has_experts=False)
        trim_last_layer(model)
        scorer = CompletionLogps(
            model, backend=BACKENDS["torch_varlen"], autocast=torch.bfloat16, adapter=adapter
        ).eval()
        checkpoint_activations(model, offloads=offloads)
        live, moved = LiveBytes(), list[int]()

        def to_host(tensor: Tensor) -> tuple[Any, ...]:
            moved.append(tensor.nbytes)
            return tensor.shape, tensor.dtype

        def back(kept: tuple[Any, ...]) -> Tensor:
            tensor = torch.empty(kept[0], dtype=kept[1])
            moved.append(tensor.nbytes)
            return tensor

        plain = torch.autograd.graph.saved_tensors_hooks
        # On fake tensors of a CPU the host's memory is the device's, so its tensors have no bytes here.
        monkeypatch.setattr("torch.autograd.graph.saved_tensors_hooks", lambda *_: plain(to_host, back))
        prompt, *completions = (random.integers(3, 1000, length) for length in (130_072, 1000, 1000))
        completions[0][0], completions[1][0] = 1, 2
        row = packed_row([Group(context=prompt, completions=tuple(completions))], CPU, share_prompt=True)
        for parameter in model.parameters():
            live.count(parameter)
        with live:
            sums = scorer(row).sums
            sums.backward(gradient=torch.ones_like(sums))
        monkeypatch.undo()
    return live.peak, sum(moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offloads", "tiles", "peak", "moved"),
    [(False, False, 88.8, 0), (True, False, 59.7, 64.5), (False, True, 69.1, 0), (True, True, 38.1, 64.5)],
)
def test_the_memory_of_a_pair_of_131072_tokens_is_that_of_the_table(
    offloads: bool, tiles: bool, peak: float, moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of docs/memory.md, in GiB: what 32 layers take, from the counts of two and of three."""
    few, many = (count_bytes(number, monkeypatch, offloads=offloads, tiles=tiles) for number in (2, 3))
    found = [(29 * (after - before) + after) / 2**30 for before, after in zip(few, many, strict=True)]
    assert found == [pytest.approx(peak, abs=0.1), pytest.approx(moved, abs=0.1)]
