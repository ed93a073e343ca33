"""Loads policies, references and tokenizers, and saves trained models, in transformers' formats."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
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

from dpo_pack.model.attention import (
    ATTENTION_NAME,
    BACKENDS,
    BackendChoice,
    register_attention,
    select_backend,
)
from dpo_pack.model.compiling import keep_products
from dpo_pack.model.config import attention_needs, check_packs, own_attention, replace_settings
from dpo_pack.model.fast_layers import apply_liger, speed_up_linears, trim_last_layer
from dpo_pack.model.logps import WantedStatistics
from dpo_pack.model.lora import LoraSettings, attach_adapter
from dpo_pack.model.quantize import Quantization, compute_restored, quantization_settings
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.scorer import CompletionLogps, LoadedModel, Precision
from dpo_pack.system.errors import DpoPackError, ModelError, first_line, is_out_of_memory
from dpo_pack.system.hub import check_model


def load_config(
    path: str, *, revision: str | None, trust_remote_code: bool, recipe_key: str
) -> PretrainedConfig:
    """Loads a model's config.json. Raises ModelError if it cannot be loaded or has no layer."""
    check_model(path, revision, recipe_key)
    with load_errors(path, recipe_key):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    assert isinstance(config, PretrainedConfig)
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if num_layers is not None and num_layers < 1:
        raise ModelError(
            f"{recipe_key}: the config.json of {path} has num_hidden_layers: {num_layers}; correct it"
        )
    return config


