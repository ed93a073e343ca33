"""Models by shape, with random weights: what a step costs does not depend on what the weights are. And what a
benchmark's pairs cost, the same for every contender: tokens and FLOPs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking.workloads import BOS_ID, EOS_ID, FIRST_ORDINARY_ID, PAD_ID
from dpo_pack.packing.lengths import (
    ADAPTER_PASSES,
    TRAINING_PASSES,
    IntArray,
    ModelShape,
    PairLengths,
    pair_sizes,
)

_LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 32768}
_QWEN: dict[str, Any] = {
    **{"model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True},
    "max_position_embeddings": 32768,
}
_LLAMA_3: dict[str, Any] = {**_LLAMA, "num_key_value_heads": 8, "rope_theta": 5e5}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Small ones are Llamas that a CPU trains in seconds; large ones are Qwen2.5's and Llama 3.1's.
SHAPES: dict[str, dict[str, Any]] = {
    name: {**common, **dict(zip(_SIZES, sizes, strict=True))}
    for name, common, *sizes in (
        ("tiny", _LLAMA, 512, 32, 64, 2, 2),
        ("7m", _LLAMA, 8192, 256, 688, 4, 4),
        ("25m", {**_LLAMA, "tie_word_embeddings": True}, 32000, 384, 1024, 7, 6),
        ("0.5b", _QWEN, 151936, 896, 4864, 24, 14),
        ("1.5b", _QWEN, 151936, 1536, 8960, 28, 12),
        ("8b", _LLAMA_3, 128256, 4096, 14336, 32, 32),
    )
}


def shape_config(name: str) -> Any:
    """The transformers config of a shape, or of a model on disk."""
    from transformers import AutoConfig

    if name not in SHAPES:
        return AutoConfig.from_pretrained(name)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return AutoConfig.for_model(**{**SHAPES[name], **ids})


def flops_shape(name: str) -> ModelShape:
    """What of a shape decides its FLOPs."""
    from dpo_pack.model.facts import model_shape, without_weights

    return model_shape(without_weights(shape_config(name)))


def save_model(name: str, target: Path, *, parameters: str, device: str) -> None:
    """Write a random model and a tokenizer of its size, unless they are there."""
    import torch
    from transformers import AutoModelForCausalLM

    if target.is_dir():
        return
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=getattr(torch, parameters))
    unfinished = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    numbered_tokenizer(model.config.vocab_size).save_pretrained(unfinished)
    unfinished.rename(target)


def numbered_tokenizer(vocabulary: int) -> Any:
    """As many tokens as the model embeds, named by their ids but for pad, BOS and EOS; pairs come as ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD_ID, "<s>": BOS_ID, "</s>": EOS_ID}
    ordinary = {f"t{token}": token for token in range(FIRST_ORDINARY_ID, vocabulary)}
    backend = Tokenizer(models.WordLevel({**special, **ordinary}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Means over the pairs. What pairs of a step have in common counts once in the step."""

    least_tokens: float  # of a pair: prompts once, and what prompts begin with in common
    shared_tokens: float  # of a pair, with its common prefix once
    unshared_tokens: float  # of a pair, with both sequences whole
    scored_tokens: float
    training_flops: float  # of a pair: `least_tokens`, the head only at completion positions
    reference_flops: float  # what all pairs have in common once

    @property
    def flops(self) -> float:
        """Of a pair, reference included: the numerator of every contender's MFU."""
        return self.training_flops + self.reference_flops


def work_of(shape: ModelShape, lengths: PairLengths, *, pairs_per_step: int, lora: bool) -> Work:
    """What DPO on these pairs has to compute at the least, whatever a contender's rows and batches are."""
    passes, num_pairs = ADAPTER_PASSES if lora else TRAINING_PASSES, len(lengths.prompt)
    steps = [
        np.arange(num_pairs)[first : first + pairs_per_step] for first in range(0, num_pairs, pairs_per_step)
    ]
    tokens, flops = least_work(shape, lengths, steps)
    return Work(
        least_tokens=tokens / num_pairs,
        shared_tokens=float(lengths.row_tokens(share_prompt=True).mean()),
        unshared_tokens=float(lengths.row_tokens(share_prompt=False).mean()),
        scored_tokens=float(lengths.completion_tokens().mean()),
        training_flops=passes * flops / num_pairs,
        reference_flops=least_work(shape, lengths, [np.arange(num_pairs)])[1] / num_pairs,
    )


def least_work(shape: ModelShape, lengths: PairLengths, steps: Sequence[IntArray]) -> tuple[int, float]:
    """(tokens, FLOPs) of one forward pass over the pairs of each step, as if they were in one row."""
    sizes = pair_sizes(lengths, shape, share_prompt=True, passes=1.0)
    rows = [sizes.of_row(pairs) for pairs in steps]
    return sum(row.tokens for row in rows), sum(row.cost for row in rows)


def forward_parts(shape: ModelShape, lengths: PairLengths, steps: Sequence[IntArray]) -> dict[str, float]:
    """FLOPs of one forward pass over the pairs of these steps, by where they are spent."""
    none = replace(shape, token_weights=0.0, head_weights=0, last_block_weights=0.0, state_products=0.0)

    def flops(of: ModelShape) -> float:
        return least_work(of, lengths, steps)[1]

    head, attention = flops(replace(none, head_weights=shape.head_weights, attention=())), flops(none)
    return {"layers": flops(shape) - head - attention, "head": head, "attention": attention}
