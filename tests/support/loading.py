"""Loads models with the settings that most tests want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpo_pack.model.loading import load_model
from dpo_pack.model.scorer import LoadedModel, Precision

_USUAL: dict[str, Any] = {
    "revision": None,
    "trust_remote_code": False,
    "precision": Precision(parameters=torch.float32, autocast=None),
    "attention": "auto",
    "packed": True,
    "gradient_checkpointing": False,
    "device": torch.device("cpu"),
    "recipe_key": "model.path",
}


def load_usual(path: str | Path, **settings: Any) -> LoadedModel:
    """Loads a model in fp32 on the CPU for packed rows; `settings` are other arguments of `load_model`."""
    return load_model(str(path), **{**_USUAL, **settings})
