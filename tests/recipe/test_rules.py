"""Recipes whose keys are each valid: rules that join keys, and what this machine must have."""

import functools
import importlib.util
import os
import re
from pathlib import Path

import pytest
from support.tiny_recipe import load, message_of

from dpo_pack.recipe.load import check_environment

# Overrides, and the key that the error names. Rules of losses, references, layouts and precisions are in
# support/combinations.py.
REFUSED: list[tuple[str, str]] = [
    ("data.max_prompt_length=2048", "data.max_prompt_length"),
    ("data.eval=[{path: e, weight: 2}]", "data.eval.0.weight"),
    ("data.eval=[{path: e, share: 2}]", "data.eval.0.share"),
    ("data.train=[{path: a, share: 2}, {path: b}]", "data.train.1.share"),
    ("data.train=[{path: a, share: 2, min_margin: 1}]", "data.train.0.min_margin"),
    ("data.train=[{path: a, name: n}, {path: b, name: n}]", "data.train.1.name"),
    ("data.train.0.format=transcript, data.continue_final_message=true", "data.continue_final_message"),
    ("data.train={path: a, turns: messages}", "data.train.0.turns"),
    ("data.train={path: a, format: sharegpt, turns: messages}", "data.train.0.turns"),
    ("data.train={path: a, format: transcript, columns: {images: b}}", "data.train.0.columns.images"),
    ("data.train={path: a, format: transcript, columns: {image: b}}", "data.train.0.columns.image"),
    ("data.train.0.columns={chosen: a, rejected: a}", "data.train.0.columns"),
    ("data.train.0.columns={prompt: null, chosen: null}", "data.train.0.columns.chosen"),
    ("data.train={path: a, format: tokenized, columns: {prompt: q}}", "data.train.0.columns.prompt"),
    ("data.train.0.columns={chosen_score: a}", "data.train.0.columns.chosen_score"),
    ("data.train.0.columns={chosen_score: a, score_margin: b}", "data.train.0.columns.chosen_score"),
    (
        "data.train.0.columns={rejected_score: a, chosen_score: b, score_margin: c}",
        "data.train.0.columns.chosen_score",
    ),
    ("data.train={path: a, format: ranked, columns: {score_margin: b}}", "data.train.0.columns.score_margin"),
    ("data.train={path: a, format: ranked, columns: {chosen_score: b}}", "data.train.0.columns.chosen_score"),
    *((f"data.train.0.keep={{from: f, {more}}}", f"data.train.0.keep.{key}") for more, key in {
        "by: c": "by", "part: 0.5": "part", "order: random": "order", "above: 1": "above",
        "by: c, part: 0.5": "part", "part: 0.5, order: largest": "order",
        "by: c, part: 0.5, order: largest, above: 1": "above", "part: 0.5, order: random, below: 1": "below",
    }.items()),
    ("data.train.0.keep={by: c, above: 1}", "data.train.0.keep.from"),
    ("data.eval=[{path: e, keep: {from: f}}]", "data.eval.0.keep"),
    ("data.eval=[{path: e, max_length_gap: 0}]", "data.eval.0.max_length_gap"),
    ("data.eval=[{path: e, min_margin: 0}]", "data.eval.0.min_margin"),
    ("loss.type=[{type: ipo}, {type: ipo}]", "loss.type"),
    ("loss.discopop_tau=0.1", "loss.discopop_tau"),
    ("loss.simpo_gamma=1", "loss.simpo_gamma"),
    ("loss={type: ipo, label_smoothing: 0.1}", "loss.label_smoothing"),
    ("loss.cpo_alpha=0", "loss.cpo_alpha"),
    ("loss.f_alpha=0.3", "loss.f_alpha"),
    ("loss={type: sft, f_divergence: forward_kl}", "loss.f_divergence"),
    ("loss.type=exo_pair", "loss.label_smoothing"),
    ("optim={schedule: constant, warmup_ratio: 0.1}", "optim.warmup_ratio"),
    ("optim={schedule: inverse_sqrt, min_lr_ratio: 0.1}", "optim.min_lr_ratio"),
    ("optim={schedule: polynomial, lr: 1e-7}", "optim.lr"),
    ("optim={name: adafactor, betas: [0.8, 0.9]}", "optim.betas"),
    ("optim={name: adafactor, eps: 1e-6}", "optim.eps"),
    ("train.eval_every_steps=10", "train.eval_every_steps"),
    ("distributed.hybrid=true", "distributed.hybrid"),
    ("model.compile=true, model.gradient_checkpointing=selective", "model.compile"),
    ("model.activation_offload=true", "model.activation_offload"),
    ("model.activation_offload=true, model.gradient_checkpointing=selective", "model.activation_offload"),
    ("model={path: a, mlp_tile_tokens: 64, gradient_checkpointing: selective}", "model.mlp_tile_tokens"),
    ("model={path: a, quantize: nf4, lora: {}}, distributed.strategy=fsdp2", "distributed.strategy"),
    ("model={path: a, quantize: nf4, lora: {r: 4}}, reference.sync={}", "reference.sync"),
    (
        "model.autocast=bfloat16, distributed={strategy: fsdp2, gather_dtype: bfloat16}",
        "distributed.gather_dtype",
    ),
    ("logging.samples={every_evals: 2}", "logging.samples.every_evals"),
    ("checkpoint.keep_best=1", "checkpoint.keep_best"),
    ("checkpoint.load_best=true", "checkpoint.load_best"),
    ("train.early_stopping={}, data.eval=e.jsonl", "train.early_stopping"),
    ("checkpoint.metric=loss, data.eval=e.jsonl", "checkpoint.metric"),
    ("model={path: m, images: true, quantize: nf4, lora: {r: 1}}", "model.quantize"),
    ("data.max_pixels=1000", "data.max_pixels"),  # without model.images no image is read
    ("data.train={path: a, image_folder: b}", "data.train.0.image_folder"),
    ("data.eval={path: a, columns: {images: b}}", "data.eval.0.columns.images"),
    ("export.push_to_hub={repo: noname}", "export.push_to_hub.repo"),
    ("output_dir=run, export.path=run/model", "export.path"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key"), REFUSED)
def test_keys_that_cannot_go_together_are_refused(overrides: str, key: str) -> None:
    message = message_of(lambda: load(*re.split(r", (?=[a-z_.]+=)", overrides)))
    assert message.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "more",
    ["", "part: 0.5, order: random", "by: c, part: 0.5, order: random", "by: c, part: 0.5, order: smallest"]
    + ["by: c, above: 1", "by: c, below: 0", "by: c, above: 0, below: 1"],
)
def test_pairs_are_kept_by_a_file_alone_by_a_part_of_it_or_by_bounds(more: str) -> None:
    (source,) = load(f"data.train.0.keep={{from: f.parquet, {more}}}").data.train
    assert source.keep is not None and source.keep.file == "f.parquet"


def test_broken_rules_of_sections_and_wrong_values_are_reported_together() -> None:
    message = message_of(lambda: load("loss.f_alpha=0.3", "loss.cpo_alpha=0", "optim.lr=x", "seed=-1"))
    assert message.startswith("seed: must be a whole number")
    assert re.search(r" \(and 3 more: loss\.cpo_alpha: .*; loss\.f_alpha: .*; optim\.lr: .*\)$", message)
    message = message_of(lambda: load("train.eval_every_steps=5", "loss.type=simpo", "reference.path=a/b"))
    assert message.startswith("reference.path: loss.type simpo uses no reference")
    assert " (and 1 more: train.eval_every_steps: data.eval is empty" in message


ACCEPTED = """
loss={type: exo_pair, label_smoothing: 0.1}
loss={type: discopop, discopop_tau: 0.1}
loss={f_divergence: alpha_divergence, f_alpha: 0.3}
loss={type: simpo, simpo_gamma: 0, label_smoothing: 0.1}
loss={type: cpo, cpo_alpha: 0}
loss={type: ipo, weighting: wpo}
loss={type: 'my.losses:mine', discopop_tau: 1, weighting: wpo}
optim={schedule: polynomial, lr: 2e-7}
optim={schedule: cosine, lr: 1e-8}
"""


def test_every_option_is_accepted_where_it_is_used() -> None:
    for override in ACCEPTED.split("\n")[1:-1]:
        load(override)


def test_a_key_that_needs_another_one_is_accepted_with_it() -> None:
    assert load("model.lora={r: 8}").shares_prompts and not load("model.lora={dropout: 0.1}").shares_prompts
    assert load("loss.type=[{type: simpo}, {type: sigmoid}]", "reference.path=org/model").reference.path


def test_a_loss_is_a_known_type_or_module_and_function() -> None:
    for name in ("sigmoyd", "my.losses", "my losses:mine", "my.losses:", ":mine", "3a:b", "a:b:c"):
        message = message_of(functools.partial(load, f"loss.type='{name}'"))
        assert message.startswith("loss.type: ") and "module:function" in message and repr(name) in message
        message = message_of(functools.partial(load, f"loss.type=[{{type: '{name}'}}]"))
        assert message.startswith("loss.type.0.type: must be one of sigmoid, ")
    assert load("loss.type=my.losses:mine").loss.terms == (("my.losses:mine", 1.0),)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a model, data files and a template."""
    for directory in ("model", "dataset"):
        (tmp_path / directory).mkdir()
    for name in ("model/config.json", "pairs.jsonl", "pairs.csv.gz", "t.jinja"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "override",
    [
        "model.path=model", "model.path=./model", "model.path=gpt2", "model.path=Qwen/Qwen3-0.6B",
        "tokenizer.path=model", "tokenizer.chat_template=t.jinja", "reference.path=model",
        "data.train=pairs.csv.gz", "data.train=dataset", "data.train=trl-lib/ultrafeedback_binarized",
        "data.eval=pairs.jsonl", "data.eval={fraction: 0.1}",
    ],
)  # fmt: skip
def test_paths_that_exist_or_can_be_made_and_hub_ids_pass(override: str) -> None:
    check_environment(load(override))


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.train=missing.jsonl", "data.train.0.path", "'missing.jsonl' (relative paths start at"),
        ("data.train=[pairs.jsonl, ./x]", "data.train.1.path", "'./x'"),
        ("data.train=a/b/c", "data.train.0.path", "not a hub id: 'a/b/c'"),
        ("data.train='parts/*.jsonl'", "data.train.0.path", "URLs and patterns are not read"),
        ("model.path=hf://a/b", "model.path", "'hf://a/b'"),
        ("model.path=https://me:hf_x@h/a/b?token=hf_x", "model.path", "'https://...@h/a/b?token=...'"),
        ("data.train=pipe.jsonl", "data.train.0.path", "no pipes"),
        ("tokenizer.chat_template=pipe.jsonl", "tokenizer.chat_template", "no pipes"),
        ("model.path=./none", "model.path", "'./none'"),
        ("model={path: model, revision: v2}", "model.revision", "a local directory has no revisions"),
        ("model={path: model, quantize: nf4}", "model.quantize", "model.lora"),
        ("tokenizer.chat_template=none.jinja", "tokenizer.chat_template", "'none.jinja'"),
        ("reference.path=/none", "reference.path", "'/none'"),
        (f"data.train={'x' * 5000}.jsonl", "data.train.0.path", "no such file"),
        ('data.train="a\\0.jsonl"', "data.train.0.path", "no such file"),
        ("data.train=no.jsonl, model.path=/no", "model.path", "(and 1 more: data.train.0.path: "),
    ],
)
def test_what_is_not_there_is_refused_naming_the_key(override: str, key: str, value: str) -> None:
    recipe = load("data.train=pairs.jsonl", *re.split(r", (?=[a-z_.]+=)", override))
    message = message_of(lambda: check_environment(recipe))
    assert message.startswith(f"{key}: ") and value in message


@pytest.mark.usefixtures("workplace")
def test_an_extra_that_is_missing_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("dpo_pack.recipe.load.install_command", lambda extra: f"install {extra}")
    server = "endpoint: {url: 'http://host:1/v1', model: m}"
    judged = f"online={{judges: [{{type: function, function: 'a:b'}}, {{type: llm, {server}}}]}}"
    served = f"online={{judges: [{{type: function, function: 'a:b'}}], generator: {{type: http, {server}}}}}"
    for override, key, extra in (
        ("model.lora={r: 8}", "model.lora", "peft"),
        ("optim.name=adamw_8bit", "optim.name", "bitsandbytes"),
        ("model.images=true", "model.images", "PIL, which is not installed; install images"),
        (judged, "online.judges.1", "openai"),
        (served, "online.generator", "openai"),
    ):
        recipe = load(override, "output_dir=a/b", "train.max_steps=1")
        message = message_of(functools.partial(check_environment, recipe))
        assert f"{key}: needs the package {extra}" in message
        assert f"; install {extra.rpartition(' ')[2]}" in message
