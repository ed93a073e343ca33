"""The Hugging Face hub, asked before anything waits for it.

A mistyped path looks like a hub id, and where the hub cannot be reached its clients would try again and
again, for half a minute. What the hub itself has to say about an id is left to them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from dpo_pack.errors import DataError, ModelError
from dpo_pack.recipe_checks import HUB_ID

_TIMEOUT_SECONDS = 10.0


def check_model(path: str, revision: str | None, recipe_key: str) -> None:
    """Raises ModelError for a hub id that is not in the local cache while the hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache

    if Path(path).exists() or not HUB_ID.fullmatch(path):
        return
    if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
        return
    obstacle = _obstacle("model", path)
    if obstacle is not None:
        raise ModelError(f"{recipe_key}: no directory {path} here, and {obstacle}; {_remedy(recipe_key)}")


def check_dataset(path: str, recipe_key: str) -> None:
    """Raises DataError for a hub id of which nothing is cached while the hub cannot be reached."""
    from datasets import config

    if Path(path).exists() or not HUB_ID.fullmatch(path):
        return
    if (Path(config.HF_DATASETS_CACHE) / path.replace("/", "___")).exists():
        return
    obstacle = _obstacle("dataset", path)
    if obstacle is not None:
        raise DataError(f"{path}: no such file here, and {obstacle}; {_remedy(recipe_key)}")


def _obstacle(kind: Literal["model", "dataset"], path: str) -> str | None:
    """Why the hub cannot be asked, None where it answers or is not to be asked."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return None
    reason = ""
    for seconds_before in (0.0, 1.0):  # a network may miss once
        time.sleep(seconds_before)
        try:
            HfApi().repo_info(path, repo_type=kind, timeout=_TIMEOUT_SECONDS)
        except HfHubHTTPError:
            return None
        except Exception as error:  # of whichever HTTP library the hub's client has
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            return None
    return f"the hub, which may have it, cannot be reached ({reason})"


def _remedy(recipe_key: str) -> str:
    return f"correct {recipe_key}, or connect, or download it first"
