"""Models by shape, with random weights: what a step costs does not depend on what the weights are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarking.workloads import BOS_ID, EOS_ID, FIRST_ORDINARY_ID, PAD_ID
from dpo_pack.packing.lengths import ModelShape

_LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 32768}
_QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
_LLAMA_3: dict[str, Any] = {**_LLAMA, "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 5e5}
# Small ones are Llamas that a CPU trains in seconds; large ones are Qwen2.5's and Llama 3.1's.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "7m": {
        **_LLAMA,
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "25m": {
        **_LLAMA,
        "vocab_size": 32000,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 7,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5b": {
        **_QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
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
