"""Loading policies, references and tokenizers, and the module that turns a row into log-probs.

Legend: B, L batch and length (a packed row is B = 1), T tokens, N scored completion tokens, S sequences.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from dpo_pack.attention import ATTENTION_NAME, BACKENDS, AttentionBackend, SeamCalls, register_attention
from dpo_pack.attention.select import AttentionNeeds, BackendChoice, select_backend
from dpo_pack.errors import ModelError, UnsupportedModelError
from dpo_pack.families import packing_obstacle
from dpo_pack.layout import Row
from dpo_pack.logps import CHUNK_BYTES, KEPT_BYTES, HeadTransform, sequence_sums, token_logps


class RowLogps(NamedTuple):
    """What a model says of one row. A NamedTuple, because sharding hooks look for tensors inside outputs."""

    sums: Tensor  # [S] float64, differentiable
    num_tokens: Tensor  # [S] int64
    entropy_sums: Tensor  # [S] float64, detached, as are the following
    top1_sums: Tensor  # [S]
    mean_logit_sums: Tensor  # [S]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtype of the parameters, and of autocast (None: off). The same pair for policy and reference."""

    parameters: torch.dtype
    autocast: torch.dtype | None

    @property
    def activations(self) -> torch.dtype:
        return self.autocast or self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM as `CompletionLogps` runs it, and how its attention is computed."""

    scorer: CompletionLogps
    attention: BackendChoice
    dropout: dict[str, float]  # config values that training set to zero

    @property
    def model(self) -> PreTrainedModel:
        return self.scorer.model


class CompletionLogps(nn.Module):
    """A causal LM whose forward is: backbone, the scored positions through the head, sums per sequence.

    All of it is inside one module's forward so that sharding wrappers gather the head's weight for it.
    """

    def __init__(
        self, model: PreTrainedModel, *, backend: AttentionBackend | None, autocast: torch.dtype | None
    ) -> None:
        """`backend` None means padded batches on the model's own attention."""
        super().__init__()
        self.model = model
        self.backend = backend
        self.autocast = autocast
        self.transform = head_transform(model.config)
        self.num_attention_layers: int = model.config.get_text_config().num_hidden_layers
        self.is_wired = False

    def forward(self, row: Row) -> RowLogps:
        device = row.input_ids.device
        with self.autocasting(device):
            hidden = self._hidden_states(row)  # [B, L, D]
        hidden = hidden.flatten(0, 1).index_select(0, row.logit_index)  # [N, D]
        head = self.model.get_output_embeddings()
        logps, statistics = token_logps(
            hidden,
            head.weight,
            head.bias,
            row.targets,
            transform=self.transform,
            compute_dtype=self.autocast or head.weight.dtype,
            chunk_bytes=CHUNK_BYTES[device.type],
            kept_bytes=KEPT_BYTES[device.type],
        )
        lengths = row.completion_lengths
        return RowLogps(
            sequence_sums(logps, lengths), lengths, *(sequence_sums(v, lengths) for v in statistics)
        )

    def autocasting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def _hidden_states(self, row: Row) -> Tensor:
        backbone = _backbone(self.model)
        arguments: dict[str, Any] = {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "attention_mask": row.attention_mask,
            # With its default of True, transformers would build a cache, and with a cache its masks.
            "use_cache": False,
        }
        if row.segments is None:
            hidden: Tensor = backbone(**arguments).last_hidden_state
            return hidden
        calls = SeamCalls()
        hidden = backbone(
            **arguments, row_segments=row.segments, row_backend=self.backend, seam_calls=calls
        ).last_hidden_state
        if not self.is_wired:
            self._check_wiring(calls.count)
        return hidden

    def _check_wiring(self, num_calls: int) -> None:
        """Every layer must mix tokens through the seam, or sequences of a row leak into each other."""
        if num_calls != self.num_attention_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has {self.num_attention_layers} layers, but {num_calls} of "
                "them went through packed attention; the others would mix the sequences of a row. "
                "Use packing.mode: padded"
            )
        self.is_wired = True


def _backbone(model: PreTrainedModel) -> nn.Module:
    """The model without its head. Llama 4's own `base_model` is the whole model."""
    return model.base_model if model.base_model is not model else model.get_submodule("model")


