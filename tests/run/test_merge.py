"""Merging an adapter into its base: the model that comes out, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from support.tiny_adapters import saved_adapter
from support.tiny_models import tiny_model
from support.tiny_run import tiny_run
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import dpo_pack.run.export as export
from dpo_pack.commands.main import app
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.export import merge_adapter
from dpo_pack.system.errors import CacheError, DpoPackError, ModelError, RunError
from dpo_pack.trainer import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and run/, a LoRA run on it."""
    directory = tmp_path_factory.mktemp("merge")
    recipe = load_recipe(tiny_run(directory), ["model.lora={r: 4, alpha: 8}", "optim.lr=1e-2"])
    train(recipe, Console(quiet=True))
    return directory


def merge(source: Path, target: Path, **options: Any) -> str:
    _, lines = merge_adapter(
        source, target, **{"base": None, "dtype": "auto", "trust_remote_code": False, **options}
    )
    return "\n".join(lines)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(torch.arange(12)[None]).logits
    return result


def test_the_merged_model_loads_without_peft_and_has_the_adapter_s_logits(
    trained: Path, tmp_path: Path
) -> None:
    merge(trained / "run", tmp_path / "merged")
    result: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    model, info = result
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base = AutoModelForCausalLM.from_pretrained(trained / "model")
    assert (logits(base) - logits(model)).abs().max() > 0.05
    adapted = PeftModel.from_pretrained(base, str(trained / "run" / "model"))
    torch.testing.assert_close(logits(model), logits(adapted), atol=1e-4, rtol=1e-5)
    assert "The LoRA adapter run, merged into" in (tmp_path / "merged" / "README.md").read_text()
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert not any("adapter" in name for name in names) and {"README.md", "config.json"} <= names
    theirs = AutoTokenizer.from_pretrained(trained / "run" / "model")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged")("ask red").input_ids == theirs("ask red").input_ids
    )


def test_the_command_merges_and_its_errors_are_one_line(trained: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), str(tmp_path / "merged")
    merged = runner.invoke(app, ["merge", str(trained / "run" / "model"), out])
    assert merged.exit_code == 0 and re.match(r"Merging \S*model into its base \.\.\.\n", merged.output)
    again = runner.invoke(app, ["merge", str(trained / "run"), out])
    assert isinstance(again.exception, RunError) and "exists already" in str(again.exception)


def test_tokens_that_the_base_does_not_embed_are_named(trained: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(trained / "run" / "model", tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer.add_tokens([f"<extra {n}>" for n in range(base.config.vocab_size - len(tokenizer))])
    tokenizer.save_pretrained(adapter)
    assert not merge(adapter, tmp_path / "all embedded")
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(adapter)
    line = merge(adapter, tmp_path / "merged")
    assert line.startswith("Warning") and "'<one more>' and 0 more" in line and "--base" in line


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_once_after_they_are_merged(dtype: str, trained: Path, tmp_path: Path) -> None:
    assert not merge(trained / "run", tmp_path / "float32", dtype="float32")
    line = merge(trained / "run", tmp_path / dtype, dtype=dtype)
    assert f"rounded to {dtype}" in line and "--dtype float32" in line
    wide, narrow = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("float32", dtype)
    )
    assert narrow.dtype == getattr(torch, dtype) and wide.dtype == torch.float32
    for ours, theirs in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


def test_auto_is_the_type_of_the_base(trained: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    merge(trained / "run", tmp_path / "merged", base=str(tmp_path / "base"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16


def test_what_a_family_keeps_in_fp32_is_not_rounded(trained: Path, tmp_path: Path) -> None:
    base: Any = tiny_model("deepseek_v3")
    bias = base.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    bias.normal_(generator=torch.Generator().manual_seed(0))
    base.to(torch.bfloat16)
    base.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias = bias = bias.float() + 2**-20
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(trained / "model").save_pretrained(tmp_path / "base")
    adapter = saved_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["o_proj"])
    merge(adapter, tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()}
    assert kinds == {torch.bfloat16, torch.float32}


def test_what_cannot_be_merged_is_one_line_and_writes_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(source: Path, kind: type[DpoPackError] = ModelError, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            merge(source, tmp_path / "out", **options)
        assert str(caught.value).isprintable()
        assert not list(tmp_path.glob("*out*")), "a half-written model"
        return str(caught.value)

    assert "no adapter_config.json in this directory" in refusal(tmp_path)
    assert "no adapter_config.json" in refusal(trained / "model")  # a full model
    assert "--base" in refusal(trained / "run", base=str(tmp_path / "gone"))
    shutil.copytree(trained / "run" / "model", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    moved = {**config, "base_model_name_or_path": "/gone/base"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(moved))
    message = refusal(tmp_path / "adapter")
    assert "/gone/base" in message and "--base" in message
    merge(tmp_path / "adapter", tmp_path / "merged", base=str(trained / "model"))

    def full_disk(*arguments: Any, **settings: Any) -> None:
        (arguments[2] / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_model", full_disk)
    assert "No space left" in refusal(trained / "run", CacheError)
