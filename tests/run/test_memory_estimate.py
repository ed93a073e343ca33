"""Memory: the estimate beside what autograd keeps and what a process grows by, and what is made of it."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.live_bytes import LiveBytes
from support.plans import make_plan
from support.row_memory import AUTOCAST, BFLOAT16, SETTINGS, build_row, load
from support.row_memory import memory_facts as facts_of
from support.tiny_models import tiny_config, tiny_model
from support.tiny_run import tiny_run
from support.tiny_vision import StandIn, picture, vision_config
from support.whole_runs import text
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

import dpo_pack.run.memory_estimate as memory
from dpo_pack.model.compiling import tower_parameters
from dpo_pack.model.facts import model_shape, without_weights
from dpo_pack.model.loading import load_config
from dpo_pack.model.scorer import LoadedModel, Precision, resolve_precision
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.memory_estimate import (
    GIB,
    MemoryFacts,
    MemoryShape,
    estimate_memory,
    fitting_rows,
    largest_row,
    layer_bytes,
    memory_shape,
    quantised_tower_weights,
    state_bytes,
    tower_pass_bytes,
)
from dpo_pack.run.models import STATE_SHARE, available_memory, training_bytes
from dpo_pack.run.pairs import offline_source
from dpo_pack.run.setup import prepare
from dpo_pack.system import ranks
from dpo_pack.system.machine import AvailableMemory
from dpo_pack.trainer import train
from dpo_pack.training.optim import build_optimizer

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
LLAMA_WIDE = {**WIDE, "intermediate_size": 352, "num_key_value_heads": 2, "head_dim": 32}


def shape_of(family: str, **changes: Any) -> MemoryShape:
    config = tiny_config(family, **changes)
    model = without_weights(config)
    return memory_shape(config, model_shape(model), model.num_parameters())


# ---------------------------------------------------------------------------------------------- activations


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of small models by family, wide enough that rounding up widths is no matter."""
    root = tmp_path_factory.mktemp("models")

    def directory(family: str) -> Path:
        if not (root / family).is_dir():
            tiny_model(family, **(WIDE if family == "gpt2" else LLAMA_WIDE)).save_pretrained(root / family)
        return root / family

    return directory


