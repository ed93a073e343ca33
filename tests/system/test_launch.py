"""A command over several processes, however they are started: it works, and it ends as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support import launched
from support.forked_ranks import fork_ranks
from support.marks import slow
from support.two_ranks import run_on_ranks
from torch._C._distributed_c10d import HashStore, PrefixStore

from dpo_pack.commands import main as cli
from dpo_pack.recipe.load import load_recipe
from dpo_pack.system import launch
from dpo_pack.system.console import make_console
from dpo_pack.system.errors import RecipeError, RunError
from dpo_pack.system.process import ALONE, Placement
from dpo_pack.trainer import train

# What torch 2.10 prints of the ranks' connections, lines of several mixed.
GLOO = re.compile(
    r"(\[Gloo\] Rank )+|\d+ is connected to \d+ peer ranks\. "
    r"Expected number of connected peer ranks is : \d+\n?"
)
PROBE = [sys.executable, str(Path(__file__).parents[1] / "support" / "launched.py"), "probe"]
DPOPACK = [sys.executable, "-m", "dpo_pack"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--main_process_port", "0", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
]
TWO = "distributed.num_processes=2"
PLACE = Placement(rank=1, num_ranks=4, local_rank=1, num_local_ranks=2, address="127.0.0.1", port=1)
EIGHT = Placement(rank=9, num_ranks=16, local_rank=1, num_local_ranks=8, address="a", port=1)


# ------------------------------------------------------------------------------------ how many processes


def with_devices(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize(
    ("devices", "wanted", "place", "expected"),
    [
        # No launcher: one process a device, or so many as the recipe says.
        *((0, "auto", None, 1), (1, "auto", None, 1), (8, "auto", None, 8)),
        *((0, 2, None, 2), (2, 2, None, 2), (8, 2, None, 2), (1, 2, None, "2 .* 1 are visible")),
        # A launcher has started them.
        *((0, "auto", PLACE, 4), (0, 4, PLACE, 4), (0, 1, ALONE, 1)),
        *((0, 2, PLACE, "asks for 2, .* 4;"), (0, 2, ALONE, "asks for 2, .* 1;")),
        *((4, "auto", EIGHT, "8 .* 4 visible"), (1, "auto", EIGHT, 16)),  # 1: srun --gpus-per-task=1
    ],
)
def test_the_number_of_processes_fits_the_launcher_and_the_devices_or_both_numbers_are_named(
    devices: int, wanted: Any, place: Placement | None, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_devices(monkeypatch, devices)
    if isinstance(expected, int):
        assert launch.wanted_processes(wanted, place) == expected
    else:
        with pytest.raises(RecipeError, match=rf"^distributed\.num_processes: .*{expected}"):
            launch.wanted_processes(wanted, place)


def test_the_cpu_is_used_on_a_machine_with_devices_where_accelerate_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_devices(monkeypatch, 1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launch.wanted_processes(2, None) == 2
    assert launch.wanted_processes("auto", None) == 1


def test_one_process_has_at_most_a_thread_for_each_core_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    for cores in (3, 16):
        monkeypatch.setattr(launch, "usable_cores", lambda cores=cores: cores)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with launch.on_every_rank(1, None, dict, quiet=True):
            pass
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    with launch.on_every_rank(1, None, dict, quiet=True):
        pass
    assert numbers == [3, 8]


# ------------------------------------------------------------------------------- how ranks find each other


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A node with three interfaces; the dict says where its routes begin: host -> own address."""
    routes: dict[str, str] = {}
    monkeypatch.setattr(launch, "_end_of_route", lambda host: routes.get(host, ""))
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"}
    interfaces = {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return routes


def interface(others: dict[int, str]) -> str:
    """What a rank derives after the other ranks have told their own addresses."""
    store = HashStore()
    for rank, address in others.items():
        PrefixStore("dpo_pack/addresses", store).set(str(rank), address)
    return launch._interface_to_other_nodes(replace(PLACE, address="node0"), store)


def test_gloo_takes_the_interface_on_the_route_to_rank_0_or_from_there_to_another_node(
    network: dict[str, str],
) -> None:
    network["node0"] = "10.1.0.7"
    assert interface({}) == "ib0"
    network |= {"node0": "", "10.0.0.9": "10.0.0.7"}  # rank 0's own node
    assert interface({0: "", 2: "10.0.0.9", 3: "10.0.0.9"}) == "eth0"


@pytest.mark.parametrize("own", ["", "10.9.9.9"])
def test_where_no_interface_leads_to_the_other_nodes_the_error_names_the_variable(
    own: str, network: dict[str, str]
) -> None:
    network["node0"] = own
    with pytest.raises(RunError, match="GLOO_SOCKET_IFNAME"):
        interface({0: "", 2: "", 3: ""})


def test_ranks_of_several_nodes_that_cannot_connect_are_told_the_variable(
    network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    network["127.0.0.1"] = "10.0.0.7"
    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    # `_join` sets it in os.environ; monkeypatch takes it away again.
    monkeypatch.setattr(os, "environ", dict(os.environ, OMP_NUM_THREADS="1"))
    with pytest.raises(RunError, match=r"connectFullMesh failed.* eth0.*GLOO_SOCKET_IFNAME"):
        launch._join(PLACE, HashStore())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    with pytest.raises(RunError, match="interface: mine"):
        launch._join(PLACE, HashStore())


def test_ranks_that_have_the_same_gpu_are_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-b"))

    def require_own_device(others: dict[int, str]) -> None:
        store = HashStore()
        for rank, identity in others.items():
            PrefixStore("dpo_pack/devices", store).set(str(rank), identity)
        launch._require_own_device(torch.device("cuda", 0), PLACE, store)

    require_own_device({0: "GPU-a", 2: "GPU-c", 3: "GPU-c"})  # ranks 2 and 3 say so themselves
    with pytest.raises(RecipeError, match="num_processes: ranks 1, 3 have the same GPU"):
        require_own_device({0: "GPU-a", 2: "GPU-c", 3: "GPU-b"})


# --------------------------------------------------------------------------------------- real processes

RunProbe = Callable[[str], tuple[int, str, str]]
Start = Callable[[Sequence[str | Path]], "subprocess.Popen[str]"]


@pytest.fixture
def start(recipe: Path) -> Iterator[Start]:
    """Starts a command; afterwards nothing that it has started may be alive."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str | Path], **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **variables},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    assert not alive(rank_pids(recipe.parent))


def rank_pids(directory: Path) -> list[int]:
    return [int(path.read_text() or 0) for path in sorted(directory.glob("rank-*.pid"))]


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


# Ranks are forks of this process.


@pytest.fixture
def run_probe(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunProbe:
    """Runs the command of launched.py on two ranks: its exit status, stdout and stderr."""

    def run(what: str) -> tuple[int, str, str]:
        fork_ranks(monkeypatch, cli.main)
        monkeypatch.setattr(cli.app, "registered_commands", [*cli.app.registered_commands])
        launched.add_commands()
        monkeypatch.setattr(cli, "_own_command", lambda: ["python", *sys.argv])
        monkeypatch.setattr(sys, "argv", ["launched.py", "probe", str(recipe), what, TWO])
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # commands put their own in its place
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        assert not alive(rank_pids(recipe.parent))
        assert isinstance(leaving.value.code, int)
        return leaving.value.code, *capfd.readouterr()

    return run


# How the command ends: its status, and what stderr says.
ENDS = {
    "one-mistake": (2, r"rank 1 \(.*error: pairs\.jsonl, row 7"),
    "same-mistake": (2, r"^rank . .*error: pairs\.jsonl"),
    "disagree": (2, r"rank 1 .* optim\.lr"),
    "bug": (1, r"rank 1 \((.|\n)*ValueError: a bug of ours"),
    "killed": (1, r"rank 1 .*SIGKILL"),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["killed", "same-mistake", *slow("one-mistake", "disagree", "bug")])
def test_however_ranks_fail_the_user_reads_it_once(what: str, run_probe: RunProbe) -> None:
    expected, told = ENDS[what]
    status, out, err = run_probe(what)
    assert status == expected and re.search(told, err)
    assert GLOO.sub("", out) == ("" if what == "disagree" else "2 ranks, 1 threads each\n")
    assert err.count("\n") == 1 or what == "bug"
    assert err.count("Traceback") == (what == "bug")


# Ranks are processes of their own, as users start them.


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate launch"])
def test_other_launchers_start_the_same_command(launcher: list[str], recipe: Path, start: Start) -> None:
    process = start([*launcher, "-m", "dpo_pack", "precompute-ref", recipe, "reference.token_budget=100"])
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert out.count("0 of 44 different sequences cached, 44 to compute\n") == 1
    assert out.splitlines()[-1].startswith("Cache: ") and out.count("Cache: ") == 1
    parts = list((recipe.parent / "cache").rglob("part-*.parquet"))
    assert len(parts) == 2, "each of two processes wrote its own"


def _train(recipe: Path, overrides: Sequence[str]) -> None:
    train(load_recipe(recipe, overrides), make_console(quiet=True))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_rank_is_recovered_by_torchrun_itself_and_the_run_is_the_same(
    recipe: Path, start: Start
) -> None:
    saving = ("packing.pairs_per_step=2", "train.max_steps=6", "checkpoint.every_steps=1", TWO)
    run_on_ranks(_train, recipe, ("output_dir=${recipe_dir}/straight", *saving))
    killed = start([*TORCHRUN, "--max-restarts", "1", PROBE[1], "killed-train", recipe, *saving])
    out, err = killed.communicate(timeout=240)
    assert killed.returncode == 0, err
    assert "Going on after step" in out and "Done: 6 steps" in out
    weights, expected = (
        (recipe.parent / run / "model" / "model.safetensors").read_bytes() for run in ("run", "straight")
    )
    assert weights == expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_tasks_of_a_slurm_step_find_each_other(recipe: Path, start: Any) -> None:
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0",
    }  # fmt: skip
    tasks = [
        start([*DPOPACK, "precompute-ref", recipe], **step, SLURM_PROCID=str(task), SLURM_LOCALID=str(task))
        for task in range(2)
    ]
    (out, err), (other_out, other_err) = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], err + other_err
    assert "0 of 44 different sequences cached, 44 to compute" in out
    assert (GLOO.sub("", other_out), other_err) == ("", "")
