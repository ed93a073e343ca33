"""Loads models with the settings that most tests want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpo_pack.model.building import load_model
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.loading import load_config
from dpo_pack.model.lora import LoraSettings
from dpo_pack.model.scorer import LoadedModel, Precision


def facts_of(path: str | Path, **changes: Any) -> ModelFacts:
    """The facts of a model in fp32 for packed rows; `changes`: other facts."""
    settings: dict[str, Any] = {
        "path": str(path),
        "revision": None,
        "recipe_key": "model.path",
        "adapter": None,
        "trust_remote_code": False,
        "precision": Precision(parameters=torch.float32, autocast=None),
        "is_packed": True,
        "cache_dir": Path(path).parent,
        **changes,
    }
    named = {key: settings[key] for key in ("revision", "trust_remote_code", "recipe_key")}
    config = settings.pop("config", None) or load_config(str(path), **named)
    return ModelFacts(config=config, **settings)


def load_usual(
    path: str | Path,
    *,
    packed: bool = True,
    adapter: LoraSettings | Path | None = None,
    tensors: Any = None,
    **changes: Any,
) -> LoadedModel:
    """Loads a model on the CPU; `changes` of what `facts_of` gives."""
    saved, new = (adapter, None) if isinstance(adapter, Path) else (None, adapter)
    facts = facts_of(path, is_packed=packed, adapter=saved, **changes)
    return load_model(facts, device=torch.device("cpu"), adapter=new, tensors=tensors)