def saved_bytes(loaded: LoadedModel, row: Any) -> int:
    """Of all tensors that autograd keeps for the backward pass of the layers, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in loaded.scorer.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept.setdefault(address, tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        loaded.scorer.autocasting(CPU),
    ):
        loaded.scorer.hidden_states(row)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# How far off the estimate of a family may be. Measured, the worst of all kinds: llama 9 %; qwen3 17 % and
# qwen3_moe 23 % too low, because they have norms of queries and keys; gpt2 34 % too low, because its GELU is
# written in Python; phi3 33 % too high, because its linear layers are fused.
WORST = {"llama": 0.12, "qwen3": 0.2, "gpt2": 0.38, "phi3": 0.37, "qwen3_moe": 0.27}


# The quick tests have every kind of one family, and every family of one kind.
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(
            family, kind, marks=() if family == "llama" or kind == next(iter(SETTINGS)) else pytest.mark.slow
        )
        for family in WORST
        for kind in SETTINGS
    ],
)
def test_the_estimate_of_activations_is_near_what_autograd_keeps(
    family: str, kind: str, models: Callable[[str], Path], record_property: Any
) -> None:
    loaded = load(kind, models(family))
    row = build_row(96, num_pairs=5, length=40)
    facts = facts_of(kind, loaded, row)
    estimate = estimate_memory(facts)["activations"]
    if facts.gradient_checkpointing:
        estimate -= layer_bytes(facts)  # of the layer that is recomputed, in the backward pass
    estimate += estimate_memory(facts)["weights cast"]
    measured = saved_bytes(loaded, row)
    record_property("memory", (family, kind, measured, estimate))
    # Of checkpointed layers next to nothing is kept, so that the final norm's part shows: gpt2 19 %.
    tolerance = 0.22 if facts.gradient_checkpointing else WORST[family]
    assert estimate == pytest.approx(measured, rel=tolerance)


def test_the_shape_of_a_model_is_read_off_its_config() -> None:
    shape = shape_of("llama", **LLAMA_WIDE)
    model = tiny_model("llama", **LLAMA_WIDE)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.num_layers, shape.hidden, shape.head_parameters) == (4, 128, 96 * 128)
    assert (shape.attention, shape.feed_forward, shape.active_experts) == (2 * 128, 3 * 352, 0)
    assert shape.linear == shape.feed_forward + 2 * 128 + 2 * 64
    # Of q, k, v and o, gate, up and down, in 4 layers: each (inputs + outputs) x rank.
    inputs_and_outputs = 2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 352)
    assert shape.num_adapter_parameters(8) == 4 * 8 * inputs_and_outputs


# ----------------------------------------------------------------------------------------------------- towers


# Measured: qwen2_5_vl 5 % and mistral3 22 % too low, idefics3 15 % too high.
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "mistral3"])
def test_the_tower_needs_the_memory_of_one_layer(family: str) -> None:
    config = vision_config(family)
    changes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 128}
    for name, value in changes.items():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, value)
    model: Any = AutoModelForImageTextToText.from_config(config)
    inputs = StandIn(family).pixel_inputs([picture(1, 8, 8), picture(2, 8, 8)])
    inputs.pop("rows", None)
    live = LiveBytes([*model.parameters(), *model.buffers(), *inputs.values()])
    with torch.no_grad(), live:
        model.base_model.get_image_features(**inputs, return_dict=True)
    pixels = inputs["pixel_values"].numel()
    estimate = tower_pass_bytes(model, pixels, Precision(parameters=torch.float32, autocast=None))
    assert estimate == pytest.approx(live.peak + 4 * pixels, rel=0.3)


def test_a_tower_is_frozen_and_no_weight_of_text_tokens() -> None:
    def facts(depth: int) -> MemoryFacts:
        config = vision_config("llava")
        config.vision_config.num_hidden_layers = depth
        model = without_weights(config)
        towers = sum(parameter.numel() for parameter in tower_parameters(model))
        shape = memory_shape(config, model_shape(model), model.num_parameters() - towers)
        return plain(shape, tower_parameters=towers)

    small, large = facts(3), facts(30)
    assert large.shape == small.shape and large.tower_parameters > 5 * small.tower_parameters
    more = 4 * (large.tower_parameters - small.tower_parameters)
    before = estimate_memory(small)
    assert estimate_memory(large) == before | {"towers": before["towers"] + more}
    in_shards = replace(small, num_shards=4, has_second_model=True)
    assert estimate_memory(in_shards)["towers"] == before["towers"] / 2
    assert estimate_memory(replace(in_shards, reads_images=True))["towers"] == 2 * before["towers"]
    assert estimate_memory(replace(small, tower_pass=9e12))["working memory"] == 9e12
    in_bits = estimate_memory(replace(small, bits=4.5, tower_linear=1000))["towers"]
    assert in_bits == before["towers"] - 1000 * (4 - 4.5 / 8)


@pytest.mark.parametrize("skipped", [None, ["model.vision_tower"], ["lm_head", "linear_1"]])
def test_the_weights_of_a_tower_that_count_as_quantised_are_those_that_are(
    skipped: list[str] | None, tmp_path: Path
) -> None:
    nn4bit = pytest.importorskip("bitsandbytes.nn").Linear4bit
    config = vision_config("llava")
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=settings)
    text = {id(module) for module in (*model.get_decoder().modules(), model.lm_head)}
    towers = [m for m in model.modules() if isinstance(m, nn4bit) and id(m) not in text]
    expected = sum(m.in_features * m.out_features for m in towers)
    assert quantised_tower_weights(without_weights(config), settings.to_dict()) == expected > 0


# -------------------------------------------------------------------------------------------------- estimates


def plain(shape: MemoryShape, **changes: Any) -> MemoryFacts:
    """Training on CUDA with rows of 8,192 tokens."""
    facts = MemoryFacts(
        shape=shape,
        row_tokens=8192,
        row_keys=11_000,
        row_scored=5_000,
        device=torch.device("cuda"),
        precision=AUTOCAST,
    )
    return replace(facts, **changes)


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def eight_billion() -> MemoryShape:
    """Llama 3.1 8B's."""
    shape = shape_of(
        "llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    assert shape.num_parameters == 8_030_261_248
    return shape


@pytest.mark.parametrize(
    ("optimizer", "parameter_bytes", "expected"),
    [("adamw", 4, 16.0), ("adamw", 2, 14.0), ("adafactor", 4, 8.0), ("adamw_8bit", 4, 10.0)],
)
def test_bytes_a_trained_parameter(optimizer: str, parameter_bytes: int, expected: float) -> None:
    state = training_bytes(num_trained=1000, trained_bytes=parameter_bytes, optimizer=optimizer)
    assert sum(state) / 1000 == pytest.approx(expected, abs=0.05)
    halves = training_bytes(
        num_trained=1000, trained_bytes=parameter_bytes, optimizer=optimizer, num_shards=2
    )
    assert sum(halves) == sum(state) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_optimizer_s_bytes_are_what_it_allocates(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("adafactor", torch.bfloat16):
        pytest.skip("refused")
    layer = nn.Linear(512, 512, bias=False, dtype=dtype)
    optimizer = build_optimizer(name, layer, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    state = optimizer.state[layer.weight].values()
    kept = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    estimate = training_bytes(
        num_trained=layer.weight.numel(), trained_bytes=dtype.itemsize, optimizer=name
    ).optimizer
    assert kept == pytest.approx(estimate, abs=0.02 * layer.weight.numel())


def test_eight_billion_parameters_fit_one_device_of_140_gib_in_bfloat16_only(
    eight_billion: MemoryShape,
) -> None:
    def needed(**changes: Any) -> float:
        return sum(estimate_memory(plain(eight_billion, **changes)).values()) / GIB

    bfloat16: dict[str, Any] = {"precision": BFLOAT16}
    recompute: dict[str, Any] = {"gradient_checkpointing": True}
    assert needed() > 140
    assert 100 < needed(**bfloat16, **recompute) < 125
    assert needed(**bfloat16, lora_rank=16) < 110
    assert needed(**bfloat16, **recompute, lora_rank=16) < 30
    assert needed(**recompute, num_shards=8) < 40


def test_offloaded_state_is_in_the_host_s_memory(eight_billion: MemoryShape) -> None:
    facts = plain(eight_billion, num_shards=8)
    offloads = replace(facts, cpu_offload=True)
    shards, offloaded = estimate_memory(facts), estimate_memory(offloads)
    in_host = sum(state_bytes(offloads))
    assert in_host == pytest.approx(2 * eight_billion.num_parameters)
    assert sum(shards.values()) - sum(offloaded.values()) == pytest.approx(in_host)
    kept_whole = estimate_memory(replace(offloads, accumulate_unsharded=True))
    gradients = 4 * eight_billion.num_parameters
    assert (kept_whole["parameters"], kept_whole["gradients"], kept_whole["optimizer"]) == (0, gradients, 0)


def test_layers_inputs_of_a_long_row_are_in_the_host_s_memory(eight_billion: MemoryShape) -> None:
    facts = plain(eight_billion, precision=BFLOAT16, row_tokens=132_072, activation_offload=True)
    each = 2 * 132_072 * 4096  # a little more than 1 GiB: torch's pinned memory comes in powers of two
    assert each > GIB and memory.host_bytes(facts) == {"model.activation_offload": 32 * 2 * GIB}
    assert memory.host_bytes(replace(facts, row_tokens=131_072)) == {"model.activation_offload": 32 * GIB}
    both = replace(facts, cpu_offload=True, num_shards=8)
    assert memory.host_bytes(both) == {
        "distributed.cpu_offload": 14 * eight_billion.num_parameters / 8,
        "model.activation_offload": 32 * 2 * GIB,
    }


@pytest.mark.parametrize(
    ("changes", "wide", "buffers"),
    [
        ({}, 4, 8),  # a gradient of one layer, and the copy from which another is reduced
        ({"precision": resolve_precision("auto", "auto", CPU, gather_dtype="bfloat16")}, 2, 6),
        ({"lora_rank": 16}, 4, 4),  # what is sent of two layers, in bf16
        ({"precision": BFLOAT16, "lora_rank": 16}, 2, 4),
    ],
)
def test_gathered_weights_are_those_of_two_layers_or_of_all(
    changes: dict[str, Any], wide: int, buffers: int, eight_billion: MemoryShape
) -> None:
    facts = plain(eight_billion, num_shards=8, **changes)
    layerwise, once = (
        estimate_memory(replace(facts, stays_gathered=stays))["gathered weights"] for stays in (False, True)
    )
    layer = eight_billion.layer_parameters
    assert once == pytest.approx(wide * eight_billion.num_parameters + buffers * layer)
    assert once - layerwise == pytest.approx(wide * 30 * layer)
    assert estimate_memory(plain(eight_billion, **changes))["gathered weights"] == 0


def test_shards_stay_gathered_if_every_device_has_the_memory(
    eight_billion: MemoryShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = plain(eight_billion, num_shards=8)
    needed = sum(estimate_memory(replace(facts, stays_gathered=True)).values())
    for free, stays in ((1.34 * needed, True), (1.33 * needed, False)):
        found = AvailableMemory(free=int(free), total=1000 * GIB)
        monkeypatch.setattr(memory, "available_memory", lambda device: found)  # noqa: B023
        assert memory._can_stay_gathered(facts) == stays
        assert not memory._can_stay_gathered(replace(facts, num_shards=1))
    monkeypatch.setattr(ranks, "every_rank_says", lambda lacking: [lacking, 1.0])
    monkeypatch.setattr(memory, "available_memory", lambda device: replace(found, free=1000 * GIB))
    assert not memory._can_stay_gathered(facts)


def test_a_second_model_and_a_base_count_without_gradients(eight_billion: MemoryShape) -> None:
    number, facts = eight_billion.num_parameters, plain(eight_billion, precision=BFLOAT16)
    assert sum(state_bytes(facts)) == 14 * number
    assert sum(state_bytes(replace(facts, has_second_model=True))) == 16 * number
    adapter = state_bytes(replace(facts, lora_rank=16))
    assert sum(adapter) == 2 * number + 16 * eight_billion.num_adapter_parameters(16)


# --------------------------------------------------------------------------------------------- what would fit


def needed_by(facts: MemoryFacts, tokens: int) -> float:
    keys, scored = (round(tokens / facts.row_tokens * size) for size in (facts.row_keys, facts.row_scored))
    return sum(estimate_memory(replace(facts, row_tokens=tokens, row_keys=keys, row_scored=scored)).values())


def test_the_largest_budget_that_fits_is_told_and_that_checkpointing_is_enough(
    eight_billion: MemoryShape,
) -> None:
    facts = plain(eight_billion)
    rows, checkpointing = fitting_rows(facts, 1000, 150 * GIB, rows_per_step=None)
    key, _, tokens = rows[0].partition("=")
    assert key == "packing.token_budget" and 1000 < int(tokens) < 8192
    assert needed_by(facts, int(tokens)) == rows[1] <= 150 * GIB
    assert needed_by(facts, int(tokens) + 1) > 150 * GIB
    checkpointed = replace(facts, gradient_checkpointing=True)
    assert checkpointing == ("model.gradient_checkpointing=true", needed_by(checkpointed, 8192))


@pytest.mark.parametrize(
    ("checkpoints", "longest_pair", "gib", "expected"),
    [
        # A budget below the longest pair saves nothing.
        (False, 8192, 140, ["model.gradient_checkpointing=true"]),
        # Checkpointing alone is not enough: with the largest rows beside it.
        (False, 1000, 131, ["model.gradient_checkpointing=true packing.token_budget=\\d+"]),
        (True, 1000, 131, ["packing.token_budget=\\d+"]),
        (True, 8192, 131, ["model.activation_offload=true"]),
        (True, 8192, 126, []),
        # A longer pair of another rank.
        (False, 10_000, 140, ["model.gradient_checkpointing=true"]),
        (False, 1000, 80, []),
    ],
)
def test_of_shorter_rows_and_checkpointing_only_what_fits_is_told(
    checkpoints: bool, longest_pair: int, gib: int, expected: list[str], eight_billion: MemoryShape
) -> None:
    facts = plain(eight_billion, gradient_checkpointing=checkpoints)
    found = list(fitting_rows(facts, longest_pair, gib * GIB, rows_per_step=None))
    assert len(found) == len(expected) and all(num_bytes <= gib * GIB for _, num_bytes in found)
    assert all(re.fullmatch(form, told) for form, (told, _) in zip(expected, found, strict=True)), found


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (141, ["model.gradient_checkpointing=true"]),
        (80, ["model.gradient_checkpointing=true model.activation_offload=true"]),
        (
            48,
            ["model.gradient_checkpointing=true model.activation_offload=true model.mlp_tile_tokens=8192"],
        ),
        (40, []),
    ],
)
def test_a_pair_of_131072_tokens_that_does_not_fit_is_told_the_keys_for_long_pairs(
    gib: int, expected: list[str], eight_billion: MemoryShape
) -> None:
    precision = Precision(parameters=torch.bfloat16, autocast=torch.bfloat16)
    facts = plain(eight_billion, precision=precision, lora_rank=16)
    facts = replace(facts, row_tokens=132_072, row_keys=262_144, row_scored=2000)
    found = list(fitting_rows(facts, 132_072, gib * GIB))
    assert [told for told, _ in found] == expected


def test_what_saves_nothing_or_is_refused_is_not_offered(eight_billion: MemoryShape) -> None:
    facts = plain(eight_billion, row_tokens=132_072, row_keys=262_144)

    def offered(**changes: Any) -> str:
        changed = replace(facts, **changes)
        return " ".join(
            told for free in range(40, 999, 20) for told, _ in fitting_rows(changed, 132_072, free * GIB)
        )

    assert "offload" in offered() and "tile" in offered()
    assert "offload" in offered(can_tile=False) and "tile" not in offered(can_tile=False)
    assert "offload" not in offered(device=CPU) and "tile" in offered(device=CPU)


def test_in_scope_epoch_shorter_rows_come_with_more_of_them(eight_billion: MemoryShape) -> None:
    (told, _), _ = fitting_rows(plain(eight_billion), 1000, 150 * GIB, rows_per_step=6)
    budget, rows = (int(part.partition("=")[2]) for part in told.split())
    assert told.split()[1].startswith("packing.rows_per_step=") and rows == round(6 * 8192 / budget) > 6


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [
        (1, ["model.lora={r: 16} model.dtype=bfloat16", "2 devices, distributed.strategy=fsdp2"]),
        (8, ["distributed.strategy=fsdp2", "model.lora={r: 16} model.dtype=bfloat16", "16 devices"]),
    ],
)
def test_of_smaller_states_the_cheapest_come_first(
    num_devices: int, expected: list[str], eight_billion: MemoryShape
) -> None:
    found = list(memory._fitting_states(plain(eight_billion), 1000, 80 * GIB, num_devices))
    assert len(found) == len(expected) and all(num_bytes <= 80 * GIB for _, num_bytes in found)
    assert all(name.startswith(begin) for begin, (name, _) in zip(expected, found, strict=True)), found


# ------------------------------------------------------------------------------------------- what is reported


def test_a_dry_run_says_what_the_run_will_take_and_that_it_fits(
    recipe_path: Path, tmp_path: Path, console: Console
) -> None:
    train(load_recipe(recipe_path, (f"output_dir={tmp_path / 'run'}",)), console, dry_run=True)
    said = text(console)
    assert "Memory on one cpu device, estimated" in said and "It fits: " in said
    assert "does not fit" not in said
    assert "scores that" not in said
    for line in ("parameters", "gradients", "optimizer", "activations", "a step"):
        assert f"\n  {line} " in said
    assert not (tmp_path / "run").exists()


def test_a_dry_run_that_does_not_fit_says_so_first_and_what_would(
    recipe_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = AvailableMemory(free=258 * 2**20, total=300 * 2**20)
    monkeypatch.setattr(memory, "available_memory", lambda device: little)
    monkeypatch.setattr(memory, "host_bytes", lambda facts: {"model.activation_offload": 2.0 * GIB})
    overrides = (f"output_dir={tmp_path / 'run'}", "packing.token_budget=1024")
    train(load_recipe(recipe_path, overrides), console, dry_run=True)
    said = text(console)
    assert "\n  in host memory      2.00 GiB" in said
    assert (
        "It does not fit the host: 0.25 GiB of 0.29 GiB are free. Leave model.activation_offload out" in said
    )
    assert "It does not fit: 0.25 GiB of 0.29 GiB are free" in said
    assert said.index("It does not fit") < said.index("Policy: ")
    assert "\n  packing.token_budget=" in said and "model.dtype=bfloat16" in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (None, None, False)),
        (("reference.sync.mixup=0.5",), (None, None, True)),
        (("model.lora={r: 4}",), (4, None, False)),
        (("model.lora={}", "model.path=quantised"), (16, 4.5, False)),
    ],
)
def test_facts_of_a_run_are_read_off_its_recipe_and_models(
    overrides: tuple[str, ...],
    expected: tuple[Any, ...],
    recipe_path: Path,
    tmp_path: Path,
) -> None:
    """ "quantised" stands for a model whose config says so."""
    quantised = tmp_path / "quantised"
    shutil.copytree(recipe_path.parent / "model", quantised)
    overrides = (*overrides, "model.gradient_checkpointing=true", "model.activation_offload=true")
    recipe = load_recipe(recipe_path, [each.replace("quantised", str(quantised)) for each in overrides])
    prepared = prepare(recipe, Console(quiet=True))
    model = prepared.policy_facts
    if model.path == str(quantised):  # a config that says so from the start is refused on the CPU
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    plan = offline_source(recipe, prepared.data, prepared.policy_facts).first_plan
    facts, longest_pair = memory.memory_facts(prepared, plan)
    on_cuda, _ = memory.memory_facts(replace(prepared, device=torch.device("cuda")), plan)
    assert on_cuda.activation_offload and not facts.activation_offload and facts.can_tile
    vars(model)["architecture"] = without_weights(tiny_config("opt"))
    assert not memory.memory_facts(prepared, plan)[0].can_tile
    assert (facts.lora_rank, facts.bits, facts.has_second_model) == expected
    assert 0 < longest_pair <= facts.row_tokens <= 128 and 0 < facts.row_scored < facts.row_tokens


