"""Runs whose parameters are bfloat16: they learn, export and resume as others do; adapters stay in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gradients import proof_rows
from support.loading import load_usual
from support.tiny_adapters import saved_adapter
from support.tiny_models import tiny_model
from torch.optim import AdamW

from dpo_pack.model.scorer import LoadedModel, Precision
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.training.optim import build_optimizer

# ---------------------------------------------------------------------------------- adapters on such a base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    model = tiny_model("llama")
    model.bfloat16().save_pretrained(directory)
    return directory


def load(base: Path, adapter: LoraRecipe | Path, dtype: torch.dtype) -> LoadedModel:
    return load_usual(base, precision=Precision(parameters=dtype, autocast=None), adapter=adapter)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
def test_adapters_on_a_bfloat16_base_are_fp32_and_right(
    targets: str | list[str], base: Path, tmp_path: Path
) -> None:
    """Log-probs and gradients beside those of the same weights in fp32: off by rounding, not by more."""
    directory = saved_adapter(tmp_path / "adapter", base, target_modules=targets)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load(base, directory, dtype)
        trained = {name: p for name, p in loaded.scorer.named_parameters() if p.requires_grad}
        assert trained and {parameter.dtype for parameter in trained.values()} == {torch.float32}
        output = loaded.scorer(proof_rows()[0])
        (output.sums / output.num_tokens).sum().backward()
        grads = torch.cat([p.grad.flatten() for _, p in sorted(trained.items()) if p.grad is not None])
        results[dtype] = (output.token_logps.detach(), grads)
        optimizer = build_optimizer(
            "adamw", loaded.scorer, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
        )
        assert isinstance(optimizer, AdamW)
    (logps, grads), (rounded_logps, rounded_grads) = results.values()
    assert (rounded_logps - logps).abs().mean() < 0.05
    assert torch.cosine_similarity(rounded_grads, grads, dim=0) > 0.99
    assert rounded_grads.norm() / grads.norm() == pytest.approx(1.0, abs=0.05)


def test_a_new_adapter_starts_as_its_bfloat16_base_to_the_bit(base: Path) -> None:
    """The head as well, whose weight is the base's in bfloat16 plus a delta of zeros in fp32."""
    settings = LoraRecipe(r=4, alpha=8.0, dropout=0.0, target_modules=("q_proj", "lm_head"))
    loaded = load(base, settings, torch.bfloat16)
    row = proof_rows()[0]
    with torch.no_grad():
        adapted = loaded.scorer(row).token_logps
        with loaded.as_reference():
            assert torch.equal(loaded.scorer(row).token_logps, adapted)
