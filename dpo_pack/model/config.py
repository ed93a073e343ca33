"""Reads a model's head, attention and limits from its config; the table of the families that are special.

A family that is not in the table is packed, and the start-up proofs decide whether the results are exact.
docs/families.md lists all families that are tested (by tests/model/test_families.py, with tiny models).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dpo_pack.model.attention import AttentionNeeds
from dpo_pack.model.logps import HeadTransform
from dpo_pack.model.recurrence.kernels import KERNELS, import_kernel
from dpo_pack.system.errors import ModelError, UnsupportedModelError

TRANSFORMERS = tuple(int(number) for number in transformers.__version__.split(".")[:2])  # the release

# The config keys of a softcap on logits: of Gemma, RecurrentGemma and xLSTM.
_LOGIT_SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SINK_FAMILIES = frozenset(
    {"deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
)
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def head_transform(config: PretrainedConfig) -> HeadTransform:
    values = config.get_text_config().to_dict()
    scale = 1.0
    for key in ("logit_scale", "lm_head_multiplier"):  # of Cohere and Falcon-H1
        if values.get(key) is not None:
            scale *= float(values[key])
    if values.get("logits_scaling") is not None:
        factor = float(values["logits_scaling"])
        # HyperCLOVA X multiplies by this value, Granite divides by it.
        is_factor = str(values.get("model_type", "")).startswith("hyperclovax")
        scale *= factor if is_factor else 1.0 / factor
    if values.get("dim_model_base") is not None:  # MiniCPM3 scales the head's input
        scale *= float(values["dim_model_base"]) / float(values["hidden_size"])
    softcap = next((values[key] for key in _LOGIT_SOFTCAP_KEYS if values.get(key)), None)
    return HeadTransform(scale=scale, softcap=None if softcap is None else float(softcap))


def attention_needs(config: PretrainedConfig) -> AttentionNeeds:
    text = config.get_text_config()
    values = text.to_dict()
    # Attributes, because GPT-2 and other families store these two under other names.
    by_width = int(text.hidden_size) // int(getattr(text, "num_attention_heads", None) or text.hidden_size)
    layers = (values.get("per_layer_config") or {}).values()  # Gemma 4: wider heads on global layers
    # A config whose layers differ raises an error if the attribute is read.
    by_name = values.get("head_dim") if layers else getattr(text, "head_dim", None)
    usual = int(values.get("qk_head_dim") or by_name or by_width)
    head_dim = max(usual, *(int(layer.get("head_dim") or 0) for layer in layers), 0)
    return AttentionNeeds(
        head_dim=head_dim,
        value_head_dim=int(values.get("v_head_dim") or head_dim),
        has_window=bool(values.get("sliding_window")),
        has_softcap=own_attention(config) is not None,
        has_sinks=values.get("model_type") in _SINK_FAMILIES,
    )


def own_attention(config: PretrainedConfig) -> str | None:
    """Returns what transformers must use if rows are not packed; None: it chooses. With a softcap it is
    eager, because some releases choose sdpa, which ignores the softcap."""
    softcap = config.get_text_config().to_dict().get("attn_logit_softcapping")
    return None if softcap is None else "eager"


def attention_names(config: PretrainedConfig) -> dict[str, str | None]:
    """Returns the attention of a model ("") and of its parts, as transformers sets it: towers have others.
    Without parts that have none, such as MPT's `attn_config`: transformers refuses to set None."""
    parts = [(name, getattr(config, name)) for name in config.sub_configs]
    named = {name: part._attn_implementation for name, part in parts if part is not None}
    return {"": config._attn_implementation, **{name: own for name, own in named.items() if own is not None}}


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Returns, from the config, each attention layer's sliding window; None means full attention, as of a
    chunked layer (Llama 4): `check_lengths` refuses sequences longer than a chunk."""
    text = config.get_text_config()
    values = text.to_dict()
    # We read the attribute and not `values`, because Gemma 3 uses another window than its file names.
    window = None if values.get("sliding_window") is None else effective_window(text.sliding_window, config)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    attend = [kind for kind in kinds if kind in ATTENTION_LAYERS or kind == "hybrid"]
    return [window if kind == "sliding_attention" else None for kind in attend]


def effective_window(window: int | None, config: PretrainedConfig) -> int | None:
    """Returns `window`; None if no sequence can be longer: Phi 3.5 MoE then ignores it."""
    known = config.get_text_config().to_dict().get("max_position_embeddings")
    return None if window is None or (known is not None and window >= int(known)) else window


def routes_tokens(config: PretrainedConfig) -> bool:
    """Whether the model is a mixture of experts, whose matrix products depend on all tokens of a row."""
    values = config.get_text_config().to_dict()
    return any(np.mean(values.get(key) or 0) > 1 for key in _NUM_EXPERTS_KEYS)


def num_recurrent_calls(config: PretrainedConfig) -> int:
    """Returns how many calls of functions of `recurrence/` one forward of a packed row must make."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    family = FAMILIES.get(config.get_text_config().model_type, _PLAIN)
    return family.functions * sum(kind in RECURRENT_LAYERS for kind in kinds)


