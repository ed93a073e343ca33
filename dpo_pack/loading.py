"""Loading policies, references and tokenizers, and saving what was trained, as transformers has them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from dpo_pack.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.attention.select import BackendChoice, select_backend
from dpo_pack.cpu_products import speed_up_linears
from dpo_pack.errors import ModelError
from dpo_pack.head_logits import Asked
from dpo_pack.hub import check_model
from dpo_pack.kernels import apply_liger
from dpo_pack.last_layer import trim_last_layer
from dpo_pack.lora import LoraSettings, attach_adapter
from dpo_pack.model_config import attention_needs, check_packs, own_attention, training_settings
from dpo_pack.models import CompletionLogps, LoadedModel, Precision


def load_config(
    path: str, *, revision: str | None, trust_remote_code: bool, recipe_key: str
) -> PretrainedConfig:
    """A model's config.json. Raises ModelError."""
    check_model(path, revision, recipe_key)
    with load_errors(path, recipe_key):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    assert isinstance(config, PretrainedConfig)
    return config


def load_tokenizer(
    path: str, *, revision: str | None, trust_remote_code: bool, chat_template: Path | None, recipe_key: str
) -> PreTrainedTokenizerBase:
    """A tokenizer, its chat template replaced by a file's if one is given. Raises ModelError."""
    check_model(path, revision, recipe_key)
    with load_errors(path, recipe_key):
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ModelError(f"tokenizer.chat_template: cannot read {chat_template}: {reason}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_model(
    path: str,
    *,
    revision: str | None,
    trust_remote_code: bool,
    precision: Precision,
    attention: str,
    packed: bool,
    gradient_checkpointing: bool,
    device: torch.device,
    recipe_key: str,
    adapter: LoraSettings | Path | None = None,
    weights_on: torch.device | None = None,
    asked: Asked | None = None,
    kernels: str = "none",
) -> LoadedModel:
    """Load a causal LM for packed rows or padded batches, with nothing random in it.

    `adapter` is a new LoRA adapter or the directory of a saved one; then it alone is trained. The model will
    run on `device`; its weights are left on `weights_on`, if that is given, and not even read on the meta
    device. Raises ModelError when it cannot be loaded, UnsupportedModelError when it cannot be computed
    exactly.
    """
    weights_on = weights_on or device
    reads_weights = weights_on.type != "meta"
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, recipe_key=recipe_key)
    own = own_attention(config)
    name = "model's own" if own is None else f"model's own, {own}"  # a key of cached log-probs
    choice = BackendChoice(name=name, reason="padded batches need no layout")
    if packed:
        check_packs(config)
        register_attention()
        choice = select_backend(
            attention, attention_needs(config), device=device, dtype=precision.activations
        )
    replaced = replace_settings(config)
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "dtype": precision.parameters,
        "attn_implementation": ATTENTION_NAME if packed else own,
    }
    if reads_weights:
        # On a CUDA device at once, so that not every process of a machine holds a copy on the CPU.
        options["device_map"] = {"": weights_on} if weights_on.type == "cuda" else None
        model = _read_model(path, config, recipe_key=recipe_key, revision=revision, **options)
    else:
        model = _empty_model(path, config, recipe_key=recipe_key, **options)
    attached = None
    if adapter is not None:
        attached = attach_adapter(
            model,
            adapter,
            base=path,
            revision=revision,
            recipe_key=recipe_key,
            reads_weights=reads_weights,
        )
    backend = BACKENDS[choice.name] if packed else None
    # In evaluation mode, which does not keep gradients from flowing: no dropout, no noise of routers, and
    # experts chosen as they will be when the model is used (Phi 3.5 MoE draws them in training mode).
    scorer = CompletionLogps(
        model,
        backend=backend,
        autocast=precision.autocast,
        gather_dtype=precision.gathered,
        adapter=attached,
        asked=asked,
    )
    if kernels == "liger":
        apply_liger(model)
    if device.type == "cpu":
        speed_up_linears(model)
    if packed:
        trim_last_layer(model)
    scorer.eval()
    if reads_weights:
        scorer.to(weights_on)
    if gradient_checkpointing:
        _checkpoint_activations(model)
    return LoadedModel(scorer=scorer, attention=choice, replaced=replaced)


