"""Compiled code for CUDA, without a device: what inductor generates, and when it compiles again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_cuda import CUDA, Compiled, fake_cuda, has_fake_driver, inductor_without_a_gpu, row_of
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.model.compiling import compile_layers
from dpo_pack.model.fast_layers import trim_last_layer
from dpo_pack.model.logps import compile_head
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.proofs.rows import proof_groups
from dpo_pack.proofs.start_up import compiling_obstacle

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(not has_fake_driver(), reason="scripts/test_cuda_build.sh loads the fake driver"),
    pytest.mark.filterwarnings("ignore"),
]
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2 0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=2,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "qwen2 1.5B": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=2,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "qwen3 1.7B": Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "llama 8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8,
    ),
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    register_attention()
    groups = proof_groups(1000)  # drawn by torch, here from a true generator
    monkeypatch.setattr("dpo_pack.proofs.start_up.proof_groups", lambda vocabulary: groups)
    with inductor_without_a_gpu() as codes, fake_cuda(backward=True):
        yield codes


def compiled_scorer(config: PretrainedConfig, *, dtype: torch.dtype = torch.float32) -> CompletionLogps:
    """As a run has it: weights in bf16, or in fp32 under autocast."""
    with CUDA:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    trim_last_layer(model)
    autocast = torch.bfloat16 if dtype == torch.float32 else None
    scorer = CompletionLogps(model, backend=BACKENDS["torch_varlen"], autocast=autocast).eval()
    compile_layers(model)
    scorer.head_passes, scorer.is_compiled = compile_head(), True
    return scorer


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_the_start_tries_is_what_trains_rows_of_all_lengths(name: str, compiled: Compiled) -> None:
    """Guards on the number of tokens would compile everything again, in the middle of a run."""
    scorer = compiled_scorer(CONFIGS[name])
    assert compiling_obstacle(scorer, CUDA) is None
    new: dict[Any, int] = {"start": len(compiled)}
    with torch.no_grad():
        scorer(row_of(500))
    before = len(compiled)
    for num_tokens in (700, 8100, 8190, 6500, 5600, 4500, 3800, 3200, 1500, 8200, 9000, 2500):
        sums = scorer(row_of(num_tokens)).sums
        sums.backward(gradient=torch.ones_like(sums))
        new[num_tokens], before = len(compiled) - before, len(compiled)
    print(name, new)
    assert new.pop("start") > 0 and new.pop(700) <= 1  # the head's passes, for any number of scored tokens
    assert set(new.values()) == {0}, new
