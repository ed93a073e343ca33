"""Loads policies, references and tokenizers in transformers' formats."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
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

from dpo_pack.model.attention import (
    ATTENTION_NAME,
    BACKENDS,
    BackendChoice,
    register_attention,
    select_backend,
)
from dpo_pack.model.compiling import keep_inputs_on_host, keep_products, text_model, tower_parameters
from dpo_pack.model.config import attention_needs, check_packs, own_attention, replace_settings, routes_tokens
from dpo_pack.model.fast_layers import (
    apply_liger,
    cast_experts,
    experts_note,
    speed_up_linears,
    tile_feed_forwards,
    trim_last_layer,
)
from dpo_pack.model.load_report import check_report, check_tied, whole_reports
from dpo_pack.model.logps import WantedStatistics
from dpo_pack.model.lora import LoraSettings, attach_adapter
from dpo_pack.model.quantize import Quantization, compute_restored, quantization_settings
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.scorer import CompletionLogps, LoadedModel, Precision
from dpo_pack.model.vision import PixelProcessor, VisionInputs, vision_family
from dpo_pack.system.errors import (
    DpoPackError,
    ModelError,
    UnsupportedModelError,
    first_line,
    is_out_of_memory,
)
from dpo_pack.system.hub import check_model, is_adapter
from dpo_pack.system.machine import install_command

# Vision checkpoints of which only the text model is built: the base model of the whole has the head, too.
_TEXT_ONLY = frozenset({"llama4"})


def load_config(
    path: str, *, revision: str | None, trust_remote_code: bool, recipe_key: str
) -> PretrainedConfig:
    """Loads a model's config.json. Raises ModelError if it cannot be loaded or has no layer."""
    check_model(path, revision, recipe_key)
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
    num_layers = getattr(text, "num_hidden_layers", None)
    if num_layers is not None and num_layers < 1:
        raise ModelError(
            f"{recipe_key}: the config.json of {path} has num_hidden_layers: {num_layers}; correct it"
        )
    return config


def load_processor(path: str, *, revision: str | None, trust_remote_code: bool, recipe_key: str) -> Any:
    """Loads transformers' processor of images and text (model.images). Raises ModelError."""
    check_model(path, revision, recipe_key)
    with load_errors(path, recipe_key):
        try:
            processor = AutoProcessor.from_pretrained(
                path, revision=revision, trust_remote_code=trust_remote_code
            )
        except ImportError as error:
            what = f"the processor of {path} needs another package ({first_line(error)})"
            raise ModelError(f"{recipe_key}: {what}; {install_command('images')}") from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "image_token", None) is None:
        what = f"{path} has no processor of images ({type(processor).__name__})"
        raise ModelError(f"{recipe_key}: {what}; leave model.images out, or take a model that reads images")
    return processor


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
    tensors: Mapping[str, Tensor] | None = None,
    refuses_unused: bool = False,
    activation_offload: bool = False,
    mlp_tile_tokens: int | None = None,
    processor: PixelProcessor | None = None,
) -> LoadedModel:
    """Loads a causal LM for packed rows or padded batches, with a new or a saved adapter if given.

    The model will run on `device`; its weights are first put on `weights_on` (None: on `device`; on the meta
    device they are not read, but `tensors`, if any, the checkpoint's on the meta device, are compared).
    `config` is the model's config if the caller has loaded it; `processor` is for rows with images. Raises
    ModelError when loading fails, a weight is missing or (`refuses_unused`) not used, UnsupportedModelError
    when the model cannot be exact.
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
    # The language model gets our attention; towers keep theirs, which reads all of an image.
    texts = [name for name in config.sub_configs if getattr(config, name) is config.get_text_config()]
    ours: Any = dict.fromkeys(["", *texts], ATTENTION_NAME) if texts else ATTENTION_NAME
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "dtype": precision.parameters,
        "attn_implementation": ours if packed else own,
    }
    if quantize is not None:
        options["quantization_config"] = quantization_settings(quantize)
    with load_errors(path, recipe_key), quiet_transformers() as said:
        model, notes = _build_model(
            path, config, weights_on, recipe_key=recipe_key, revision=revision, tensors=tensors,
            refuses_unused=refuses_unused, **options,
        )  # fmt: skip
    if routes_tokens(config):
        cast_experts()
        notes += filter(None, [experts_note(device, precision.activations)])
    if any(getattr(module, "is_causal", True) is False for module in text_model(model).modules()):
        raise UnsupportedModelError(
            f"{recipe_key}: {path}: {type(model).__name__} attends to later tokens of a prompt as well, as "
            "PaliGemma and embedding models do; give a causal model"
        )
    for parameter in tower_parameters(model):
        parameter.requires_grad_(False)
    reads_weights = weights_on.type != "meta"
    attached = None
    if adapter is not None:
        with quiet_transformers() as more:
            attached = attach_adapter(
                model,
                adapter,
                base=path,
                revision=revision,
                recipe_key=recipe_key,
                reads_weights=reads_weights,
            )
        said += more
    scorer = CompletionLogps(
        model,
        backend=BACKENDS[choice.name] if packed else None,
        autocast=precision.autocast,
        gather_dtype=precision.gathered,
        adapter=attached,
        wanted=wanted,
        vision=None if processor is None else VisionInputs(processor=processor, family=vision_family(config)),
    )
    if kernels == "liger":
        apply_liger(model)
    if device.type == "cpu":
        speed_up_linears(model)
    if mlp_tile_tokens is not None:
        tile_feed_forwards(model, mlp_tile_tokens, has_experts=routes_tokens(config))
    if packed:
        wrap_recurrent_layers(model)
        trim_last_layer(model)
    # We train in evaluation mode: it allows gradients, and has no dropout and no noise in routers.
    scorer.eval()
    if reads_weights:
        scorer.to(weights_on)
    if gradient_checkpointing:
        is_selective = gradient_checkpointing == "selective"
        _checkpoint_activations(model, keeps_products=is_selective, offloads=activation_offload)
    return LoadedModel(scorer=scorer, attention=choice, replaced=replaced, notes=notes + said)


def auto_class(config: PretrainedConfig, source: str) -> Any:
    """Returns transformers' class that builds a causal LM; of a vision checkpoint, all of it.

    `source`: the recipe key with the checkpoint. Raises ModelError if there is no such class.
    """
    kind, values = type(config), config.to_dict()
    has_own_code = "AutoModelForCausalLM" in (values.get("auto_map") or {})
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    has_towers = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and "text_config" in values
    if has_own_code or kind.model_type in _TEXT_ONLY or (causal is not None and not has_towers):
        return AutoModelForCausalLM
    if has_towers and not config.is_encoder_decoder:
        return AutoModelForImageTextToText
    raise ModelError(
        f"{source}: transformers has no causal language model for the config of a {kind.model_type} model; "
        "give a checkpoint of a language model"
    )


def _build_model(
    path: str,
    config: PretrainedConfig,
    weights_on: torch.device,
    *,
    recipe_key: str,
    revision: str | None,
    tensors: Mapping[str, Tensor] | None,
    refuses_unused: bool,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Reads the model, and returns lines for the user about its tensors.

    On the meta device its parameters have no values, but its buffers have.
    """
    source = f"{recipe_key}: {path}"
    auto = auto_class(config, source)
    if weights_on.type == "meta":
        with init_empty_weights(include_buffers=False):
            model = auto.from_config(config, **options)
        assert isinstance(model, PreTrainedModel)
        model.tie_weights()  # parameters that were tied are separate ones on the meta device
        if not tensors:
            return model, []
        options = {"dtype": options["dtype"], "state_dict": tensors, "device_map": {"": weights_on}}
        read: Any = partial(type(model).from_pretrained, None, config=model.config, **options)
    else:
        # We read weights directly onto a CUDA device. Otherwise each process would hold a copy on the CPU.
        # Without a map transformers puts quantised weights onto the first GPU, in every process.
        has_map = weights_on.type == "cuda" or "quantization_config" in options
        device_map = {"": weights_on} if has_map else None
        read = partial(
            auto.from_pretrained, path, config=config, revision=revision, device_map=device_map, **options
        )
    with whole_reports() as reports:
        model, loading = read(output_loading_info=True, ignore_mismatched_sizes=True)
    notes = check_report(model, reports[0], loading, source=source, refuses_unused=refuses_unused)
    if getattr(model, "is_quantized", False):
        compute_restored(model)
    return model, notes if weights_on.type == "meta" else notes + check_tied(model)


