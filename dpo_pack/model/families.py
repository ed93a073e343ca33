"""A table of the model families that have recurrent layers or cannot be packed.

A family that is not in the table is packed, and the start-up proofs decide whether the results are exact.
docs/families.md lists all families that are tested (by tests/model/test_families.py, with tiny models).
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from transformers import PretrainedConfig

from dpo_pack.model.recurrence.kernels import KERNELS, import_kernel


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


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Returns the kind of each layer; an empty list means: all are attention layers."""
    return list(getattr(config.get_text_config(), "layer_types", None) or ())


def num_attention_layers(config: PretrainedConfig) -> int:
    kinds = layer_kinds(config)
    if not kinds:
        return int(config.get_text_config().num_hidden_layers)
    return sum(kind in ATTENTION_LAYERS or kind == "hybrid" for kind in kinds)


def num_recurrent_calls(config: PretrainedConfig) -> int:
    """Returns how many calls of functions of `recurrence/` one forward of a packed row must make."""
    family = FAMILIES.get(config.get_text_config().model_type, _PLAIN)
    return family.functions * sum(kind in RECURRENT_LAYERS for kind in layer_kinds(config))


def packing_obstacle(config: PretrainedConfig) -> str | None:
    """Returns why models of this config cannot be packed; None if the config shows no reason.

    A family that is refused for its recurrent layers can be packed if a config names only attention layers.
    """
    text = config.get_text_config()
    layers = set(text.to_dict().get("layer_types") or ())
    others = layers - ATTENTION_LAYERS
    family = FAMILIES.get(text.model_type, _PLAIN)
    is_refused = family.reason is not None and (others or not layers)
    if is_refused and (family.kernel is None or isinstance(import_kernel(KERNELS[family.kernel]), str)):
        return family.reason
    release = tuple(int(number) for number in transformers.__version__.split(".")[:2])
    if release < family.since:
        return (
            f"in transformers {transformers.__version__} its layers do not pass a row's layout on; install "
            "transformers {}.{} or newer".format(*family.since)
        )
    if family.functions:
        others -= RECURRENT_LAYERS | _NO_MIXING_LAYERS
    if others:
        return f"its {', '.join(sorted(others))} layers mix the sequences of a row outside attention"
    return None


_MAMBA1 = "a shared prompt ends in a state, and transformers' code for Mamba 1 cannot start from one"
_NOT_WRITTEN = "dpo-pack has no code for its recurrence, which would mix the sequences of a row"
_OWN_ATTENTION = "its own code computes the attention, and does not take a row's layout"
_SELECTS = "its attention selects tokens, and its n-grams join tokens, across the sequences of a row"
_NEEDS_FLA = "its delta attention is packed only on CUDA with flash-linear-attention, which is not installed"
_DROPS_ARGUMENTS = "its layers do not pass a row's layout on to their attention"

_PLAIN = Family()
FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(functions=2, kernel="chunk_kimi_delta_attention", reason=_NEEDS_FLA),
    "bamba": Family(functions=2),
    "falcon_h1": Family(functions=2, since=(5, 16)),
    "granitemoehybrid": Family(functions=2),
    "kimi_linear": Family(functions=2, kernel="chunk_kimi_delta_attention", reason=_NEEDS_FLA),
    "lfm2": Family(functions=1, since=(5, 22)),
    "lfm2_moe": Family(functions=1, since=(5, 22)),
    "lfm3": Family(functions=1),
    "mamba2": Family(functions=2, since=(5, 17)),
    "nemotron_h": Family(functions=2, since=(5, 17)),
    "olmo_hybrid": Family(functions=2),
    "qwen3_5_moe_text": Family(functions=2),
    "qwen3_5_text": Family(functions=2),
    "qwen3_next": Family(functions=2),
    "zamba2": Family(functions=2),
    "bloom": Family(reason=_OWN_ATTENTION),
    "codegen": Family(reason=_OWN_ATTENTION),
    "falcon": Family(reason=_OWN_ATTENTION),
    "falcon_mamba": Family(reason=_MAMBA1),
    "gpt_neo": Family(reason=_OWN_ATTENTION),
    "gptj": Family(reason=_OWN_ATTENTION),
    "jamba": Family(reason=_MAMBA1),
    "mamba": Family(reason=_MAMBA1),
    "minimax": Family(reason=_NOT_WRITTEN),
    "mpt": Family(reason=_OWN_ATTENTION),
    "nemotron": Family(reason=_DROPS_ARGUMENTS),
    "qwen4_exp_text": Family(reason=_SELECTS),
    "recurrent_gemma": Family(reason=_NOT_WRITTEN),
    "rwkv": Family(reason=_NOT_WRITTEN),
    "stablelm": Family(reason=_DROPS_ARGUMENTS),
    "xlstm": Family(reason=_NOT_WRITTEN),
}