def check_packs(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError if rows of the config's family cannot be packed. A family that is refused
    for its recurrent layers can be packed if a config names only attention layers."""
    text = config.get_text_config()
    layers, family = set(text.to_dict().get("layer_types") or ()), FAMILIES.get(text.model_type, _PLAIN)
    others = layers - ATTENTION_LAYERS
    unknown = others - (RECURRENT_LAYERS | _NO_MIXING_LAYERS if family.functions else set())
    lacks_kernel = family.kernel is None or isinstance(import_kernel(KERNELS[family.kernel]), str)
    obstacle = None
    if family.reason is not None and (others or not layers) and lacks_kernel:
        obstacle = family.reason
    elif family.since > TRANSFORMERS:
        obstacle = (
            f"in transformers {transformers.__version__} its layers do not pass a row's layout on; install "
            "transformers {}.{} or newer".format(*family.since)
        )
    elif unknown:
        obstacle = f"its {', '.join(sorted(unknown))} layers mix the sequences of a row outside attention"
    if obstacle is not None:
        raise UnsupportedModelError(
            f"{text.model_type} cannot be packed: {obstacle}; use packing.mode: padded"
        )


def rotary_kinds(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Returns [a config's rotary parameters, and those of each kind of layer if it has them (Gemma 3)]."""
    rope = config.get_text_config().to_dict().get("rope_parameters") or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def known_positions(config: PretrainedConfig) -> int | None:
    """Returns how many positions a model computes exactly; None if its config does not say. If its rotary
    frequencies change with a batch's longest position, that is the original maximum, if it has one."""
    values = config.get_text_config().to_dict()
    names = ("max_position_embeddings", "n_positions", "max_seq_len")  # the last two: GPT-2, MPT
    known = next((values[name] for name in names if values.get(name) is not None), None)
    for kind in rotary_kinds(config):
        if kind.get("rope_type") in ("dynamic", "longrope"):
            known = kind.get("original_max_position_embeddings") or known
    return None if known is None else int(known)


def check_lengths(config: PretrainedConfig, *, longest_sequence: int, longest_row: int | None) -> None:
    """Raises ModelError if a sequence is longer than `known_positions`. Raises UnsupportedModelError if a
    sequence of a packed row does not fit into a chunk of Llama 4's local layers, or a row into the first step
    of `floor_scale` tokens. Lengths are in tokens; without `longest_row`, rows are padded."""
    known, values = known_positions(config), config.get_text_config().to_dict()
    if known is not None and longest_sequence > known:
        raise ModelError(
            f"data.max_length: the longest sequence has {longest_sequence} tokens, but this model is exact "
            f"for {known} positions only; set data.max_length: {known}"
        )
    if longest_row is None:
        return
    chunk = values.get("attention_chunk_size")
    if chunk and "chunked_attention" in (values.get("layer_types") or ()) and longest_sequence > chunk:
        raise UnsupportedModelError(
            f"data.max_length: the longest sequence has {longest_sequence} tokens, and a chunk of attention "
            f"has {chunk} in this model; set data.max_length: {chunk} or packing.mode: padded"
        )
    if values.get("attn_temperature_tuning") and longest_row >= (scale := int(values["floor_scale"])):
        raise UnsupportedModelError(
            f"packing.token_budget: rows may have {longest_row} tokens, but this model scales queries by "
            f"their position in the row; set packing.token_budget and reference.token_budget to at most "
            f"{scale - 1}, or packing.mode: padded"
        )


# In evaluation mode RWKV halves the weights of every n-th layer in place, and xLSTM computes long batches in
# blocks, without gradients. These values switch both off.
_INFERENCE_SETTINGS = {"rescale_every": 0, "max_inference_chunksize": 2**31 - 1}


def replace_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Switches dropout and inference shortcuts off, in place; returns the keys' values before. Dropout would
    act in layers that recompute activations, which are in training mode."""
    text = config.get_text_config()
    replaced = {
        key: value
        for key, value in text.to_dict().items()
        if value and (key in _INFERENCE_SETTINGS or ("drop" in key and isinstance(value, float)))
    }
    text.update({key: _INFERENCE_SETTINGS.get(key, 0.0) for key in replaced})
    return replaced


def count_experts(values: dict[str, Any]) -> tuple[float, float]:
    """Returns (routed experts of a layer, experts that one token uses), means over layers if these differ;
    (1, 1) if the config names none."""
    num_experts = next((np.mean(values[key]) for key in _NUM_EXPERTS_KEYS if values.get(key)), 1.0)
    num_active = next((np.mean(values[key]) for key in _ACTIVE_EXPERTS_KEYS if values.get(key)), num_experts)
    return float(num_experts), float(num_active)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is special about one `model_type` of transformers."""

    reason: str | None = None  # why its rows cannot be packed
    kernel: str | None = None  # where this one of recurrence/ can be imported, they can
    # How many functions of recurrence/ a recurrent layer calls: usually 2, a convolution and a recurrence.
    functions: int = 0
    # The first release of transformers whose layers pass a row's layout on; older ones cannot be packed.
    since: tuple[int, int] = (0, 0)


# Layers in which tokens depend on other tokens only through attention.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Layers that carry a state from token to token, in families that `recurrence/` can compute. A "hybrid" layer
# also has attention.
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid"})
_NO_MIXING_LAYERS = frozenset({"mlp", "moe"})  # Nemotron-H counts its feed-forward blocks as layers


_PLAIN = Family()
_WITHOUT_FLA = (
    "its delta attention is packed only on CUDA with flash-linear-attention, which is not installed"
)
_KIMI = Family(functions=2, kernel="chunk_kimi_delta_attention", reason=_WITHOUT_FLA)
_RECURRENT = ("bamba", "granitemoehybrid", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_REFUSED = {  # by the reason
    "a shared prompt ends in a state, and transformers' code for Mamba 1 cannot start from one": (
        ("falcon_mamba", "jamba", "mamba")
    ),
    "dpo-pack has no code for its recurrence, which would mix the sequences of a row": (
        ("minimax", "recurrent_gemma", "rwkv", "xlstm")
    ),
    "its own code computes the attention, and does not take a row's layout": (
        ("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt")
    ),
    "its attention selects tokens, and its n-grams join tokens, across the sequences of a row": (
        ("qwen4_exp_text",)
    ),
    "its layers do not pass a row's layout on to their attention": ("nemotron", "stablelm"),
}
FAMILIES: dict[str, Family] = {
    **dict.fromkeys((*_RECURRENT, "zamba2"), Family(functions=2)),
    "falcon_h1": Family(functions=2, since=(5, 16)),
    **dict.fromkeys(("mamba2", "nemotron_h"), Family(functions=2, since=(5, 17))),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Family(functions=1, since=(5, 22))),
    "lfm3": Family(functions=1),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _KIMI),
    **{name: Family(reason=reason) for reason, names in _REFUSED.items() for name in names},
}


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> set[int]:
    """Returns the ends that a model's files name; some families have one in the generation config only.
    With a tokenizer also its EOS, at which transformers does not stop by itself."""
    named: list[Any] = [model.config.get_text_config().eos_token_id, tokenizer and tokenizer.eos_token_id]
    if model.can_generate():  # other models have no generation config
        named.append(model.generation_config.eos_token_id)
    return {end for ends in named for end in ([ends] if isinstance(ends, int) else ends or ())}