def replace_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Set the config to what training computes with; returns what it had there instead, by key."""
    text, settings = config.get_text_config(), training_settings(config)
    replaced = {key: text.to_dict()[key] for key in settings}
    text.update(settings)
    return replaced


def _read_model(path: str, config: PretrainedConfig, *, recipe_key: str, **options: Any) -> PreTrainedModel:
    """The model with its weights: all of them, none of them random."""
    with load_errors(path, recipe_key), quiet_transformers():
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(  # type: ignore[assignment]
            path,
            config=config,
            output_loading_info=True,
            **options,
        )
    model, loading = loaded
    assert isinstance(model, PreTrainedModel)
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(
            f"{recipe_key}: the weights in {path} lack {len(missing)} of {type(model).__name__}'s tensors "
            f"(first: {missing[0]}), which would start random; point at complete weights"
        )
    return model


def _empty_model(path: str, config: PretrainedConfig, *, recipe_key: str, **options: Any) -> PreTrainedModel:
    """The model with parameters on the meta device; its buffers are real."""
    with load_errors(path, recipe_key), quiet_transformers(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **options)
    assert isinstance(model, PreTrainedModel)
    model.tie_weights()  # to the meta device each went by itself
    return model


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Layers recompute in the backward pass; they do so in training mode only, and they alone get it."""
    with warnings.catch_warnings():
        # Newer transformers call it activation_checkpointing_enable, older ones only know this name.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = bool(vars(module).get("gradient_checkpointing"))


def save_model(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write weights, configs and tokenizer into `target` as `from_pretrained` reads them.

    Of a model with an adapter, the adapter and the tokenizer only. `state` holds the model's tensors where it
    is sharded itself.
    """
    with quiet_transformers():
        if loaded.adapter is not None:
            loaded.adapter.save(target, state)
            tokenizer.save_pretrained(target)
            return
        with _default_generation_config(loaded.model) as own:
            loaded.model.save_pretrained(target, state_dict=state)
        if own is not None:
            own.to_json_file(target / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
        # Training switched dropout off; whoever uses the model or trains it on gets its own settings back.
        config = copy.deepcopy(loaded.model.config)
        config.get_text_config().update(loaded.replaced)
        config.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _default_generation_config(model: PreTrainedModel) -> Iterator[GenerationConfig | None]:
    """Yields the model's own settings, which are not there meanwhile; None of a model that cannot generate.

    Published ones may contradict themselves (a `top_p` without sampling); transformers loads them with a
    warning, and some of its releases then refuse to save them, which would lose a trained model.
    """
    own: GenerationConfig | None = model.generation_config if model.can_generate() else None
    if own is None:
        yield None
        return
    model.generation_config = GenerationConfig()
    try:
        yield own
    finally:
        model.generation_config = own


# StrictDataclassError: a value in config.json of a wrong type; the last two: config.json that is not one.
_LOAD_ERRORS = (
    *(OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError),
    StrictDataclassError,
    *(TypeError, AttributeError),
)


@contextlib.contextmanager
def load_errors(path: str, recipe_key: str) -> Iterator[None]:
    """What transformers raises for a bad directory or hub id -> one line naming the recipe key."""
    try:
        yield
    except _LOAD_ERRORS as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            raise ModelError(
                f"{recipe_key}: {path} does not fit in memory ({first_line.rstrip('.')}); set "
                "model.dtype=bfloat16, train an adapter (model.lora), or shard it over several devices"
            ) from error
        raise ModelError(
            f"{recipe_key}: cannot load {path}: {first_line.rstrip('.')}; it must be a hub id or a directory "
            "with config.json, safetensors weights and tokenizer files"
        ) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Loading and saving print bars and reports of their own; what matters of them we check ourselves."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