def head_transform(config: PretrainedConfig) -> HeadTransform:
    """What this family does to its logits after the head's matrix product."""
    values = config.get_text_config().to_dict()
    family = str(values.get("model_type", ""))
    scale = 1.0
    if values.get("logit_scale") is not None:  # Cohere
        scale *= float(values["logit_scale"])
    if values.get("lm_head_multiplier") is not None:  # Falcon-H1
        scale *= float(values["lm_head_multiplier"])
    if values.get("logits_scaling") is not None:
        factor = float(values["logits_scaling"])
        # HyperCLOVA X multiplies, Granite divides by the key of the same name.
        scale *= factor if family.startswith("hyperclovax") else 1.0 / factor
    if values.get("dim_model_base") is not None:  # MiniCPM3 scales the head's input
        scale *= float(values["dim_model_base"]) / float(values["hidden_size"])
    softcap = next((values[key] for key in _LOGIT_SOFTCAP_KEYS if values.get(key)), None)
    return HeadTransform(scale=scale, softcap=None if softcap is None else float(softcap))


# Of Gemma, RecurrentGemma and xLSTM.
_LOGIT_SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def attention_needs(config: PretrainedConfig) -> AttentionNeeds:
    """What this model's attention asks of a kernel, read off its config."""
    text = config.get_text_config()
    values = text.to_dict()
    # hidden_size and num_attention_heads as attributes: GPT-2 and others store them under other names.
    by_width = int(text.hidden_size) // int(text.num_attention_heads)
    head_dim = int(values.get("qk_head_dim") or values.get("head_dim") or by_width)
    return AttentionNeeds(
        head_dim=head_dim,
        value_head_dim=int(values.get("v_head_dim") or head_dim),
        has_window=values.get("sliding_window") is not None,
        has_softcap=values.get("attn_logit_softcapping") is not None,
        has_sinks=values.get("model_type") == "gpt_oss",
        has_custom_scale=any(
            values.get(key) is not None for key in ("attention_multiplier", "query_pre_attn_scalar")
        ),
    )


def resolve_precision(dtype: str, autocast: str, device: torch.device) -> Precision:
    """A recipe's `model.dtype` and `model.autocast`; auto: fp32 parameters, bf16 autocast on CUDA."""
    parameters: torch.dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    if autocast == "auto":
        use_bfloat16 = device.type == "cuda" and parameters == torch.float32
        return Precision(parameters=parameters, autocast=torch.bfloat16 if use_bfloat16 else None)
    return Precision(parameters=parameters, autocast=None if autocast == "none" else getattr(torch, autocast))


def load_config(
    path: str, *, revision: str | None, trust_remote_code: bool, recipe_key: str
) -> PretrainedConfig:
    """A model's config.json. Raises ModelError."""
    with _load_errors(path, recipe_key):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    assert isinstance(config, PretrainedConfig)
    return config


def load_tokenizer(
    path: str, *, revision: str | None, trust_remote_code: bool, chat_template: Path | None, recipe_key: str
) -> PreTrainedTokenizerBase:
    """A tokenizer, its chat template replaced by a file's if one is given. Raises ModelError."""
    with _load_errors(path, recipe_key):
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
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
) -> LoadedModel:
    """Load a causal LM for packed rows or padded batches, dropout off, in training mode.

    Raises ModelError when it cannot be loaded, UnsupportedModelError when it cannot be computed exactly.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, recipe_key=recipe_key)
    choice = BackendChoice(name="model's own", reason="padded batches need no layout")
    if packed:
        check_packs(config)
        register_attention()
        choice = select_backend(
            attention, attention_needs(config), device=device, dtype=precision.activations
        )
    dropout = _dropout_settings(config)
    config.get_text_config().update(dict.fromkeys(dropout, 0.0))
    with _load_errors(path, recipe_key), _quiet_transformers():
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(  # type: ignore[assignment]
            path,
            config=config,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=precision.parameters,
            attn_implementation=ATTENTION_NAME if packed else None,
            output_loading_info=True,
        )
    model, loading = loaded
    assert isinstance(model, PreTrainedModel)
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(
            f"{recipe_key}: the weights in {path} lack {len(missing)} of {type(model).__name__}'s tensors "
            f"(first: {missing[0]}), which would start random; point at complete weights"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        with warnings.catch_warnings():
            # Newer transformers call it activation_checkpointing_enable, older ones only know this name.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = BACKENDS[choice.name] if packed else None
    scorer = CompletionLogps(model, backend=backend, autocast=precision.autocast).to(device).train()
    return LoadedModel(scorer=scorer, attention=choice, dropout=dropout)


def save_model(loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Write weights, configs and tokenizer into `target` as `from_pretrained` reads them."""
    with _quiet_transformers():
        loaded.model.save_pretrained(target)
        # Training switched dropout off; whoever fine-tunes further gets the family's own settings back.
        config = copy.deepcopy(loaded.model.config)
        config.get_text_config().update(loaded.dropout)
        config.save_pretrained(target)
        tokenizer.save_pretrained(target)


