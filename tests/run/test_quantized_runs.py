"""model.quantize: LoRA on a base that bitsandbytes stores in 4 or 8 bits; on the CPU, as on CUDA."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from support.refusals import refusal
from support.run_files import assert_same_metrics, timeless
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks
from support.whole_runs import adapter_recipe as recipe_in
from support.whole_runs import num_computed
from transformers import AutoConfig, AutoModelForCausalLM

from dpo_pack.model.lora import compute_restored, quantization_settings
from dpo_pack.recipe.load import check_environment
from dpo_pack.run.export import merge_adapter
from dpo_pack.run.models import check_model, load_and_prove, resolve_model
from dpo_pack.run.setup import prepare
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.files import read_json
from dpo_pack.trainer import train

# bitsandbytes takes two seconds to import: no process does it that runs other tests.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
CPU, LORA, NF4, INT8 = torch.device("cpu"), "model.lora={r: 4}", "model.quantize=nf4", "model.quantize=int8"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its model and pairs."""
    return tiny_run(tmp_path_factory.mktemp("quantized")).parent


@pytest.fixture(scope="module")
def finished(assets: Path) -> Path:
    """A finished run on a base in 4 bits."""
    return run_in(assets, assets / "run", LORA, NF4, "export.verify=full")


def run_in(assets: Path, run: Path, *overrides: str) -> Path:
    train(recipe_in(assets, f"output_dir={run}", *overrides), Console(quiet=True))
    return run


