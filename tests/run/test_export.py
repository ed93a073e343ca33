"""A trained model as others find it: loaded by transformers, with its family's settings and a model card."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.family_errors import GROUPS
from support.groups import make_row
from support.loading import load_usual
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dpo_pack.model.attention import ATTENTION_NAME
from dpo_pack.model.saving import save_model
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.recipe.load import Recipe, dump_recipe, parse_recipe
from dpo_pack.run.export import model_card, usage_section, write_model

# top_p without sampling: transformers only warns of it, and published models have such settings.
GENERATION = {"max_new_tokens": 77, "do_sample": False, "top_p": 0.9, "eos_token_id": [2, 3]}
TOTALS = {"steps": 1200, "pairs": 4000, "tokens": 123456, "train_seconds": 43.0}
EVALUATION: dict[str, dict[str, Any]] = {
    "towns": {
        **{"rewards/accuracies": 0.987, "rewards/margins": 1.25, "loss": 0.31, "pairs": 500},
        "intervals": {"rewards/accuracies": [0.97, 0.99]},
    }
}


def make_recipe(directory: Path, **sections: Any) -> Recipe:
    tree = {
        "output_dir": str(directory / "my-run"),
        "model": {"path": str(directory / "model")},
        "data": {"train": str(directory / "pairs.jsonl")},
    }
    return parse_recipe(tree | sections)


def load(path: Path, *, packed: bool = True) -> LoadedModel:
    return load_usual(path, packed=packed)


@pytest.fixture
def exported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[LoadedModel, Path]:
    """A GPT-2 with dropout whose weights have been changed since it was loaded, and where it was exported."""
    tokenizer = tiny_tokenizer(chat_template=True)
    changes: dict[str, Any] = {"attn_pdrop": 0.25, "resid_pdrop": 0.125, "embd_pdrop": 0.0}
    tiny_model("gpt2", vocab_size=len(tokenizer), **changes).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(GENERATION))
    loaded = load(tmp_path / "model")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    capfd.readouterr()
    usage = usage_section(loaded, tokenizer, tmp_path, "Answers end with </s>", trusts_code=False)
    card = model_card(make_recipe(tmp_path), usage, totals=TOTALS, evaluation=EVALUATION)
    target = tmp_path / "my-run" / "model"
    write_model(loaded, tokenizer, target, card)
    return loaded, target


def test_transformers_loads_the_trained_weights_and_the_tokenizer(exported: tuple[LoadedModel, Path]) -> None:
    loaded, directory = exported
    result: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, info = result
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained = loaded.model.state_dict()
    assert model.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    original = tiny_tokenizer(chat_template=True)
    assert tokenizer("the friendly robot").input_ids == original("the friendly robot").input_ids
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("</s>", original.chat_template)


def test_dropout_is_off_in_training_and_back_in_the_exported_config(
    exported: tuple[LoadedModel, Path],
) -> None:
    loaded, directory = exported
    assert loaded.model.config.attn_pdrop == loaded.model.config.resid_pdrop == 0.0
    config = json.loads((directory / "config.json").read_text())
    assert (config["attn_pdrop"], config["resid_pdrop"], config["embd_pdrop"]) == (0.25, 0.125, 0.0)
    assert ATTENTION_NAME not in (directory / "config.json").read_text()


@pytest.mark.parametrize(
    ("family", "key", "value"), [("rwkv", "rescale_every", 1), ("xlstm", "max_inference_chunksize", 8)]
)
def test_what_a_family_does_for_inference_is_off_in_training_and_back_in_the_exported_config(
    family: str, key: str, value: int, tmp_path: Path
) -> None:
    """In evaluation mode RWKV halves its weights, in place, and xLSTM's long batches have no gradients."""
    changes: dict[str, Any] = {key: value}
    tiny_model(family, **changes).save_pretrained(tmp_path / "model")
    loaded, row = load(tmp_path / "model", packed=False), make_row(GROUPS, "padded")
    sums = loaded.scorer(row).sums
    sums.sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.model.parameters())
    save_model(loaded, tiny_tokenizer(), tmp_path / "saved")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())[key] == value
    assert torch.equal(load(tmp_path / "saved", packed=False).scorer(row).sums, sums)


