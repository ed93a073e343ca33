"""Memory: the estimate beside what autograd keeps and what a process grows by, and what is made of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from row_memory import SETTINGS, build_row, load, memory_setting
from tiny_models import tiny_config, tiny_model
from tiny_online import online_recipe
from tiny_run import tiny_run
from torch import Tensor, nn

import dpo_pack.memory_report as memory_report
from dpo_pack.data.packing import plan_epoch
from dpo_pack.errors import RunError
from dpo_pack.host_memory import AvailableMemory
from dpo_pack.memory import (
    GIB,
    MemorySetting,
    RowSize,
    estimate_memory,
    kept_bytes,
    layer_bytes,
    training_bytes,
)
from dpo_pack.memory_advice import Limits, advice
from dpo_pack.memory_report import available_memory, format_bytes, frozen_bytes, largest_row
from dpo_pack.memory_shape import MemoryShape, memory_shape
from dpo_pack.model_shape import without_weights
from dpo_pack.models import LoadedModel
from dpo_pack.optim import build_optimizer
from dpo_pack.prepare import prepare, prepare_prompts, recipe_objective
from dpo_pack.recipe import load_recipe
from dpo_pack.train import train

# peft reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
CPU = torch.device("cpu")
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
LLAMA_WIDE = {**WIDE, "intermediate_size": 352, "num_key_value_heads": 2, "head_dim": 32}


def shape_of(family: str, **changes: Any) -> MemoryShape:
    return memory_shape(without_weights(tiny_config(family, **changes), trust_remote_code=False))


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


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3", "qwen3_moe"])
def test_the_estimate_of_activations_is_what_autograd_keeps(
    family: str, kind: str, models: Callable[[str], Path], record_property: Any
) -> None:
    loaded = load(kind, models(family))
    row = build_row(96, num_pairs=5, length=40)
    setting = memory_setting(kind, loaded, row)
    estimate = kept_bytes(setting)
    if setting.checkpoints_activations:
        estimate -= layer_bytes(setting)  # of the layer that is recomputed, in the backward pass
    estimate += estimate_memory(setting).casts
    measured = saved_bytes(loaded, row)
    record_property("memory", (family, kind, measured, estimate))
    # Of checkpointed layers next to nothing is kept, so that the final norm's part shows.
    tolerance = 0.25 if setting.checkpoints_activations else 0.08
    assert estimate == pytest.approx(measured, rel=tolerance)


def test_the_shape_of_a_model_is_read_without_its_weights() -> None:
    shape = shape_of("llama", **LLAMA_WIDE)
    assert shape.num_parameters == sum(p.numel() for p in tiny_model("llama", **LLAMA_WIDE).parameters())
    assert (shape.num_layers, shape.hidden, shape.inner, shape.kept_inner) == (4, 128, 352, 3 * 352)
    assert (shape.queries, shape.keys, shape.norms, shape.num_readers) == (128, 64, 2 * 128, 5)


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "mixtral", "olmo2", "opt", "deepseek_v3"])
def test_other_families_have_a_shape_as_well(family: str) -> None:
    shape = shape_of(family)
    model = tiny_model(family)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert layer_bytes(plain(shape)) > 0


# -------------------------------------------------------------------------------------------------- estimates


def plain(shape: MemoryShape, **changes: Any) -> MemorySetting:
    """Full training in fp32 under bf16 autocast on CUDA, of rows of 8,192 tokens."""
    setting = MemorySetting(
        shape=shape,
        num_trained=shape.num_parameters,
        num_frozen=0,
        trained_bytes=4,
        frozen_bytes=4,
        activation_bytes=2,
        autocasts=True,
        lora_rank=None,
        trains_head=True,
        optimizer="adamw",
        checkpoints_activations=False,
        shares_key_heads=True,
        device="cuda",
        row=RowSize(tokens=8192, keys=11_000, scored=5_000),
        reference_row=None,
    )
    return replace(setting, **changes)


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
    assert state.total / 1000 == pytest.approx(expected, abs=0.05)
    halves = training_bytes(
        num_trained=1000, trained_bytes=parameter_bytes, optimizer=optimizer, num_shards=2
    )
    assert halves.total == state.total / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_optimizer_s_bytes_are_what_it_allocates(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("adafactor", torch.bfloat16):
        pytest.skip("refused")
    layer = nn.Linear(512, 512, bias=False, dtype=dtype)
    optimizer = build_optimizer(name, layer, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    kept = sum(tensor.nbytes for tensor in optimizer.state[layer.weight].values())
    estimate = training_bytes(
        num_trained=layer.weight.numel(), trained_bytes=dtype.itemsize, optimizer=name
    ).optimizer
    assert kept == pytest.approx(estimate, abs=0.02 * layer.weight.numel())


def test_eight_billion_parameters_fit_one_device_of_140_gib_in_bfloat16_only(
    eight_billion: MemoryShape,
) -> None:
    def needed(**changes: Any) -> float:
        return estimate_memory(plain(eight_billion, **changes)).total / GIB

    assert needed() > 140
    in_bfloat16 = {"trained_bytes": 2, "autocasts": False}
    assert 100 < needed(**in_bfloat16, checkpoints_activations=True) < 125
    adapter = {
        "num_trained": eight_billion.num_adapter_parameters(16),
        "num_frozen": eight_billion.num_parameters,
        "frozen_bytes": 2,
        "autocasts": False,
        "lora_rank": 16,
        "trains_head": False,
    }
    assert needed(**adapter) < 100 and needed(**adapter, checkpoints_activations=True) < 30
    assert needed(num_shards=8, checkpoints_activations=True) < 40


def test_offloaded_state_is_in_the_host_s_memory(eight_billion: MemoryShape) -> None:
    shards = estimate_memory(plain(eight_billion, num_shards=8))
    offloaded = estimate_memory(plain(eight_billion, num_shards=8, offloads_state=True))
    assert shards.host == 0 and offloaded.state.total == 0
    assert offloaded.host == shards.state.total == pytest.approx(2 * eight_billion.num_parameters)
    assert shards.total - offloaded.total == pytest.approx(shards.state.total)
    whole = plain(eight_billion, num_shards=8, offloads_state=True, holds_whole_gradients=True)
    assert estimate_memory(whole).state.total == 4 * eight_billion.num_parameters


def test_a_gradient_beside_ddp_s_buckets_counts_twice(eight_billion: MemoryShape) -> None:
    once, twice = (estimate_memory(plain(eight_billion, num_gradients=number)) for number in (1, 2))
    assert twice.total - once.total == pytest.approx(4 * eight_billion.num_parameters)
    assert estimate_memory(plain(eight_billion, num_gradients=2, num_shards=2)).total < once.total


# ----------------------------------------------------------------------------------------------------- advice


def test_every_single_change_that_fits_is_told_cheapest_first(eight_billion: MemoryShape) -> None:
    limits = Limits(available_bytes=140 * GIB, longest_pair=4096)
    changes = advice(plain(eight_billion), limits)
    assert [change.override.partition("=")[0] for change in changes] == [
        "model.gradient_checkpointing",
        "distributed.num_processes",
        "'model.lora",
    ]
    assert all(change.total_bytes <= limits.available_bytes for change in changes)


def test_where_no_single_change_is_enough_the_fewest_are_put_together(eight_billion: MemoryShape) -> None:
    limits = Limits(available_bytes=80 * GIB, longest_pair=1024)
    setting = plain(eight_billion)
    assert all(
        estimate_memory(replace(setting, **change)).total > limits.available_bytes
        for change in ({"checkpoints_activations": True}, {"num_shards": 64})
    )
    (change,) = advice(setting, limits)
    assert change.override == (
        "model.gradient_checkpointing=true distributed.num_processes=2 distributed.strategy=fsdp2"
    )
    assert change.total_bytes <= limits.available_bytes


def test_rows_are_shortened_no_further_than_needed_or_to_the_longest_pair(
    eight_billion: MemoryShape,
) -> None:
    setting = plain(eight_billion, trained_bytes=2, autocasts=False)
    limits = Limits(available_bytes=140 * GIB, longest_pair=1000)
    assert "packing.token_budget=4096" in [change.override for change in advice(setting, limits)]
    unhelpful = Limits(available_bytes=140 * GIB, longest_pair=8192)
    assert not any("token_budget" in change.override for change in advice(setting, unhelpful))


@pytest.mark.parametrize(
    ("refusing", "key"),
    [
        ({"optimizer": "adafactor"}, "distributed.strategy"),
        ({"optimizer": "adamw_8bit"}, "distributed.strategy"),
        ({"can_shard": False}, "distributed.strategy"),
        ({"optimizer": "adafactor"}, "model.dtype"),
        ({"reference_mixup": 0.6}, "model.dtype"),
        ({"can_adapt": False}, "model.lora"),
    ],
)
def test_what_the_recipe_s_other_settings_refuse_is_not_advised(
    eight_billion: MemoryShape, refusing: dict[str, Any], key: str
) -> None:
    def advised(**changes: Any) -> set[str]:
        limits = [Limits(available_bytes=GIB * gib, longest_pair=8192) for gib in range(10, 200, 10)]
        found = [advice(plain(eight_billion, **changes), limit) for limit in limits]
        overrides = {change.override for changes in found for change in changes}
        # With an adapter a bfloat16 base has an optimizer that the whole model must not have.
        return {override for override in overrides if key == "model.lora" or "lora" not in override}

    assert any(key in override for override in advised())
    assert not any(key in override for override in advised(**refusing))


def test_a_moving_reference_that_copies_takes_bfloat16_or_an_adapter_and_not_both(
    eight_billion: MemoryShape,
) -> None:
    def advised(mixup: float | None) -> list[str]:
        setting = plain(eight_billion, reference_mixup=mixup, can_shard=False)
        limits = [Limits(available_bytes=GIB * gib, longest_pair=8192) for gib in range(10, 200, 5)]
        return [change.override for limit in limits for change in advice(setting, limit)]

    both = [["model.dtype" in override, "model.lora" in override] for override in advised(1.0)]
    assert [True, False] in both and [False, True] in both and [True, True] not in both
    assert any("model.dtype" in override and "model.lora" in override for override in advised(None))


def test_in_scope_epoch_shorter_rows_come_with_more_of_them(eight_billion: MemoryShape) -> None:
    setting = plain(eight_billion, trained_bytes=2, autocasts=False, rows_per_step=6)
    limits = Limits(available_bytes=140 * GIB, longest_pair=1000)
    assert "packing.token_budget=4096 packing.rows_per_step=12" in [
        change.override for change in advice(setting, limits)
    ]


def test_where_nothing_fits_nothing_is_advised(eight_billion: MemoryShape) -> None:
    limits = Limits(available_bytes=1 * GIB, longest_pair=4096)
    assert advice(plain(eight_billion, device="cpu"), limits) == []


# ------------------------------------------------------------------------------------------- what is reported


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("run"))


def text_of(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_dry_run_says_what_the_run_will_take_and_that_it_fits(
    recipe_path: Path, tmp_path: Path, console: Console
) -> None:
    train(load_recipe(recipe_path, (f"output_dir={tmp_path / 'run'}",)), console, dry_run=True)
    said = text_of(console)
    assert "Memory on one cpu device, estimated" in said and "It fits: " in said
    for line in ("parameters", "gradients", "optimizer", "activations", "a step", "reference pass"):
        assert f"\n  {line} " in said
    assert not (tmp_path / "run").exists()


def test_a_dry_run_that_does_not_fit_says_so_first_and_what_would(
    recipe_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = AvailableMemory(free=258 * 2**20, total=300 * 2**20)
    monkeypatch.setattr(memory_report, "available_memory", lambda device: little)
    overrides = (f"output_dir={tmp_path / 'run'}", "packing.token_budget=1024", "reference.token_budget=128")
    train(load_recipe(recipe_path, overrides), console, dry_run=True)
    said = text_of(console)
    assert "It does not fit: 0.25 GiB of 0.29 GiB are free" in said
    assert said.index("It does not fit") < said.index("Policy: ")
    assert "packing.token_budget=" in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (None, None, True, True)),
        (("reference.sync.mixup=0.5",), (None, 0.5, True, True)),
        (
            ("packing.scope=epoch", "packing.rows_per_step=3", "packing.pairs_per_step=64"),
            (3, None, True, True),
        ),
        (("model.lora={}", "model.path=quantised"), (None, None, False, True)),
        (("reference.path=quantised",), (None, None, False, True)),
    ],
)
def test_what_can_be_advised_is_read_off_the_recipe(
    overrides: tuple[str, ...],
    expected: tuple[Any, ...],
    recipe_path: Path,
    tmp_path: Path,
) -> None:
    """ "quantised" stands for a model whose config says so."""
    quantised = tmp_path / "quantised"
    shutil.copytree(recipe_path.parent / "model", quantised)
    recipe = load_recipe(recipe_path, [each.replace("quantised", str(quantised)) for each in overrides])
    prepared = prepare(recipe, Console(quiet=True))
    config = json.loads((quantised / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config), encoding="utf-8")
    setting, _ = memory_report.recipe_memory(prepared, recipe_objective(recipe))
    found = (setting.rows_per_step, setting.reference_mixup, setting.can_shard, setting.can_adapt)
    assert found == expected


def test_an_online_run_whose_policy_answers_is_not_sharded_nor_adapted_with_an_offloaded_reference(
    tmp_path: Path,
) -> None:
    recipe = online_recipe(tmp_path / "assets", tmp_path / "run", offload_reference=True)
    prepared = prepare(recipe, Console(quiet=True), prepare_prompts)
    setting, _ = memory_report.recipe_memory(prepared, recipe_objective(recipe))
    assert not setting.can_shard and not setting.can_adapt


def test_the_largest_row_is_searched_in_every_step_and_among_pairs_longer_than_a_row() -> None:
    tokens = np.array([10, 20, 30, 10, 25, 90])
    settings: dict[str, Any] = {
        "order": np.arange(6), "pairs_per_step": 2, "algorithm": "best_fit_decreasing", "num_ranks": 1
    }  # fmt: skip
    plan = plan_epoch(tokens, token_budget=50, **settings)
    assert largest_row(plan, rank=0).tolist() == [5]
    plan = plan_epoch(tokens[:5], token_budget=50, **{**settings, "order": np.arange(5)})
    assert sorted(largest_row(plan, rank=0).tolist()) == [2, 3]


def test_memory_of_the_cpu_is_what_the_system_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = available_memory(CPU)
    assert found is not None and 0 < found.free <= found.total
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared = available_memory(CPU)
    assert shared is not None and shared.total == found.total // 2


def test_a_system_that_does_not_say_how_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "host_memory", lambda: None)
    assert available_memory(CPU) is None


def test_quantised_layers_count_with_their_scales() -> None:
    shape = shape_of("llama")
    layers = shape.num_layers * shape.layer_parameters / shape.num_parameters
    for settings, expected in (
        (None, 4.0),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, layers + 4 * (1 - layers)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, layers * 9 / 16 + 4 * (1 - layers)),
    ):
        config = tiny_config("llama", **({} if settings is None else {"quantization_config": settings}))
        assert frozen_bytes(config, shape, torch.float32) == pytest.approx(expected)


def test_sizes_are_told_in_units_that_fit() -> None:
    assert [format_bytes(size) for size in (2048, 12 * 2**20, 0.31 * GIB, 104.6 * GIB)] == [
        "2 KiB", "12 MiB", "0.31 GiB", "104.6 GiB"
    ]  # fmt: skip


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
    from dpo_pack.strategy import ALONE, distribute_policy

    path = models("llama")  # made with torch's own
    monkeypatch.setattr(memory_report, "release_memory", lambda: None)
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    loaded, row = load("bfloat16", path), build_row(96, num_pairs=2, length=5)
    before = [parameter.detach().clone() for parameter in loaded.scorer.parameters()]
    optimizer = build_optimizer(
        "adamw", loaded.scorer, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1
    )
    policy = distribute_policy(loaded.scorer, ALONE)
    memory_report.print_measured_memory(policy, optimizer, row, CPU, console)
    assert "30 tokens: 3.00 GiB at the peak; torch held 4.00 GiB, and 5.00 GiB" in text_of(console)
    assert fake.resets == 1 and optimizer.param_groups[0]["lr"] == 1e-3
    assert all(map(torch.equal, before, loaded.scorer.parameters()))
    assert all(optimizer.state[parameter] for parameter in loaded.scorer.parameters())
    assert all(parameter.grad is not None for parameter in loaded.scorer.parameters())


def test_out_of_memory_in_the_measurement_is_one_line(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(optimizer: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory_report, "hold_optimizer_state", out_of_memory)
    row: Any = SimpleNamespace(num_tokens=8192)
    nothing: Any = None
    with pytest.raises(RunError, match=r"^the largest row, 8,192 tokens, does not fit .*gradient_check"):
        memory_report.print_measured_memory(nothing, nothing, row, CPU, console)


@pytest.mark.gpu
def test_a_dry_run_on_cuda_measures_near_its_estimate(
    recipe_path: Path, tmp_path: Path, console: Console
) -> None:
    train(load_recipe(recipe_path, (f"output_dir={tmp_path / 'run'}",)), console, dry_run=True)
    assert "Measured on the largest row" in text_of(console)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "checkpointed", "bfloat16", "lora bfloat16"])
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
    script = Path(__file__).parent / "row_memory.py"
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
