"""Ranks end together: by themselves, by one's failure, by a signal, with the process that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.file_operations import fork
from support.forked_ranks import fork_ranks
from support.marks import slow

from dpo_pack.system import launch
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.launch import end_with_parent, num_threads, start_ranks, usable_cores

# A rank that says that it is ready, and does what it is told when a stop signal comes.
_RANK = """
import os, pathlib, signal, sys, time
from dpo_pack.system import interrupts
def stop(signum, frame):
    pathlib.Path(sys.argv[1], f"stopped-{os.environ['RANK']}-by-{signum}").touch()
    ON_SIGNAL
for number in interrupts.STOP_SIGNALS:
    signal.signal(number, stop)
pathlib.Path(sys.argv[1], f"ready-{os.environ['RANK']}").touch()
signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.STOP_SIGNALS)
while True:
    time.sleep(0.01)
"""


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def rank_that(on_signal: str, directory: Path) -> list[str]:
    return [sys.executable, "-c", _RANK.replace("ON_SIGNAL", on_signal), str(directory)]


def send_when_ready(directory: Path, signum: int, *, times: int = 1) -> threading.Thread:
    """To this process, which has started two ranks; a second time when both have got the first."""

    def send() -> None:
        for what in ("ready", "stopped")[:times]:
            wait_until(lambda what=what: len(list(directory.glob(f"{what}-*"))) == 2)  # type: ignore[misc]
            os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_every_rank_knows_its_place_and_all_that_end_well_end_well(tmp_path: Path) -> None:
    told = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $TORCHELASTIC_USE_AGENT_STORE"
    script = f"echo {told} > {tmp_path}/$RANK"
    assert start_ranks(shell(script), 3) == 0
    for rank in "012":
        assert (tmp_path / rank).read_text().split() == [rank, "3", rank, "3", "127.0.0.1", "True"]


def test_cores_are_shared_out_unless_the_user_has_said_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: 9)
    assert start_ranks(shell(f"echo $OMP_NUM_THREADS > {tmp_path}/$RANK"), 2) == 0
    assert (tmp_path / "1").read_text() == "4\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert start_ranks(shell(f"echo $OMP_NUM_THREADS > {tmp_path}/$RANK"), 2) == 0
    assert (tmp_path / "1").read_text() == "7\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cgroup": "0::/"}, 16),
        ({"cgroup": "0::/", "cpu.max": "max 100000"}, 16),
        ({"cgroup": "0::/", "cpu.max": "350000 100000"}, 4),
        ({"cgroup": "0::/job/step", "job/cpu.max": "300000 100000", "job/step/cpu.max": "9900 100000"}, 1),
        ({"cgroup": "0::/job", "cpu.max": "200000 100000", "job/cpu.max": "800000 100000"}, 2),
        ({"cgroup": "4:cpu,cpuacct:/x", "cpu/x/cpu.cfs_quota_us": -1, "cpu/x/cpu.cfs_period_us": 9}, 16),
        ({"cgroup": "4:cpu,cpuacct:/x", "cpu/cpu.cfs_quota_us": 20000, "cpu/cpu.cfs_period_us": 10000}, 2),
        ({"cgroup": "5:cpuset:/", "cpu.max": "100000 100000"}, 16),
    ],
)
def test_a_container_s_quota_of_time_counts_as_cores(
    files: dict[str, object], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for name, content in files.items():
        path = tmp_path / ("proc/self/cgroup" if name == "cgroup" else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("status", "seconds"), [(1, 5), (2, 5), (130, 600), (143, 600)])
def test_after_a_failure_the_others_get_five_seconds_and_after_an_interruption_ten_minutes(
    status: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    ranks: list[Any] = [SimpleNamespace(poll=lambda: None), SimpleNamespace(poll=lambda: status)]
    assert launch._watch(ranks, received=[]) == status
    assert now[0] - 100.0 == pytest.approx(seconds, abs=0.2)


def test_a_killed_rank_is_named_and_nothing_is_left_of_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 has a process of its own, as the one that tokenises has.
    child = f"sleep 20 & echo $! > {tmp_path}/child; wait; touch {tmp_path}/late"
    monkeypatch.setattr(launch, "_SECONDS_AFTER_A_FAILURE", 60.0)
    assert start_ranks(shell(f"[ $RANK = 1 ] && sleep 0.3 && kill -9 $$; {child}"), 2) == 1
    assert not (tmp_path / "late").exists(), "nobody is given time to save what cannot be saved"
    assert capfd.readouterr().err.startswith(
        f"rank 1 ({socket.gethostname()}): error: it was killed (SIGKILL)"
    )
    wait_until(lambda: not psutil.pid_exists(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGINT, 130), *slow((signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 143))],
)
def test_a_signal_reaches_every_rank_once_and_they_may_take_their_time(
    tmp_path: Path, signum: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if signal.getsignal(signum) is signal.SIG_IGN:
        pytest.skip(f"{signal.Signals(signum).name} is ignored here, as under nohup")
    monkeypatch.setattr(launch, "_SECONDS_AFTER_A_FAILURE", 0.1)
    thread = send_when_ready(tmp_path, signum)
    rank = "os.environ['RANK']"
    saves = f"time.sleep(0.5 * int({rank})); pathlib.Path(sys.argv[1], 'saved-' + {rank}).touch()"
    assert start_ranks(rank_that(f"{saves}; sys.exit({status})", tmp_path), 2) == status
    thread.join()
    stopped = sorted(path.name for path in tmp_path.glob("stopped-*"))
    assert stopped == [f"stopped-0-by-{int(signum)}", f"stopped-1-by-{int(signum)}"]
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_second_signal_ends_them_at_once(tmp_path: Path) -> None:
    thread = send_when_ready(tmp_path, signal.SIGTERM, times=2)
    with pytest.raises(Interrupted) as interrupted:
        start_ranks(rank_that("pass", tmp_path), 2)
    thread.join()
    assert interrupted.value.exit_status == 143
    assert len(list(tmp_path.glob("stopped-*"))) == 2, "the first one was passed on"


def test_ranks_that_a_signal_ends_before_they_can_tell_are_told_of(tmp_path: Path) -> None:
    thread = send_when_ready(tmp_path, signal.SIGTERM)
    dies = "signal.signal(signum, signal.SIG_DFL); os.kill(os.getpid(), signum)"
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        start_ranks(rank_that(dies, tmp_path), 2)
    thread.join()


def _rank_with_a_process_of_its_own(directory: Path) -> None:
    end_with_parent()
    child = subprocess.Popen(["sleep", "100"])
    (directory / os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(100)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_and_their_own_processes_end_with_a_parent_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch, lambda: _rank_with_a_process_of_its_own(tmp_path))
    parent = fork(lambda: start_ranks(["rank"], 2))
    files = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10)


def test_ranks_divide_the_usable_cores_unless_their_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 5)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [num_threads(), num_threads(1), num_threads(2), num_threads(8)] == [5, 5, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert num_threads() == num_threads(2) == 8
