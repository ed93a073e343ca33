"""Saved models are right for other readers: types in headers, ties, ends of turns, older keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.loading import load_usual
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from support.tiny_vision import vision_config
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from dpo_pack.data.tokenizer import end_of_turn
from dpo_pack.model.fingerprint import stored_dtype
from dpo_pack.model.saving import _complete_config, find_beyond, is_tied, needs_transformers_5, save_model
from dpo_pack.run.export import name_turn_end, write_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_what_readers_find_in_a_saved_model(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model("llama", vocab_size=len(tokenizer)).bfloat16().save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    rope = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = {**config, **rope, "tie_word_embeddings": True, "dtype": None}
    del config["rope_parameters"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert stored_dtype(str(tmp_path / "model"), None) == torch.bfloat16
    loaded = load_usual(tmp_path / "model")
    read, turn_end = AutoTokenizer.from_pretrained(tmp_path / "model"), end_of_turn(tokenizer)
    assert turn_end == tokenizer.convert_tokens_to_ids("<|im_end|>")
    save_model(loaded, read, tmp_path / "saved", dtype=torch.bfloat16, turn_end=turn_end)
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    saved, generation, settings = (json.loads((tmp_path / "saved" / name).read_text()) for name in names)
    assert (saved["dtype"], saved["tie_word_embeddings"], saved["eos_token_id"]) == (
        "bfloat16",
        False,
        turn_end,
    )
    assert {key: saved[key] for key in rope} == rope
    assert generation["eos_token_id"] == [turn_end, tokenizer.eos_token_id]
    assert settings["eos_token"] == "<|im_end|>" and not {"is_local", "local_files_only"} & settings.keys()
    assert {t.dtype for t in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.bfloat16}


def test_an_end_that_only_the_tokenizer_names_is_written_for_generation(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.save_pretrained(tmp_path / "model")
    model = tiny_model("llama", eos_token_id=5)  # its template ends answers with the tokenizer's EOS
    model.save_pretrained(tmp_path / "model")
    loaded = load_usual(tmp_path / "model")
    turn_end, line = name_turn_end(loaded, tokenizer)
    assert turn_end == tokenizer.eos_token_id and line.startswith("Answers end with </s>: the model's files")
    save_model(loaded, tokenizer, tmp_path / "saved", turn_end=turn_end)
    generation = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [turn_end, 5]
    loaded = load_usual(tmp_path / "saved")
    assert name_turn_end(loaded, tokenizer) == (None, "")


def test_a_template_that_the_recipe_names_takes_the_place_of_several(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    several = [{"name": name, "template": name} for name in ("default", "tool_use")]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": several}))
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    read = AutoTokenizer.from_pretrained(tmp_path / "model")
    read.chat_template = CHATML
    save_model(load_usual(tmp_path / "model"), read, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / file.name).read_text())["chat_template"] == CHATML
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == CHATML


@pytest.mark.parametrize(("value", "found"), [(1e5, "a"), (6e4, None), (float("inf"), None)])
def test_values_beyond_a_type_are_found(value: float, found: str | None) -> None:
    assert find_beyond({"a": torch.tensor([1.0, -value])}, torch.float16) == found


@pytest.mark.parametrize(
    "family", ["llama", "mamba2", "bamba", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5_text"]
)
def test_the_config_of_every_kind_of_model_is_read_as_it_was(family: str, tmp_path: Path) -> None:
    """Some have values that JSON lacks, as infinity, or rotary parameters by type of layer."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    _complete_config(tmp_path / "config.json", model.config, is_tied=is_tied(model))
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_flat_config_and_its_processor_are_right_for_older_readers(family: str, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_config(vision_config(family))
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    nested = json.loads(file.read_text())
    text = nested.pop("text_config")
    section = text.pop("rope_parameters")["mrope_section"]
    older = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": section}}
    del text["model_type"], nested["dtype"]
    file.write_text(json.dumps({**text, **nested, **older, "torch_dtype": "float32"}))
    limits = {"min_pixels": 3136, "max_pixels": 50176}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps({**limits, "size": limits}))
    size = {"shortest_edge": 3136, "longest_edge": 9408}
    tokenizer, target = tiny_tokenizer(), tmp_path / "saved"
    save_model(load_usual(tmp_path / "model"), tokenizer, target, image_size=size)
    saved = json.loads((target / "config.json").read_text())["text_config"]
    assert {key: saved[key] for key in older} == older and saved["torch_dtype"] == "float32"
    assert not needs_transformers_5(target)
    images = json.loads((target / "preprocessor_config.json").read_text())
    limits["max_pixels"] = 9408
    assert images == {**limits, "size": {**limits, **size}}
    save_model(load_usual(tmp_path / "model"), tokenizer, tmp_path / "merged", processor=str(target))
    assert json.loads((tmp_path / "merged" / "preprocessor_config.json").read_text()) == images


@pytest.mark.parametrize(
    ("older", "needs"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, True),
    ],
)
def test_the_card_says_if_transformers_4_would_read_another_model(
    older: dict[str, object], needs: bool, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    values = json.loads(file.read_text())
    del values["rope_parameters"]
    file.write_text(json.dumps(values | older))
    write_model(
        load_usual(tmp_path / "model"), tiny_tokenizer(), tmp_path / "saved", "## How to use it\n\nAs"
    )
    card = (tmp_path / "saved" / "README.md").read_text()
    assert ("needs transformers 5" in card) is needs and card.endswith("\n\nAs")
