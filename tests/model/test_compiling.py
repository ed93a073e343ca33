"""model.compile: layers and head compute what they do uncompiled, compiled once for rows of any length."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.family_errors import skip_unless_packed
from support.flash_stand_ins import use_stand_ins
from support.gradients import flat, gradients
from support.groups import CPU, random_groups
from support.groups import make_row as row_of
from support.heads import TRANSFORMS, chunked, make_head
from support.heads import gradients as head_gradients
from support.reference_pairs import load_scorer
from support.tiny_models import tiny_model
from support.tiny_run import tiny_run
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import dpo_pack.model.building as building
import dpo_pack.run.models as recipe_models
from dpo_pack.model.attention import BACKENDS
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fast_layers import checkpoint_activations, compile_layers, compiler_obstacle
from dpo_pack.model.layout import Row
from dpo_pack.model.logps import compile_head
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.proofs.start_up import prove
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.models import check_model, load_and_prove, resolve_model
from dpo_pack.system.errors import RecipeError
from dpo_pack.trainer import train

CUDA = torch.device("cuda")
pytestmark = pytest.mark.usefixtures("fresh_compiler")
# Traces and differentiates as the real one does, and generates no code: that takes a minute on two cores.
compile_quickly = functools.partial(compile_layers, backend="aot_eager")


def make_row(seed: int, *, is_packed: bool = True) -> Row:
    """Of another length for each seed."""
    lengths = [(11 + seed, 7, 3 + number) for number in range(2 + seed)]
    return row_of(random_groups(*lengths, seed=seed), "shared" if is_packed else "padded")


def logps_and_gradient(scorer: CompletionLogps, row: Row) -> tuple[Tensor, Tensor]:
    sums, grads = gradients(scorer, row)
    return sums, flat(grads)


def assert_as_before(scorer: CompletionLogps, rows: list[Row], *, backend: str = "aot_eager") -> None:
    """Compiled for the first two rows, and for no other."""
    expected = [logps_and_gradient(scorer, row) for row in rows]
    compile_layers(scorer.model, backend=backend)
    num_compiled = 0
    for number, (row, (sums, gradient)) in enumerate(zip(rows, expected, strict=True)):
        our_sums, our_gradient = logps_and_gradient(scorer, row)
        torch.testing.assert_close(our_sums, sums, rtol=0, atol=1e-4)
        assert (our_gradient - gradient).norm() <= 1e-5 * gradient.norm()
        if number == 1:
            num_compiled = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == num_compiled > 0


@pytest.mark.parametrize(
    ("is_packed", "backend"),
    [
        (True, "eager"),  # traces only
        pytest.param(True, "aot_eager", marks=pytest.mark.slow),
        pytest.param(False, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_give_what_plain_ones_give_and_are_compiled_once_for_all_lengths(
    is_packed: bool, backend: str, model_path: Path
) -> None:
    scorer = load_scorer(model_path, packed=is_packed)
    rows = [make_row(seed, is_packed=is_packed) for seed in range(5)]
    assert len({row.input_ids.shape for row in rows}) == 5
    assert_as_before(scorer, rows, backend=backend)
    # A checkpoint of a compiled model is one of the model.
    assert all("forward" not in name for name in scorer.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_layer_with_a_kernel_is_one_graph(
    checkpoints: bool, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are known by numbers, also if nobody else holds them when gradients are computed."""
    use_stand_ins(monkeypatch)
    scorer = load_scorer(model_path)
    scorer.backend, scorer.autocast = BACKENDS["torch_varlen"], torch.bfloat16
    if checkpoints:
        checkpoint_activations(scorer.model, keeps_products=False)
    expected = [logps_and_gradient(scorer, make_row(seed)) for seed in range(3)]
    compile_quickly(scorer.model)
    for seed, (sums, gradient) in enumerate(expected):
        our_sums, our_gradient = logps_and_gradient(scorer, make_row(seed))
        torch.testing.assert_close(our_sums, sums, rtol=0, atol=1e-2)
        assert (our_gradient - gradient).norm() <= 1e-2 * gradient.norm()
    assert counters["stats"]["unique_graphs"] == 2  # the last layer computes what is scored