def test_a_machine_elsewhere_holds_shards_where_auto_would_take_them(recipe_path: Path) -> None:
    def printed(num_bytes: int, *overrides: str) -> str:
        recipe = load_recipe(recipe_path, ("model.autocast=none", *overrides))
        quiet, device = Console(quiet=True), torch.device("cuda")
        setup = prepare(recipe, quiet, runs_models=False, device=device)
        plan = offline_source(recipe, setup.data, setup.policy_facts).first_plan
        console = Console(file=io.StringIO(), width=200)
        setup = replace(setup, console=console)
        memory.print_memory_estimate(setup, plan, device_bytes=num_bytes, num_devices=2)
        return text(console)

    config = load_config(
        str(recipe_path.parent / "model"), revision=None, trust_remote_code=False, recipe_key=""
    )
    enough = (
        int(16 * without_weights(config).num_parameters() / STATE_SHARE) + 9
    )  # of fp32 weights, gradients and moments
    assert "of 2 shards" not in printed(enough) and "of 2 shards" in printed(enough - 18)
    assert "of 2 shards" in printed(enough, "distributed.strategy=fsdp2")
    assert "of 2 shards" not in printed(enough - 18, "distributed.strategy=ddp")


def test_the_largest_row_is_searched_in_every_step_and_among_pairs_longer_than_a_row() -> None:
    tokens = np.array([10, 20, 30, 10, 25, 90])
    settings: dict[str, Any] = {
        "order": np.arange(6), "pairs_per_step": 2, "algorithm": "best_fit_decreasing", "num_ranks": 1
    }  # fmt: skip
    plan = make_plan(tokens, token_budget=50, **settings)
    assert largest_row(plan, rank=0).tolist() == [5]
    plan = make_plan(tokens[:5], token_budget=50, **{**settings, "order": np.arange(5)})
    assert sorted(largest_row(plan, rank=0).tolist()) == [2, 3]


