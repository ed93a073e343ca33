"""Merges a LoRA adapter and its base into one model that needs no peft."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dpo_pack
from dpo_pack.model.loading import load_config, load_model, load_tokenizer
from dpo_pack.model.lora import SavedAdapter, is_adapter, read_adapter, require_peft
from dpo_pack.model.scorer import CompletionLogps, LoadedModel, Precision
from dpo_pack.recipe.load import TOKENIZER_FILES
from dpo_pack.run.export import USAGE_TITLE, usage, write_model
from dpo_pack.system.errors import ModelError, RunError
from dpo_pack.system.files import written_aside
from dpo_pack.system.hub import name_for_others


def merge_adapter(
    source: Path, target: Path, *, base: str | None, dtype: str, trust_remote_code: bool
) -> SavedAdapter:
    """Writes the merged model and the tokenizer to `target`, whole or not at all; returns the adapter.

    `source` is the directory of an adapter or of a run. `base` replaces the base that the adapter names. Base
    plus adapter is computed in float32 and rounded once, to `dtype`; `auto`: the type of the base's weights.
    Tensors that transformers always reads in float32 stay in float32. Raises ModelError if the adapter or its
    base cannot be loaded, RunError if `target` exists and is not an empty directory.
    """
    adapter = find_adapter(source)
    require_peft("dpopack merge")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(f"{target} exists already; give a path that does not exist")
    if base is not None:
        adapter = replace(adapter, base=base, base_revision=None)
    tokenizer = _tokenizer(adapter, trust_remote_code)
    merged = _merged(adapter, dtype, trust_remote_code)
    with written_aside(target) as temporary:
        example = usage(
            str(target),
            is_chat=tokenizer.chat_template is not None,
            needs_peft=False,
            needs_code=trust_remote_code,
        )
        write_model(merged, tokenizer, temporary, _card(adapter, "\n".join(example)))
    return adapter


def _card(adapter: SavedAdapter, example: str) -> str:
    """Returns the adapter's card, changed into that of the merged model.

    If dpo-pack did not write the adapter's card, or the user has changed it, returns a short card.
    `example` is the section of the card that says how to use the merged model.
    """
    name = adapter.directory.resolve()
    name = name.parent if name.name == "model" else name
    base = name_for_others(adapter.base)
    origin = f"The LoRA adapter {name.name}, merged into {base} by dpo-pack {dpo_pack.__version__}."
    file = adapter.directory / "README.md"
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # users may edit it
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        before, title, after = text.partition(USAGE_TITLE)
        if title:
            card = ModelCard(re.sub("^A LoRA adapter for .*?: ", "", before, count=1, flags=re.MULTILINE))
            card.data["library_name"] = "transformers"
            card.data["tags"] = [tag for tag in card.data.get("tags") or () if tag != "lora"]
            rest = after.partition("\n```\n\n")[2]
            return f"{str(card).rstrip()}\n\n{origin}\n\n{example}\n{rest}"
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [dpo-pack]\n---\n\n"
        f"# {name.name}\n\n{origin}\n\n{example}"
    )


def find_adapter(source: Path) -> SavedAdapter:
    """Returns the adapter in `source` or, if `source` is a run, in `source`/model. Raises ModelError."""
    for directory in (source, source / "model"):
        if is_adapter(directory):
            return read_adapter(directory, "dpopack merge")
        if (directory / "config.json").is_file():
            raise ModelError(f"{directory} is a full model; there is nothing to merge")
    raise ModelError(
        f"{source}: no adapter_config.json in this directory or in its model/; give the directory of an "
        "adapter, or of a finished run with model.lora"
    )


def _tokenizer(adapter: SavedAdapter, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    has_own = any((adapter.directory / name).is_file() for name in TOKENIZER_FILES)
    return load_tokenizer(
        str(adapter.directory) if has_own else adapter.base,
        revision=None if has_own else adapter.base_revision,
        trust_remote_code=trust_remote_code,
        chat_template=None,
        recipe_key="dpopack merge",
    )


def _merged(adapter: SavedAdapter, dtype: str, trust_remote_code: bool) -> LoadedModel:
    key = f"dpopack merge (the base of {adapter.directory}; --base gives another)"
    config = load_config(
        adapter.base, revision=adapter.base_revision, trust_remote_code=trust_remote_code, recipe_key=key
    )
    if config.to_dict().get("quantization_config") is not None:
        raise ModelError(f"{key}: {adapter.base} is quantised; give the unquantised model with --base")
    loaded = load_model(
        adapter.base,
        revision=adapter.base_revision,
        trust_remote_code=trust_remote_code,
        precision=Precision(parameters=torch.float32, autocast=None),
        attention="auto",
        packed=False,
        gradient_checkpointing=False,
        device=torch.device("cpu"),
        recipe_key=key,
        config=config,
        adapter=adapter.directory,
    )
    assert loaded.adapter is not None
    model = loaded.adapter.merge()
    own: Any = config.dtype or torch.float32
    _round(model, own if dtype == "auto" else getattr(torch, dtype))
    return replace(loaded, scorer=CompletionLogps(model, backend=None, autocast=None))


def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Rounds every tensor to `dtype`, except those that transformers always reads in fp32 (some routers)."""
    kept = [re.compile(name.replace("*", ".*")) for name in model._get_dtype_plan(dtype)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(pattern.search(name) for pattern in kept):
            tensor.data = tensor.data.to(dtype)
