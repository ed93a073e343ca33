"""What a model's config tells before any weight is loaded: its head, its attention, how far it is exact."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from dpo_pack.attention.select import AttentionNeeds
from dpo_pack.errors import ModelError, UnsupportedModelError
from dpo_pack.families import packing_obstacle
from dpo_pack.head_logits import HeadTransform


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
    usual = int(values.get("qk_head_dim") or values.get("head_dim") or by_width)
    layers = (values.get("per_layer_config") or {}).values()  # Gemma 4: wider heads on global layers
    head_dim = max(usual, *(int(layer.get("head_dim") or 0) for layer in layers), 0)
    return AttentionNeeds(
        head_dim=head_dim,
        value_head_dim=int(values.get("v_head_dim") or head_dim),
        has_window=bool(values.get("sliding_window")),
        has_softcap=_has_softcap(config),
        has_sinks=values.get("model_type") in _SINK_FAMILIES,
        has_custom_scale=_has_custom_scale(values),
    )


def own_attention(config: PretrainedConfig) -> str | None:
    """What transformers is to compute attention with where rows are not packed; None lets it choose.

    For families with a softcap on attention some of its releases choose sdpa, which drops the softcap without
    a word.
    """
    return "eager" if _has_softcap(config) else None


def _has_softcap(config: PretrainedConfig) -> bool:
    return config.get_text_config().to_dict().get("attn_logit_softcapping") is not None


_SINK_FAMILIES = frozenset(
    {"deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
)


def _has_custom_scale(values: dict[str, Any]) -> bool:
    """Whether attention scores are scaled by something else than the root of the head dimension."""
    named = any(values.get(key) is not None for key in ("attention_multiplier", "query_pre_attn_scalar"))
    in_rope = bool((values.get("rope_parameters") or {}).get("mscale_all_dim"))  # DeepSeek with yarn
    in_gpt2 = values.get("scale_attn_weights") is False or values.get("scale_attn_by_inverse_layer_idx")
    return named or in_rope or bool(in_gpt2) or values.get("model_type") in _UNIT_SCALE_FAMILIES


# They scale queries or keys themselves, or rely on their norms.
_UNIT_SCALE_FAMILIES = frozenset({"gemma3n_text", "gemma4_text", "opt"})


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of each layer by the model's config, None for full attention.

    Chunked layers (Llama 4) are full here: `check_rows` refuses sequences longer than a chunk.
    """
    text = config.get_text_config()
    values = text.to_dict()
    # Not from `values`: Gemma 3 writes another window to its file than it computes with.
    window = effective_window(
        text.sliding_window if values.get("sliding_window") is not None else None, config
    )
    kinds = values.get("layer_types") or ["sliding_attention"] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def effective_window(window: int | None, config: PretrainedConfig) -> int | None:
    """None for a window wider than any sequence; Phi 3.5 MoE has one and does not even pass it on."""
    known = config.get_text_config().to_dict().get("max_position_embeddings")
    return None if window is None or (known is not None and window >= int(known)) else window


def routes_tokens(config: PretrainedConfig) -> bool:
    """Whether the model is a mixture of experts, whose grouped products depend on which tokens meet."""
    values = config.get_text_config().to_dict()
    return any(_mean(values.get(key) or 0) > 1 for key in _NUM_EXPERTS_KEYS)


def check_packs(config: PretrainedConfig) -> None:
    """Refuse families whose rows cannot be packed, before loading. Raises UnsupportedModelError."""
    obstacle = packing_obstacle(config)
    if obstacle is not None:
        family = config.get_text_config().model_type
        raise UnsupportedModelError(f"{family} cannot be packed: {obstacle}; use packing.mode: padded")


def check_positions(config: PretrainedConfig, longest_sequence: int) -> None:
    """Refuse sequences beyond the positions a model knows. `longest_sequence` is in tokens.

    Raises ModelError.
    """
    known = known_positions(config)
    if known is not None and longest_sequence > known:
        raise ModelError(
            f"data.max_length: the longest sequence has {longest_sequence} tokens, but this model is exact "
            f"for {known} positions only; set data.max_length: {known}"
        )


def known_positions(config: PretrainedConfig) -> int | None:
    """For how many positions a model is exact; None where its config does not say.

    Rotary variants whose frequencies depend on the longest position in a batch are exact within the original
    maximum only, which is their `max_position_embeddings` here as well.
    """
    values = config.get_text_config().to_dict()
    names = ("max_position_embeddings", "n_positions", "max_seq_len")  # GPT-2's and MPT's the latter
    known = next((values[name] for name in names if values.get(name) is not None), None)
    rope = values.get("rope_parameters") or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # Gemma 3: by layer type
        if kind.get("rope_type") in ("dynamic", "longrope"):
            known = kind.get("original_max_position_embeddings") or known
    return None if known is None else int(known)


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


# Config values that switch a family's dropout on, by layers that recompute in training mode too.
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
    }
)


# What families do in evaluation mode, in which models are trained here, and what to have in its place. RWKV
# halves weights every so many layers, in place; xLSTM computes longer batches in blocks, without gradients.
_INFERENCE_SETTINGS = {"rescale_every": 0, "max_inference_chunksize": 2**31 - 1}


def training_settings(config: PretrainedConfig) -> dict[str, float]:
    """What to compute with in place of a config's own values, by key: no dropout, nothing of inference."""
    values = config.get_text_config().to_dict()
    dropout = dict.fromkeys((key for key in sorted(_DROPOUT_KEYS) if values.get(key)), 0.0)
    return dropout | {key: value for key, value in _INFERENCE_SETTINGS.items() if values.get(key)}


_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def count_experts(values: dict[str, Any]) -> tuple[float, float]:
    """(routed experts, those active for a token) of a layer, from a config's values; (1, 1) without any."""
    num_experts = next((_mean(values[key]) for key in _NUM_EXPERTS_KEYS if values.get(key)), 1.0)
    num_active = next((_mean(values[key]) for key in _ACTIVE_EXPERTS_KEYS if values.get(key)), num_experts)
    return num_experts, num_active


def _mean(value: float | list[float]) -> float:
    """Of a number, or of one for each layer, which Hunyuan's configs may have."""
    return sum(value) / len(value) if isinstance(value, list) else float(value)