def test_memory_of_the_cpu_is_what_the_system_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = available_memory(CPU)
    assert 0 < found.free <= found.total
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_memory(CPU).total == found.total // 2


@pytest.mark.parametrize(("bits", "in_layers"), [(None, 4.0), (8, 1.0), (4.5, 9 / 16)])
def test_quantised_layers_count_with_their_scales(bits: float | None, in_layers: float) -> None:
    facts = plain(shape_of("llama"), lora_rank=4, bits=bits)
    part = facts.shape.num_layers * facts.shape.layer_parameters / facts.shape.num_parameters
    base = facts.shape.num_parameters * (part * in_layers + 4 * (1 - part))
    adapter = 4 * facts.shape.num_adapter_parameters(4)
    assert state_bytes(facts).parameters == pytest.approx(base + adapter)


# ----------------------------------------------------------------------------------------------- measurements


class FakeCuda:
    """torch.cuda's counters, on a machine without it."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.resets = 0

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.resets += 1

    def synchronize(self, device: torch.device) -> None:
        pass

    def max_memory_allocated(self, device: torch.device) -> int:
        return 3 * GIB

    def max_memory_reserved(self, device: torch.device) -> int:
        return 4 * GIB

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 5 * GIB, 10 * GIB


def test_the_measurement_runs_the_row_beside_the_optimizer_s_state_and_trains_nothing(
    models: Callable[[str], Path], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpo_pack.model.parallel import ALONE, distribute_policy

    path = models("llama")  # made with torch's own
    monkeypatch.setattr(memory, "release_memory", lambda: None)
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    loaded, row = load("bfloat16", path), build_row(96, num_pairs=2, length=5)
    before = [parameter.detach().clone() for parameter in loaded.scorer.parameters()]
    optimizer = build_optimizer(
        "adamw", loaded.scorer, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1
    )
    policy = distribute_policy(loaded.scorer, ALONE)
    memory.print_measured_memory(policy, optimizer, row, CPU, console)
    assert "30 tokens: 3.00 GiB at the peak; torch held 4.00 GiB, and 5.00 GiB" in text(console)
    assert fake.resets == 1 and optimizer.param_groups[0]["lr"] == 1e-3
    assert all(map(torch.equal, before, loaded.scorer.parameters()))
    assert all(optimizer.state[parameter] for parameter in loaded.scorer.parameters())
    assert all(parameter.grad is not None for parameter in loaded.scorer.parameters())


@pytest.mark.gpu
def test_a_dry_run_on_cuda_measures_near_its_estimate(
    recipe_path: Path, tmp_path: Path, console: Console
) -> None:
    train(load_recipe(recipe_path, (f"output_dir={tmp_path / 'run'}",)), console, dry_run=True)
    assert "Measured on the largest row" in text(console)


# Products in bfloat16 take working memory on some CPUs and not on others, and a minute here on the latter.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "checkpointed", "lora fp32"])
def test_a_process_grows_by_about_the_estimate(
    kind: str, tmp_path_factory: pytest.TempPathFactory, record_property: Any
) -> None:
    directory = tmp_path_factory.mktemp("sizes")
    large: dict[str, Any] = {
        "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1056, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 1024,
    }  # fmt: skip
    tiny_model("llama").save_pretrained(directory / "small")
    tiny_model("llama", **large).save_pretrained(directory / "large")
    script = Path(__file__).parents[1] / "support" / "row_memory.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), kind, str(directory)],
        # glibc would keep freed tensors of up to 32 MiB, some 100 to 180 MiB of them here.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    measured, estimate = map(int, done.stdout.split()[-2:])
    record_property("memory", (kind, measured, estimate))
    assert estimate == pytest.approx(measured, rel=0.15)
