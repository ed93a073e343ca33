"""Checks before clients of the Hugging Face hub ask for half a minute, as for a mistyped path."""

import re
import time
from pathlib import Path
from typing import Literal

from dpo_pack.system.errors import DataError, ModelError, first_line

HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def check_model(path: str, revision: str | None, recipe_key: str) -> None:
    """Raises ModelError if `path` is a hub id without cached files and the hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache

    if _may_be_hub_id(path):
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
        obstacle = None if isinstance(cached, str) else _obstacle("model", path, recipe_key)
        if obstacle is not None:
            raise ModelError(f"{recipe_key}: no directory {path} here, and {obstacle}")


def check_dataset(path: str, recipe_key: str) -> None:
    """Raises DataError if `path` is a hub id without cached files and the hub cannot be reached."""
    from datasets import config

    if _may_be_hub_id(path) and not (Path(config.HF_DATASETS_CACHE) / path.replace("/", "___")).exists():
        obstacle = _obstacle("dataset", path, recipe_key)
        if obstacle is not None:
            raise DataError(f"{path}: no such file here, and {obstacle}")


def _obstacle(kind: Literal["model", "dataset"], path: str, recipe_key: str) -> str | None:
    """Returns why the hub does not answer, and a remedy; None if it answers or HF_HUB_OFFLINE is set."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    reason: str | None = None
    for seconds_before in () if constants.HF_HUB_OFFLINE else (0.0, 1.0):  # a network may fail once
        time.sleep(seconds_before)
        try:
            HfApi().repo_info(path, repo_type=kind, timeout=10.0)
            return None
        except HfHubHTTPError:
            return None
        except Exception as error:  # the class of the error depends on the client's HTTP library
            reason = first_line(error)
    return reason and (
        f"the Hugging Face hub cannot be reached to look for this {kind} ({reason}); correct {recipe_key}, "
        f"connect to the internet, or download the {kind} first"
    )


def _may_be_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def is_on_hub(path: str) -> bool:
    """Whether a path has the form owner/name of a hub id, and is not a path on this machine."""
    return "/" in path and _may_be_hub_id(path)


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
