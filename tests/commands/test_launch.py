"""A command over several processes, however they are started: it works, and it ends as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
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
from support.old_releases import without_gloo
from support.tiny_recipe import load, message_of
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks
from torch._C._distributed_c10d import HashStore, PrefixStore

from dpo_pack.commands import launch
from dpo_pack.commands import main as cli
from dpo_pack.commands.launch import wanted_processes
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.prepare import prepare
from dpo_pack.system.console import make_console
from dpo_pack.system.errors import RecipeError, RunError
from dpo_pack.system.placement import ALONE, Placement
from dpo_pack.train import train

PROBE = [sys.executable, str(Path(__file__).parents[1] / "support" / "launched.py"), "probe"]
DPOPACK = [sys.executable, "-m", "dpo_pack"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--main_process_port", "0", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
]
TWO = "distributed.num_processes=2"
PLACE = Placement(rank=1, num_ranks=4, local_rank=1, num_local_ranks=2, address="127.0.0.1", port=1)


# ------------------------------------------------------------------------------------ how many processes


def with_devices(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize(("devices", "processes"), [(0, 1), (1, 1), (8, 8)])
def test_auto_is_one_process_a_device(devices: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, devices)
    assert wanted_processes(load(), None) == processes


def test_a_number_is_taken_as_it_is_where_there_are_so_many_devices_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for devices in (0, 2, 8):
        with_devices(monkeypatch, devices)
        assert wanted_processes(load(TWO), None) == 2
    with_devices(monkeypatch, 1)
    assert "2 processes need as many GPUs, and 1 are visible" in message_of(
        lambda: wanted_processes(load(TWO), None)
    )


def test_the_cpu_is_used_on_a_machine_with_devices_where_accelerate_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_devices(monkeypatch, 1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert wanted_processes(load(TWO), None) == 2
    assert wanted_processes(load(), None) == 1


def test_a_launcher_that_starts_another_number_is_refused_naming_both() -> None:
    assert wanted_processes(load(), PLACE) == 4
    assert wanted_processes(load("distributed.num_processes=4"), PLACE) == 4
    assert wanted_processes(load("distributed.num_processes=1"), ALONE) == 1
    for place, number in ((PLACE, 4), (ALONE, 1)):
        message = message_of(lambda place=place: wanted_processes(load(TWO), place))  # type: ignore[misc]
        assert f"num_processes: the recipe asks for 2, but the launcher has started {number}" in message


def test_more_processes_than_devices_on_a_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = Placement(rank=9, num_ranks=16, local_rank=1, num_local_ranks=8, address="a", port=1)
    with_devices(monkeypatch, 4)
    assert "8 processes were started on a node with 4" in message_of(lambda: wanted_processes(load(), eight))
    with_devices(monkeypatch, 1)  # srun --gpus-per-task=1
    assert wanted_processes(load(), eight) == 16


def test_one_process_that_a_launcher_started_says_that_it_uses_one_of_the_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*overrides: str) -> str:
        with launch.on_every_rank(load(*overrides)) as console:
            console.print("begun")
        return capsys.readouterr().out

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with_devices(monkeypatch, 4)
    assert told().startswith(
        "Note: one of 4 visible GPUs is used, because the launcher has started one process"
    )
    assert told("distributed.num_processes=1") == "begun\n"
    with_devices(monkeypatch, 1)
    assert told() == "begun\n"


def test_from_python_several_processes_are_not_started_behind_the_caller_s_back(tmp_path: Path) -> None:
    recipe = load_recipe(tiny_run(tmp_path), [TWO])
    with pytest.raises(RecipeError, match="num_processes: 2 are asked for, but this run has 1"):
        prepare(recipe, make_console(quiet=True))


def test_the_ranks_get_the_command_line_and_find_the_modules_that_this_process_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/dpopack", "train", "recipe.yaml", "optim.lr=1e-6"])
    module = ["-m", "dpo_pack", "train", "recipe.yaml", "optim.lr=1e-6"]
    monkeypatch.setattr(sys, "path", ["/bin", *sys.path])
    assert launch._own_command() == [sys.executable, "-P", *module]
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    assert launch._own_command() == [sys.executable, *module]


# ------------------------------------------------------------------------------- how ranks find each other

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A node with the interfaces of ADDRESSES; the dict says where its routes begin: host -> own address."""
    routes: dict[str, str] = {}
    monkeypatch.setattr(launch, "_end_of_route", lambda host: routes.get(host, ""))
    interfaces = {name: [SimpleNamespace(address=address)] for name, address in ADDRESSES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    return routes


def interface(place: Placement, others: dict[int, str]) -> str:
    """What a rank derives after the other ranks have told their own addresses."""
    store = HashStore()
    for rank, address in others.items():
        PrefixStore("dpo_pack/addresses", store).set(str(rank), address)
    return launch._interface_to_other_nodes(place, store)


def test_gloo_takes_the_interface_on_the_route_to_rank_0(network: dict[str, str]) -> None:
    network["node0"] = "10.1.0.7"
    assert interface(replace(PLACE, address="node0"), {}) == "ib0"


def test_a_node_whose_own_name_is_loopback_takes_the_route_to_another_node(network: dict[str, str]) -> None:
    network.update({"node0": "127.0.1.1", "10.0.0.9": "10.0.0.7"})
    others = {0: "127.0.1.1", 2: "10.0.0.9", 3: "10.0.0.9"}
    assert interface(replace(PLACE, address="node0"), others) == "eth0"


@pytest.mark.parametrize("own", ["127.0.0.1", "", "10.9.9.9"])
def test_where_no_interface_leads_to_the_other_nodes_the_error_names_the_variable(
    own: str, network: dict[str, str]
) -> None:
    network["node0"] = own
    with pytest.raises(RunError, match=r"on each node set GLOO_SOCKET_IFNAME to the interface that does"):
        interface(replace(PLACE, address="node0"), dict.fromkeys((0, 2, 3), "127.0.0.1"))


def test_the_end_of_a_route_is_an_address_of_this_machine() -> None:
    assert launch._end_of_route("127.0.0.1") == "127.0.0.1"
    assert launch._end_of_route("no such host") == ""


def test_ranks_of_several_nodes_that_cannot_connect_are_told_the_variable(
    network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    network["127.0.0.1"] = "10.0.0.7"
    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # `_join` sets it in os.environ; monkeypatch takes it away again.
    monkeypatch.setattr(os, "environ", dict(os.environ, OMP_NUM_THREADS="1"))
    with pytest.raises(
        RunError, match=r"connectFullMesh failed; network interface: eth0\); on each node set"
    ):
        launch._join(PLACE, HashStore())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    with pytest.raises(RunError, match=r"interface: mine"):
        launch._join(PLACE, HashStore())


def test_ranks_that_have_the_same_gpu_are_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-b"))

    def require_own_device(others: dict[int, str]) -> None:
        store = HashStore()
        for rank, identity in others.items():
            PrefixStore("dpo_pack/devices", store).set(str(rank), identity)
        launch._require_own_device(torch.device("cuda", 0), PLACE, store)

    require_own_device({0: "GPU-a", 2: "GPU-c", 3: "GPU-c"})  # ranks 2 and 3 say so themselves
    with pytest.raises(RecipeError, match=r"num_processes: ranks 1, 3 have the same GPU; start one process"):
        require_own_device({0: "GPU-a", 2: "GPU-c", 3: "GPU-b"})


# --------------------------------------------------------------------------------------- real processes

RunProbe = Callable[[str], tuple[int, str, str]]
Start = Callable[[Sequence[str | Path]], "subprocess.Popen[str]"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny_run(tmp_path)


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


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def probe(recipe: Path, what: str, start: Start) -> subprocess.Popen[str]:
    """The command of launched.py on two ranks, when both are at work."""
    process = start([*PROBE, recipe, what, TWO])
    wait_until(lambda: all(rank_pids(recipe.parent)) and len(rank_pids(recipe.parent)) == 2, 120)
    return process


# Ranks are forks of this process.


@pytest.fixture
def run_probe(recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunProbe:
    """Runs the command of launched.py on two ranks: its exit status, stdout and stderr."""

    def run(what: str) -> tuple[int, str, str]:
        fork_ranks(monkeypatch, cli.main)
        monkeypatch.setattr(cli.app, "registered_commands", [*cli.app.registered_commands])
        launched.add_commands()
        monkeypatch.setattr(launch, "_own_command", lambda: ["python", *sys.argv])
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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_mistake_of_one_rank_ends_both_with_its_one_line(
    run_probe: RunProbe,
) -> None:
    status, out, err = run_probe("one-mistake")
    assert status == 2
    assert without_gloo(out) == "2 ranks, 1 threads each\n", "rank 0 alone prints"
    assert err.startswith("rank 1 (")
    assert err.endswith("): error: pairs.jsonl, row 7: no chosen completion\n") and err.count("\n") == 1


ENDS: dict[str, tuple[int, str, str]] = {
    "same-mistake": (2, "rank ", "error: pairs.jsonl: no such file\n"),
    "disagree": (2, "rank ", "same recipe, overrides and packages\n"),
    "bug": (1, "rank 1 (", "ValueError: a bug of ours\n"),
    "killed": (1, "rank 1 (", "it was killed (SIGKILL), often because the machine has too little memory\n"),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["killed", "same-mistake", *slow("disagree", "bug")])
def test_however_ranks_fail_the_user_reads_it_once(what: str, run_probe: RunProbe) -> None:
    expected, begin, end = ENDS[what]
    status, _, err = run_probe(what)
    assert status == expected
    assert err.startswith(begin) and err.endswith(end)
    assert err.count("\n") == 1 or what == "bug"
    assert err.count("Traceback") == (what == "bug")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)]
)
def test_a_signal_is_waited_for_until_all_ranks_have_saved(
    signum: int, status: int, recipe: Path, run_probe: RunProbe
) -> None:
    def send() -> None:
        wait_until(lambda: len(list(recipe.parent.glob("rank-*.waits"))) == 2, 120)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    ended, _, err = run_probe("wait")
    thread.join()
    assert ended == status
    name = signal.Signals(signum).name
    assert err == f"stopped by {name}; run the same command again; it uses what was saved\n"
    assert len(list(recipe.parent.glob("rank-*.saved"))) == 2


# Ranks are processes of their own, as users start them.


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_mistake_of_one_new_process_ends_both_with_its_one_line(recipe: Path, start: Start) -> None:
    process = start([*PROBE, recipe, "one-mistake", TWO])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert without_gloo(out) == "2 ranks, 1 threads each\n"
    assert err.endswith("): error: pairs.jsonl, row 7: no chosen completion\n") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_do_not_outlive_a_command_that_is_killed(recipe: Path, start: Start) -> None:
    process = probe(recipe, "sleep", start)
    pids = rank_pids(recipe.parent)
    assert len(alive(pids)) == 2
    process.kill()
    wait_until(lambda: not alive(pids), 60)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate launch"])
def test_other_launchers_start_the_same_command(launcher: list[str], recipe: Path, start: Start) -> None:
    process = start([*launcher, "-m", "dpo_pack", "precompute-ref", recipe, "reference.token_budget=100"])
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert out.splitlines()[-1].endswith("0 sequences reused, 44 computed")
    assert out.count("sequences reused") == 1
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
def test_a_wrong_recipe_under_torchrun_is_told_once(recipe: Path, start: Start) -> None:
    process = start([*TORCHRUN, "-m", "dpo_pack", "precompute-ref", recipe, "optim.lrr=1"])
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "error: optim.lrr: unknown key" in err.splitlines()[0]
    assert err.count("unknown key") == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_tasks_of_a_slurm_step_find_each_other(recipe: Path, start: Any) -> None:
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    tasks = [
        start([*DPOPACK, "precompute-ref", recipe], **step, SLURM_PROCID=str(task), SLURM_LOCALID=str(task))
        for task in range(2)
    ]
    (out, err), (other_out, other_err) = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], err + other_err
    assert "0 sequences reused, 44 computed" in out
    assert (without_gloo(other_out), other_err) == ("", "")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_training_on_two_processes_prints_and_writes_as_one(recipe: Path, start: Start) -> None:
    process = start([*DPOPACK, "train", recipe, TWO])
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert err == ""
    assert out.count("Done: 2 steps, 16 pairs") == out.count("Data: 16 pairs to train on") == 1
    lines = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["split"], line["step"]) for line in lines]
    assert steps == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
