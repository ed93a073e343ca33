"""LoRA runs: the reference shared with full training, what they leave, how they resume, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.refusals import refusal
from support.run_files import timeless
from support.tiny_adapters import saved_adapter
from support.tiny_run import tiny_run
from support.whole_runs import adapter_recipe as recipe_in
from support.whole_runs import num_computed
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

import dpo_pack.run.models as recipe_models
import dpo_pack.trainer as train_module
from dpo_pack.model.building import load_model
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.recipe.load import check_environment
from dpo_pack.run.evaluate import evaluate_models
from dpo_pack.run.pairs import prepare_reference
from dpo_pack.run.setup import prepare
from dpo_pack.system.errors import ModelError, RecipeError, RunError
from dpo_pack.system.files import read_json
from dpo_pack.trainer import train

LORA = "model.lora={r: 4, alpha: 8}"
SHORT = "train.max_steps=2"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its model and pairs, and run/, a finished LoRA run."""
    directory = tmp_path_factory.mktemp("lora")
    tiny_run(directory)
    train(recipe_in(directory, LORA), Console(quiet=True))
    return directory


@pytest.fixture
def copy(assets: Path, tmp_path: Path) -> Path:
    """The same in a directory of its own."""
    shutil.copytree(assets, tmp_path / "copy")
    return tmp_path / "copy"


def at(run: Path) -> str:
    return f"output_dir={run}"


def starting_from(adapter: Path) -> str:
    return f"model.path={adapter}"


def adapter_weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "adapter_model.safetensors")


def logits(model: Any) -> Tensor:
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        result: Tensor = model.eval()(tokens).logits
    return result


# ------------------------------------------------------------------------------------------- the reference


def test_a_lora_run_and_a_full_run_on_the_same_base_share_their_reference(assets: Path) -> None:
    both = (prepare(recipe_in(assets, *overrides), Console(quiet=True)) for overrides in ((), (LORA,)))
    plain, with_adapter = (setup.reference_facts.namespace for setup in both)
    assert plain == with_adapter


