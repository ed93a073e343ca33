"""What dpo-pack takes from the file of `accelerate config`, and what it leaves to torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.utils import DistributedType
from rich.console import Console
from support.refusals import refusal
from support.run_files import timeless
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks

from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.setup import prepare
from dpo_pack.system.errors import RecipeError
from dpo_pack.system.launch import on_every_rank

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


ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
SEVERAL_ON_CPUS = {**ONE_PROCESS, "distributed_type": "MULTI_CPU", "num_processes": 2}


def launch(directory: Path, config: dict[str, Any], *overrides: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` of a tiny run, with a file of this content."""
    file = directory / "accelerate.yaml"
    file.write_text(yaml.safe_dump(config))
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    train = ["-m", "dpo_pack", "train", str(directory / "recipe.yaml"), *overrides]
    return subprocess.run([*accelerate, *train], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_files_of_accelerate_config_start_runs_that_take_the_same_steps(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    two = "distributed.num_processes=2"  # `accelerate launch` starts one process, and dpo-pack the two
    for name, config, strategy, overrides in (
        ("one", ONE_PROCESS, None, ()),
        ("two", TWO_PROCESSES, "ddp", ()),
        ("two on cpus", SEVERAL_ON_CPUS, "ddp", (two,)),
        ("shards", FSDP2, "fsdp2", ()),
    ):
        done = launch(tmp_path, config, f"output_dir={tmp_path / name}", *overrides)
        assert done.returncode == 0, done.stderr
        assert (f"Strategy: {strategy} on 2 processes" in done.stdout) is (strategy is not None)
    alone = timeless(tmp_path / "one", "train")
    for name in ("two", "two on cpus", "shards"):
        for ours, theirs in zip(timeless(tmp_path / name, "train"), alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "model.autocast: .*mixed_precision: fp16"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "model.autocast: .*bf16"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "model.compile: .*inductor"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "distributed.cpu_offload: "),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "model.gradient_checkpointing: "),
    ],
)
def test_what_accelerate_s_file_asks_for_and_the_recipe_does_not_is_refused(
    variables: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = refusal(lambda: prepare(load_recipe(tiny_run(tmp_path)), Console(quiet=True)), RecipeError)
    assert re.search(message, found), found


def test_other_kinds_of_sharding_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `accelerate launch` has started one process."""
    for variable, name in {
        "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
        "ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG": "PARALLELISM_CONFIG",
    }.items():  # fmt: skip
        with monkeypatch.context() as patch:
            for each, value in {**ONE_RANK, variable: "true"}.items():
                patch.setenv(each, value)
            found = refusal(lambda: on_every_rank("auto", None, dict).__enter__(), RecipeError)
        assert f"asks for {name}, which" in found


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
        assert refused.startswith("distributed.strategy: accelerate's configuration asks for FSDP2, but")
