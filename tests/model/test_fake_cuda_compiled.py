"""Compiled code for CUDA, without a device: what inductor generates, and when it compiles again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_cuda import CUDA, fake_cuda, has_fake_driver, inductor_without_a_gpu, row_of
from torch._inductor.codecache import PyCodeCache
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, cuda, register_attention
from dpo_pack.model.attention.cuda import flex_attention
from dpo_pack.model.attention.segments import AttentionOptions, make_segments
from dpo_pack.model.fast_layers import compile_layers, trim_last_layer
from dpo_pack.model.logps import compile_head
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.proofs import proof_groups
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
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    register_attention()
    groups = proof_groups(1000)  # drawn by torch, here from a true generator
    monkeypatch.setattr("dpo_pack.proofs.proof_groups", lambda vocabulary: groups)
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
def test_what_the_start_tries_is_what_trains_rows_of_all_lengths(name: str, compiled: list[str]) -> None:
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
    # The start compiles a layer and the last one, and the head's passes, forward and backward each.
    assert new.pop("start") == 6 and new.pop(700) <= 1  # the head's, for any number of scored tokens
    assert set(new.values()) == {0}, new


def run_flex(compiled: list[str], options: AttentionOptions, *, head_dim: int, rows: int) -> None:
    for number in range(rows):
        lengths = [300 + number, 500, 90]
        segments = make_segments(lengths, [300 + number, 700, 200], CUDA)
        query, key, value = (
            torch.empty(sum(tokens), heads, head_dim, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
            for tokens, heads in ((segments.query_lengths, 8), *[(segments.key_lengths, 4)] * 2)
        )
        out = flex_attention(query, key, value, segments, options)
        out.backward(gradient=torch.ones_like(out))


@pytest.mark.parametrize("special", ["softcap", "sinks"])
def test_flex_is_compiled_for_rows_of_all_lengths(special: str, compiled: list[str]) -> None:
    """Gemma 2's softcap, and the sinks of gpt-oss."""
    sinks = torch.zeros(8, device=CUDA) if special == "sinks" else None
    softcap = 50.0 if special == "softcap" else None
    options = AttentionOptions(scale=0.0625, window=64, softcap=softcap, sinks=sinks)
    cuda._kernel.cache_clear()
    run_flex(compiled, options, head_dim=128, rows=2)
    before = len(compiled)
    run_flex(compiled, options, head_dim=128, rows=5)
    assert len(compiled) == before >= 2


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])  # some minutes each
def test_every_generated_kernel_becomes_machine_code(capability: tuple[int, int]) -> None:
    """Layers, head and FlexAttention with softcaps: a kernel may want more shared memory than a GPU has."""
    register_attention()
    with inductor_without_a_gpu(capability) as codes, fake_cuda(backward=True, capability=capability):
        scorer = compiled_scorer(CONFIGS["qwen3 1.7B"])
        sums = scorer(row_of(700)).sums
        sums.backward(gradient=torch.ones_like(sums))
        cuda._kernel.cache_clear()
        options = AttentionOptions(scale=0.0625, window=64, softcap=50.0, sinks=None)
        run_flex(codes, options, head_dim=128, rows=1)
        num_kernels = 0
        for code in codes:
            for name, source in re.findall(
                r"async_compile\.triton\('(\w+)', '''(.*?)''', device", code, re.S
            ):
                kernel = getattr(PyCodeCache.load(source), name)
                fits = [kernel._precompile_config(config) for config in kernel.configs]
                assert fits, name
                num_kernels += 1
        assert num_kernels == sum(code.count("async_compile.triton('") for code in codes) > 20
