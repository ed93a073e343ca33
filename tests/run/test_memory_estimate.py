"""Memory: the estimate beside what autograd keeps and what a process grows by, and what is made of it."""

from __future__ import annotations

import os
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
from support.plans import make_plan
from support.row_memory import AUTOCAST, BFLOAT16, SETTINGS, build_row, load
from support.row_memory import memory_facts as facts_of
from support.tiny_models import tiny_config, tiny_model
from support.tiny_run import tiny_run
from support.whole_runs import text
from torch import Tensor, nn

import dpo_pack.run.memory_estimate as memory
from dpo_pack.model.facts import model_shape, without_weights
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.recipe.load import load_recipe
from dpo_pack.recipe.schema import ModelRecipe
from dpo_pack.run.memory_estimate import (
    GIB,
    MemoryFacts,
    MemoryShape,
    estimate_memory,
    fitting_changes,
    largest_row,
    layer_bytes,
    memory_facts,
    memory_report,
    memory_shape,
    state_bytes,
    step_bytes,
)
from dpo_pack.run.models import STATE_SHARE, Setup, available_memory, training_bytes
from dpo_pack.run.pairs import offline_source
from dpo_pack.run.setup import prepare
from dpo_pack.system.machine import AvailableMemory
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
        loaded.scorer._run_layers(row)
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
    if facts.model.gradient_checkpointing:
        estimate -= layer_bytes(facts)  # of the layer that is recomputed, in the backward pass
    estimate += estimate_memory(facts)["weights cast"]
    measured = saved_bytes(loaded, row)
    record_property("memory", (family, kind, measured, estimate))
    # Of checkpointed layers next to nothing is kept, so that the final norm's part shows: gpt2 19 %.
    tolerance = 0.22 if facts.model.gradient_checkpointing else WORST[family]
    assert estimate == pytest.approx(measured, rel=tolerance)


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
        model=ModelRecipe(path="-"),
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
    def needed(recomputes: bool = False, **changes: Any) -> float:
        facts = plain(eight_billion, **changes)
        return step_bytes(facts.changed(gradient_checkpointing=recomputes)) / GIB

    bfloat16: dict[str, Any] = {"precision": BFLOAT16}
    assert needed() > 140
    assert 100 < needed(True, **bfloat16) < 125
    assert needed(**bfloat16, lora_rank=16) < 110
    assert needed(True, **bfloat16, lora_rank=16) < 30
    assert needed(True, num_shards=8) < 40


def test_a_second_model_and_a_base_count_without_gradients(eight_billion: MemoryShape) -> None:
    number, facts = eight_billion.num_parameters, plain(eight_billion, precision=BFLOAT16)
    assert sum(state_bytes(facts)) == 14 * number
    assert sum(state_bytes(replace(facts, has_second_model=True))) == 16 * number
    adapter = state_bytes(replace(facts, lora_rank=16))
    assert sum(adapter) == 2 * number + 16 * eight_billion.num_adapter_parameters(16)


# --------------------------------------------------------------------------------------------- what would fit


RECOMPUTE, SHARDS = "model.gradient_checkpointing=true", "distributed.strategy=fsdp2"
OFFLOAD = f"{RECOMPUTE} model.activation_offload=true"


def test_the_largest_budget_that_fits_is_told_and_that_checkpointing_is_enough(
    eight_billion: MemoryShape,
) -> None:
    def needed(tokens: int) -> float:
        keys, scored = (round(tokens / 8192 * size) for size in (11_000, 5_000))
        return step_bytes(replace(facts, row_tokens=tokens, row_keys=keys, row_scored=scored))

    facts = plain(eight_billion)
    rows, recomputed, _ = fitting_changes(facts, 1000, 150 * GIB, 1)
    key, _, tokens = rows[0].partition("=")
    assert key == "packing.token_budget" and 1000 < int(tokens) < 8192
    assert needed(int(tokens)) == rows[1] <= 150 * GIB < needed(int(tokens) + 1)
    assert recomputed == (RECOMPUTE, step_bytes(facts.changed(gradient_checkpointing=True)))


LOW = f"{RECOMPUTE} model.dtype=bfloat16"
LORA = f"{LOW} model.lora={{r: 16}}"


@pytest.mark.parametrize(
    ("changes", "longest_pair", "gib", "num_devices", "expected"),
    [
        # A budget below the longest pair saves nothing.
        ({}, 8192, 140, 1, [RECOMPUTE, OFFLOAD]),
        ({}, 10_000, 140, 1, [RECOMPUTE, OFFLOAD]),  # a longer pair of another rank
        ({}, 8192, 131, 1, [OFFLOAD, f"{OFFLOAD} model.mlp_tile_tokens=8192"]),
        ({"device": CPU}, 8192, 131, 1, [LOW, LORA]),
        ({}, 8192, 80, 1, [LORA, f"{RECOMPUTE} {SHARDS}, 4 devices"]),
        ({}, 8192, 80, 8, [f"{RECOMPUTE} {SHARDS}", LORA]),
        ({"optimizer": "adafactor"}, 8192, 30, 8, [LORA]),
        ({"lora_rank": 16}, 8192, 30, 7, [f"{RECOMPUTE} {SHARDS}", LOW]),
        ({}, 8192, 2, 1, []),
    ],
)  # fmt: skip
def test_the_cheapest_changes_with_which_a_run_fits_are_told(
    changes: dict[str, Any], longest_pair: int, gib: int, num_devices: int, expected: list[str],
    eight_billion: MemoryShape,
) -> None:  # fmt: skip
    found = list(fitting_changes(plain(eight_billion, **changes), longest_pair, gib * GIB, num_devices))
    assert [change for change, _ in found] == expected
    assert all(num_bytes <= gib * GIB for _, num_bytes in found)


