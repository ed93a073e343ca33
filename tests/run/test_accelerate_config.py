"""What dpo-pack takes from the file of `accelerate config`, and what it leaves to torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from rich.console import Console
from support.run_files import timeless
from support.tiny_adapters import refusal
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks
from torch.nn.parallel import DistributedDataParallel

from dpo_pack.commands.launch import _join
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.prepare import prepare
from dpo_pack.system.errors import RecipeError
from dpo_pack.system.placement import Placement

# What `accelerate config` writes, with its defaults, for one process on the CPU and for two with devices.
ONE_PROCESS = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "NO", "downcast_bf16": "no",
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1,
    "num_processes": 1, "use_cpu": True,
}  # fmt: skip
TWO_PROCESSES = {
    **ONE_PROCESS, "distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": False,
    "rdzv_backend": "static", "same_network": True, "main_process_port": 0,
}  # fmt: skip
FSDP2 = {
    **TWO_PROCESSES, "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_version": 2,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.multiprocess
def test_files_of_accelerate_config_start_runs_that_take_the_same_steps(tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    for name, config, strategy in (
        ("one", ONE_PROCESS, None),
        ("two", TWO_PROCESSES, "ddp"),
        ("shards", FSDP2, "fsdp2"),
    ):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, "-m", "dpo_pack"]
        command = [*map(str, launch), "train", str(recipe), f"output_dir={tmp_path / name}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert (f"Strategy: {strategy} on 2 processes" in done.stdout) is (strategy is not None)
    alone = timeless(tmp_path / "one", "train")
    for name in ("two", "shards"):
        for ours, theirs in zip(timeless(tmp_path / name, "train"), alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"ACCELERATE_MIXED_PRECISION": "fp16"},
            "model.autocast: .*mixed_precision: fp16.* float32; dpo-pack",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "model.autocast: .*bf16.*; set model.autocast: bfloat16"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "model.compile: .*inductor.*; set model.compile: true"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "distributed.cpu_offload: .*; set distributed.cpu_offload: true"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "; set model.gradient_checkpointing: true"),
    ],
)
def test_what_accelerate_s_file_asks_for_and_the_recipe_does_not_is_refused(
    variables: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = refusal(lambda: prepare(load_recipe(tiny_run(tmp_path)), Console(quiet=True)), RecipeError)
    assert re.search(message, found), found


def test_what_the_recipe_asks_for_too_is_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    overrides = ["model.autocast=bfloat16", "model.gradient_checkpointing=true"]
    prepared = prepare(load_recipe(tiny_run(tmp_path), overrides), Console(quiet=True))
    assert prepared.accelerator.mixed_precision == "no" and not prepared.accelerator.native_amp


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP 1"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "a parallelism_config"),
    ],
)
def test_other_kinds_of_sharding_are_refused_by_name(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    place = Placement(rank=0, num_ranks=2, local_rank=0, num_local_ranks=2, address="127.0.0.1", port=1)
    store: Any = None  # refused before it is asked
    assert f"asks for {name}, which" in refusal(lambda: _join(place, store), RecipeError)


def _chosen(directory: Path, *overrides: str) -> str:
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    try:
        prepared = prepare(load_recipe(directory / "recipe.yaml", overrides), Console(quiet=True))
    except RecipeError as error:
        return str(error)
    assert prepared.accelerator.distributed_type == DistributedType.MULTI_CPU
    return prepared.strategy.sentence()


@pytest.mark.multiprocess
def test_fsdp2_of_accelerate_selects_fsdp2_and_does_not_contradict_the_recipe(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    assert set(run_on_ranks(_chosen, tmp_path)) == {"fsdp2 on 2 processes (accelerate's configuration)"}
    for refused in run_on_ranks(_chosen, tmp_path, "distributed.strategy=ddp"):
        assert refused.startswith("distributed.strategy: accelerate's configuration asks for FSDP2, and")


# ----------------------------------------------------------- why the shards are torch's, not accelerate's


def _kind_of_shards() -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return type(accelerator.prepare_model(torch.nn.Linear(2, 2))).__name__


@pytest.mark.multiprocess
def test_accelerate_has_no_shards_on_cpus() -> None:
    assert run_on_ranks(_kind_of_shards) == [DistributedDataParallel.__name__] * 2


def test_accelerate_shards_no_model_without_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    shared = AcceleratorState._shared_state
    monkeypatch.setitem(shared, "distributed_type", DistributedType.FSDP)
    monkeypatch.setitem(shared, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(ValueError, match="optimizer"):
        accelerator.prepare(torch.nn.Linear(2, 2))
