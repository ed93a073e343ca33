"""Files and directories that are whole or absent."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.limits import no_file_beyond
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.files import (
    locked,
    read_json,
    remove_directory,
    text_of,
    write_json_atomically,
    written_aside,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_directory_replaces_the_earlier_one_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "directory"
    for name in ("old", "new"):
        with written_aside(target) as temporary:
            (temporary / "below").mkdir(parents=True)
            (temporary / "below" / name).write_text(name)
    assert names(target / "below") == ["new"]
    assert names(tmp_path) == ["directory"]


def test_the_new_directory_is_in_place_before_the_old_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing takes minutes where it is large, and a process may be killed meanwhile."""
    target = tmp_path / "directory"
    (target / "old").mkdir(parents=True)
    seen: list[list[str]] = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **options: seen.append(names(target)))
    with written_aside(target) as temporary:
        (temporary / "new").mkdir(parents=True)
    assert seen == [["new"]] and names(target) == ["new"]


def test_a_directory_that_will_not_go_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system keeps files that somebody has open."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()

    def held(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr("os.rmdir", lambda path, **options: held(path))
    remove_directory(tmp_path / "old")
    assert not (tmp_path / "old").exists()


@pytest.mark.parametrize("is_directory", [False, True])
def test_what_fails_half_way_leaves_the_earlier_content_alone(is_directory: bool, tmp_path: Path) -> None:
    target = tmp_path / "new folder" / "target"

    def write(content: str, *, fails: bool) -> None:
        with written_aside(target) as temporary:
            if is_directory:
                temporary.mkdir()
            (temporary / "file" if is_directory else temporary).write_text(content)
            assert temporary.name.startswith(".") and (content == "later") == target.exists()
            if fails:
                raise KeyboardInterrupt

    write("earlier", fails=False)
    with pytest.raises(KeyboardInterrupt):
        write("later", fails=True)
    assert (target / "file" if is_directory else target).read_text() == "earlier"
    assert names(target.parent) == ["target"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
def test_content_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut could leave the name with nothing, or half of it, behind."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".")[-1])
        fsync(descriptor)

    def spy_replace(path: Path, target: Path) -> Path:
        events.append("renamed")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    with written_aside(tmp_path / "directory") as temporary:
        temporary.mkdir()
        (temporary / "a.bin").write_text("a")
        (temporary / "b.json").write_text("b")
    assert sorted(events[:2]) == ["bin", "json"]
    assert events[2:] == ["tmp", "renamed", tmp_path.name]


def test_json_survives_a_round_trip_and_damage_reads_as_absence(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    value = {"name": "naïve", "numbers": [1, 0.1, None]}
    assert read_json(path) is None
    write_json_atomically(path, value)
    assert read_json(path) == value == json.loads(path.read_text(encoding="utf-8"))
    assert "naïve" in path.read_text(encoding="utf-8") and path.read_text().endswith("}\n")
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    assert read_json(path) is None
    path.write_bytes(content.replace("ï".encode(), b"\xff"))
    assert read_json(path) is None
    assert read_json(tmp_path) is None  # a directory
    os.mkfifo(tmp_path / "pipe")
    assert read_json(tmp_path / "pipe") is None and text_of(tmp_path / "pipe") == ""
    os.truncate(path, 1 << 40)
    assert read_json(path) is None and text_of(path) == ""
    with pytest.raises(CacheError, match=r"value\.json: rename 'a\\udcfc', no UTF-8"):
        write_json_atomically(path, {"name": "a\udcfc"})


def refused_by_tokenizers(path: Path) -> None:
    tiny_tokenizer().backend_tokenizer.save(str(path))  # as `save_pretrained` does after the other files


WRITERS: dict[str, Callable[[Path], object]] = {
    "python": lambda path: path.write_text("x" * 2000),
    "tokenizers": refused_by_tokenizers,
    "safetensors": lambda path: save_file({"x": torch.zeros(1000)}, path),
    "torch": lambda path: torch.save(torch.zeros(1000), path),
}


@pytest.mark.parametrize("library", WRITERS)
def test_each_library_s_word_for_a_full_disk_is_understood(library: str, tmp_path: Path) -> None:
    with (
        no_file_beyond(500),
        pytest.raises(CacheError) as caught,
        written_aside(tmp_path / "file") as temporary,
    ):
        WRITERS[library](temporary)
    reason = "it could not be written in full" if library == "torch" else "File too large"
    assert str(caught.value).startswith(f"cannot write {tmp_path / 'file'}: {reason}; free space")
    assert names(tmp_path) == []


def test_a_wrong_place_is_no_matter_of_space(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", Path("/proc/nowhere/file")):
        with pytest.raises(CacheError) as caught, written_aside(path):
            pass
        assert str(caught.value).endswith("; choose a writable directory") and "free" not in str(caught.value)


# ------------------------------------------------------------------------------------------------- locks


def test_a_lock_has_one_holder_whom_others_are_told_of(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "run.lock"
    with locked(lock, "output_dir: new"):
        with pytest.raises(RunError) as caught, locked(lock, "output_dir: new"):
            pass
        holder = f"process {os.getpid()} on {socket.gethostname()} since 2"
        assert str(caught.value).startswith("output_dir: new ") and holder in str(caught.value)
        assert names(lock.parent) == ["run.lock"]  # the refused one has removed nothing
    assert names(tmp_path) == []  # nor is a directory left that nothing was written into
    (tmp_path / "new").mkdir()
    with locked(lock, "output_dir: new"):
        pass
    assert names(tmp_path) == ["new"] and names(tmp_path / "new") == []


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    process = os.fork()
    if process == 0:
        with locked(lock, "output_dir"):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert str(process) in lock.read_text()
    with locked(lock, "output_dir"):
        assert str(process) not in lock.read_text()


def test_a_lock_file_that_its_holder_removes_meanwhile_gives_no_second_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has opened the removed file could lock it, while a third process locks a new one."""
    lock, flock, opened = tmp_path / "run.lock", fcntl.flock, []

    def removed_before(file: object, operation: int) -> None:
        opened.append(file)
        if len(opened) == 1:
            lock.unlink()
        flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with pytest.raises(RunError), locked(lock, "output_dir"):
        pass
    with locked(lock, "output_dir"):
        assert len(opened) == 2


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "run.lock", "output_dir: runs/a"):
        pass
    assert [record.message for record in caplog.records if "output_dir: runs/a" in record.message]
