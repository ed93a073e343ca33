"""Uploads a run's exported model, model card and report.html to the Hugging Face hub. Needs no torch."""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

# The base class of the HTTP library's errors.
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from dpo_pack.run.checkpoint_files import checkpoints, step_of
from dpo_pack.system.errors import RunError, first_line
from dpo_pack.system.files import read_json
from dpo_pack.system.hub import HUB_ID, repo_fault, why_no_upload

# The line in the model card's code example that names the model.
MODEL_ID_LINE = re.compile(r'^model_id = ".*"$', re.MULTILINE)
_CONFIGS = ("config.json", "adapter_config.json")
# Files that loaders prefer. If an earlier upload left one, it would be loaded in place of the new model.
_OLD_WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?|adapter_config\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """An uploaded model. `notes`: sentences on what may surprise the user, e.g. who can see it."""

    url: str
    is_private: bool
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Returns the lines to print after the upload."""
        kind = "private" if self.is_private else "public"
        return [*(f"Note: {note}" for note in self.notes), f"Model on the hub: {self.url} ({kind})"]


def push_command(source: Path, repo: str, *, private: bool) -> str:
    """Returns the command that uploads `source`."""
    return f"dpopack push {shlex.quote(str(source))} {repo}{'' if private else ' --public'}"


def push(source: Path, repo: str, *, private: bool) -> Pushed:
    """Uploads the newest model of `source`, a run or the directory of an exported model, in one commit.

    Creates `repo` if the hub does not have it. A second upload of the same files changes nothing. Removes
    weight files of an earlier upload that this model does not have. Raises RunError if the upload fails, or
    if `private` is True and `repo` is public.
    """
    for obstacle in (repo_fault(repo), why_no_upload()):
        if obstacle is not None:
            raise RunError(f"push: {obstacle}")
    model, notes = find_model(source)
    with _quiet_client(repo):
        api = HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        is_private = bool(api.repo_info(repo).private)
        if private and not is_private:
            raise RunError(
                f"push: {repo} is public, but this upload must be private; allow a public one with "
                "--public (in a recipe: export.push_to_hub.private: false), or make the repository private"
            )
        operations: list[CommitOperationAdd | CommitOperationDelete]
        operations = list(_files(model, source / "report.html", repo))
        operations += [
            CommitOperationDelete(path_in_repo=name)
            for name in api.list_repo_files(repo)
            if _OLD_WEIGHTS.fullmatch(name) and not (model / name).is_file()
        ]
        api.create_commit(repo, operations, commit_message="Upload model with dpo-pack")
    if is_private and not private:
        notes.append(f"{repo} was private already and stays private; change that in its settings")
    base = (read_json(model / "adapter_config.json") or {}).get("base_model_name_or_path")
    if isinstance(base, str) and (Path(base).exists() or not HUB_ID.fullmatch(base)):
        notes.append(
            f"the adapter's base, {base}, is only on this machine, so others cannot load the adapter; "
            "'dpopack merge' makes a model that needs no base"
        )
    return Pushed(url=str(url), is_private=is_private, notes=tuple(notes))


def find_model(source: Path) -> tuple[Path, list[str]]:
    """Returns the directory of the newest exported model, and a list of notes.

    The list has one note if the model is a checkpoint of an unfinished run, else none. Raises RunError if
    `source` has no exported model.
    """
    if any((source / name).is_file() for name in _CONFIGS):
        return source, []
    info = read_json(source / "run.json")
    if info is None or "status" not in info:
        raise RunError(f"{source}: no run and no model (no run.json or config.json); give a run's output_dir")
    if (source / "model").is_dir():
        return source / "model", []
    exported = [path for path in checkpoints(source / "checkpoints") if (path / "model").is_dir()]
    if not exported:
        raise RunError(
            f"{source}: the run is {info['status']} and has exported no model; finish it with 'dpopack train'"
        )
    note = f"the run is {info['status']}; this is its checkpoint after step {step_of(exported[-1])}"
    return exported[-1] / "model", [note]


def _files(model: Path, page: Path, repo: str) -> Iterator[CommitOperationAdd]:
    """Yields the files to upload. In README.md, `repo` replaces the model's name in the code example."""
    paths = {path.relative_to(model).as_posix(): path for path in sorted(model.rglob("*")) if path.is_file()}
    if page.is_file():
        paths["report.html"] = page
    for name, path in paths.items():
        content: Path | bytes = path
        if name == "README.md":
            card = path.read_text(encoding="utf-8")
            content = MODEL_ID_LINE.sub(lambda _: f'model_id = "{repo}"', card).encode()
        yield CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)


@contextlib.contextmanager
def _quiet_client(repo: str) -> Iterator[None]:
    """Turns an error of the network, the hub or a file into a RunError of one line. Hides the client's
    warnings and, if stderr is not a terminal, its progress bars."""
    logger = logging.getLogger("huggingface_hub")
    level, hides_bars = logger.level, not sys.stderr.isatty() and not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if hides_bars:
        disable_progress_bars()
    try:
        yield
    except (OSError, HTTPError, ValueError, RuntimeError) as error:
        # ValueError: a malformed answer. RuntimeError: the upload of a large file failed.
        raise RunError(f"push: {repo}: {_reason(error)}") from error
    finally:
        logger.setLevel(level)
        if hides_bars:
            enable_progress_bars()


def _reason(error: BaseException) -> str:
    """Returns why the upload failed and, for HTTP status 401, 403 or 404, a remedy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    cause = error.__cause__  # the client wraps errors of single files
    if status is None and cause is not None:
        return _reason(cause)
    remedy = {
        401: "; the token is missing or not valid: set HF_TOKEN, or log in with 'hf auth login'",
        403: "; the token may not write there: use one that may, or another REPO",
        404: "; the hub has no such repository, or the token may not see it",
    }.get(status or 0, "")
    return f"the upload failed ({first_line(error)}){remedy}"
