"""Builds the model that its facts describe: reads the weights, changes layers, attaches an adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dpo_pack.model.attention import (
    ATTENTION_NAME,
    BACKENDS,
    BackendChoice,
    register_attention,
    select_backend,
)
from dpo_pack.model.config import (
    attention_needs,
    check_packs,
    num_recurrent_calls,
    own_attention,
    replace_settings,
    routes_tokens,
)
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fast_layers import (
    cast_experts,
    checkpoint_activations,
    compile_layers,
    compiler_obstacle,
    outermost_layers,
    speed_up_linears,
    text_model,
    tile_feed_forwards,
    tower_parameters,
    trim_last_layer,
)
from dpo_pack.model.loading import (
    auto_class,
    check_report,
    check_tied,
    load_errors,
    quiet_transformers,
    whole_reports,
)
from dpo_pack.model.logps import WantedStatistics, compile_head
from dpo_pack.model.lora import attach_adapter, compute_restored, quantization_settings
from dpo_pack.model.parallel import ALONE, Strategy, shard_model
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.model.vision import VisionInputs, vision_family
from dpo_pack.system import ranks
from dpo_pack.system.errors import ModelError


def load_model(
    facts: ModelFacts,
    *,
    device: torch.device,
    strategy: Strategy = ALONE,
    adds_adapter: bool = False,
    tensors: Mapping[str, Tensor] | None = None,
) -> LoadedModel:
    """Loads the model on the device; with `adds_adapter` it gets the new adapter of its settings, if any. All
    ranks must call it if the strategy shards. With `tensors`, the checkpoint's on the meta device, it reads
    no weights, and compares these with the model. Raises ModelError when loading fails, a weight is missing
    or not used, UnsupportedModelError when the model cannot be exact."""
    meta = torch.device("meta")
    if not strategy.shards:
        return _load(facts, device, device if tensors is None else meta, adds_adapter, tensors)
    if facts.quantization is not None:
        raise ModelError(
            f"{facts.recipe_key}: the weights of {facts.settings.path} are quantised, and quantised weights "
            "cannot be in shards; set distributed.strategy: ddp"
        )
    with ranks.first_goes_first():
        weights_on = torch.device("cpu") if ranks.is_first() else meta
        loaded = _load(facts, device, weights_on, adds_adapter, None)
    shard_model(loaded.scorer, strategy, device)
    return loaded


def _load(
    facts: ModelFacts,
    device: torch.device,
    weights_on: torch.device,
    adds_adapter: bool,
    tensors: Mapping[str, Tensor] | None,
) -> LoadedModel:
    """`weights_on` is where the weights are put first; on the meta device they are not read."""
    config, settings, precision = copy.deepcopy(facts.config), facts.settings, facts.precision
    if facts.is_packed:
        check_packs(config)
        register_attention()
        needs, dtype = attention_needs(config), precision.activations
        choice = select_backend(settings.attention, needs, device=device, dtype=dtype)
    else:  # the name is part of the key of cached log-probs
        name = ", ".join(filter(None, ("model's own", own_attention(config))))
        choice = BackendChoice(name=name, reason="padded batches need no layout")
    replaced = replace_settings(config)
    adapter = facts.adapter or (settings.lora if adds_adapter else None)
    attached = None
    with load_errors(settings.path, facts.recipe_key), quiet_transformers() as said:
        model, notes = _read_model(facts, config, weights_on, tensors)
        if config.get_text_config() is not config:
            for parameter in tower_parameters(model):
                parameter.requires_grad_(False)
        if adapter is not None:
            attached = attach_adapter(
                model,
                adapter,
                base=settings.path,
                revision=settings.revision,
                recipe_key=facts.recipe_key,
                reads_weights=weights_on.type != "meta",
                seed=facts.seed,
            )
    if routes_tokens(config):
        cast_experts()
    vision = facts.processor and VisionInputs(processor=facts.processor, family=vision_family(config))
    scorer = CompletionLogps(
        model,
        backend=BACKENDS[choice.name] if facts.is_packed else None,
        autocast=precision.autocast,
        gather_dtype=precision.gathered,
        adapter=attached,
        wanted=WantedStatistics(squares=facts.keeps_squares),
        vision=vision,
    )
    _change_layers(facts, scorer, device, weights_on, compiles=tensors is None)
    return LoadedModel(scorer=scorer, attention=choice, replaced=replaced, notes=notes + said)


def _change_layers(
    facts: ModelFacts, scorer: CompletionLogps, device: torch.device, weights_on: torch.device, compiles: bool
) -> None:
    model, settings = scorer.model, facts.settings
    is_selective = settings.gradient_checkpointing == "selective"
    if device.type == "cpu":
        speed_up_linears(model)
    if settings.mlp_tile_tokens is not None:
        tile_feed_forwards(model, settings.mlp_tile_tokens, has_experts=routes_tokens(facts.config))
    if facts.is_packed:
        if num_recurrent_calls(facts.config):
            wrap_recurrent_layers(model)
        trim_last_layer(model)
    # We train in evaluation mode: it allows gradients, and has no dropout and no noise in routers.
    scorer.eval()
    if weights_on.type != "meta":
        scorer.to(weights_on)
    if settings.gradient_checkpointing:
        checkpoint_activations(model, keeps_products=is_selective, offloads=settings.activation_offload)
    wanted, falls_back = settings.compile, settings.compile == "auto"
    if falls_back:  # selective checkpointing has to see each product
        wanted = device.type == "cuda" and not is_selective and facts.quantization is None
        wanted = wanted and bool(outermost_layers(text_model(model))) and compiler_obstacle(device) is None
    if wanted and compiles:
        compile_layers(model, falls_back=falls_back)
        scorer.head_passes = compile_head(falls_back=falls_back)
        scorer.is_compiled = True


def _read_model(
    facts: ModelFacts,
    config: PretrainedConfig,
    weights_on: torch.device,
    tensors: Mapping[str, Tensor] | None,
) -> tuple[PreTrainedModel, list[str]]:
    """Returns also lines for the user. On the meta device parameters have no values, but buffers have."""
    settings, attention = facts.settings, cast(Any, own_attention(config))
    if facts.is_packed:
        # The language model gets our attention; towers keep theirs, which reads all of an image.
        texts = [name for name in config.sub_configs if getattr(config, name) is config.get_text_config()]
        attention = dict.fromkeys(["", *texts], ATTENTION_NAME) if texts else ATTENTION_NAME
    options: dict[str, Any] = {
        "trust_remote_code": settings.trust_remote_code,
        "dtype": facts.precision.parameters,
        "attn_implementation": attention,
    }
    if settings.quantize is not None:
        options["quantization_config"] = quantization_settings(settings.quantize)
    source = f"{facts.recipe_key}: {settings.path}"
    auto = auto_class(config)
    if weights_on.type == "meta":
        with init_empty_weights(include_buffers=False):
            model = auto.from_config(config, **options)
        assert isinstance(model, PreTrainedModel)
        model.tie_weights()  # parameters that were tied are separate ones on the meta device
        # Of tied tensors the first is in a checkpoint. Where all names fit, the long report would be empty.
        own = {id(one): (name, one.shape) for name, one in [*model.state_dict(keep_vars=True).items()][::-1]}
        if not tensors or dict(own.values()) == {name: one.shape for name, one in tensors.items()}:
            return model, []
        options = {"dtype": options["dtype"], "state_dict": tensors, "device_map": {"": weights_on}}
        read: Any = partial(type(model).from_pretrained, None, config=model.config, **options)
    else:
        # We read weights directly onto a CUDA device. Otherwise each process would hold a copy on the CPU.
        # Without a map transformers puts quantised weights onto the first GPU, in every process.
        has_map = weights_on.type == "cuda" or settings.quantize is not None
        device_map = {"": weights_on} if has_map else None
        options |= {"config": config, "revision": settings.revision, "device_map": device_map}
        read = partial(auto.from_pretrained, settings.path, **options)
    with whole_reports() as reports:
        model, loading = read(output_loading_info=True, ignore_mismatched_sizes=True)
    refuses = settings.unused_tensors == "error"
    notes = check_report(model, reports[0], loading, source=source, refuses_unused=refuses)
    if getattr(model, "is_quantized", False):
        compute_restored(model)
    return model, notes if weights_on.type == "meta" else notes + check_tied(model)
