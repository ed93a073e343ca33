"""Recipes: values and defaults, paths, what is generated from the schema, and running again."""

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_recipe import KEYS, SMALLEST, changed_keys, load, message_of

from dpo_pack.recipe import load as loading
from dpo_pack.recipe.data import EvalFraction, SourceRecipe, source_names
from dpo_pack.recipe.load import NEUTRAL_KEYS, load_recipe, only_goes_on, recipe_defaults, recipe_schema
from dpo_pack.recipe.training import LOSSES

REPOSITORY = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------ values and defaults


def test_a_source_may_be_a_path_a_mapping_or_a_list_of_either() -> None:
    one, two = SourceRecipe(path="a.jsonl"), SourceRecipe(path="b.jsonl", max_pairs=3)
    assert load("data.train=a.jsonl").data.train == (one,)
    assert load("data.train={path: b.jsonl, max_pairs: 3}").data.train == (two,)
    assert load("data.train=[a.jsonl, {path: b.jsonl, max_pairs: 3}]").data.train == (one, two)
    assert load("data.eval=a.jsonl").data.eval == (one,)
    assert load("data.eval=[a.jsonl, {path: b.jsonl, max_pairs: 3}]").data.eval == (one, two)
    assert load("data.eval={fraction: 0.02}").data.eval == EvalFraction(fraction=0.02)


def test_loss_terms_are_the_same_however_the_loss_is_written() -> None:
    assert load("loss.type=ipo").loss.terms == (("ipo", 1.0),)
    terms = load("loss.type=[{type: sigmoid}, {type: hinge, weight: 0.2}]").loss.terms
    assert terms == (("sigmoid", 1.0), ("hinge", 0.2))


def test_schedule_constant_has_no_warmup_unless_asked_for() -> None:
    assert load("optim.schedule=constant").optim.warmup_ratio == 0.0
    assert load("optim.schedule=constant_with_warmup").optim.warmup_ratio == 0.1


def test_source_names_are_derived_from_paths_and_all_different() -> None:
    sources = [
        SourceRecipe(path="a/pairs.jsonl.gz"),
        SourceRecipe(path="b/pairs.jsonl"),
        SourceRecipe(path="b/pairs.jsonl"),
        SourceRecipe(path="org/ultra", split="test"),
        SourceRecipe(path="org/tulu.3", name="mine"),
        SourceRecipe(path="mine"),
        SourceRecipe(path="/"),
        SourceRecipe(path="dir/.jsonl"),
    ]
    assert source_names(sources) == (
        "pairs", "b/pairs.jsonl", "b/pairs.jsonl-2", "ultra-test", "mine", "mine-2", "/", "dir/.jsonl",
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------- paths


def test_recipe_dir_and_home_are_expanded_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    here = "${recipe_dir}"
    (tmp_path / "recipe.yaml").write_text(SMALLEST)
    overrides = [
        f"output_dir={here}/out",
        f"model.path={here}/model",
        f"tokenizer={{path: '{here}/tokenizer', chat_template: ~/t.jinja}}",
        f"reference={{path: '{here}/reference', cache_dir: '~/cache'}}",
        f"data.train=['{here}/a.jsonl', ~/b.jsonl]",
        f"data.eval={here}/e.jsonl",
        f"checkpoint.resume={here}/step-1",
        f"data.system_prompt={here}",
    ]
    recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
    assert recipe.output_dir == tmp_path / "out" and recipe.model.path == f"{tmp_path}/model"
    assert recipe.tokenizer.path == f"{tmp_path}/tokenizer"
    assert recipe.tokenizer.chat_template == Path("/home/me/t.jinja")
    assert recipe.reference.path == f"{tmp_path}/reference"
    assert recipe.reference.cache_dir == Path("/home/me/cache")
    assert [source.path for source in recipe.data.train] == [f"{tmp_path}/a.jsonl", "/home/me/b.jsonl"]
    assert isinstance(recipe.data.eval, tuple) and recipe.data.eval[0].path == f"{tmp_path}/e.jsonl"
    assert recipe.checkpoint.resume == f"{tmp_path}/step-1"
    assert recipe.data.system_prompt == here


def test_recipe_dir_is_absolute_of_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALLEST)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Path("recipe.yaml"), ["output_dir=${recipe_dir}/out", "model.path=local/model"])
    assert recipe.output_dir == tmp_path / "out" and recipe.model.path == "local/model"