def test_the_generation_config_is_kept_also_if_its_settings_contradict_themselves(
    exported: tuple[LoadedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = GenerationConfig.validate
    # As transformers before 5.23 saves.
    monkeypatch.setattr(GenerationConfig, "validate", lambda self, **_: validate(self, strict=True))
    loaded, before = exported
    with pytest.raises(ValueError, match="top_p"):
        loaded.model.generation_config.save_pretrained(tmp_path / "plain")
    save_model(loaded, tiny_tokenizer(), tmp_path / "again")
    name = "generation_config.json"
    kept = json.loads((before / name).read_text())
    assert {key: kept[key] for key in GENERATION} == GENERATION
    assert json.loads((tmp_path / "again" / name).read_text()) == kept
    assert loaded.model.generation_config.top_p == 0.9


def test_whoever_may_read_the_config_may_read_the_weights(exported: tuple[LoadedModel, Path]) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in exported[1].iterdir()}
    assert "model.safetensors" in modes and len(set(modes.values())) == 1, modes


# ------------------------------------------------------------------------------------------------ model card


def card_of(recipe: Recipe, **settings: Any) -> tuple[dict[str, Any], str]:
    """The front matter and the text."""
    card = model_card(recipe, "usage", totals=TOTALS, evaluation=EVALUATION, **settings)
    empty, front, text = card.split("---\n", 2)
    parsed = yaml.safe_load(front)
    assert empty == "" and isinstance(parsed, dict)
    return parsed, text


def test_the_card_says_how_the_model_came_to_be(exported: tuple[LoadedModel, Path]) -> None:
    card = (exported[1] / "README.md").read_text(encoding="utf-8")
    assert "# my-run\n" in card and "Answers end with </s>.\n" in card
    assert "| towns | 0.9870 | 1.2500 | 0.3100 |" in card and "\ntowns: with 500 pairs, " in card
    assert "1,200 steps, 4,000 preference pairs, 123,456 tokens, 43 s" in card
    shown = parse_recipe(yaml.safe_load(card.split("```yaml\n")[1].split("```")[0]))
    expected = {"output_dir": "my-run", "model": {"path": "model"}, "data": {"train": "pairs.jsonl"}}
    assert shown == parse_recipe(expected)


def test_numbers_of_the_card_agree_with_their_words_and_zero_has_no_sign(tmp_path: Path) -> None:
    totals = {"steps": 1, "pairs": 1, "tokens": 1, "train_seconds": 1.0}
    found = {"towns": {**EVALUATION["towns"], "rewards/margins": -1e-6}}
    card = model_card(make_recipe(tmp_path), "usage", totals=totals, evaluation=found)
    assert (
        "Training: 1 step, 1 preference pair, 1 token, 1" in card
        and "| 0.0000 |" in card
        and "-0.0" not in card
    )


def test_the_card_names_hub_ids_whole_and_of_local_paths_the_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = str(tmp_path)
    recipe = make_recipe(
        tmp_path,
        model={"path": f"{home}/base/", "lora": {"r": 4}},
        tokenizer={"path": "org/tokenizer", "chat_template": f"{home}/own.jinja"},
        reference={"path": f"{home}/sft", "cache_dir": f"{home}/cache"},
        data={"train": ["org/pairs", f"{home}/pairs/*.jsonl"], "eval": f"{home}/held.jsonl"},
        checkpoint={"resume": f"{home}/other/checkpoints/step-000002"},
    )
    _, card = card_of(recipe, adapter_base=f"{home}/base")
    assert home not in card and home in dump_recipe(recipe), "the run's own recipe keeps its paths"
    for part in (
        "A LoRA adapter for base: base fine-tuned with",
        "Trained on: [org/pairs](https://huggingface.co/datasets/org/pairs), `*.jsonl`.",
        "Held out: `held.jsonl`.",
        "path: org/tokenizer",
        "resume: step-000002",
    ):
        assert part in card, part
    recipe = make_recipe(tmp_path, data={"train": "org/pairs", "eval": {"fraction": 0.1}})
    assert f"\n{tmp_path.name}/model fine-tuned with" in card_of(recipe)[1], "model alone says nothing"
    monkeypatch.setenv("HOME", home)  # its name is the user's
    assert "\nmodel fine-tuned with" in card_of(recipe)[1]
    assert "Held out: a fraction of 0.1 of" in card_of(recipe)[1]


def test_the_front_matter_names_only_what_the_hub_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub refuses a card whose base model is a local directory."""
    tags = ["dpo", "preference-optimization", "dpo-pack"]
    kinds = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for local in (str(tmp_path / "model"), "models/base"):  # a relative path looks like a hub id
        assert card_of(make_recipe(tmp_path, model={"path": local}))[0] == {**kinds, "tags": tags}
    train = ["org/pairs", {"path": "org/pairs", "split": "more"}, str(tmp_path / "own.jsonl")]
    recipe = make_recipe(tmp_path, model={"path": "org/model"}, data={"train": train})
    front, _ = card_of(recipe, adapter_base="org/model")
    assert front == {
        **{**kinds, "library_name": "peft", "tags": [*tags, "lora"]},
        **{"base_model": "org/model", "datasets": ["org/pairs"]},
    }
