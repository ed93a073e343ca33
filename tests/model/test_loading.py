"""What goes wrong while a model is loaded is told as what it is."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.loading import load_usual
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM

from dpo_pack.model.facts import without_weights
from dpo_pack.model.fingerprint import files_fingerprint, meta_tensors, weight_files
from dpo_pack.model.loading import load_config, load_errors, load_tokenizer
from dpo_pack.model.lora import read_adapter
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.proofs.start_up import prove
from dpo_pack.system.errors import ModelError


def test_a_model_that_does_not_fit_into_memory_is_not_called_a_wrong_path() -> None:
    with pytest.raises(ModelError) as caught, load_errors("org/model", "reference.path"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")
    message = str(caught.value)
    assert message.startswith("reference.path: org/model does not fit in memory") and message.isprintable()


class NotATensor:
    """What a training script pickles beside its weights; to load it would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of a stranger",)


@pytest.mark.parametrize("reads", ["weights", "hashes"])
def test_pickled_weights_are_refused_with_the_name_of_the_other_format(
    reads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**model.state_dict(), "more": NotATensor()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        if reads == "hashes":
            files_fingerprint(weight_files(tmp_path), tmp_path / "memo.json")
        with load_errors(str(tmp_path), "model.path"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    message = str(caught.value)
    assert "pickled objects that are not tensors; save them as safetensors" in message
    assert message.isprintable() and "weights_only" not in message
    assert "stranger" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"num_attention_heads": 0}),
        ("config.json", {"dtype": [1]}),
        ("config.json", {"hidden_size": "wide"}),
        ("config.json", None),
        ("tokenizer.json", {"model": [1]}),
        ("tokenizer.json", {"version": None}),
        ("tokenizer.json", None),
        ("tokenizer_config.json", None),
    ],
)
def test_damaged_json_is_one_line_told(name: str, changes: dict[str, object] | None, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole = json.loads((tmp_path / name).read_text())
    for content in ("[1]", "[" * 10**5) if changes is None else (json.dumps({**whole, **changes}),):
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelError, match=f"model.path: cannot load {tmp_path}: ") as caught:
            options = {"revision": None, "trust_remote_code": False, "recipe_key": "model.path"}
            config = load_config(str(tmp_path), **options)  # type: ignore[arg-type]
            with load_errors(str(tmp_path), "model.path"):
                without_weights(config)
            load_tokenizer(str(tmp_path), chat_template=None, **options)  # type: ignore[arg-type]
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_a_run_in_place_of_a_model_is_told_where_its_model_is(kind: str, tmp_path: Path) -> None:
    (tmp_path / f"{kind}.json").write_text("{}")
    options = {"revision": None, "trust_remote_code": False, "recipe_key": "model.path"}
    for remedy in ("it has no model yet; finish the run", f"its model is {tmp_path}/model: set model.path"):
        told = f"model.path: {tmp_path} is a {kind} of dpo-pack, not a model; {remedy}"
        with pytest.raises(ModelError, match=re.escape(told)):
            load_config(str(tmp_path), **options)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=re.escape(told)):
            load_tokenizer(str(tmp_path), chat_template=None, **options)  # type: ignore[arg-type]
        (tmp_path / "model").mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("model.layers.0.self_attn.q_proj.bias", {}, "LlamaForCausalLM does not use 1 tensors"),
        ("model.layers.2.mlp.up_proj.weight", {}, "first: model.layers.2.mlp.up_proj.weight"),
        ("model.layers.2.mlp.up_proj.weight", {"num_nextn_predict_layers": 1}, None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}, None),
        ("vision_tower.patch.weight", {}, None),
        ("model.norm.weight", {}, "tensors with other shapes"),
    ],
)
@pytest.mark.parametrize("reads", ["weights", "headers"])
def test_tensors_that_the_config_does_not_name_are_told(
    name: str, config: dict[str, Any], message: str | None, reads: str, tmp_path: Path
) -> None:
    model = tiny_model("llama", **config)
    model.save_pretrained(tmp_path)
    tensors = {**load_file(tmp_path / "model.safetensors"), name: torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    headers = meta_tensors(str(tmp_path), None, "model.path")
    assert not isinstance(headers, str) and set(headers) == set(tensors)
    read = partial(load_usual, tmp_path, tensors=headers if reads == "headers" else None)
    if message is not None:
        with pytest.raises(ModelError, match=message):
            read(unused_tensors="error")
        return
    loaded = read(unused_tensors="error")
    assert [name in note for note in loaded.notes] == [True]
    assert not loaded.model.config.to_dict().get("num_nextn_predict_layers")


@pytest.mark.parametrize(
    "content", ["[1]", "{}", '{"weight_map": [1]}', '{"weight_map": {"w": 1}}', "[" * 10**5]
)
def test_an_index_of_shards_with_other_content_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="download the model again"):
        weight_files(tmp_path)


@pytest.mark.parametrize("changes", [{"peft_type": ["LORA"]}, {"base_model_name_or_path": {}}, None])
def test_damaged_config_of_an_adapter_is_one_line(changes: dict[str, object] | None, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/model", "revision": None, "r": 4}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(config))
    assert read_adapter(tmp_path, "model.path").rank == 4
    file.write_text("[1]" if changes is None else json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=f"model.path: {tmp_path}.*; "):
        read_adapter(tmp_path, "model.path")


def test_a_config_that_lies_is_corrected_or_refused(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def load(**changes: object) -> LoadedModel:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return load_usual(tmp_path)

    with pytest.raises(ModelError, match=r"lm_head\.weight.*set tie_word_embeddings: true in its config"):
        load(tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"rope_theta 5000, and 10000\.0 in rope_parameters"):
        load(rope_theta=5000)
    assert load(rope_theta=10000).model.config.rope_parameters["rope_theta"] == 10000
    loaded = load(return_dict=False)  # the proofs read outputs by name
    assert all(proof.passed for proof in prove(loaded.scorer, torch.device("cpu")))
