"""The Hugging Face hub: what is a hub id, and uploads."""

import contextlib
import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from dpo_pack.system.errors import RunError, first_line
from dpo_pack.system.files import read_json

HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
# The line in the model card's code example that names the model.
_MODEL_ID_LINE = re.compile(r'^model_id = ".*"$', re.MULTILINE)
# Files that loaders prefer. If an earlier upload left one, it would be loaded in place of the new model.
_OLD_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]


def is_on_hub(path: str) -> bool:
    """Whether a path has the form owner/name of a hub id, and is not a path on this machine."""
    return "/" in path and HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def name_for_others(path: str) -> str:
    """Returns a hub id whole, and of a path only its last part: the rest describes the user's disk."""
    return path if is_on_hub(path) else Path(path).name or path


def repo_fault(repo: str) -> str | None:
    """Returns why `repo` cannot be the name of a repository on the hub; None if it can."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        return first_line(error).rstrip(".:")
    return None if "/" in repo else f"must be owner/name, not '{repo}'"


def why_no_upload() -> str | None:
    """Returns why nothing can be uploaded from here now; None if there is a token. Asks no server."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so nothing is uploaded; unset it"
    if get_token() is None:
        return "there is no token of the hub; set HF_TOKEN, or log in with 'hf auth login'"
    return None


# ------------------------------------------------------------------------------------------------- upload


def push_command(source: Path, repo: str, *, private: bool) -> str:
    return f"dpopack push {shlex.quote(str(source))} {repo}{'' if private else ' --public'}"


def check_upload(repo: str) -> None:
    """Raises RunError if nothing can be uploaded from here to `repo`. Asks no server."""
    for obstacle in (repo_fault(repo), why_no_upload()):
        if obstacle is not None:
            raise RunError(f"push: {obstacle}")


def upload_model(model: Path, page: Path, repo: str, *, private: bool) -> tuple[str, list[str]]:
    """Uploads the directory `model`, and `page` if it exists, in place of earlier weights. Returns the URL,
    and lines to print. Raises RunError if it fails, or if `private` is True and `repo` is public."""
    from huggingface_hub import HfApi

    check_upload(repo)
    if not any((model / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RunError(f"{model}: no run and no model (no run.json or config.json); give a run's output_dir")
    with TemporaryDirectory() as name, _one_line(repo):
        folder, api = Path(name), HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        is_private = bool(api.repo_info(repo).private)
        if private and not is_private:
            raise RunError(
                f"push: {repo} is public, but this upload must be private; allow a public one with "
                "--public (in a recipe: export.push_to_hub.private: false), or make the repository private"
            )
        files = {page.name: page} | {str(file.relative_to(model)): file for file in model.rglob("*")}
        for inside, file in files.items():
            if file.is_file():
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                (folder / inside).symlink_to(file.resolve())
        card = folder / "README.md"
        if card.exists():  # its code example names the repository, not a directory here
            text = _MODEL_ID_LINE.sub(lambda _: f'model_id = "{repo}"', card.read_text(encoding="utf-8"))
            card.unlink()
            card.write_text(text, encoding="utf-8")
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Upload model with dpo-pack",
            delete_patterns=_OLD_WEIGHTS,
        )
    lines = []
    base = (read_json(model / "adapter_config.json") or {}).get("base_model_name_or_path")
    if isinstance(base, str) and (Path(base).exists() or not HUB_ID.fullmatch(base)):
        lines.append(
            f"Note: the adapter's base, {base}, is only on this machine, so others cannot load the adapter; "
            "'dpopack merge' makes a model that needs no base"
        )
    return str(url), [*lines, f"Model on the hub: {url} ({'private' if is_private else 'public'})"]


@contextlib.contextmanager
def _one_line(repo: str) -> Iterator[None]:
    """Turns an error of the network, the hub or a file into a RunError of one line."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP library

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its warnings quote addresses with signatures
    try:
        yield
    except (OSError, HTTPError, ValueError, RuntimeError) as error:
        # ValueError: a malformed answer. RuntimeError: the upload of a large file failed, by its cause.
        raise RunError(f"push: {repo}: the upload failed ({first_line(error.__cause__ or error)})") from error
    finally:
        logger.setLevel(level)
