"""A table of model families: which can be packed, which features are special, why others cannot be packed.

We checked each line of the table with a tiny random model of the family (tests/model/test_families.py). If a
family is not in the table, we try to pack it, and the start-up proofs decide whether the results are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What we know about one `model_type` of transformers."""

    packs: bool
    special: str  # the features that a packed row, or the head, must compute correctly
    reason: str | None = None  # why its rows cannot be packed
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


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Returns the kind of each layer from the config. An empty list means: all are attention layers."""
    return list(getattr(config.get_text_config(), "layer_types", None) or ())


def num_attention_layers(config: PretrainedConfig) -> int:
    """Returns how many layers have attention."""
    kinds = layer_kinds(config)
    if not kinds:
        return int(config.get_text_config().num_hidden_layers)
    return sum(kind in ATTENTION_LAYERS or kind == "hybrid" for kind in kinds)


def num_recurrent_calls(config: PretrainedConfig) -> int:
    """Returns how many calls of functions of `recurrence/` one forward of a packed row must make."""
    family = FAMILIES.get(config.get_text_config().model_type)
    functions = 0 if family is None else family.functions
    return functions * sum(kind in RECURRENT_LAYERS for kind in layer_kinds(config))


def packing_obstacle(config: PretrainedConfig) -> str | None:
    """Returns why models of this config cannot be packed; None if the config shows no reason.

    A family that is refused for its recurrent layers can be packed if a config names only attention layers.
    """
    text = config.get_text_config()
    layers = set(text.to_dict().get("layer_types") or ())
    others = sorted(layers - ATTENTION_LAYERS)
    family = FAMILIES.get(text.model_type)
    if family is not None and not family.packs and (others or not layers):
        return family.reason
    if family is not None and _transformers_release() < family.since:
        return (
            f"its layers of transformers {transformers.__version__} do not pass a row's layout on; install "
            "transformers {}.{} or newer".format(*family.since)
        )
    if family is not None and family.functions:
        others = sorted(layers - ATTENTION_LAYERS - RECURRENT_LAYERS - _NO_MIXING_LAYERS)
    if others:
        return f"its {', '.join(others)} layers mix the sequences of a row outside attention"
    return None


def _transformers_release() -> tuple[int, ...]:
    return tuple(int(number) for number in transformers.__version__.split(".")[:2])


def _packs(special: str) -> Family:
    return Family(packs=True, special=special)


def _hybrid(special: str, *, functions: int = 2, since: tuple[int, int] = (0, 0)) -> Family:
    return Family(packs=True, special=special, functions=functions, since=since)


def _refused(special: str, reason: str) -> Family:
    return Family(packs=False, special=special, reason=reason)


_MAMBA1 = "transformers' scan of Mamba 1 takes no state that a tail could start from"
_NOT_WRITTEN = "its recurrence is not written for packed rows, and would mix their sequences"
_OWN_ATTENTION = "it computes attention itself, where a row's layout cannot reach"
_SELECTS = "its attention selects tokens, and its n-grams join tokens, across the sequences of a row"
_DROPS_ARGUMENTS = "its layers do not pass a row's layout on to their attention"

FAMILIES: dict[str, Family] = {
    "afmoe": _packs("mixture of experts, sliding window on some layers, gated attention"),
    "apertus": _packs("query and key norms, xIELU"),
    "arcee": _packs("squared ReLU"),
    "bailing_hybrid": _hybrid("linear attention on most layers, mixture of experts"),
    "bamba": _hybrid("Mamba 2 on most layers"),
    "biogpt": _packs("learned absolute positions"),
    "bitnet": _packs("norms inside attention and MLP"),
    "cohere": _packs("logit scale, parallel attention and MLP"),
    "cohere2": _packs("logit scale, sliding window on some layers, no positions on the others"),
    "cohere2_moe": _packs("mixture of experts, logit scale, sliding window on some layers"),
    "cwm": _packs("sliding window on some layers"),
    "deepseek_v2": _packs("mixture of experts, MLA: value heads narrower than query heads"),
    "deepseek_v3": _packs("mixture of experts, MLA: value heads narrower than query heads"),
    "dots1": _packs("mixture of experts, sliding window on some layers"),
    "ernie4_5": _packs("interleaved rotary positions"),
    "ernie4_5_moe": _packs("mixture of experts from the second layer on"),
    "exaone4": _packs("sliding window on some layers, no positions on the others, norms after"),
    "exaone_moe": _packs("mixture of experts, sliding window on some layers, no positions on the others"),
    "falcon_h1": _hybrid("Mamba 2 beside attention, head multiplier", since=(5, 16)),
    "flex_olmo": _packs("mixture of experts, query and key norms"),
    "gemma": _packs("scaled embeddings, tied head"),
    "gemma2": _packs("attention and logit softcaps, sliding window on some layers, own scale"),
    "gemma3_text": _packs("sliding window and other rotary base on some layers, own scale"),
    "gemma3n_text": _packs("keys and values shared by layers, embeddings of each layer, logit softcap"),
    "gemma4_text": _packs("wider heads on global layers, embeddings of each layer, scale of 1"),
    "glm": _packs("partial rotary positions"),
    "glm4": _packs("partial rotary positions, norms before and after"),
    "glm4_moe": _packs("mixture of experts, partial rotary positions"),
    "glm4_moe_lite": _packs("mixture of experts, MLA: value heads narrower than query heads"),
    "gpt2": _packs("learned absolute positions, tied head"),
    "gpt_bigcode": _packs("learned absolute positions, one key and value head"),
    "gpt_neox": _packs("partial rotary positions, parallel attention and MLP"),
    "gpt_oss": _packs("mixture of experts, attention sinks, sliding window on some layers"),
    "granite": _packs("logit divisor, own attention scale"),
    "granitemoe": _packs("mixture of experts, logit divisor, own attention scale"),
    "granitemoehybrid": _hybrid("Mamba 2 on most layers, mixture of experts, logit divisor"),
    "granitemoeshared": _packs("mixture of experts, logit divisor, own attention scale"),
    "helium": _packs("interleaved rotary positions"),
    "hunyuan_v1_dense": _packs("norms of rotated queries and keys"),
    "hunyuan_v1_moe": _packs("mixture of experts, norms of rotated queries and keys"),
    "hyperclovax": _packs("logit factor, own attention scale"),
    "jetmoe": _packs("mixtures of experts, of attention heads too"),
    "kimi_linear": _hybrid("linear attention on most layers, MLA, mixture of experts"),
    "lfm2": _hybrid("short convolutions on most layers", functions=1, since=(5, 22)),
    "lfm2_moe": _hybrid("short convolutions on most layers, mixture of experts", functions=1, since=(5, 22)),
    "lfm3": _hybrid("short convolutions on most layers, sliding window on others", functions=1),
    "llama": _packs("nothing: the plain case"),
    "llama4_text": _packs("mixture of experts, chunked attention, queries scaled by their place in the row"),
    "longcat_flash": _packs("mixture of experts, two MLA attentions a block"),
    "mamba2": _hybrid("Mamba 2", since=(5, 17)),
    "minicpm3": _packs("MLA, logit divisor"),
    "minimax_m2": _packs("mixture of experts, query and key norms"),
    "ministral": _packs("sliding window on some layers"),
    "ministral3": _packs("queries scaled by their position"),
    "mistral": _packs("sliding window"),
    "mixtral": _packs("mixture of experts, sliding window"),
    "nanochat": _packs("logit softcap, norms of rotated queries and keys"),
    "nemotron_h": _hybrid("Mamba 2 on most layers, mixture of experts", since=(5, 17)),
    "olmo": _packs("clipped queries, keys and values"),
    "olmo2": _packs("norms after attention and MLP"),
    "olmo3": _packs("sliding window on some layers"),
    "olmo_hybrid": _hybrid("gated delta nets on most layers"),
    "olmoe": _packs("mixture of experts, query and key norms"),
    "opt": _packs("learned absolute positions with an offset, narrower embeddings"),
    "persimmon": _packs("query and key norms, partial rotary positions"),
    "phi": _packs("partial rotary positions, head with a bias"),
    "phi3": _packs("sliding window, longrope within its original positions"),
    "phimoe": _packs("mixture of experts, head with a bias"),
    "qwen2": _packs("biases of queries, keys and values; sliding window on some layers"),
    "qwen2_moe": _packs("mixture of experts with a shared one"),
    "qwen3": _packs("query and key norms"),
    "qwen3_5_moe_text": _hybrid("gated delta nets on most layers, mixture of experts"),
    "qwen3_5_text": _hybrid("gated delta nets on most layers"),
    "qwen3_moe": _packs("mixture of experts, query and key norms"),
    "qwen3_next": _hybrid("gated delta nets on most layers, mixture of experts"),
    "seed_oss": _packs("biases of queries, keys and values; dropout in its config"),
    "smollm3": _packs("no positions on some layers"),
    "starcoder2": _packs("sliding window, biases"),
    "vaultgemma": _packs("attention and logit softcaps, sliding window on some layers"),
    "zamba2": _hybrid("Mamba 2 with shared attention blocks"),
    # From here on packing is refused.
    "bloom": _refused("ALiBi", _OWN_ATTENTION),
    "codegen": _refused("partial rotary positions", _OWN_ATTENTION),
    "falcon": _refused("one key and value head", _OWN_ATTENTION),
    "falcon_mamba": _refused("Mamba", _MAMBA1),
    "gpt_neo": _refused("learned absolute positions, local layers", _OWN_ATTENTION),
    "gptj": _refused("partial rotary positions, head with a bias", _OWN_ATTENTION),
    "jamba": _refused("Mamba on most layers, mixture of experts", _MAMBA1),
    "mamba": _refused("Mamba", _MAMBA1),
    "minimax": _refused("linear attention on most layers, mixture of experts", _NOT_WRITTEN),
    "mpt": _refused("ALiBi", _OWN_ATTENTION),
    "nemotron": _refused("partial rotary positions, squared ReLU", _DROPS_ARGUMENTS),
    "qwen4_exp_text": _refused(
        "gated delta nets on most layers, mixture of experts, n-gram embeddings, selected tokens",
        _SELECTS,
    ),
    "recurrent_gemma": _refused("linear recurrences on most layers, logit softcap", _NOT_WRITTEN),
    "rwkv": _refused("recurrence instead of attention", _NOT_WRITTEN),
    "stablelm": _refused("partial rotary positions", _DROPS_ARGUMENTS),
    "xlstm": _refused("matrix LSTM, logit softcap", _NOT_WRITTEN),
}
