"""The recipes of configs/ that name their GPUs: the committed shapes of their models fit on these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dpo_pack.model.facts import model_shape, without_weights
from dpo_pack.model.lora import bits_per_weight, quantization_settings
from dpo_pack.model.scorer import resolve_precision
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.memory_estimate import GIB, MemoryFacts, estimate_memory, memory_shape

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def config_of(family: str, hidden: int, layers: int, ffn: int, heads: int, kv: int, words: int) -> Any:
    return AutoConfig.for_model(
        family, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=ffn,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=128, vocab_size=words,
        tie_word_embeddings=hidden < 2048,
    )  # fmt: skip


# File -> GPUs of 80 GB, parameters of the model, and its shape, from its config.json on the hub.
SETUPS: dict[str, tuple[int, int, tuple[Any, ...]]] = {
    "ultrafeedback_1gpu": (1, 1_543_714_304, ("qwen2", 1536, 28, 8960, 12, 2, 151936)),
    "tulu3_8gpu": (8, 8_030_326_784, ("llama", 4096, 32, 14336, 32, 8, 128264)),
    "qwen3_8b_lora_1gpu": (1, 8_190_735_360, ("qwen3", 4096, 36, 12288, 32, 8, 151936)),
    "qwen3_32b_qlora_1gpu": (1, 32_762_123_264, ("qwen3", 5120, 64, 25600, 64, 8, 151936)),
    "qwen3_14b_2nodes": (16, 14_768_307_200, ("qwen3", 5120, 40, 17408, 40, 8, 151936)),
}


@pytest.mark.parametrize("name", SETUPS)
def test_the_run_of_a_recipe_fits_on_its_gpus(name: str) -> None:
    gpus, num_parameters, sizes = SETUPS[name]
    recipe, device, config = load_recipe(CONFIGS / f"{name}.yaml"), torch.device("cuda"), config_of(*sizes)
    model, lora, tokens = without_weights(config), recipe.model.lora, recipe.token_budgets("cuda")[0]
    assert model.num_parameters() == num_parameters
    facts = MemoryFacts(
        shape=memory_shape(config, model_shape(model), num_parameters),
        row_tokens=tokens,
        row_keys=2 * tokens,
        row_scored=tokens,  # the worst: everything is scored
        device=device,
        precision=resolve_precision(
            recipe.model.dtype, recipe.model.autocast, device, gather_dtype=None, trains_adapter=False
        ),
        model=recipe.model,
        lora_rank=None if lora is None else lora.r,
        bits=bits_per_weight(quantization_settings("nf4").to_dict()) if recipe.model.quantize else None,
        num_shards=gpus,
        num_gradients=2 if gpus > 1 else 1,
    )
    assert sum(estimate_memory(facts).values()) < 70 * GIB  # of 79 GiB: the estimate may be too low