def _checkpoint_activations(
    model: PreTrainedModel, *, keeps_products: bool = False, offloads: bool = False
) -> None:
    """Makes layers recompute activations; with `keeps_products` all but matrix products and attention, with
    `offloads` from inputs that the host keeps."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if keeps_products:
        settings["context_fn"] = keep_products
    with warnings.catch_warnings():
        # Newer transformers call this activation_checkpointing_enable; older ones have only this name.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(settings)
    for module in model.modules():  # transformers recomputes in training mode only
        module.training = bool(vars(module).get("gradient_checkpointing"))
        if offloads and module.training:
            plain: Any = module._gradient_checkpointing_func
            vars(module)["_gradient_checkpointing_func"] = partial(keep_inputs_on_host, plain)


@contextlib.contextmanager
def load_errors(path: str, recipe_key: str) -> Iterator[None]:
    """Turns errors about a bad directory or hub id into one line that names the recipe key."""
    try:
        yield
    except DpoPackError:
        raise
    except Exception as error:  # the user's files decide the class
        reason = first_line(error).rstrip(".")
        if is_out_of_memory(error):
            raise ModelError(
                f"{recipe_key}: {path} does not fit in memory ({reason}); set "
                "model.dtype=bfloat16, train an adapter (model.lora), or shard the model over several devices"
            ) from error
        if isinstance(error, StrictDataclassError):
            raise ModelError(
                f"{recipe_key}: cannot load {path}: {reason}; correct its config.json"
            ) from error
        raise ModelError(
            f"{recipe_key}: cannot load {path}: {reason}; it must be a hub id or a directory "
            "with config.json, safetensors weights and tokenizer files"
        ) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """Collects what transformers and peft warn of, a line each; hides transformers' bars and load report."""
    said: dict[str, None] = {}

    def hear(package: str, message: object) -> None:
        text = " ".join(str(message).split())
        # We check ourselves what the report and the warning about tied weights say.
        if not re.search("LOAD REPORT|tie_word_embeddings", text):
            said[f"Warning by {package}: {text}"] = None

    def show(message: Any, category: type[Warning], filename: str, *where: Any) -> None:
        package = next((name for name in ("peft", "transformers") if f"/{name}/" in filename), None)
        hear(package, message) if package else shows(message, category, filename, *where)

    logger, handler = transformers_logging.get_logger(), logging.Handler(logging.WARNING)
    handler.emit = lambda record: hear("transformers", record.getMessage())  # type: ignore[method-assign]
    handlers, logger.handlers = logger.handlers, [handler]
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    lines: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=UserWarning, module=r"(peft|transformers)\b")
            shows, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
            yield lines
    finally:
        lines += said
        logger.handlers = handlers
        if bars:
            transformers_logging.enable_progress_bar()
