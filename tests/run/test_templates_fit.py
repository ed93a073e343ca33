"""The models of the templates: their committed shapes have the parameters of the hub's, and each run fits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from dpo_pack.model.facts import model_shape, without_weights
from dpo_pack.model.quantize import bits_per_weight, quantization_settings
from dpo_pack.model.scorer import resolve_precision
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.recipe.templates import MODELS, TEMPLATES, recipe_template
from dpo_pack.run.memory_estimate import GIB, MemoryFacts, MemoryShape, estimate_memory, memory_shape


def _config(family: str, hidden: int, layers: int, ffn: int, heads: int, kv: int, head: int, vocabulary: int,
            *, tied: bool = False, **others: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, **others,
    }  # fmt: skip


# The shapes of the models, from their config.json on the hub.
CONFIGS = {
    "qwen3-0.6b": _config("qwen3", 1024, 28, 3072, 16, 8, 128, 151936, tied=True),
    "qwen3-1.7b": _config("qwen3", 2048, 28, 6144, 16, 8, 128, 151936, tied=True),
    "qwen3-4b": _config("qwen3", 2560, 36, 9728, 32, 8, 128, 151936, tied=True),
    "qwen3-8b": _config("qwen3", 4096, 36, 12288, 32, 8, 128, 151936),
    "qwen3-14b": _config("qwen3", 5120, 40, 17408, 40, 8, 128, 151936),
    "qwen3-32b": _config("qwen3", 5120, 64, 25600, 64, 8, 128, 151936),
    "llama3.2-1b": _config("llama", 2048, 16, 8192, 32, 8, 64, 128256, tied=True),
    "llama3.2-3b": _config("llama", 3072, 28, 8192, 24, 8, 128, 128256, tied=True),
    "llama3.1-8b": _config("llama", 4096, 32, 14336, 32, 8, 128, 128256),
    "llama3.3-70b": _config("llama", 8192, 80, 28672, 64, 8, 128, 128256),
    "gemma3-1b": _config("gemma3_text", 1152, 26, 6912, 4, 1, 256, 262144, tied=True, sliding_window=512),
    "mistral-7b": _config("mistral", 4096, 32, 14336, 32, 8, 128, 32768),
    "mistral-small-24b": _config("mistral", 5120, 40, 32768, 32, 8, 128, 131072),
    "gpt-oss-20b": _config("gpt_oss", 2880, 24, 2880, 64, 8, 64, 201088, num_local_experts=32,
                            num_experts_per_tok=4, sliding_window=128, attention_bias=True),
}  # fmt: skip
FREE_BYTES = 70 * GIB  # of an 80 GB device, which has 79 GiB; the estimate may be too low


@cache
def shape_of(name: str) -> MemoryShape:
    values = dict(CONFIGS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = without_weights(config)
    return memory_shape(config, model_shape(model), model.num_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_committed_shape_has_the_parameters_of_the_model(name: str) -> None:
    assert shape_of(name).num_parameters == MODELS[name].parameters
    tables = CONFIGS[name]["vocab_size"] * CONFIGS[name]["hidden_size"]
    assert MODELS[name].embeddings == tables * (1 if CONFIGS[name]["tie_word_embeddings"] else 2)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_run_of_a_template_fits_on_its_devices(name: str) -> None:
    recipe = parse_recipe(yaml.safe_load(recipe_template(name)))
    setup, device = TEMPLATES[name][1], torch.device("cuda")
    shape = shape_of(next(key for key in MODELS if name.startswith(f"{key}-")))
    tokens = recipe.packing.token_budget
    facts = MemoryFacts(
        shape=shape,
        row_tokens=tokens,
        row_keys=2 * tokens,
        row_scored=tokens,  # the worst: everything is scored
        device=device,
        precision=resolve_precision(
            recipe.model.dtype,
            recipe.model.autocast,
            device,
            gather_dtype=recipe.distributed.gather_dtype,
        ),
        optimizer=recipe.optim.name,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        cpu_offload=recipe.distributed.cpu_offload,
        accumulate_unsharded=recipe.distributed.accumulate_unsharded,
        lora_rank=None if recipe.model.lora is None else recipe.model.lora.r,
        bits=bits_per_weight(quantization_settings("nf4").to_dict()) if setup.is_quantised else None,
        num_shards=setup.gpus if recipe.distributed.strategy == "fsdp2" else 1,
        num_gradients=2 if setup.gpus > 1 else 1,
    )
    assert sum(estimate_memory(facts).values()) < FREE_BYTES
