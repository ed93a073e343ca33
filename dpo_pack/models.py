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
from dpo_pack.attention.select import BackendChoice, select_backend
from dpo_pack.errors import ModelError, UnsupportedModelError
from dpo_pack.layout import Row
from dpo_pack.logps import CHUNK_BYTES, KEPT_BYTES, sequence_sums, token_logps
from dpo_pack.lora import Adapter, LoraSettings, attach_adapter
from dpo_pack.model_config import attention_needs, check_packs, dropout_settings, head_transform


class RowLogps(NamedTuple):
    """What a model says of one row. A NamedTuple, because sharding hooks look for tensors inside outputs."""

    sums: Tensor  # [S] float64, differentiable
    num_tokens: Tensor  # [S] int64
    entropy_sums: Tensor  # [S] float64, detached, as are the following
    top1_sums: Tensor  # [S]
    mean_logit_sums: Tensor  # [S]
    log_square_sums: Tensor  # [S] of log sum_v p(v)^2, nats
    token_logps: Tensor  # [N] fp32, differentiable, sequence by sequence: what `sums` are the sums of


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

    @property
    def adapter(self) -> Adapter | None:
        return self.scorer.adapter

    def as_reference(self) -> contextlib.AbstractContextManager[None]:
        """A policy that has not been trained yet is its reference meanwhile."""
        return contextlib.nullcontext() if self.adapter is None else self.adapter.as_reference()


class CompletionLogps(nn.Module):
    """A causal LM whose forward is: backbone, the scored positions through the head, sums per sequence.

    All of it is inside one module's forward so that sharding wrappers gather the head's weight for it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: AttentionBackend | None,
        autocast: torch.dtype | None,
        adapter: Adapter | None = None,
    ) -> None:
        """`backend` None means padded batches on the model's own attention; `adapter` is in `model`."""
        super().__init__()
        self.model = model
        self.adapter = adapter
        self.backend = backend
        self.autocast = autocast
        self.transform = head_transform(model.config)
        self.num_attention_layers: int = model.config.get_text_config().num_hidden_layers
        self.is_wired = False

    def forward(self, row: Row) -> RowLogps:
        device = row.input_ids.device
        if self.adapter is not None:
            self.adapter.set_dropout(torch.is_grad_enabled())
        with self.autocasting(device):
            hidden = self.hidden_states(row)  # [B, L, D]
        hidden = hidden.flatten(0, 1).index_select(0, row.logit_index)  # [N, D]
        head = self.model.get_output_embeddings()
        weight, bias = (head.weight, head.bias) if self.adapter is None else self.adapter.head_weights(head)
        logps, statistics = token_logps(
            hidden,
            weight,
            bias,
            row.targets,
            transform=self.transform,
            compute_dtype=self.autocast or weight.dtype,
            chunk_bytes=CHUNK_BYTES[device.type],
            kept_bytes=KEPT_BYTES[device.type],
        )
        lengths = row.completion_lengths
        return RowLogps(
            sums=sequence_sums(logps, lengths),
            num_tokens=lengths,
            entropy_sums=sequence_sums(statistics.entropy, lengths),
            top1_sums=sequence_sums(statistics.is_top1, lengths),
            mean_logit_sums=sequence_sums(statistics.mean_logit, lengths),
            log_square_sums=sequence_sums(statistics.log_sum_squares, lengths),
            token_logps=logps,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrix products are computed in."""
        return self.autocast or next(self.model.parameters()).dtype

    def autocasting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def hidden_states(self, row: Row) -> Tensor:
        """[B, L, D]: what the layers make of a row, before the output head."""
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
    with load_errors(path, recipe_key):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    assert isinstance(config, PretrainedConfig)
    return config


def load_tokenizer(
    path: str, *, revision: str | None, trust_remote_code: bool, chat_template: Path | None, recipe_key: str
) -> PreTrainedTokenizerBase:
    """A tokenizer, its chat template replaced by a file's if one is given. Raises ModelError."""
    with load_errors(path, recipe_key):
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
    adapter: LoraSettings | Path | None = None,
) -> LoadedModel:
    """Load a causal LM for packed rows or padded batches, with nothing random in it.

    `adapter` is a new LoRA adapter or the directory of a saved one; then it alone is trained.
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
    dropout = dropout_settings(config)
    config.get_text_config().update(dict.fromkeys(dropout, 0.0))
    with load_errors(path, recipe_key), quiet_transformers():
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
    attached = None
    if adapter is not None:
        attached = attach_adapter(model, adapter, base=path, revision=revision, recipe_key=recipe_key)
    backend = BACKENDS[choice.name] if packed else None
    # In evaluation mode, which does not keep gradients from flowing: no dropout, no noise of routers, and
    # experts chosen as they will be when the model is used (Phi 3.5 MoE draws them in training mode).
    scorer = CompletionLogps(model, backend=backend, autocast=precision.autocast, adapter=attached)
    scorer.to(device).eval()
    if gradient_checkpointing:
        _checkpoint_activations(model)
    return LoadedModel(scorer=scorer, attention=choice, dropout=dropout)


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Layers recompute in the backward pass; they do so in training mode only, and they alone get it."""
    with warnings.catch_warnings():
        # Newer transformers call it activation_checkpointing_enable, older ones only know this name.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = bool(vars(module).get("gradient_checkpointing"))


def save_model(loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Write weights, configs and tokenizer into `target` as `from_pretrained` reads them.

    Of a model with an adapter, the adapter and the tokenizer only.
    """
    with quiet_transformers():
        if loaded.adapter is not None:
            loaded.adapter.save(target)
            tokenizer.save_pretrained(target)
            return
        loaded.model.save_pretrained(target)
        # Training switched dropout off; whoever fine-tunes further gets the family's own settings back.
        config = copy.deepcopy(loaded.model.config)
        config.get_text_config().update(loaded.dropout)
        config.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def load_errors(path: str, recipe_key: str) -> Iterator[None]:
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
