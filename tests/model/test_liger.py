"""model.kernels: liger-kernel's code in the layers of one model, and the family's own where that is asked."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from support.groups import CPU, group, make_row
from support.reference_pairs import load_scorer
from support.tiny_models import tiny_config, tiny_model
from support.tiny_run import tiny_run
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import dpo_pack.model.fast_layers as fast_layers
import dpo_pack.run.models as recipe_models
from dpo_pack.model.facts import without_weights
from dpo_pack.model.fast_layers import apply_liger, check_kernels, stock_layers
from dpo_pack.model.fingerprint import modelling_source
from dpo_pack.proofs.start_up import prove
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.inputs import prove_and_measure
from dpo_pack.system.errors import RecipeError, UnsupportedModelError
from dpo_pack.trainer import train

CUDA = torch.device("cuda")


class FusedNorm(nn.Module):
    """Stands in for liger-kernel's class, and computes the same."""

    calls = 0
    factor = 1.0

    def forward(self: Any, hidden: Tensor) -> Tensor:
        FusedNorm.calls += 1
        variance = hidden.float().square().mean(-1, keepdim=True)
        normed: Tensor = hidden.float() * torch.rsqrt(variance + self.variance_epsilon)
        scaled: Tensor = FusedNorm.factor * self.weight * normed.to(hidden.dtype)
        return scaled


def apply_to_llama(
    *,
    model: Any,
    rope: bool,
    rms_norm: bool,
    swiglu: bool,
    cross_entropy: bool,
    fused_linear_cross_entropy: bool,
) -> None:
    """What liger-kernel does to a family: classes and functions of its module, methods of its instances."""
    assert rope and rms_norm and swiglu and not cross_entropy and not fused_linear_cross_entropy
    plain_rope = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda *a, **k: plain_rope(*a, **k)
    modeling_llama.LlamaRMSNorm = FusedNorm  # type: ignore[assignment,misc]
    for layer in model.model.layers:
        norm = layer.input_layernorm
        norm.__dict__["forward"] = MethodType(FusedNorm.forward, norm)
        layer.mlp.__dict__["forward"] = MethodType(modeling_llama.LlamaMLP.forward, layer.mlp)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FusedNorm]]:
    """A package that knows llama."""
    package, transformers, patch = (
        ModuleType(name)
        for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    )
    patch.__dict__["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"llama": apply_to_llama}
    for module in (package, transformers, patch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fast_layers, "_replaced", {})
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(FusedNorm, "calls", 0)
    monkeypatch.setattr(FusedNorm, "factor", 1.0)
    yield FusedNorm


def package_is(monkeypatch: pytest.MonkeyPatch, *, present: bool) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return present or None if name == "liger_kernel" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_the_layers_of_the_model_compute_with_the_kernels_and_stock_layers_do_not(
    liger: type[FusedNorm], model_path: Path
) -> None:
    scorer, plain_rope = load_scorer(model_path, packed=False), modeling_llama.apply_rotary_pos_emb
    apply_liger(scorer.model)
    ids = torch.arange(5, 9)[None]
    scorer.model(ids)
    assert liger.calls == 2 and modeling_llama.apply_rotary_pos_emb is not plain_rope
    with stock_layers(scorer.model):
        scorer.model(ids)
        assert modeling_llama.apply_rotary_pos_emb is plain_rope
    assert liger.calls == 2
    scorer.model(ids)
    assert liger.calls == 4 and modeling_llama.apply_rotary_pos_emb is not plain_rope


def test_a_second_model_is_of_the_family_s_own_classes_and_the_fingerprint_stays(
    liger: type[FusedNorm], model_path: Path
) -> None:
    config = tiny_config("llama")
    before = modelling_source(without_weights(config, trust_remote_code=False))
    first = load_scorer(model_path)
    apply_liger(first.model)
    assert modelling_source(without_weights(config, trust_remote_code=False)) == before
    second = load_scorer(model_path, packed=False)
    second.model(torch.arange(5, 9)[None])
    assert liger.calls == 0
    apply_liger(second.model)
    with stock_layers(second.model):  # the first replacement of the rope is not taken for the family's own
        assert modeling_llama.apply_rotary_pos_emb.__module__ == modeling_llama.__name__


def test_the_proofs_compare_with_the_family_s_own_code(liger: type[FusedNorm], model_path: Path) -> None:
    scorer = load_scorer(model_path)
    apply_liger(scorer.model)
    assert all(proof.passed for proof in prove(scorer, CPU))
    assert liger.calls > 0
    liger.factor = 1.01
    assert [proof.name for proof in prove(scorer, CPU) if not proof.passed] == ["equivalence"]


@pytest.mark.slow
def test_a_recipe_with_kernels_trains_and_its_proof_is_remembered_apart(
    liger: type[FusedNorm], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_models, "check_kernels", lambda *_: None)
    package_is(monkeypatch, present=True)
    recipe = tiny_run(tmp_path)
    train(load_recipe(recipe, [f"output_dir={tmp_path / 'plain'}"]), console)
    assert liger.calls == 0
    train(load_recipe(recipe, [f"output_dir={tmp_path / 'fused'}", "model.kernels=liger"]), console)
    assert liger.calls > 0
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "passed before" not in told
    assert "44 of 44 different sequences cached" in told  # the values are the same


def test_what_the_last_layer_skips_it_skips_with_kernels_as_well(
    liger: type[FusedNorm], model_path: Path
) -> None:
    row = make_row([group(range(3, 23), range(30, 33), range(40, 42))])
    num_positions: list[int] = []
    scorer = load_scorer(model_path, kernels="liger")
    for number in range(2):
        scorer.model.get_submodule(f"model.layers.{number}.mlp.down_proj").register_forward_pre_hook(
            lambda module, inputs: num_positions.append(inputs[0].shape[1])
        )
    scorer(row)
    assert liger.calls == 2 and num_positions == [row.num_tokens, 4]


@pytest.mark.parametrize(
    "failure", [ImportError("no lce_forward"), AttributeError("no q_norm"), TypeError("unexpected rope")]
)
def test_a_package_that_does_not_fit_is_told_in_one_line(
    failure: Exception, liger: type[FusedNorm], model_path: Path
) -> None:
    def fails(**_: Any) -> None:
        raise failure

    table = sys.modules["liger_kernel.transformers.monkey_patch"].__dict__["MODEL_TYPE_TO_APPLY_LIGER_FN"]
    table["llama"] = fails
    with pytest.raises(UnsupportedModelError, match=f"does not fit llama.*{failure}"):
        apply_liger(load_scorer(model_path).model)


def test_kernels_are_refused_where_they_do_not_run() -> None:
    check_kernels(tiny_config("qwen3"), CUDA)
    with pytest.raises(RecipeError, match="model.kernels: .*CUDA devices, and this is cpu; set"):
        check_kernels(tiny_config("llama"), CPU)
    with pytest.raises(UnsupportedModelError, match="model.kernels: .*for gpt2, only for gemma, .*; set"):
        check_kernels(tiny_config("gpt2"), CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(fast_layers.LIGER_FAMILIES))
def test_on_cuda_liger_s_kernels_are_exact(family: str, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    recipe = tiny_run(tmp_path)
    tiny_model(family, vocab_size=len(load_recipe(recipe).model.path) + 200).save_pretrained(
        tmp_path / "model"
    )
    outcome = prove_and_measure(load_recipe(recipe, ["model.kernels=liger"]), Console())
    assert all(proof.passed for proof in outcome.proofs), outcome
