"""Files and directories that are whole or absent."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import (
    read_json,
    remove_directory,
    write_json_atomically,
    write_text_atomically,
    written_aside,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_whole_and_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new folder" / "file.txt"
    with written_aside(target) as temporary:
        temporary.write_text("content")
        assert temporary.parent == target.parent and temporary.name.startswith(".")
        assert not target.exists()
    assert target.read_text() == "content"
    assert names(target.parent) == ["file.txt"]


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
    target = tmp_path / "target"

    def write(content: str, *, fails: bool) -> None:
        with written_aside(target) as temporary:
            if is_directory:
                temporary.mkdir()
            (temporary / "file" if is_directory else temporary).write_text(content)
            if fails:
                raise KeyboardInterrupt

    write("earlier", fails=False)
    with pytest.raises(KeyboardInterrupt):
        write("later", fails=True)
    assert (target / "file" if is_directory else target).read_text() == "earlier"
    assert names(tmp_path) == ["target"]


def test_a_full_disk_is_a_one_line_cache_error_and_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(CacheError) as caught, written_aside(tmp_path / "file") as temporary:
        temporary.write_text("half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = str(caught.value)
    assert str(tmp_path / "file") in message and "No space left" in message and message.isprintable()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_a_cache_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="Not a directory.*choose a writable directory"):
        write_text_atomically(tmp_path / "file" / "below" / "x.txt", "text")
    assert (tmp_path / "file").read_text() == "in the way"


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


def test_two_writers_of_one_file_do_not_share_a_temporary_path(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with written_aside(target) as one, written_aside(target) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert target.read_text() == "one"  # the outer block ends last
    assert names(tmp_path) == ["file"]


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
