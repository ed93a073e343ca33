"""Which strategy a run gets and why, which combinations are refused, and what ranks without a row compute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_recipe import message_of
from support.tiny_run import tiny_run
from support.tiny_vision import vision_config

import dpo_pack.run.models as strategies
from dpo_pack.model.parallel import Strategy
from dpo_pack.model.scorer import resolve_precision
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.models import choose_strategy, resolve_model
from dpo_pack.system import ranks
from dpo_pack.system.machine import AvailableMemory

CPU = torch.device("cpu")
FSDP2 = "distributed.strategy=fsdp2"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("strategy")
    tiny_run(directory)
    return directory


def num_parameters(directory: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(directory / "model" / "model.safetensors").values())


def memory_of(total: int) -> AvailableMemory:
    return AvailableMemory(free=total, total=total)


def chosen(directory: Path, *overrides: str) -> Strategy:
    recipe = load_recipe(directory / "recipe.yaml", overrides)
    return choose_strategy(recipe, resolve_model(recipe, CPU), CPU)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to several ranks is said to this one, of two."""
    monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
    monkeypatch.setattr(ranks, "every_rank_says", lambda value: [value, value])
    monkeypatch.setattr(strategies, "init_device_mesh", lambda device, shape, **_: (device, shape))


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_one_process_needs_no_strategy(strategy: str, directory: Path) -> None:
    assert chosen(directory, f"distributed.strategy={strategy}").name == "none"


def test_what_is_computed_otherwise_in_shards_is_refused_on_one_process(directory: Path) -> None:
    for option in ("gather_dtype=bfloat16", "cpu_offload=true"):
        message = message_of(lambda: chosen(directory, FSDP2, f"distributed.{option}"))  # noqa: B023
        assert message.startswith(f"distributed.{option.partition('=')[0]}: ")


def test_auto_copies_what_fits(two: None, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 16 * num_parameters(directory)
    monkeypatch.setattr(strategies, "available_memory", lambda device: memory_of(int(needed / 0.6) + 9))
    copies = chosen(directory)
    assert copies.name == "ddp" and not copies.shards and "parameters with gradients" in copies.sentence()
    monkeypatch.setattr(strategies, "available_memory", lambda device: memory_of(int(needed / 0.6) - 9))
    shards = chosen(directory)
    assert shards.name == "fsdp2" and shards.mesh == ("cpu", (2,)) and "a device has" in shards.reason
    assert chosen(directory, "model.lora={r: 4, alpha: 8}").name == "ddp"
    assert chosen(directory, "distributed.strategy=ddp").reason == "distributed.strategy"


@pytest.mark.parametrize(
    ("overrides", "parameter_bytes"),
    [
        (("reference.sync={every_steps: 2, mixup: 0.5}",), 20),
        (("reference.sync={every_steps: 2, mixup: 0.5}", "model.lora={r: 4, alpha: 8}"), 8),
        (("model.autocast=bfloat16",), 18),
        (("model.autocast=bfloat16", "model.gradient_checkpointing=true"), 16),
        (("model.dtype=bfloat16",), 14),
        ((), None),  # a tower, which is frozen
    ],
)
def test_auto_counts_a_reference_that_moves_the_casts_of_weights_and_a_tower_as_frozen(
    overrides: tuple[str, ...],
    parameter_bytes: int | None,
    two: None,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = load_recipe(directory / "recipe.yaml", overrides)
    facts = resolve_model(recipe, CPU)
    needed = (parameter_bytes or 0) * num_parameters(directory)
    if parameter_bytes is None:
        facts = replace(facts, config=vision_config("llava"))
        assert 0 < facts.tower_parameters < facts.num_parameters
        needed = 16 * (facts.num_parameters - facts.tower_parameters) + 4 * facts.tower_parameters
    for spare, name in ((9, "ddp"), (-9, "fsdp2")):
        memory = memory_of(int(needed / 0.6) + spare)
        monkeypatch.setattr(strategies, "available_memory", lambda device: memory)  # noqa: B023
        assert choose_strategy(recipe, facts, CPU).name == name


def test_hybrid_shards_within_nodes(two: None, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "num_ranks", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert chosen(directory, FSDP2, "distributed.hybrid=true").mesh == ("cpu", (2, 4))
    for num_here in ("8", "1", "3"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_here)
        message = message_of(lambda: chosen(directory, FSDP2, "distributed.hybrid=true"))
        assert "distributed.hybrid" in message and f"{num_here} of the run's 8" in message


def test_the_dtype_of_gathered_shards_takes_the_place_of_autocast() -> None:
    precision = resolve_precision(
        "auto", "auto", torch.device("cuda"), gather_dtype="bfloat16", trains_adapter=False
    )
    assert (precision.parameters, precision.autocast) == (torch.float32, None)
    assert precision.gathered == precision.activations == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "device", "autocast"),
    [
        ("auto", "cuda", torch.bfloat16),
        ("float32", "cuda", torch.bfloat16),
        ("bfloat16", "cuda", None),
        ("auto", "cpu", None),
        ("bfloat16", "cpu", None),
    ],
)
def test_only_parameters_in_fp32_on_a_gpu_get_autocast_by_themselves(
    dtype: str, device: str, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = partial(resolve_precision, dtype, "auto", torch.device(device), gather_dtype=None)
    assert resolve(trains_adapter=False).autocast == autocast
    # Adapters are fp32, and products in fp32 are slow on a GPU.
    assert resolve(trains_adapter=True).autocast == (torch.bfloat16 if device == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert resolve(trains_adapter=False).autocast is None
