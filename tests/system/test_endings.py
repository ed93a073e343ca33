"""Whatever ends a command on several ranks, the user reads it once, from the one that was first."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, Store

from dpo_pack.system.endings import ending_of, settle_failure
from dpo_pack.system.errors import DataError
from dpo_pack.system.interrupts import Interrupted

HOST = socket.gethostname()


def settle_all(errors: Mapping[int, BaseException], *, store: Store | None = None) -> dict[int, int]:
    """What each failing rank ends with; they fail one after the other, in the given order."""
    statuses = {}
    shared = store or HashStore()

    def settle(rank: int) -> None:
        statuses[rank] = settle_failure(errors[rank], rank=rank, store=shared)

    threads = [threading.Thread(target=settle, args=(rank,)) for rank in errors]
    for place, thread in enumerate(threads, start=1):
        thread.start()
        while thread.is_alive() and HashStore.add(shared, "dpo_pack/failures/number", 0) < place:
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    return statuses


def test_the_same_mistake_on_all_ranks_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    errors = {rank: DataError("pairs.jsonl: no such file") for rank in (2, 0, 1)}
    assert settle_all(errors) == {0: 2, 1: 2, 2: 2}
    assert capsys.readouterr().err == f"rank 2 ({HOST}): error: pairs.jsonl: no such file\n"


def test_a_bug_is_told_with_the_traceback_of_its_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.system.endings._SECONDS_BEFORE_A_TRACEBACK", 0.1)
    errors = {1: ValueError("a bug of ours"), 0: RuntimeError("Connection closed by peer")}
    assert settle_all(errors) == {0: 1, 1: 1}
    told = capsys.readouterr().err
    assert told.startswith(f"rank 1 ({HOST}): ") and told.endswith("ValueError: a bug of ours\n")
    assert "Connection" not in told


def test_a_rank_that_outlives_another_says_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under srun, which does not end it. The store may have ended with rank 0."""

    def gone(store: Store, key: str, number: int) -> int:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr("torch._C._distributed_c10d.PrefixStore.add", gone)
    monkeypatch.setattr("dpo_pack.system.endings._SECONDS_BEFORE_A_TRACEBACK", 0.1)
    assert settle_failure(RuntimeError("Connection closed by peer"), rank=1, store=HashStore()) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"rank 1 ({HOST}): error: ") and told.count("\n") == 1
    assert settle_failure(DataError("no such file"), rank=1, store=HashStore()) == 2
    assert capsys.readouterr().err == f"rank 1 ({HOST}): error: no such file\n"


def test_an_interruption_is_told_once_at_once_and_by_nobody_in_particular(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.system.endings._SECONDS_BEFORE_A_TRACEBACK", 60.0)
    errors = {1: Interrupted(2), 0: RuntimeError("Connection closed by peer")}
    assert settle_all(errors) == {0: 130, 1: 130}
    assert capsys.readouterr().err == "stopped by SIGINT; run the same command again\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_whatever_file_a_full_or_broken_disk_refuses_is_one_line(number: int) -> None:
    ending = ending_of(OSError(number, os.strerror(number), "/tmp/x"))
    assert ending.exit_status == 2 and ending.message is not None
    assert ending.message.startswith(f"error: /tmp/x: {os.strerror(number)}; free space")
    assert ending_of(FileNotFoundError(errno.ENOENT, "No such file", "/tmp/x")).message is None  # a bug


def test_a_torchvision_that_does_not_fit_torch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    error = ModuleNotFoundError("Could not import module 'AttentionInterface'")  # as transformers says it
    ending = ending_of(error)
    assert ending.exit_status == 2 and ending.message is not None
    assert "does not fit torch " in ending.message and "(operator torchvision::nms does not" in ending.message
    (tmp_path / "torchvision.py").write_text("")
    importlib.invalidate_caches()
    assert ending_of(error).message is None  # a bug