# --------------------------------------------------------------------------------------------- generated


def test_the_commented_defaults_are_a_recipe_of_defaults() -> None:
    text = recipe_defaults()
    required = ["output_dir=runs/x", "model.path=org/model", "data.train=pairs.jsonl"]
    assert load(*required, text=text) == load()
    assert load(text=text).model.path == "Qwen/Qwen3-0.6B"
    assert max(map(len, text.splitlines())) <= 100


def test_the_commented_defaults_hold_every_key_below_a_comment() -> None:
    lines = recipe_defaults().splitlines()
    for key in KEYS:
        inside = (
            "data.eval.", "data.train.0.keep.", "export.push_to_hub.", "logging.samples.", "loss.type.",
            "model.lora.", "online.", "reference.sync.", "train.early_stopping.", "verdict.",
        )  # fmt: skip
        if key.startswith(inside) or key.endswith(".0"):  # what a value can hold
            continue
        name = key.rsplit(".", 1)[-1]
        found = [i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:")]
        assert any(lines[i - 1].strip().startswith(("#", "-")) for i in found), key


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for value in schema.values():
            yield from _objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _objects(value)


def test_the_json_schema_describes_every_key_and_allows_no_other() -> None:
    schema = recipe_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["output_dir", "model", "data"]
    objects = list(_objects(schema))
    assert len(objects) == 1 + len(schema["$defs"]) >= 17
    for section in objects:
        assert section["additionalProperties"] is False
        for name, key in section["properties"].items():
            referred = schema["$defs"][key["$ref"].removeprefix("#/$defs/")] if "$ref" in key else key
            assert referred["description"] and ("title" in referred or "anyOf" in referred), name


def test_the_reference_in_docs_is_up_to_date() -> None:
    script = REPOSITORY / "scripts" / "make_recipe_reference.py"
    spec = importlib.util.spec_from_file_location("make_recipe_reference", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.pages().items():
        written = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        assert written == text, f"run python {script.relative_to(REPOSITORY)}"


# --------------------------------------------------------------------------------------- earlier releases


# Of a key or value that went: values that changed no step, others, and what to do about these.
GONE = [
    ("model.kernels", ("none", "liger"), (), ""),
    ("logging.breakdowns", ("true", "false"), (), ""),
    ("loss.ld_alpha", ("null",), ("0.5",), "take sigmoid_norm"),
    ("loss.type", (), ("aot", "aot_unpaired", "[{type: sft}, {type: aot}]"), "take another"),
    ("packing.scope", ("step",), ("epoch",), "take more packing.pairs_per_step"),
    ("packing.rows_per_step", ("null",), ("2",), "set packing.pairs_per_step"),
    ("packing.window_pairs", ("16384", "64"), (), ""),
    ("packing.algorithm", ("best_fit_decreasing", "first_fit"), (), ""),
    ("packing.merge_prompts", ("true", "false"), (), ""),
]


def test_the_table_has_all_that_went_and_nothing_of_it_is_a_key_or_a_loss() -> None:
    assert {key for key, *_ in GONE} == {*loading.REMOVED_KEYS, "loss.type"}
    assert not loading.REMOVED_KEYS.keys() & set(KEYS)
    assert not LOSSES.keys() & set(loading.REMOVED_LOSSES)


@pytest.mark.parametrize(("key", "harmless", "harmful", "remedy"), GONE)
def test_what_went_is_dropped_where_it_changed_no_step_and_refused_else(
    key: str, harmless: tuple[str, ...], harmful: tuple[str, ...], remedy: str
) -> None:
    for value in harmless:
        assert load(f"{key}={value}") == load()
    for value in harmful:
        message = message_of(functools.partial(load, f"{key}={value}", "optim.lr=fast"))
        assert message.startswith(f"{key}: dpo-pack no longer has ") and remedy in message
        assert "(and 1 more: optim.lr: must be" in message
        section, name = key.split(".")
        text = f"{SMALLEST}{section}: {{{name}: {value}}}\n"
        assert remedy in message_of(functools.partial(load, text=text))
        assert load(f"{key}={(*harmless, 'sigmoid')[0]}", text=text) == load()


@pytest.mark.parametrize("name", ["", "recipe.yaml"])
def test_of_a_run_that_is_only_read_removed_values_are_dropped_and_named(name: str, tmp_path: Path) -> None:
    loss = "loss: {type: [{type: aot}, {type: aot_unpaired}, {type: sft, weight: 2}], label_smoothing: 0.1}\n"
    (tmp_path / "recipe.yaml").write_text(SMALLEST + loss + "packing: {scope: epoch}\n")
    message_of(lambda: load_recipe(tmp_path / "recipe.yaml", lenient=True))  # not yet of a run
    (tmp_path / "run.json").write_text("{}")
    recipe = load_recipe(tmp_path / name, lenient=True)
    assert recipe.loss.terms == (("sft", 2.0), ("sigmoid", 1.0))  # which has a reference, as they had
    assert [line.partition(", which")[0] for line in recipe.dropped] == [
        "packing.scope 'epoch'",
        "loss.type aot and aot_unpaired",
    ]
    message = message_of(lambda: load_recipe(tmp_path / name))
    assert message.startswith(f"{tmp_path}: this run has packing.scope 'epoch', ") and "copy its" in message


# ----------------------------------------------------------------------------------------- running again


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ([], []),
        (["optim.lr=1e-6", "seed=1"], ["seed", "optim.lr"]),
        (["optim.betas=[0.9, 0.95]"], ["optim.betas"]),
        (["output_dir=elsewhere", "logging.every_steps=5", "checkpoint.resume=never"], []),
        (["logging.trackers=[wandb]", "checkpoint.every_steps=3", "distributed.num_processes=2"], []),
        (["model.attention=sdpa", "model.gradient_checkpointing=true"], []),
        (["model.gradient_checkpointing=true", "model.activation_offload=true"], []),
        (["model.mlp_tile_tokens=4096"], []),
        (["model.dtype=bfloat16"], ["model.dtype"]),
        (["reference.cache_dir=c", "reference.token_budget=5", "data.num_workers=0"], []),
        (["reference.path=org/other"], ["reference.path"]),
        (["packing.token_budget=64", "packing.share_prompt=false"], []),
        (["packing.mode=padded"], []),
        (["packing.pairs_per_step=8"], ["packing.pairs_per_step"]),
        (["data.eval=e.jsonl", "train.eval_every_steps=4"], []),
        (["data.eval.fraction=0.1"], ["data.eval"]),
        (["train.eval_precision=float32"], []),
        (["data.train.0.name=mine"], []),
        (
            ["data.train.0.max_pairs=9", "data.train.0.columns.prompt=q"],
            ["data.train.0.columns.prompt", "data.train.0.max_pairs"],
        ),
        (["data.train=[pairs.jsonl, more.jsonl]"], ["data.train"]),
        (["data.on_bad_row=skip", "train.stop_on_nonfinite=false"], []),
        (["loss.type=[{type: sigmoid, weight: 1}]"], []),
        (["loss.type=[{type: sigmoid, weight: 2}]"], ["loss.type.0.weight"]),
        (["loss.type=ipo"], ["loss.type.0.type"]),
        (["loss.router_aux_coef=0.1"], ["loss.router_aux_coef"]),
        (["train.max_steps=3", "train.epochs=2"], ["train.epochs", "train.max_steps"]),
    ],
)
def test_changed_keys_are_those_that_change_training(overrides: list[str], changed: list[str]) -> None:
    assert changed_keys(load(), load(*overrides)) == changed
    assert sorted(changed_keys(load(*overrides), load())) == sorted(changed)


@pytest.mark.parametrize(
    "compares", ["train.early_stopping={}", "checkpoint={load_best: true, keep_best: 1}"]
)
def test_evaluations_that_are_compared_keep_their_precision(compares: str) -> None:
    assert "train.eval_precision" in changed_keys(
        load("data.eval=e.jsonl", compares, "train.eval_every_steps=4"),
        load("data.eval=e.jsonl", compares, "train.eval_every_steps=4", "train.eval_precision=training"),
    )


@pytest.mark.parametrize(
    ("override", "goes_on"),
    [("train.epochs=2", True), ("train.max_steps=5", False), ("data.train=[a.jsonl, b.jsonl]", False)],
)
def test_only_more_epochs_or_steps_let_a_finished_run_go_on(override: str, goes_on: bool) -> None:
    old, new = load("optim.schedule=constant"), load("optim.schedule=constant", override)
    assert only_goes_on(loading.changed_values(old, new), new) == goes_on


def test_every_key_named_as_neutral_exists() -> None:
    for key in NEUTRAL_KEYS:
        assert key in KEYS
