"""The vLLM generator on vLLM itself, where it is installed: a CPU build, or CUDA and a device."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.loading import load_usual
from support.tiny_run import tiny_checkpoint
from support.tiny_tokenizer import tiny_tokenizer
from test_online_generation import draws

from dpo_pack.model.scorer import LoadedModel
from dpo_pack.online.interface import Completion, Generator, SamplingSettings
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.online.vllm_generator import (
    VllmEngine,
    VllmGenerator,
    checkpoint_tensors,
    prove_agreement,
    start_engine,
)
from dpo_pack.system.errors import ModelError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIKELIEST = SamplingSettings(completions_per_prompt=2, max_new_tokens=12, top_k=1)


def write_model(directory: Path, family: str = "llama", **changes: Any) -> Path:
    """vLLM's kernels want heads of at least 32."""
    return tiny_checkpoint(directory, family, **{"hidden_size": 64, "head_dim": 32, **changes})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def start(policy: LoadedModel) -> VllmEngine:
    return start_engine(
        policy.model,
        tiny_tokenizer(),
        dtype=policy.scorer.compute_dtype,
        device=DEVICE,
        max_tokens=128,
        gpu_memory_utilization=0.12,
        trust_remote_code=False,
    )


@pytest.fixture(scope="module")
def policy(directory: Path) -> LoadedModel:
    return load_usual(directory, device=DEVICE)


@pytest.fixture(scope="module")
def engine(policy: LoadedModel) -> VllmEngine:
    return start(policy)


def by_vllm(policy: LoadedModel, engine: VllmEngine, sampling: SamplingSettings) -> Generator:
    return VllmGenerator(
        engine=engine, scorer=policy.scorer, tokenizer=tiny_tokenizer(), sampling=sampling, seed=0
    )


def by_policy(policy: LoadedModel, sampling: SamplingSettings) -> Generator:
    return TransformersGenerator(
        scorer=policy.scorer,
        tokenizer=tiny_tokenizer(),
        sampling=sampling,
        seed=0,
        token_budget=10_000,
        device=DEVICE,
        console=Console(quiet=True),
    )


def written(generator: Generator) -> list[tuple[list[int], str, bool]]:
    results = generator.generate(draws())
    assert all(isinstance(result, tuple) for result in results)
    completions = [c for result in results if isinstance(result, tuple) for c in result]
    assert all(isinstance(c, Completion) for c in completions)
    return [(c.ids.tolist(), c.text, c.is_finished) for c in completions]


def test_the_likeliest_tokens_ends_and_stop_strings_are_those_of_the_transformers_generator(
    policy: LoadedModel, engine: VllmEngine
) -> None:
    free = written(by_policy(policy, LIKELIEST))
    assert written(by_vllm(policy, engine, LIKELIEST)) == free
    assert len({tuple(ids) for ids, _, _ in free}) == len(draws())
    letter = next(char for _, text, _ in free for char in text[2:] if char.isascii() and char.isalpha())
    stopping = replace(LIKELIEST, stop=(letter, "no such text"))
    stopped = written(by_policy(policy, stopping))
    assert written(by_vllm(policy, engine, stopping)) == stopped
    assert any(is_finished for _, _, is_finished in stopped)
    # A token that comes up anyway, as the end.
    token = free[0][0][3]
    config, policy.model.config.eos_token_id = policy.model.config.eos_token_id, token
    try:
        ended = written(by_policy(policy, LIKELIEST))
        assert ended[0][0][-1] == token and ended[0][2]
        assert written(by_vllm(policy, engine, LIKELIEST)) == ended
    finally:
        policy.model.config.eos_token_id = config


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"hidden_size": 128, "use_sliding_window": False},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gpt2": {"hidden_size": 128, "n_positions": 256},
    "mistral": {},
    "phi3": {"hidden_size": 128},
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_family_s_log_probs_are_those_of_training(family: str, tmp_path: Path) -> None:
    assert float(in_a_process(family, str(tmp_path))) < 1e-5


@pytest.mark.parametrize(
    "family, changes, fragment",
    [
        ("xlstm", {}, "vLLM cannot run this policy: .*xLSTM"),
        ("olmo2", {}, "vLLM has no code of its own for Olmo2ForCausalLM"),
        ("qwen2", {"hidden_size": 128}, "vLLM cannot run this policy: Sliding window"),
        pytest.param(
            *("qwen3_moe", {"moe_intermediate_size": 64}, "vLLM's log-probs differ"),
            marks=pytest.mark.skipif(DEVICE.type == "cuda", reason="vLLM's CPU build loses the experts"),
        ),
    ],
)
def test_what_vllm_does_not_run_is_refused_in_one_line(
    family: str, changes: dict[str, int], fragment: str, tmp_path: Path
) -> None:
    told = in_a_process(family, str(tmp_path), json.dumps(changes))
    assert re.match(rf"online\.generator\.type: {fragment}", told)
    assert "\n" not in told and len(told) < 400


# ------------------------------------------------------------------- in processes of their own: vLLM gives no
# memory back, and makes its groups of processes once


def difference(family: str, directory: str, changes: str = "") -> str:
    """Of the log-probs of vLLM and training, in nats a token; or why there is none."""
    sizes = json.loads(changes) if changes else _FAMILIES[family]
    try:
        path = write_model(Path(directory), family, **sizes)
        policy = load_usual(path, packed=family != "xlstm", device=DEVICE)
        engine = start(policy)
        engine.take_weights(checkpoint_tensors(policy.model, has_adapter=False))
        found = prove_agreement(
            engine, policy.scorer, draws()[1].prompt.ids, max_new_tokens=32, dtype=torch.float32
        )
    except ModelError as error:
        return str(error)
    return str(found)


def in_a_process(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    print(difference(*sys.argv[1:]))
