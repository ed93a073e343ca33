"""The policy's tensors as an engine with weights of its own is given them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.loading import load_usual
from support.tiny_adapters import saved_adapter
from support.tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dpo_pack.model.lora import plain_name
from dpo_pack.online.vllm_weights import checkpoint_tensors

# Dense, tied, convolution-like weights, fused projections, experts stacked in memory, buffers that are saved.
FAMILIES = ("llama", "gemma2", "gpt2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")


def saved(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    model.save_pretrained(directory)
    tensors: dict[str, Tensor] = load_file(directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_that_a_checkpoint_of_the_family_has(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "first")
    for model in (tiny_model(family), AutoModelForCausalLM.from_pretrained(tmp_path / "first")):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        handed = list(checkpoint_tensors(model, has_adapter=False))
        expected = saved(model, tmp_path / "saved")
        assert sorted(name for name, _ in handed) == sorted(expected)  # none twice
        assert all(torch.equal(tensor, expected[name]) for name, tensor in handed)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tensors_nobody_changed_are_not_copied() -> None:
    model = tiny_model("llama")
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    handed = dict(checkpoint_tensors(model, has_adapter=False))
    assert {tensor.data_ptr() for tensor in handed.values()} == own
    assert not any(tensor.requires_grad for tensor in handed.values())


@pytest.mark.parametrize(
    "family, settings",
    [
        ("llama", {}),
        ("llama", {"use_rslora": True, "r": 8}),
        ("llama", {"use_dora": True}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("gpt2", {"fan_in_fan_out": True, "target_modules": ["c_attn"]}),
    ],
    ids=["all", "rslora", "dora", "head-saved", "head", "transposed"],
)
def test_an_adapter_is_added_as_peft_merges_it_and_the_policy_stays_bitwise(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model(family, tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    adapter = saved_adapter(tmp_path / "adapter", tmp_path / "base", **settings)
    policy = load_usual(tmp_path / "base", adapter=adapter)
    before = {name: (t.data_ptr(), t.clone()) for name, t in policy.model.state_dict().items()}
    handed = list(checkpoint_tensors(policy.model, has_adapter=True))
    for name, tensor in policy.model.state_dict().items():
        assert before[name][0] == tensor.data_ptr() and torch.equal(before[name][1], tensor), name
    assert policy.adapter is not None
    expected = saved(policy.adapter.merge(), tmp_path / "merged")
    assert sorted(name for name, _ in handed) == sorted(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in handed)
    plain = load_file(tmp_path / "base" / "model.safetensors")
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in handed)


def test_of_merged_weights_one_layer_exists_at_a_time(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=6).save_pretrained(tmp_path / "base")
    policy = load_usual(tmp_path / "base", adapter=saved_adapter(tmp_path / "adapter", tmp_path / "base"))
    made: list[weakref.ref[Tensor]] = []
    most = 0
    for name, tensor in checkpoint_tensors(policy.model, has_adapter=True):
        if name.endswith("_proj.weight"):
            made.append(weakref.ref(tensor))
        most = max(most, sum(reference() is not None for reference in made))
    assert len(made) == 6 * 7  # linear modules, all merged
    assert most <= 7 + 1  # those of a layer, and the one in hand


def test_names_are_those_without_the_adapter() -> None:
    assert plain_name("model.layers.0.q_proj.base_layer.weight") == "model.layers.0.q_proj.weight"
    assert plain_name("model.layers.0.q_proj.lora_A.default.weight") is None
    assert plain_name("lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert plain_name("lm_head.original_module.weight") is None
    assert plain_name("model.norm.weight") == "model.norm.weight"
