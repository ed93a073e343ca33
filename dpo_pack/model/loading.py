"""Loads configs, tokenizers and processors in transformers' formats; one-line errors of all that it loads.

A checkpoint's tensors are compared with its model's, both ways, by transformers' own report of a load: what
the files lack would start with random values, and what the model does not use would be lost in training and
export. The same report comes from the headers of safetensors files, without the tensors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest import mock

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from dpo_pack.recipe.load import is_adapter
from dpo_pack.system.errors import DpoPackError, ModelError, first_line, is_out_of_memory
from dpo_pack.system.files import regular_file
from dpo_pack.system.hub import is_on_hub
from dpo_pack.system.machine import install_command

# Vision checkpoints of which only the text model is built: the base model of the whole has the head, too.
_TEXT_ONLY = frozenset({"llama4"})
# Layers that predict further tokens (MTP). Config keys that name their number; names of their tensors.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_MTP = re.compile(r"(^|\.)(mtp|nextn)\w*\.")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TOWER = re.compile(
    r"(^|\.)(vision|visual|image|audio|speech|multi_modal|mm_projector|embed_(vision|audio)|vq(model|_?vae))"
)
_ROTARY = re.compile(r"rotary_emb\.(original_)?inv_freq$")
_NO_MTP = "layers that predict further tokens are not trained, and an exported model's config says 0"


def load_config(
    path: str, *, revision: str | None, trust_remote_code: bool, recipe_key: str
) -> PretrainedConfig:
    """Loads a model's config.json. Raises ModelError."""
    if is_adapter(path):
        raise ModelError(f"{recipe_key}: {path} is an adapter; merge it into its base, and give that model")
    with load_errors(path, recipe_key):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        given, _ = PretrainedConfig.get_config_dict(path, revision=revision, local_files_only=True)
    assert isinstance(config, PretrainedConfig)
    text = config.get_text_config()
    config.return_dict = text.return_dict = True  # outputs are read by name, by readers of exports too
    theta = (given.get("text_config") or given).get("rope_theta")
    used = (getattr(text, "rope_parameters", None) or {}).get("rope_theta", theta)
    if theta is not None and used != theta:
        what = f"config.json of {path} has rope_theta {theta}, and {used} in rope_parameters"
        raise ModelError(f"{recipe_key}: {what}, which transformers would use; make them equal")
    return config


def load_processor(path: str, *, revision: str | None, trust_remote_code: bool, recipe_key: str) -> Any:
    """Loads transformers' processor of images and text (model.images). Raises ModelError."""
    given: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with load_errors(path, recipe_key):
        processor = AutoProcessor.from_pretrained(path, **given)
    if getattr(processor, "image_processor", None) is None or getattr(processor, "image_token", None) is None:
        what = f"{path} has no processor of images ({type(processor).__name__})"
        raise ModelError(f"{recipe_key}: {what}; leave model.images out, or take a model that reads images")
    return processor


def load_tokenizer(
    path: str, *, revision: str | None, trust_remote_code: bool, chat_template: Path | None, recipe_key: str
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. The file `chat_template` replaces its template. Raises ModelError."""
    given: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with load_errors(path, recipe_key):
        tokenizer = AutoTokenizer.from_pretrained(path, **given)
    if chat_template is not None:
        try:
            regular_file(chat_template)
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"tokenizer.chat_template: cannot read {chat_template}: {error}") from error
    try:  # as data/ calls it; those of mistral-common take other arguments and have no templates
        tokenizer(["a"], add_special_tokens=False, return_token_type_ids=False, verbose=False)["input_ids"][0]
        if tokenizer.chat_template is None or chat_template is not None:
            asked: Any = [{"role": "user", "content": "a"}]
            tokenizer.apply_chat_template(asked, chat_template="{{ messages[0].content }}", tokenize=False)
        assert isinstance(tokenizer, PreTrainedTokenizerBase)
    except Exception as error:  # of any class's code
        lacks = f"the tokenizer of {path}, a {type(tokenizer).__name__}, lacks what dpo-pack needs"
        remedy = "set tokenizer.path to a directory or hub id with tokenizer.json"
        raise ModelError(f"{recipe_key}: {lacks} (Jinja templates, for instance); {remedy}") from error
    return tokenizer


def auto_class(config: PretrainedConfig) -> Any:
    """Returns transformers' class that builds a causal LM; of a vision checkpoint, all of it."""
    kind, values = type(config), config.to_dict()
    has_own_code = "AutoModelForCausalLM" in (values.get("auto_map") or {})
    has_towers = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and "text_config" in values
    is_text = has_own_code or kind.model_type in _TEXT_ONLY or not has_towers or config.is_encoder_decoder
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


@contextlib.contextmanager
def load_errors(path: str, recipe_key: str) -> Iterator[None]:
    """Turns errors about a bad directory or hub id into one line that names the recipe key."""
    try:
        yield
    except DpoPackError:
        raise
    except Exception as error:  # the user's files decide the class
        what = f"cannot load {path}: {first_line(error).rstrip('.')}"
        remedy = "give a directory with config.json, safetensors weights and tokenizer files, or a hub id"
        if is_on_hub(path):
            remedy = "connect to the network, unset HF_HUB_OFFLINE, or run 'hf auth login'"
            remedy = f"there is no such directory; if it is a hub id: {remedy}"
        if isinstance(error, StrictDataclassError):
            remedy = "correct its config.json"
        if isinstance(error, ImportError):
            remedy = f"install what it needs; for images: {install_command('images')}"
        if is_out_of_memory(error):
            what = f"{path} does not fit in memory ({first_line(error)})"
            remedy = "set model.dtype=bfloat16, train an adapter (model.lora), or shard over several devices"
        own = [name for name in ("run", "checkpoint") if (Path(path) / f"{name}.json").is_file()]
        if own and not (Path(path) / "config.json").exists():
            what, model = f"{path} is a {own[0]} of dpo-pack, not a model", Path(path) / "model"
            remedy = f"its model is {model}: set {recipe_key} to it"
            if not model.is_dir():
                remedy = "it has no model yet; finish the run, and give the run's directory model"
        raise ModelError(f"{recipe_key}: {what}; {remedy}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """Collects what transformers and peft warn of, a line each; hides transformers' bars and load report."""
    logger, handler = transformers_logging.get_logger(), BufferingHandler(10**6)
    handler.setLevel(logging.WARNING)
    handlers, logger.handlers = logger.handlers, [handler]
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    lines: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=UserWarning, module=r"(peft|transformers)\b")
            yield lines
    finally:
        logger.handlers = handlers
        if bars:
            transformers_logging.enable_progress_bar()
        said = [f"transformers: {record.getMessage()}" for record in handler.buffer]
        for each in caught:
            if package := re.search(r"/(peft|transformers)/", each.filename):
                said.append(f"{package[1]}: {each.message}")
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)
        for text in dict.fromkeys(" ".join(text.split()) for text in said):
            # We check ourselves what the report and the warning about tied weights say.
            if not re.search("LOAD REPORT|tie_word_embeddings", text):
                lines.append(f"Warning by {text}")