def test_the_proofs_find_a_layer_compiled_wrongly(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain answer they compare with is not computed by the compiled layers."""
    scorer = load_scorer(model_path)

    def miscompile(plain: Any, **_: Any) -> Any:
        return lambda layer, hidden, *arguments, **options: plain(layer, 1.01 * hidden, *arguments, **options)

    monkeypatch.setattr(torch, "compile", miscompile)
    compile_layers(scorer.model)
    assert [proof.name for proof in prove(scorer, CPU) if not proof.passed] == ["equivalence"]


def test_without_a_compiler_the_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_obstacle(CPU) is None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton" in str(compiler_obstacle(CUDA))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RecipeError, match="^model.compile: .*no-such-compiler"):
        check_model(resolve_model(load_recipe(tiny_run(tmp_path), ["model.compile=true"]), CPU), CPU)


def fails(graph: Any, inputs: Any) -> Any:
    raise NotImplementedError("no such kernel")


FAILING: dict[str, Any] = {
    "layers": fails,
    "gradients": aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=fails),
}


def compile_where_auto(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """On this CPU, as on CUDA: `load_model` compiles a model with `model.compile: auto`."""
    load = building.load_model

    def load_model(model: ModelFacts, **options: Any) -> LoadedModel:
        loaded = load(model, **options)
        if model.settings.compile == "auto":
            compile_layers(loaded.model, backend=backend, falls_back=True)
            loaded.scorer.is_compiled = True
        return loaded

    monkeypatch.setattr(recipe_models, "load_model", load_model)


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILING)
def test_a_model_that_cannot_be_compiled_is_found_at_the_start_and_loaded_uncompiled(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_where_auto(monkeypatch, FAILING[what])
    recipe = load_recipe(tiny_run(tmp_path))
    policy = resolve_model(recipe, CPU)
    loaded, outcome = load_and_prove(policy, device=CPU)
    assert loaded.not_compiled is not None and "no such kernel" in loaded.not_compiled
    assert not loaded.scorer.is_compiled and all(proof.passed for proof in outcome.proofs)
    logps_and_gradient(loaded.scorer, make_row(0))


@pytest.mark.slow
def test_a_model_that_can_be_compiled_stays_compiled_and_has_no_gradients_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_where_auto(monkeypatch, "aot_eager")
    recipe = load_recipe(tiny_run(tmp_path))
    policy = resolve_model(recipe, CPU)
    state = torch.get_rng_state()
    loaded, _ = load_and_prove(policy, device=CPU)
    assert loaded.scorer.is_compiled and loaded.not_compiled is None
    assert all(parameter.grad is None for parameter in loaded.scorer.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_compiled_run_is_plain(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter, gradient checkpointing and evaluation: all that calls the layers otherwise."""
    monkeypatch.setattr(building, "compile_layers", compile_quickly)
    monkeypatch.setattr(building, "compile_head", functools.partial(compile_head, backend="aot_eager"))
    recipe, lines = tiny_run(tmp_path), []
    for setting in ("false", "true"):
        overrides = [f"model.compile={setting}", f"output_dir={tmp_path / setting}"]
        overrides += ["model.lora={r: 2}", "model.gradient_checkpointing=true"]
        train(load_recipe(recipe, overrides), console)
        written = (tmp_path / setting / "metrics.jsonl").read_text().splitlines()
        lines.append([json.loads(line)["loss"] for line in written])
    assert counters["stats"]["unique_graphs"] > 0
    assert lines[1] == pytest.approx(lines[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma2", "gpt2", "deepseek_v3", "gpt_oss", "gemma4_text", "qwen3_5_text", "llama"]
)
def test_compiled_layers_of_other_families_give_what_plain_ones_give(family: str, tmp_path: Path) -> None:
    """Llama's with generated code."""
    skip_unless_packed(family)
    tiny_model(family).save_pretrained(tmp_path)
    backend = "inductor" if family == "llama" else "aot_eager"
    assert_as_before(load_scorer(tmp_path), [make_row(seed) for seed in range(4)], backend=backend)


@pytest.mark.parametrize(
    ("dtype", "name", "is_frozen", "kept_chunks"),
    [
        (torch.float64, "scaled and softcapped", False, 2),
        pytest.param(torch.bfloat16, "plain", True, 0, marks=pytest.mark.slow),
        # Each two of these values are together somewhere.
        pytest.param(torch.float64, "plain", True, 2, marks=pytest.mark.slow),
        pytest.param(torch.float64, "plain", False, 0, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "plain", False, 2, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "scaled and softcapped", False, 0, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "scaled and softcapped", True, 2, marks=pytest.mark.slow),
    ],
)
def test_compiled_passes_of_the_head_give_what_plain_ones_give(
    dtype: torch.dtype, name: str, is_frozen: bool, kept_chunks: int
) -> None:
    head, transform = make_head(has_bias=name != "plain", is_frozen=is_frozen), TRANSFORMS[name]
    results = []
    for passes in (None, compile_head(backend="aot_eager")):
        logps, statistics = chunked(
            head, transform, kept_chunks=kept_chunks, compute_dtype=dtype, passes=passes
        )
        results.append([logps.detach(), statistics, *head_gradients(head, logps)])
    assert counters["stats"]["unique_graphs"] > 0
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6 if dtype.itemsize == 2 else 1e-12)