@pytest.mark.parametrize("kind", [NF4, INT8])
@pytest.mark.parametrize("autocast", ["none", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_packed_rows_of_a_quantised_base_are_proved_exact(kind: str, autocast: str, assets: Path) -> None:
    recipe = recipe_in(assets, LORA, kind, f"model.autocast={autocast}")
    prepared = prepare(recipe, Console(quiet=True))
    loaded, outcome = load_and_prove(prepared.policy_facts, device=CPU, adds_adapter=True, again=True)
    types = {parameter.dtype for parameter in loaded.model.parameters()}
    assert types == {torch.float32, torch.uint8 if kind == NF4 else torch.int8}
    assert [proof.name for proof in outcome.proofs if not proof.passed] == []
    equivalence = next(proof for proof in outcome.proofs if proof.name == "equivalence")
    name = "max error" if autocast == "none" else "max error, in float32"
    assert equivalence.numbers[name] <= 1e-4


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_layer_computes_as_a_linear_layer_with_the_restored_weight(
    kind: str, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_layer(**options: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype=torch.float32, **options)
        return model.model.layers[0].mlp.gate_proj

    plain = first_layer()
    quantised = first_layer(quantization_config=quantization_settings(kind), device_map={"": "cpu"})
    holder = torch.nn.ModuleList([quantised])
    compute_restored(holder)
    if kind == "nf4":  # restored in the type of the products at once, not by way of fp32
        from bitsandbytes import functional

        made: list[torch.dtype] = []
        real = functional.dequantize_4bit

        def restore(*arguments: Any) -> torch.Tensor:
            made.append(real(*arguments).dtype)
            return real(*arguments)  # type: ignore[no-any-return]

        monkeypatch.setattr(functional, "dequantize_4bit", restore)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            holder[0](torch.randn(5, plain.in_features, requires_grad=True)).sum().backward()
        assert made == [torch.bfloat16] * 2
    inputs = [torch.randn(5, plain.in_features, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        weight = holder[0](torch.eye(plain.in_features)).T
        inputs[1].copy_(inputs[0])
    error = (weight - plain.weight).norm() / plain.weight.norm()
    assert 1e-3 < error < (0.01 if kind == "int8" else 0.1)  # 0.09 is that of 4 bits for normal numbers
    outputs = holder[0](inputs[0]), torch.nn.functional.linear(inputs[1], weight)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_only_the_adapter_is_trained_and_it_learns(finished: Path) -> None:
    lines = timeless(finished)
    assert lines[0]["rewards/margins"] == 0.0 and lines[-1]["rewards/margins"] > 0.1
    assert {path.name for path in (finished / "model").glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert all("lora_" in name for name in load_file(finished / "model" / "adapter_model.safetensors"))


@pytest.mark.slow
def test_a_quantised_base_is_a_reference_of_its_own(assets: Path, finished: Path, tmp_path: Path) -> None:
    num_sequences = num_computed(finished)
    assert num_sequences > 0
    for name, overrides, computed in (
        ("plain", (LORA,), num_sequences),
        ("again", (LORA, NF4), 0),
        ("int8", (LORA, INT8), num_sequences),
    ):
        assert num_computed(run_in(assets, tmp_path / name, *overrides)) == computed


@pytest.mark.slow
def test_plain_peft_and_merge_take_the_adapter_on_the_base_that_is_not_quantised(
    assets: Path, finished: Path, tmp_path: Path
) -> None:
    adapter = finished / "model"
    assert read_json(finished / "run.json")["verified"] is True  # in another process
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(assets / "model"), str(adapter)
        )
        expected = adapted.eval()(tokens).logits
        merge_adapter(adapter, tmp_path / "merged", base=None, dtype="auto", trust_remote_code=False)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(tokens).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_quantised_weights_of_files_are_loaded_and_not_quantised_again(
    assets: Path, finished: Path, tmp_path: Path
) -> None:
    settings = quantization_settings("nf4")
    model = AutoModelForCausalLM.from_pretrained(
        assets / "model", quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )
    shutil.copytree(assets / "model", tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(tmp_path / "model")
    start = f"model.path={tmp_path / 'model'}"
    lines = timeless(run_in(assets, tmp_path / "run", LORA, start))
    for ours, theirs in zip(lines, timeless(finished), strict=True):
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=1e-6)
    message = refusal(lambda: run_in(assets, tmp_path / "next", LORA, NF4, start), ModelError)
    assert "are quantised (bitsandbytes) already; leave model.quantize out" in message
    message = refusal(lambda: run_in(assets, tmp_path / "next", start), ModelError)
    assert "quantised weights cannot be trained; set model.lora" in message


@pytest.mark.slow
def test_two_processes_with_a_copy_each_take_the_steps_of_one(
    assets: Path, finished: Path, tmp_path: Path
) -> None:
    run_on_ranks(run_in, assets, tmp_path / "run", LORA, NF4, "distributed.strategy=ddp")
    assert_same_metrics(timeless(tmp_path / "run"), timeless(finished), ("ddp", "nf4", ()))


def test_what_cannot_be_quantised_is_refused_in_one_line(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(lambda: check_environment(recipe_in(assets, NF4)), RecipeError)
    assert message.startswith("model.quantize: quantised weights cannot be trained; set model.lora")
    message = refusal(lambda: recipe_in(assets, LORA, NF4, "distributed.strategy=fsdp2"), RecipeError)
    assert message.startswith("distributed.strategy: fsdp2 cannot shard quantised weights")
    message = refusal(lambda: recipe_in(assets, LORA, NF4, "reference.sync={}"), RecipeError)
    assert message.startswith("reference.sync: a model with model.quantize")
    with pytest.raises(ModelError, match="model.compile: layers with quantised weights are not compiled"):
        prepare(recipe_in(assets, LORA, NF4, "model.compile=true"), Console(quiet=True))
    experts = AutoConfig.for_model("gpt_oss", num_hidden_layers=1, num_local_experts=8, vocab_size=64)
    facts = replace(resolve_model(recipe_in(assets, LORA, NF4), CPU), config=experts)
    with pytest.raises(ModelError, match="^model.quantize: .*experts"):
        check_model(facts, CPU)
    assert "nf4" in refusal(lambda: recipe_in(assets, LORA, "model.quantize=fp4"), RecipeError)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name)
    )
    message = refusal(functools.partial(check_environment, recipe_in(assets, LORA, NF4)), RecipeError)
    assert message.startswith("model.quantize: needs the package bitsandbytes") and "pip install" in message