# ------------------------------------------------------------------------------------------- what is reported


def prepared(recipe_path: Path, *overrides: str, **options: Any) -> tuple[Setup, PackingPlan]:
    setup = prepare(load_recipe(recipe_path, overrides), Console(quiet=True), **options)
    return setup, offline_source(setup).first_plan


def test_a_run_that_does_not_fit_is_told_with_what_would(
    recipe_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, plan = prepared(recipe_path, "packing.token_budget=1024")
    report = memory_report(setup, plan)
    assert (
        report["fits"]
        and report["would_fit"] == {}
        and (report["num_devices"], report["num_shards"]) == (1, 1)
    )
    assert report["step"] == sum(report["parts"].values())
    memory.print_memory_report(report, console)
    assert "Memory on one cpu device" in text(console) and "It fits: " in text(console)
    little = AvailableMemory(free=258 * 2**20, total=300 * 2**20)
    monkeypatch.setattr(memory, "available_memory", lambda device: little)
    report = memory_report(setup, plan)
    assert not report["fits"] and next(iter(report["would_fit"])).startswith("packing.token_budget=")
    memory.print_memory_report(report, console)
    assert "It does not fit: 0.25 GiB of 0.29 GiB are free" in text(console)
    assert "\n  packing.token_budget=" in text(console)


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
    overrides: tuple[str, ...], expected: tuple[Any, ...], recipe_path: Path, tmp_path: Path
) -> None:
    """ "quantised" stands for a model whose config says so."""
    quantised = tmp_path / "quantised"
    shutil.copytree(recipe_path.parent / "model", quantised)
    setup, plan = prepared(recipe_path, *(each.replace("quantised", str(quantised)) for each in overrides))
    model = setup.policy_facts
    if model.settings.path == str(quantised):  # a config that says so from the start is refused on the CPU
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    facts, longest_pair = memory_facts(setup, plan)
    assert (facts.lora_rank, facts.bits, facts.has_second_model) == expected
    assert 0 < longest_pair <= facts.row_tokens <= 128 and 0 < facts.row_scored < facts.row_tokens
    assert facts.row_keys > facts.row_tokens and facts.mask_bytes > 0


def test_a_machine_elsewhere_holds_shards_where_auto_would_take_them(recipe_path: Path) -> None:
    def num_shards(num_bytes: int, *overrides: str) -> int:
        elsewhere: dict[str, Any] = {"for_device": torch.device("cuda")}
        setup, plan = prepared(recipe_path, "model.autocast=none", *overrides, **elsewhere)
        return int(memory_report(setup, plan, device_bytes=num_bytes, num_devices=2)["num_shards"])

    num_parameters = prepared(recipe_path)[0].policy_facts.num_parameters
    enough = int(16 * num_parameters / STATE_SHARE) + 9  # of fp32 weights, gradients and moments
    assert (num_shards(enough), num_shards(enough - 18)) == (1, 2)
    assert num_shards(enough, "distributed.strategy=fsdp2") == 2
    assert num_shards(enough - 18, "distributed.strategy=ddp") == 1


def test_the_largest_row_is_searched_in_every_step_and_among_pairs_longer_than_a_row() -> None:
    tokens = np.array([10, 20, 30, 10, 25, 90])
    plan = make_plan(tokens, token_budget=50, pairs_per_step=2)
    assert largest_row(plan, rank=0).tolist() == [5]
    plan = make_plan(tokens[:5], token_budget=50, pairs_per_step=2)
    assert sorted(largest_row(plan, rank=0).tolist()) == [2, 3]


def test_the_row_with_the_most_keys_may_be_another_than_that_with_the_most_tokens() -> None:
    plan = make_plan(np.array([10, 20, 30, 10]), token_budget=40, pairs_per_step=4)
    keys = np.array([1, 900, 1, 1])
    assert 2 in largest_row(plan, rank=0)
    assert 1 in largest_row(plan, rank=0, by=lambda row: keys[row].sum())


def test_copies_of_keys_count_in_one_layer_by_backend(eight_billion: MemoryShape) -> None:
    """In bfloat16 copies and gradients have 2 bytes each, and those for four times as many heads 8 bytes."""
    facts = plain(eight_billion, precision=BFLOAT16, row_keys=1_000_000)
    more = replace(facts, row_keys=1_100_000)
    number = 2 * 8 * 128  # of a key and its value
    for backend, width in {"torch_varlen": 12, "flash_attn": 12, "sdpa": 20, "flex": 0, "padded": 0}.items():
        few, many = (estimate_memory(replace(each, backend=backend)) for each in (facts, more))
        assert few["activations"] == many["activations"]
        grown = many["working memory"] - few["working memory"]
        assert grown == 100_000 * number * width


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