def check_packs(config: PretrainedConfig) -> None:
    """Refuse families whose rows cannot be packed, before loading. Raises UnsupportedModelError."""
    obstacle = packing_obstacle(config)
    if obstacle is not None:
        family = config.get_text_config().model_type
        raise UnsupportedModelError(f"{family} cannot be packed: {obstacle}; use packing.mode: padded")


def check_positions(config: PretrainedConfig, longest_sequence: int) -> None:
    """Refuse sequences beyond the positions a model knows. `longest_sequence` is in tokens.

    Raises ModelError. Rotary variants whose frequencies depend on the longest position in a batch are
    exact within the original maximum only, which is their `max_position_embeddings` here as well.
    """
    values = config.get_text_config().to_dict()
    known = values.get("max_position_embeddings")
    rope = values.get("rope_parameters") or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # Gemma 3: by layer type
        if kind.get("rope_type") in ("dynamic", "longrope"):
            known = kind.get("original_max_position_embeddings") or known
    if known is not None and longest_sequence > int(known):
        raise ModelError(
            f"data.max_length: the longest sequence has {longest_sequence} tokens, but this model is exact "
            f"for {known} positions only; set data.max_length: {known}"
        )


def check_rows(config: PretrainedConfig, *, longest_sequence: int, longest_row: int) -> None:
    """Refuse packed rows that Llama 4 computes otherwise than each sequence alone. Lengths are in tokens.

    Its local layers attend within chunks, which are not windows: exact for sequences of one chunk. Where it
    uses no positions it scales queries by their place in the row, in steps of `floor_scale`: exact for rows
    within the first step. Raises UnsupportedModelError.
    """
    values = config.get_text_config().to_dict()
    chunk = values.get("attention_chunk_size")
    is_chunked = "chunked_attention" in (values.get("layer_types") or ())
    if is_chunked and chunk is not None and longest_sequence > chunk:
        raise UnsupportedModelError(
            f"data.max_length: the longest sequence has {longest_sequence} tokens, but packing this model is "
            f"exact for {chunk} only, the size of its attention chunks; set data.max_length: {chunk} or "
            "packing.mode: padded"
        )
    if values.get("attn_temperature_tuning") and longest_row >= values["floor_scale"]:
        exact = int(values["floor_scale"]) - 1
        raise UnsupportedModelError(
            f"packing.token_budget: rows may have {longest_row} tokens, but this model scales queries by "
            f"their place in the row, and packing it is exact for rows of {exact} only; set "
            f"packing.token_budget and reference.token_budget to at most {exact}, or packing.mode: padded"
        )


# Config values that switch a family's dropout or router noise on; DPO trains without either.
_DROPOUT_KEYS = frozenset(
    {
        "activation_dropout",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "dropout",
        "embd_pdrop",
        "embedding_dropout",
        "ffn_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "layerdrop",
        "resid_pdrop",
        "residual_dropout",
        "router_jitter_noise",
    }
)


def _dropout_settings(config: PretrainedConfig) -> dict[str, float]:
    values = config.get_text_config().to_dict()
    return {key: values[key] for key in sorted(_DROPOUT_KEYS & values.keys()) if values[key]}


@contextlib.contextmanager
def _load_errors(path: str, recipe_key: str) -> Iterator[None]:
    """What transformers raises for a bad directory or hub id -> one line naming the recipe key."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{recipe_key}: cannot load {path}: {first_line.rstrip('.')}; it must be a hub id or a directory "
            "with config.json, safetensors weights and tokenizer files"
        ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
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
