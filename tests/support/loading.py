"""Loads models with the settings that most tests want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpo_pack.model.building import load_model
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.loading import load_config
from dpo_pack.model.scorer import LoadedModel, Precision
from dpo_pack.recipe.schema import LoraRecipe, ModelRecipe

CPU = torch.device("cpu")


def facts_of(path: str | Path, **changes: Any) -> ModelFacts:
    """The facts of a model in fp32 for packed rows; `changes`: other facts, or keys of `ModelRecipe`."""
    keys = {key: changes.pop(key) for key in changes.keys() & ModelRecipe.model_fields.keys()}
    settings = ModelRecipe(**{"path": str(path), "unused_tensors": "warn", **keys})
    facts: dict[str, Any] = {
        "recipe_key": "model.path",
        "adapter": None,
        "precision": Precision(parameters=torch.float32, autocast=None),
        "is_packed": True,
        "cache_dir": Path(path).parent,
        **changes,
    }
    if "config" not in facts:
        named = {key: getattr(settings, key) for key in ("revision", "trust_remote_code")}
        facts["config"] = load_config(str(path), recipe_key=facts["recipe_key"], **named)
    return ModelFacts(settings=settings, **facts)


def load_usual(
    path: str | Path,
    *,
    packed: bool = True,
    adapter: LoraRecipe | Path | None = None,
    tensors: Any = None,
    device: torch.device = CPU,
    **changes: Any,
) -> LoadedModel:
    """Loads a model; `changes` of what `facts_of` gives."""
    saved, new = (adapter, None) if isinstance(adapter, Path) else (None, adapter)
    facts = facts_of(path, is_packed=packed, adapter=saved, lora=new, **changes)
    return load_model(facts, device=device, adds_adapter=True, tensors=tensors)