def test_the_base_is_loaded_once_and_its_log_probs_are_bitwise_those_of_the_base_alone(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_loaded = 0

    def counting(*arguments: Any, **settings: Any) -> LoadedModel:
        nonlocal num_loaded
        num_loaded += 1
        return load_model(*arguments, **settings)

    monkeypatch.setattr(recipe_models, "load_model", counting)
    own_cache = f"reference.cache_dir={tmp_path / 'cache'}"
    train(recipe_in(copy, LORA, at(tmp_path / "run"), own_cache), Console(quiet=True))
    assert num_loaded == 1 and num_computed(tmp_path / "run") > 0
    plain = prepare(recipe_in(copy, f"reference.cache_dir={tmp_path / 'other'}"), Console(quiet=True))
    prepare_reference(plain)
    ours, theirs = (sorted((tmp_path / name).rglob("part-*.parquet")) for name in ("cache", "other"))
    assert [part.name for part in ours] == [part.name for part in theirs]  # named by what is in them


def test_a_new_adapter_starts_as_its_reference(assets: Path) -> None:
    before = timeless(assets / "run")[0]
    assert before["step"] == 0 and before["rewards/margins"] == 0.0 and before["kl/chosen"] == 0.0
    after = timeless(assets / "run")[-1]
    assert after["rewards/margins"] > 0.1 and after["rewards/accuracies"] > 0.75


# ------------------------------------------------------------------------------------------------- the runs


def test_plain_peft_loads_the_adapter_that_a_run_leaves(assets: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(assets / "model")
    alone = logits(base)
    adapted = PeftModel.from_pretrained(base, str(assets / "run" / "model"))
    adapted_logits = logits(adapted)
    merged_logits = logits(adapted.merge_and_unload())
    assert (adapted_logits - alone).abs().max() > 0.1
    torch.testing.assert_close(adapted_logits, merged_logits, atol=1e-4, rtol=1e-5)
    names = {path.name for path in (assets / "run" / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    config = read_json(assets / "run" / "model" / "adapter_config.json")
    assert config["base_model_name_or_path"] == str(assets / "model")
    assert "library_name: peft" in (assets / "run" / "model" / "README.md").read_text()


def test_a_checkpoint_holds_the_adapter_alone_and_knows_its_base(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(copy, LORA, at(tmp_path / "run"), "checkpoint.every_steps=2")

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_module.Trainer, "finish", killed)
        train(recipe, Console(quiet=True))
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    saved = FileSystemReader(newest / "tensors").read_metadata().state_dict_metadata
    assert saved and all("lora_" in name for name in saved)
    weights = load_file(copy / "model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1.0
    save_file(weights, copy / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="another base model"):
        train(recipe, Console(quiet=True))


def test_dropout_unshares_prompts_says_so_and_is_off_where_nothing_is_learned(
    copy: Path, tmp_path: Path, console: Console
) -> None:
    lora = "model.lora={r: 4, alpha: 8, dropout: 0.3}"
    train(recipe_in(copy, lora, at(tmp_path / "run"), "train.max_steps=1"), console)
    assert "model.lora.dropout: 0 shares them" in console.file.getvalue()  # type: ignore[attr-defined]
    with_dropout, without = timeless(tmp_path / "run"), timeless(copy / "run")
    for name in ("rewards/margins", "kl/chosen", "kl/rejected"):  # evaluated at step 0
        assert with_dropout[0][name] == pytest.approx(0.0, abs=1e-5)
    assert with_dropout[1]["tokens"] > without[1]["tokens"]
    assert abs(with_dropout[1]["grad_norm"] / without[1]["grad_norm"] - 1) > 1e-2


def test_evaluate_takes_an_adapter_s_directory(assets: Path, tmp_path: Path) -> None:
    trained = timeless(assets / "run")[-1]
    model = str(assets / "run" / "model")
    (results,) = evaluate_models(recipe_in(assets, LORA), [model], Console(quiet=True))
    result = results["heldout"].record
    assert result["rewards/margins"] == pytest.approx(trained["rewards/margins"], abs=1e-6)
    with pytest.raises(ModelError, match="--model"):
        evaluate_models(recipe_in(assets, LORA), [str(tmp_path)], Console(quiet=True))


# -------------------------------------------------------------------------------- an adapter as the start


@pytest.mark.slow
def test_an_adapter_as_the_start_is_its_own_reference_by_its_content(assets: Path, tmp_path: Path) -> None:
    adapter = assets / "run" / "model"
    train(recipe_in(assets, starting_from(adapter), at(tmp_path / "one"), SHORT), Console(quiet=True))
    assert num_computed(tmp_path / "one") > 0, "the base's log-probs are not the adapter's"
    assert timeless(tmp_path / "one")[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)

    shutil.copytree(adapter, tmp_path / "renamed")
    train(
        recipe_in(assets, starting_from(tmp_path / "renamed"), at(tmp_path / "two"), SHORT),
        Console(quiet=True),
    )
    assert num_computed(tmp_path / "two") == 0
    ours, theirs = adapter_weights(tmp_path / "one"), adapter_weights(tmp_path / "two")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    start = load_file(adapter / "adapter_model.safetensors")
    assert ours.keys() == start.keys() and not all(torch.equal(ours[name], start[name]) for name in ours)

    other = saved_adapter(tmp_path / "other", assets / "model")
    train(recipe_in(assets, starting_from(other), at(tmp_path / "three"), SHORT), Console(quiet=True))
    assert num_computed(tmp_path / "three") == num_computed(tmp_path / "one")


def test_an_adapter_may_be_the_reference_of_another_policy(assets: Path, tmp_path: Path) -> None:
    reference = f"reference.path={assets / 'run' / 'model'}"
    train(recipe_in(assets, LORA, reference, at(tmp_path / "run"), SHORT), Console(quiet=True))
    expected = timeless(assets / "run")[-1]["rewards/margins"]
    # The base against the trained adapter: the margin the other way round.
    assert timeless(tmp_path / "run")[0]["rewards/margins"] == pytest.approx(-expected, abs=1e-5)


def test_dropout_of_a_saved_adapter_is_off_and_stays_in_its_config(assets: Path, tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path / "adapter", assets / "model", lora_dropout=0.5)
    train(recipe_in(assets, starting_from(adapter), at(tmp_path / "run"), SHORT), Console(quiet=True))
    assert timeless(tmp_path / "run")[1]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)  # of a train step
    assert read_json(tmp_path / "run" / "model" / "adapter_config.json")["lora_dropout"] == 0.5


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "is a IA3 adapter"),
        ({"alora_invocation_tokens": [1, 2]}, "is a alora_invocation_tokens adapter"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "is a layer_replication adapter"),
        ({"base_model_name_or_path": None}, "does not name the model"),
        ({"base_model_name_or_path": "/gone/base"}, "/gone/base"),
    ],
)
def test_an_adapter_s_config_is_checked_before_anything_is_tokenised(
    change: dict[str, Any], words: str, copy: Path, console: Console
) -> None:
    file = copy / "run" / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    recipe = recipe_in(copy, starting_from(copy / "run" / "model"), at(copy / "next"))
    message = refusal(lambda: train(recipe, console), ModelError)
    assert message.startswith("model.path") and words in message
    assert "Data:" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "words"),
    [("gptq", "only bitsandbytes is supported"), ("bitsandbytes", "remove quantization_config")],
)
def test_settings_of_quantised_weights_that_do_not_fit_are_refused(
    method: str, words: str, copy: Path, console: Console
) -> None:
    """Weights that another method has quantised; a config that says so of weights that are not quantised."""
    file = copy / "model" / "config.json"
    settings = {"quant_method": method, "load_in_4bit": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    message = refusal(lambda: train(recipe_in(copy, LORA, at(copy / "next")), console), ModelError)
    assert message.startswith("model.path: ") and words in message


def test_weights_that_are_not_finite_are_named(copy: Path, console: Console) -> None:
    file, name = copy / "model" / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    weights = load_file(file)
    weights[name][3, 5] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    message = refusal(lambda: train(recipe_in(copy, at(copy / "next")), console), ModelError)
    assert "change of other pairs nan" in message and "or what they compute, are not finite" in message


def test_a_new_adapter_on_an_adapter_is_refused(assets: Path) -> None:
    recipe = recipe_in(assets, LORA, starting_from(assets / "run" / "model"))
    assert refusal(lambda: check_environment(recipe), RecipeError).startswith("model.lora: ")