@contextlib.contextmanager
def whole_reports() -> Iterator[list[Any]]:
    """Collects the reports of loads before transformers takes out the tensors that it expects not to use."""
    reports: list[Any] = []
    take_out = PreTrainedModel._adjust_missing_and_unexpected_keys

    def collect(model: PreTrainedModel, report: Any) -> None:
        reports.append(copy.copy(report))  # `take_out` puts other sets into `report`
        take_out(model, report)

    with mock.patch.object(PreTrainedModel, take_out.__name__, collect):
        yield reports


def check_report(
    model: PreTrainedModel, whole: Any, loading: dict[str, Any], *, source: str, refuses_unused: bool
) -> list[str]:
    """Returns lines about tensors that the model does not use. Raises ModelError if it cannot start. `whole`
    and `loading`: the report of a load before and after transformers' clean-up. `source`: recipe key and
    checkpoint. With `refuses_unused`, tensors left out for no known reason are an error."""
    name = type(model).__name__
    if missing := sorted(loading["missing_keys"]):
        remedy = "give a model with complete weights"
        if missing == ["lm_head.weight"]:
            remedy += "; if its head is its embeddings, set tie_word_embeddings: true in its config.json"
        raise ModelError(
            f"{source}: the weights lack {len(missing)} of {name}'s tensors (first: {missing[0]}), which "
            f"would start with random values; {remedy}"
        )
    if others := sorted((tensor, *map(tuple, shapes)) for tensor, *shapes in whole.mismatched_keys):
        tensor, found, expected = others[0]
        raise ModelError(
            f"{source}: tensors with other shapes than config.json says: {len(others)} (first: {tensor}, "
            f"{found} and not {expected}); give the config that belongs to the weights"
        )
    left_out, lines = defaultdict[str | None, list[str]](list), []
    for tensor in sorted(whole.unexpected_keys):
        is_expected = tensor not in loading["unexpected_keys"]
        left_out[_why_unused(tensor, model, is_expected=is_expected)].append(tensor)
    if _NO_MTP in left_out:
        text = model.config.get_text_config()
        text.update({key: 0 for key in _MTP_KEYS if text.to_dict().get(key)})
    for reason, tensors in left_out.items():
        what = f"{name} does not use {len(tensors)} tensors of the checkpoint (first: {tensors[0]})"
        if reason is None and refuses_unused:
            raise ModelError(
                f"{source}: {what}, so they would be lost; correct config.json, which does not name them, or "
                "set model.unused_tensors: warn to train without them"
            )
        lines.append(f"Warning: {what}" if reason is None else f"{what}: {reason}")
    return lines


def _why_unused(tensor: str, model: PreTrainedModel, *, is_expected: bool) -> str | None:
    """Returns why a tensor is left out on purpose; None: nobody knows. `is_expected`: by transformers."""
    text = model.config.get_text_config()
    layer = _LAYER.search(tensor)
    is_behind = layer is not None and int(layer[1]) >= text.num_hidden_layers
    if _MTP.search(tensor) or (is_behind and (is_expected or any(map(text.to_dict().get, _MTP_KEYS)))):
        return _NO_MTP
    if _TOWER.search(tensor):
        return "text needs no tower for images or sound, and an exported model has none"
    return "transformers does not need them" if is_expected or _ROTARY.search(tensor) else None


def check_tied(model: PreTrainedModel) -> list[str]:
    """Corrects a config that says that head and embeddings are one, but the weights differ; says so."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    configs = (model.config, model.config.get_text_config())
    says_tied = [config for config in configs if config.to_dict().get("tie_word_embeddings")]
    if not says_tied or head is None or head.weight is table.weight:
        return []
    for config in says_tied:
        config.update({"tie_word_embeddings": False})
    return [
        "Warning: config.json says tie_word_embeddings: true, but the weights of head and embeddings differ, "
        "so both are trained, and an exported model's config says false"
    ]
