"""Saves trained models, adapters and tokenizers, so that every reader of the files reads what was trained."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from dpo_pack.model.config import eos_tokens
from dpo_pack.model.loading import quiet_transformers
from dpo_pack.model.parallel import local_part
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.system.files import read_json

# What transformers 4 reads in place of `rope_parameters`; version 5 reads these keys too.
_OLD_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base")
_PROCESSOR_FILES = (  # of towers, which are carried through
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "chat_template.json",
)  # fmt: skip


def save_model(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    state: dict[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    turn_end: int | None = None,
    image_size: dict[str, int] | None = None,
    processor: str = "",
) -> dict[str, Tensor]:
    """Writes weights (or only the adapter), configs and tokenizer as `from_pretrained` reads them.

    `state`: whole tensors of a sharded model. `dtype`: of the weights in the files; None: as they are.
    `turn_end`: a token that the files of a model name as an end, before the model's EOS. `image_size`: the
    processor's limits of pixels, if they change. `processor`: a directory whose files of the processor come
    before the checkpoint's. Returns the tensors that a reader finds under the names in the model."""
    model, adapter = loaded.model, loaded.adapter
    tensors = model.state_dict(keep_vars=True) if state is None else state
    if adapter is not None and state is None:
        # MiCA freezes B.
        tensors = {name: t for name, t in tensors.items() if t.requires_grad or ".lora_" in name}
    saved = {name: tensor.detach() for name, tensor in tensors.items()}
    if dtype is not None:
        saved = _rounded(model, saved, dtype)
    with quiet_transformers():
        if adapter is not None:
            adapter.save(target, saved if dtype is not None else state)
            _save_tokenizer(tokenizer, target)
            _save_processor(model.config, tokenizer, target, image_size, processor)
            return {name: tensor.to(tensors[name].dtype) for name, tensor in saved.items()}
        with contextlib.ExitStack() as stack:
            if model.can_generate():
                # Published settings can contradict each other (a `top_p` without sampling), and some releases
                # of transformers refuse to save a model with such settings.
                stack.enter_context(mock.patch.object(model, "generation_config", GenerationConfig()))
            model.save_pretrained(target, state_dict=dict(saved))
        if model.can_generate():
            generation = copy.deepcopy(model.generation_config)
            if turn_end is not None:
                generation.eos_token_id = [turn_end, *sorted(eos_tokens(model, tokenizer) - {turn_end})]
            generation.to_json_file(target / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
        # Training switched dropout off; the saved config has the model's own settings.
        config = copy.deepcopy(model.config)
        config.get_text_config().update(loaded.replaced)
        for part in (config, config.get_text_config()):
            if dtype is not None:
                part.dtype = dtype
            if turn_end is not None:
                part.eos_token_id = turn_end
        config.save_pretrained(target)
        _complete_config(target / "config.json", config, is_tied=is_tied(model))
        _save_tokenizer(tokenizer, target, turn_end)
        _save_processor(config, tokenizer, target, image_size, processor)
    return saved


def _kept_wide(model: PreTrainedModel, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers always reads this tensor in float32, as some routers."""
    return any(re.search(part.replace("*", ".*"), name) for part in model._get_dtype_plan(dtype))


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype, *, keeps_type: bool) -> None:
    """Rounds all saved tensors to the values of `dtype`; with `keeps_type` they stay in their own type."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not _kept_wide(model, name, dtype):
            if keeps_type:
                tensor.copy_(tensor.data.to(dtype))
            else:
                tensor.data = tensor.data.to(dtype)


def find_beyond(state: dict[str, Tensor], dtype: torch.dtype) -> str | None:
    """Returns the name of the first tensor with a finite value (on this rank) that is infinite in `dtype`."""
    most = torch.finfo(dtype).max
    for name, tensor in state.items():
        tensor = local_part(tensor)
        is_number = tensor.is_floating_point() and len(tensor.shape)
        if is_number and bool(((tensor.abs() > most) & tensor.isfinite()).any()):
            return name
    return None


def _rounded(model: PreTrainedModel, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors on the CPU, in `dtype`. Tensors that are one stay one."""
    done: dict[Any, Tensor] = {}
    rounded = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in done:
            is_kept = not tensor.is_floating_point() or _kept_wide(model, name, dtype)
            done[key] = tensor if is_kept else tensor.to(device="cpu", dtype=dtype)
        rounded[name] = done[key]
    return rounded


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head is the embeddings, or there is no head."""
    head = model.get_output_embeddings()
    return head is None or head.weight is model.get_input_embeddings().weight


def _complete_config(file: Path, config: PretrainedConfig, *, is_tied: bool) -> None:
    """Adds what older readers need as the checkpoint had it, and corrects what the weights contradict."""
    values: dict[str, Any] = read_json(file)
    before = copy.deepcopy(values)
    parts = [values, *(part for part in values.values() if isinstance(part, dict))]
    for part in parts:
        if part.get("tie_word_embeddings", part is values and config.tie_word_embeddings) and not is_tied:
            part["tie_word_embeddings"] = before["tie_word_embeddings"] = False
    given: dict[Any, Any] = {}
    with contextlib.suppress(OSError):  # the model was made in code, or its files are gone
        revision = vars(config).get("_commit_hash")
        given, _ = PretrainedConfig.get_config_dict(
            config._name_or_path, revision=revision, local_files_only=True
        )
    for name in (None, *values):
        part = values if name is None else values[name]
        of_part = config if name is None else getattr(config, name, None)
        # Of some checkpoints, as Qwen2.5-VL, the keys of the text are the config's own.
        old = given.get(name, given if of_part in (config, config.get_text_config()) else None)
        if not (isinstance(part, dict) and isinstance(old, dict)):
            continue
        if "torch_dtype" in old and "dtype" in part:
            part["torch_dtype"] = part["dtype"]
        # Keys that transformers 5 writes by a newer name, as num_experts of Qwen 3 MoE.
        newer = getattr(of_part, "attribute_map", {})
        part.update({key: part[newer[key]] for key in old if newer.get(key) in part})
        rope = part.get("rope_parameters")
        # Of several kinds, by type of layer, transformers 5 would read the one kind in `rope_scaling` only.
        if isinstance(rope, dict) and not any(isinstance(kind, dict) for kind in rope.values()):
            part.update({key: old[key] for key in _OLD_ROPE_KEYS if key in old})
    for content in (values, before):
        file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        read, trained = (
            one.get_text_config().to_dict() for one in (type(config).from_json_file(str(file)), config)
        )
        if read.get("rope_parameters") == trained.get("rope_parameters"):
            return


def needs_transformers_5(directory: Path) -> bool:
    """Whether transformers 4 would read other rotary parameters than the config.json in `directory` has."""
    values = read_json(directory / "config.json") or {}
    parts = (values, values.get("text_config") or {})
    return any(part.get("rope_parameters") and not part.keys() & {*_OLD_ROPE_KEYS} for part in parts)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, target: Path, turn_end: int | None = None) -> None:
    """Writes the tokenizer: with the same vocabulary the checkpoint's own files, which older readers know."""
    if turn_end is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(turn_end))
    tokenizer.save_pretrained(target)
    names = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    names |= {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    vocabularies = [
        (read_json(Path(file)) or {}).get("model", {}).get("vocab") if file is not None else None
        for file in (_given_file(tokenizer.name_or_path, "tokenizer.json"), str(target / "tokenizer.json"))
    ]
    if vocabularies[0] is not None and vocabularies[0] == vocabularies[1]:
        for name in names:
            if (file := _given_file(tokenizer.name_or_path, name)) is not None:
                shutil.copyfile(file, target / name)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = read_json(target / name)
        if settings is None:
            continue
        for key in ("is_local", "local_files_only"):  # how transformers 5 loaded the tokenizer here
            settings.pop(key, None)
        if turn_end is not None:
            settings["eos_token"] = tokenizer.eos_token
        if "chat_template" in settings and isinstance(tokenizer.chat_template, str):  # it may be a list
            settings["chat_template"] = tokenizer.chat_template
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (target / name).write_text(text + "\n", encoding="utf-8")


def _save_processor(
    config: Any, tokenizer: Any, target: Path, size: dict[str, int] | None, given: str
) -> None:
    """Copies the processor's files: those in `given`, else the checkpoint's. A chat template in them,
    which it prefers, becomes the tokenizer's, and `size` its limits of an image's pixels."""
    template = tokenizer.chat_template
    for name in _PROCESSOR_FILES if config.get_text_config() is not config else ():
        file = _given_file(given, name) or _given_file(
            config._name_or_path, name, vars(config).get("_commit_hash"), downloads=True
        )
        if file is None:
            continue
        shutil.copyfile(file, target / name)
        values = read_json(target / name) or {}
        before = copy.deepcopy(values)
        if template is not None and "chat_template" in values:
            values["chat_template"] = template
        part = values if name == _PROCESSOR_FILES[0] else values.get("image_processor")
        if size is not None and isinstance(part, dict):
            part["size"] = (part.get("size") or {}) | size
            for old in (part, part["size"]):  # the same limit, as older releases call it
                old.update({"max_pixels": size["longest_edge"]} if "max_pixels" in old else {})
        if values != before:
            text = json.dumps(values, indent=2, ensure_ascii=False)
            (target / name).write_text(text + "\n", encoding="utf-8")


def _given_file(
    source: str, name: str, revision: str | None = None, *, downloads: bool = False
) -> str | None:
    """Returns the path of a file of the checkpoint or tokenizer `source`, if it has one of this name."""
    options: dict[str, Any] = {
        f"_raise_exceptions_for_{what}": False
        for what in ("missing_entries", "gated_repo", "connection_errors")
    }
    options |= {"local_files_only": not downloads, "revision": revision}
    return cached_file(source, name, **options) if source else None