def load_tokenizer(
    path: str, *, revision: str | None, trust_remote_code: bool, chat_template: Path | None, recipe_key: str
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. The file `chat_template` replaces its template. Raises ModelError."""
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


def load_model(
    path: str,
    *,
    revision: str | None,
    trust_remote_code: bool,
    precision: Precision,
    attention: str,
    packed: bool,
    gradient_checkpointing: bool | Literal["selective"],
    device: torch.device,
    recipe_key: str,
    adapter: LoraSettings | Path | None = None,
    weights_on: torch.device | None = None,
    wanted: WantedStatistics | None = None,
    kernels: str = "none",
    quantize: Quantization | None = None,
    config: PretrainedConfig | None = None,
) -> LoadedModel:
    """Loads a causal LM for packed rows or padded batches, with a new or a saved adapter if given.

    The model will run on `device`; its weights are first put on `weights_on` (None: on `device`; on the meta
    device they are not read). `config` is the model's config if the caller has loaded it. Raises ModelError
    when loading fails or a weight is missing, UnsupportedModelError when the model cannot be exact.
    """
    weights_on = weights_on or device
    config = copy.deepcopy(config) or load_config(
        path, revision=revision, trust_remote_code=trust_remote_code, recipe_key=recipe_key
    )
    own = own_attention(config)
    name = "model's own" if own is None else f"model's own, {own}"  # part of the key of cached log-probs
    choice = BackendChoice(name=name, reason="padded batches need no layout")
    if packed:
        check_packs(config)
        register_attention()
        needs = attention_needs(config)
        choice = select_backend(attention, needs, device=device, dtype=precision.activations)
    replaced = replace_settings(config)
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "dtype": precision.parameters,
        "attn_implementation": ATTENTION_NAME if packed else own,
    }
    if quantize is not None:
        options["quantization_config"] = quantization_settings(quantize)
    with load_errors(path, recipe_key), quiet_transformers():
        model = _build_model(path, config, weights_on, recipe_key=recipe_key, revision=revision, **options)
    reads_weights = weights_on.type != "meta"
    attached = None
    if adapter is not None:
        attached = attach_adapter(
            model, adapter, base=path, revision=revision, recipe_key=recipe_key, reads_weights=reads_weights
        )
    scorer = CompletionLogps(
        model,
        backend=BACKENDS[choice.name] if packed else None,
        autocast=precision.autocast,
        gather_dtype=precision.gathered,
        adapter=attached,
        wanted=wanted,
    )
    if kernels == "liger":
        apply_liger(model)
    if device.type == "cpu":
        speed_up_linears(model)
    if packed:
        wrap_recurrent_layers(model)
        trim_last_layer(model)
    # We train in evaluation mode: it allows gradients, and has no dropout and no noise in routers.
    scorer.eval()
    if reads_weights:
        scorer.to(weights_on)
    if gradient_checkpointing:
        _checkpoint_activations(model, keeps_products=gradient_checkpointing == "selective")
    return LoadedModel(scorer=scorer, attention=choice, replaced=replaced)


def _build_model(
    path: str,
    config: PretrainedConfig,
    weights_on: torch.device,
    *,
    recipe_key: str,
    revision: str | None,
    **options: Any,
) -> PreTrainedModel:
    """Reads the model; on the meta device its parameters have no values, but its buffers have."""
    if weights_on.type == "meta":
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, **options)
        assert isinstance(model, PreTrainedModel)
        model.tie_weights()  # parameters that were tied are separate ones on the meta device
        return model
    # We read weights directly onto a CUDA device. Otherwise each process would hold a copy on the CPU.
    # Without a map transformers puts quantised weights onto the first GPU, in every process.
    has_map = weights_on.type == "cuda" or "quantization_config" in options
    loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(  # type: ignore[assignment]
        path,
        config=config,
        revision=revision,
        device_map={"": weights_on} if has_map else None,
        output_loading_info=True,
        **options,
    )
    model, loading = loaded
    assert isinstance(model, PreTrainedModel)
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(
            f"{recipe_key}: the weights in {path} lack {len(missing)} of {type(model).__name__}'s tensors "
            f"(first: {missing[0]}), which would start with random values; give a model with complete weights"
        )
    if getattr(model, "is_quantized", False):
        compute_restored(model)
    return model


def _checkpoint_activations(model: PreTrainedModel, *, keeps_products: bool) -> None:
    """Makes layers recompute activations; with `keeps_products` all but matrix products and attention."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if keeps_products:
        settings["context_fn"] = keep_products
    with warnings.catch_warnings():
        # Newer transformers call this activation_checkpointing_enable; older ones have only this name.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(settings)
    for module in model.modules():  # transformers recomputes in training mode only
        module.training = bool(vars(module).get("gradient_checkpointing"))


def save_model(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Writes weights (or only the adapter), configs and tokenizer as `from_pretrained` reads them.

    For a sharded model, `state` holds its whole tensors.
    """
    with quiet_transformers():
        if loaded.adapter is not None:
            loaded.adapter.save(target, state)
            tokenizer.save_pretrained(target)
            return
        model = loaded.model
        generation: GenerationConfig | None = model.generation_config if model.can_generate() else None
        try:
            if generation is not None:
                # Published settings can contradict each other (a `top_p` without sampling), and some releases
                # of transformers refuse to save a model with such settings.
                model.generation_config = GenerationConfig()
            model.save_pretrained(target, state_dict=state)
        finally:
            if generation is not None:
                model.generation_config = generation
        if generation is not None:
            generation.to_json_file(target / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
        # Training switched dropout off; the saved config has the model's own settings.
        config = copy.deepcopy(model.config)
        config.get_text_config().update(loaded.replaced)
        config.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def load_errors(path: str, recipe_key: str) -> Iterator[None]:
    """Turns errors about a bad directory or hub id into one line that names the recipe key."""
    try:
        yield
    except DpoPackError:
        raise
    except Exception as error:  # the user's files decide the class
        reason = first_line(error)
        if is_out_of_memory(error):
            raise ModelError(
                f"{recipe_key}: {path} does not fit in memory ({reason.rstrip('.')}); set "
                "model.dtype=bfloat16, train an adapter (model.lora), or shard the model over several devices"
            ) from error
        raise ModelError(
            f"{recipe_key}: cannot load {path}: {reason.rstrip('.')}; it must be a hub id or a directory "
            "with config.json, safetensors weights and tokenizer files"
        ) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' progress bars and reports. We check ourselves what matters in them."""
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
