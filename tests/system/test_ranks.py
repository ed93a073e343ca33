"""What ranks say to each other: nothing on one process, and over two the same on both."""

from __future__ import annotations

import errno
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.two_ranks import run_on_ranks

from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError, DataError, RunError


def test_one_process_says_nothing_and_agrees_with_itself(tmp_path: Path) -> None:
    assert (ranks.rank(), ranks.num_ranks(), ranks.is_first()) == (0, 1, True)
    assert ranks.first_says("a") == ranks.first_does_for_all(lambda: "a") == "a"
    assert ranks.every_rank_says("a") == ["a"]
    assert ranks.of_node(lambda: "a") == "a"
    assert ranks.share_out([1, 2, 3], _doubled) == [2, 4, 6] and ranks.share_out([], _doubled) == []
    ranks.require_same({"the data": "abc"}, "remedy")
    ranks.require_shared(tmp_path / "absent", "output_dir")
    assert not (tmp_path / "absent").exists()
    with pytest.raises(DataError), ranks.first_goes_first():
        raise DataError("no such file")


def _message(error: type[Exception], action: Any) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


def _doubled(items: Sequence[int]) -> list[int]:
    assert items, "a rank without an item is not asked"
    return [2 * item for item in items]


def _fails_on_the_second_rank(items: Sequence[int]) -> list[int]:
    if ranks.rank() == 1:
        raise RunError("the server says 401")
    return list(items)


def _on_two(directory: Path) -> dict[str, Any]:
    rank = ranks.rank()
    told: dict[str, Any] = {
        "first says": ranks.first_says(rank),
        "first does": ranks.first_does_for_all(lambda: _leave_a_file(directory)),
        "every": ranks.every_rank_says(rank),
        "shared": ranks.share_out(range(5), lambda mine: [(rank, 2 * item) for item in mine]),
        "one": ranks.share_out([7], _doubled),
        "not shared out": _message(RunError, lambda: ranks.share_out(range(3), _fails_on_the_second_rank)),
    }
    with ranks.first_goes_first():
        if rank == 0:
            time.sleep(0.3)
            (directory / "cache").touch()
        told["found"] = (directory / "cache").exists()

    def fail() -> None:
        raise DataError(f"rank {ranks.rank()} found no such file")

    def library_fails() -> None:
        with ranks.first_goes_first():
            raise ValueError("no such option")

    told["library"] = "no such option" in _message(Exception, library_fails)
    told["while agreeing"] = _message(Exception, lambda: ranks.every_rank_does(library_fails))[-14:]
    told["failed"] = _message(DataError, lambda: ranks.first_does_for_all(fail))
    ranks.require_same({"optim.lr": 0.5, "seed": 1}, "remedy")
    told["differ"] = _message(
        RunError, lambda: ranks.require_same({"seed": 1, "optim.lr": 0.5 + rank, "a": rank}, "do so")
    )
    told["lacks"] = _message(RunError, lambda: ranks.require_same({} if rank else {"a": "x" * 99}, "do so"))
    told["no value"] = _message(DataError, lambda: ranks.of_node(fail))
    told["of node"] = _of_node(directory)
    (directory / f"tmp-{rank}").mkdir()  # two containers with one host name
    own = str(directory / f"tmp-{rank}")
    with (
        mock.patch.object(tempfile, "tempdir", own),
        mock.patch.object(Path, "exists", lambda path: own in str(path)),
    ):
        told["of containers"] = ranks.every_rank_says(ranks.of_node(lambda: [rank, np.arange(2**14)])[0])
        ranks.wait_for_all()
    with mock.patch.object(socket, "gethostname", lambda: f"host-{rank}"):
        ranks.require_shared(directory / "shared", "output_dir")
        ranks.wait_for_all()
        told["of nodes"] = _of_nodes(directory)
        told["marks left"] = len(list((directory / "shared").iterdir()))
        with mock.patch.object(Path, "exists", lambda path: rank == 0):
            told["not shared"] = _message(
                RunError, lambda: ranks.require_shared(directory / "shared", "output_dir")
            )
    ranks.wait_for_all()
    return told


def _of_node(directory: Path) -> list[Any]:
    """Facts of a value that rank 0 made: all should be true."""
    numbers, file = np.arange(2**14) + ranks.rank(), directory / "numbers"
    ranks.first_does_for_all(lambda: numbers.tofile(file))
    on_disk = np.asarray(np.memmap(file, dtype=np.int64, mode="r"))
    with mock.patch.object(tempfile, "tempdir", str(directory)):
        value = ranks.of_node(lambda: (numbers, {"again": numbers}, on_disk, numbers[:3], ranks.rank()))
        later = ranks.of_node(lambda: value[0])
        ranks.wait_for_all()  # for rank 0, which removes the files
        return [
            *(np.array_equal(array, np.arange(len(array))) for array in (value[0], *value[2:4], later)),
            value[1]["again"] is value[0] and value[4] == 0 and not value[0].flags.writeable,
            str(file) in _map_of(value[2]),
            "(deleted)" in _map_of(value[0]),
            not list(directory.glob("dpo_pack-*")),
        ]


def _map_of(array: Any) -> str:
    """Returns the line of /proc/self/maps that has the array's memory. To read the file may add a line."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= array.ctypes.data < end:
            return line
    raise AssertionError


def _of_nodes(directory: Path) -> list[Any]:
    """Who did the work of two nodes, and what both raise if the second one fails."""

    def fail_on_the_second() -> int:
        if ranks.rank():
            raise DataError("the second node has no such file")
        return 0

    work = ranks.every_rank_says(ranks.of_node(lambda: [ranks.rank(), np.arange(2**14)])[0])
    failed = _message(DataError, lambda: ranks.of_node(fail_on_the_second))
    is_full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(tempfile, "tempdir", str(directory)),
        mock.patch.object(ranks, "_place", side_effect=is_full if ranks.rank() else None, return_value=None),
    ):
        refused = _message(CacheError, lambda: ranks.of_node(ranks.rank))
    ranks.wait_for_all()
    return [work, failed, refused, list(directory.glob("dpo_pack-*"))]


def _leave_a_file(directory: Path) -> int:
    (directory / f"done-by-{ranks.rank()}").touch()
    return ranks.rank()


@pytest.mark.multiprocess
def test_over_two_processes_both_end_with_the_same(tmp_path: Path) -> None:
    first, second = run_on_ranks(_on_two, tmp_path)
    both = f"rank 1 (on {socket.gethostname()}) and rank 0 (on {socket.gethostname()})"
    assert first == second
    assert first == {
        "first says": 0,
        "first does": 0,
        "every": [0, 1],
        "shared": [(0, 0), (1, 2), (0, 4), (1, 6), (0, 8)],
        "one": [14],
        "not shared out": "the server says 401",
        "found": True,
        "library": True,
        "while agreeing": "no such option",
        "failed": "rank 0 found no such file",
        "differ": f"{both} differ in optim.lr and 1 more: 1.5 and 0.5; do so",
        "lacks": f"{both} differ in a: None and '{'x' * 39}; do so",
        "no value": "rank 0 found no such file",
        "of node": 8 * [True],
        "of containers": [0, 1],
        "of nodes": [
            [0, 1],
            "the second node has no such file",
            f"cannot write {tmp_path}: No space left on device; free space or choose a writable directory",
            [],
        ],
        "marks left": 0,
        "not shared": "output_dir: host-1 does not see a file that rank 0 (on host-0) wrote in "
        f"{tmp_path / 'shared'}; use a directory on a file system that all nodes share",
    }
    assert [path.name for path in tmp_path.glob("done-by-*")] == ["done-by-0"]
