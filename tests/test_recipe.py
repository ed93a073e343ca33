"""Recipes: what is accepted, what is refused and in which words, and what is generated from the schema."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpo_pack import recipe as recipe_module
from dpo_pack.errors import RecipeError
from dpo_pack.recipe import (
    EvalFraction,
    Recipe,
    SourceRecipe,
    changed_keys,
    check_environment,
    check_paths,
    check_trackers,
    dump_recipe,
    load_recipe,
    parse_recipe,
    recipe_defaults,
    recipe_schema,
    source_names,
)

REPOSITORY = Path(__file__).resolve().parent.parent
SMALLEST = "output_dir: runs/x\nmodel: {path: org/model}\ndata: {train: pairs.jsonl}\n"
Load = Callable[..., Recipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a recipe text with overrides."""

    def load(*overrides: str, text: str = SMALLEST) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return load_recipe(path, overrides)

    return load


@pytest.fixture
def everything_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_module, "AVAILABLE_SO_FAR", {})


def message_of(function: Callable[[], object]) -> str:
    """The message of the RecipeError, which must be one line in the recipe's own words."""
    with pytest.raises(RecipeError) as caught:
        function()
    message = str(caught.value)
    assert message.isprintable() and "\n" not in message
    for jargon in ("pydantic", "http", "Input should", "ValidationError", "[type=", "literal_error"):
        assert jargon not in message
    return message


# ------------------------------------------------------------------------------------ values and defaults


def test_defaults_are_those_of_the_contract(load: Load) -> None:
    recipe = load()
    assert recipe.output_dir == Path("runs/x") and recipe.seed == 0
    assert recipe.model.path == "org/model" and recipe.model.attention == "auto"
    assert recipe.data.train == (SourceRecipe(path="pairs.jsonl"),) and recipe.data.eval == ()
    assert (recipe.data.max_length, recipe.data.truncation, recipe.data.on_bad_row) == (2048, "drop", "error")
    assert (recipe.packing.token_budget, recipe.packing.pairs_per_step) == (8192, 64)
    assert (recipe.packing.scope, recipe.packing.window_pairs) == ("step", 16384)
    assert recipe.packing.algorithm == "best_fit_decreasing" and recipe.packing.share_prompt
    assert recipe.loss.terms == (("sigmoid", 1.0),) and recipe.loss.beta == 0.1
    assert (recipe.optim.lr, recipe.optim.warmup_ratio, recipe.optim.betas) == (5e-7, 0.1, (0.9, 0.999))
    assert (recipe.checkpoint.keep, recipe.checkpoint.resume, recipe.logging.trackers) == (2, "auto", ())


@pytest.mark.parametrize("text", ["5e-7", "5.0e-7", "5E-7", "0.0000005", ".0000005", "+5e-7", "5.e-7"])
def test_every_way_to_write_a_float_is_a_number(load: Load, text: str) -> None:
    assert load(f"optim.lr={text}").optim.lr == 5e-7
    assert load(text=SMALLEST + f"optim: {{lr: {text}}}").optim.lr == 5e-7


def test_a_whole_number_is_accepted_for_a_float_and_becomes_one(load: Load) -> None:
    beta = load("loss.beta=1").loss.beta
    assert beta == 1.0 and isinstance(beta, float)


def test_leading_zeros_are_decimal_and_words_such_as_no_are_text(load: Load) -> None:
    assert load("seed=010").seed == 10
    assert load("logging.run_name=no").logging.run_name == "no"
    assert load("logging.run_name=2026-11-20").logging.run_name == "2026-11-20"
    assert load("logging.run_name=1:30").logging.run_name == "1:30"


def test_an_empty_section_holds_defaults(load: Load) -> None:
    assert load(text=SMALLEST + "optim:\nloss:\n  # beta: 0.2\n") == load()
    text = "output_dir: runs/x\nmodel: {path: org/model}\ndata:\n  train: pairs.jsonl\n  eval:\n"
    assert load(text=text) == load()


def test_a_source_may_be_a_path_a_mapping_or_a_list_of_either(load: Load) -> None:
    one, two = SourceRecipe(path="a.jsonl"), SourceRecipe(path="b.jsonl", max_pairs=3)
    assert load("data.train=a.jsonl").data.train == (one,)
    assert load("data.train={path: b.jsonl, max_pairs: 3}").data.train == (two,)
    assert load("data.train=[a.jsonl, {path: b.jsonl, max_pairs: 3}]").data.train == (one, two)
    assert load("data.eval=a.jsonl").data.eval == (one,)
    assert load("data.eval=[a.jsonl, {path: b.jsonl, max_pairs: 3}]").data.eval == (one, two)
    assert load("data.eval={fraction: 0.02}").data.eval == EvalFraction(fraction=0.02)


def test_loss_terms_are_the_same_however_the_loss_is_written(load: Load) -> None:
    assert load("loss.type=ipo").loss.terms == (("ipo", 1.0),)
    terms = load("loss.type=[{type: sigmoid}, {type: hinge, weight: 0.2}]").loss.terms
    assert terms == (("sigmoid", 1.0), ("hinge", 0.2))


def test_schedule_constant_has_no_warmup_unless_asked_for(load: Load) -> None:
    assert load("optim.schedule=constant").optim.warmup_ratio == 0.0
    assert load("optim.schedule=constant_with_warmup").optim.warmup_ratio == 0.1


def test_max_grad_norm_null_means_no_clipping(load: Load) -> None:
    assert load("optim.max_grad_norm=null").optim.max_grad_norm is None


def test_source_names_are_derived_from_paths_and_all_different() -> None:
    sources = [
        SourceRecipe(path="a/pairs.jsonl.gz"),
        SourceRecipe(path="b/pairs.jsonl"),
        SourceRecipe(path="b/pairs.jsonl"),
        SourceRecipe(path="org/ultra", split="test"),
        SourceRecipe(path="org/tulu.3", name="mine"),
        SourceRecipe(path="mine"),
    ]
    names = source_names(sources)
    assert names == ("pairs", "b/pairs.jsonl", "b/pairs.jsonl-2", "ultra-test", "mine", "mine-2")


# ---------------------------------------------------------------------------------------------- overrides


def test_overrides_replace_what_the_file_says_and_the_last_one_wins(load: Load) -> None:
    text = SMALLEST + "optim: {lr: 1e-6, eps: 1e-7}\n"
    recipe = load("optim.lr=2e-6", "optim.lr=3e-6", "optim.betas=[0.9, 0.95]", text=text)
    assert recipe.optim.lr == 3e-6 and recipe.optim.eps == 1e-7 and recipe.optim.betas == (0.9, 0.95)


def test_an_override_reaches_into_an_item_of_a_list(load: Load) -> None:
    assert load("data.train.0.max_pairs=100").data.train[0].max_pairs == 100
    recipe = load("data.train=[a.jsonl, b.jsonl]", "data.train.1.weight=0.5", "data.train.1.columns.prompt=q")
    assert [source.weight for source in recipe.data.train] == [1.0, 0.5]
    assert recipe.data.train[1].columns == {"prompt": "q"}


def test_an_override_changes_one_place_of_a_mapping_shared_by_a_yaml_alias(load: Load) -> None:
    text = """
output_dir: runs/x
model: {path: org/model}
data:
  train: &source {path: pairs.jsonl, columns: {chosen: better}}
  eval: [*source]
"""
    recipe = load("data.train.0.max_pairs=1", "data.train.0.columns.chosen=best", text=text)
    assert recipe.data.train == (SourceRecipe(path="pairs.jsonl", max_pairs=1, columns={"chosen": "best"}),)
    assert recipe.data.eval == (SourceRecipe(path="pairs.jsonl", columns={"chosen": "better"}),)


def test_an_override_of_a_value_keeps_equals_signs_in_it(load: Load) -> None:
    assert load("logging.run_name=a=b").logging.run_name == "a=b"


def test_parse_recipe_leaves_its_argument_alone() -> None:
    tree = yaml.safe_load(SMALLEST)
    parse_recipe(tree, ["optim.lr=1e-6", "data.train.0.max_pairs=3", "model.dtype=float32"])
    assert tree == yaml.safe_load(SMALLEST)


# --------------------------------------------------------------------------------------- refused key by key

REFUSED: list[tuple[str, list[str]]] = [
    # unknown keys
    ("optim.lrr=1", ["optim.lrr: unknown key", "optim.lr?"]),
    ("optm.lr=1", ["optm: unknown key", "optim?"]),
    ("optim={lr: 1, shedule: cosine}", ["optim.shedule: unknown key", "optim.schedule?"]),
    ("lr=1", ["lr: unknown key", "optim.lr?"]),
    ("train.lr=1", ["train.lr: unknown key", "optim.lr?"]),
    ("optim.learning_rate=1", ["optim.learning_rate: unknown key", "known here: lr, schedule"]),
    ("zzz=1", ["zzz: unknown key", "output_dir, seed, model"]),
    ("data.train.0.formt=x", ["data.train.0.formt: unknown key", "data.train.0.format?"]),
    (
        "data.train={pth: x}",
        ["data.train.0.pth: unknown key", "data.train.0.path?", "1 more: data.train.0.path"],
    ),
    ("data.eval={fractoin: 0.1}", ["data.eval.fractoin: unknown key", "data.eval.fraction?"]),
    ("data.train.0.columns={promt: q}", ["data.train.0.columns.promt: no field of a pair", "prompt?"]),
    ("loss.type=[{type: ipo, weigth: 2}]", ["loss.type.0.weigth: unknown key", "loss.type.0.weight?"]),
    ("reference.sync=1", ["reference.sync: unknown key"]),
    ("model.lora={rank: 8}", ["model.lora.rank: unknown key", "model.lora.r?"]),
    # wrong types
    ("optim.lr=abc", ["optim.lr: must be a number > 0, not 'abc'"]),
    ("optim.lr=true", ["optim.lr: must be a number > 0, not true"]),
    ("optim.lr=", ["optim.lr: must be a number > 0, not null"]),
    ("optim.lr=[1]", ["optim.lr: must be a number > 0, not [1]"]),
    ("optim.lr.x=1", ["optim.lr: must be a number > 0, not a mapping with keys x"]),
    ("seed=true", ["seed: must be a whole number", "not true"]),
    ("seed=1.0", ["seed: must be a whole number", "not 1.0"]),
    ("seed='1'", ["seed: must be a whole number", "not '1'"]),
    ("data.shuffle=yes", ["data.shuffle: must be true or false, not 'yes'"]),
    ("data.shuffle=1", ["data.shuffle: must be true or false, not 1"]),
    ("model.revision=123", ["model.revision: must be text or null, not 123", "quotes"]),
    ("model.path=3", ["model.path: must be a path or a hub id, not 3"]),
    ("output_dir=3", ["output_dir: must be a path, not 3"]),
    ("optim=3", ["optim: must be a mapping with keys among lr, schedule", "not 3"]),
    ("optim.betas=[0.9]", ["optim.betas: must be a list of two numbers", "not [0.9]"]),
    ("optim.betas=0.9", ["optim.betas: must be a list of two numbers", "not 0.9"]),
    ("data.train=3", ["data.train: must be a path", "not 3"]),
    ("data.train=[3]", ["data.train.0: must be a mapping with keys among path", "not 3"]),
    ("data.train=[]", ["data.train: must be a path", "not []"]),
    ("data.train.0.columns=[a]", ["data.train.0.columns: must be a mapping from prompt", "not ['a']"]),
    (
        "data.train.0.columns={prompt: 3}",
        ["data.train.0.columns.prompt: must be the name of a column, not 3"],
    ),
    ("data.eval=3", ["data.eval: must be a path", "{fraction: 0.02}", "not 3"]),
    (
        "loss.type=[sigmoid, ipo]",
        ["loss.type.0: must be a mapping with keys among type, weight", "'sigmoid'"],
    ),
    (
        "logging.trackers=tensorboard",
        ["logging.trackers: must be a list of tensorboard", "not 'tensorboard'"],
    ),
    ("model.lora=true", ["model.lora: must be a mapping with keys among r", "not true"]),
    # out of range
    ("optim.lr=0", ["optim.lr: must be a number > 0, not 0"]),
    ("optim.lr=.nan", ["optim.lr: must be a number > 0, not nan"]),
    ("optim.lr=.inf", ["optim.lr: must be a number > 0, not inf"]),
    ("optim.lr=1e999", ["optim.lr: must be a number > 0, not inf"]),
    (f"optim.lr=1{'0' * 400}", ["optim.lr: must be a number > 0, not 1000"]),
    ("optim.betas=[0.9, 1]", ["optim.betas: must be a list of two numbers", ">= 0 and < 1, not [0.9, 1]"]),
    ("optim.warmup_ratio=1.5", ["optim.warmup_ratio: must be a number >= 0 and <= 1, not 1.5"]),
    ("optim.warmup_steps=-1", ["optim.warmup_steps: must be a whole number >= 0 or null, not -1"]),
    ("optim.min_lr_ratio=1", ["optim.min_lr_ratio: must be a number >= 0 and < 1, not 1"]),
    ("optim.schedule=cosin", ["optim.schedule: must be one of linear, cosine", "not 'cosin'"]),
    ("optim.schedule=reduce_lr_on_plateau", ["optim.schedule: must be one of"]),
    ("optim.max_grad_norm=0", ["optim.max_grad_norm: must be a number > 0 or null, not 0"]),
    ("loss.beta=0", ["loss.beta: must be a number > 0, not 0"]),
    ("loss.label_smoothing=0.5", ["loss.label_smoothing: must be a number >= 0 and < 0.5, not 0.5"]),
    ("loss.type=dpo", ["loss.type: must be one of sigmoid", "not 'dpo'"]),
    ("loss.type=[]", ["loss.type: must be one of sigmoid", "not []"]),
    ("loss.type=[{type: sigmoid, weight: 0}]", ["loss.type.0.weight: must be a number > 0, not 0"]),
    ("loss.type=[{type: dpo}]", ["loss.type.0.type: must be one of sigmoid", "not 'dpo'"]),
    ("data.eval={fraction: 1}", ["data.eval.fraction: must be a number > 0 and < 1, not 1"]),
    ("data.train.0.weight=0", ["data.train.0.weight: must be a number > 0, not 0"]),
    ("data.train.0.format=hh", ["data.train.0.format: must be one of auto, preference", "not 'hh'"]),
    ("packing.token_budget=0", ["packing.token_budget: must be a whole number >= 1", "not 0"]),
    ("packing.token_budget=9999999999", ["packing.token_budget: must be", "<= 2147483647, not 9999999999"]),
    ("reference.token_budget=none", ["reference.token_budget: must be auto or a whole number >= 1"]),
    (
        "distributed.num_processes=0",
        ["distributed.num_processes: must be auto or a whole number >= 1, not 0"],
    ),
    ("data.num_workers=-1", ["data.num_workers: must be auto or a whole number >= 0, not -1"]),
    ("seed=-1", ["seed: must be a whole number >= 0 and < 4294967296, not -1"]),
    ("checkpoint.keep=0", ["checkpoint.keep: must be a whole number >= 1, not 0"]),
    ("logging.trackers=[foo]", ["logging.trackers: must be a list of tensorboard", "not ['foo']"]),
    # paths
    ("output_dir=''", ["output_dir: must not be empty"]),
    ("model.path=${HOME}/m", ["model.path: only ${recipe_dir} is expanded", "'${HOME}/m'"]),
    # rules that join keys
    ("data.max_prompt_length=2048", ["data.max_prompt_length: must be below data.max_length (2048)"]),
    ("data.eval=[{path: e, weight: 2}]", ["data.eval.0.weight:", "training"]),
    ("data.train=[{path: a, name: n}, {path: b, name: n}]", ["data.train.1.name: 'n'", "data.train.0"]),
    ("data.train.0.columns={chosen: a, rejected: a}", ["data.train.0.columns: column 'a'", "several"]),
    ("data.train={path: a, format: tokenized, columns: {prompt: q}}", ["columns.prompt:", "prompt_ids"]),
    ("packing.rows_per_step=4", ["packing.rows_per_step: needs packing.scope: epoch"]),
    ("packing.window_pairs=4", ["packing.window_pairs: needs packing.scope: epoch"]),
    ("loss.type=[{type: ipo}, {type: ipo}]", ["loss.type: 'ipo' is given twice"]),
    ("loss.discopop_tau=0.1", ["loss.discopop_tau: not used by loss.type sigmoid", "discopop"]),
    ("loss.simpo_gamma=1", ["loss.simpo_gamma: not used by loss.type sigmoid", "simpo"]),
    ("loss={type: ipo, label_smoothing: 0.1}", ["loss.label_smoothing: not used by loss.type ipo", "robust"]),
    ("loss.f_alpha=0.3", ["loss.f_alpha:", "alpha_divergence"]),
    ("optim={schedule: constant, warmup_ratio: 0.1}", ["optim.warmup_ratio:", "constant_with_warmup"]),
    ("optim={schedule: constant, warmup_steps: 5}", ["optim.warmup_steps:", "constant_with_warmup"]),
    ("optim={schedule: inverse_sqrt, min_lr_ratio: 0.1}", ["optim.min_lr_ratio:", "linear and cosine"]),
    ("optim={schedule: polynomial, lr: 1e-7}", ["optim.lr: must be > 1e-07", "polynomial"]),
    ("train.eval_every_steps=10", ["train.eval_every_steps:", "data.eval is empty"]),
    ("logging.trackers=[wandb, wandb]", ["logging.trackers: 'wandb' is given twice"]),
    # not built yet
    ("model.compile=true", ["model.compile: true is not available yet"]),
    ("model.lora={r: 8}", ["model.lora:", "is not available yet"]),
    ("loss.type=aot", ["loss.type: 'aot' is not available yet", "sigmoid, ipo, hinge, sigmoid_norm"]),
    ("loss.type=[{type: sigmoid}, {type: sft}]", ["loss.type: 'sft' is not available yet"]),
    ("loss.f_divergence=forward_kl", ["loss.f_divergence: 'forward_kl' is not available yet"]),
    ("loss.ld_alpha=0.5", ["loss.ld_alpha: 0.5 is not available yet"]),
    ("loss.weighting=wpo", ["loss.weighting: 'wpo' is not available yet"]),
    ("loss.router_aux_coef=0.01", ["loss.router_aux_coef: 0.01 is not available yet"]),
    ("packing.scope=epoch", ["packing.scope: 'epoch' is not available yet", "1 more: packing.rows_per_step"]),
    ("distributed.num_processes=2", ["distributed.num_processes: 2 is not available yet", "auto, 1"]),
    ("distributed.strategy=ddp", ["distributed.strategy: 'ddp' is not available yet"]),
    ("online={judge: length}", ["online:", "is not available yet"]),
    # malformed overrides
    ("optim.lr", ["override 'optim.lr'", "optim.lr=1e-6"]),
    ("=3", ["override '=3'", "key=value"]),
    ("logging.run_name=\udcff", ["override 'logging.run_name=\\udcff', line 1: invalid YAML: a character"]),
    ("optim..lr=3", ["override 'optim..lr=3'", "key=value"]),
    ("data.train=[a", ["override 'data.train=[a', line 1, column 3: invalid YAML"]),
    ("data.train=@x", ["override 'data.train=@x', line 1, column 1: invalid YAML"]),
    ("data.train.1.path=x", ["data.train.1: data.train is a list of 1", "data.train.0"]),
    ("data.train.path=x", ["data.train.path: data.train is a list of 1", "data.train.0"]),
    ("output_dir.x=1", ["output_dir.x: output_dir is 'runs/x'", "no keys"]),
]


@pytest.mark.parametrize(("override", "fragments"), REFUSED, ids=[override[:60] for override, _ in REFUSED])
def test_a_wrong_value_is_refused_naming_key_value_and_remedy(
    load: Load, override: str, fragments: list[str]
) -> None:
    message = message_of(lambda: load(override))
    for fragment in fragments:
        assert fragment in message


BROKEN_RULES_OF_WHAT_IS_NOT_BUILT: list[tuple[str, list[str]]] = [
    ("loss.type=exo_pair", ["loss.label_smoothing: must be > 0", "exo_pair"]),
    ("loss={type: aot, weighting: wpo}", ["loss.weighting: loss.type aot"]),
    (
        "loss={type: nca_pair, f_divergence: forward_kl}",
        ["loss.f_divergence: loss.type nca_pair", "reverse_kl"],
    ),
    ("packing.scope=epoch", ["packing.rows_per_step: packing.scope epoch needs it"]),
    (
        "packing={scope: epoch, rows_per_step: 2, pairs_per_step: 8}",
        ["packing.pairs_per_step: needs", "step"],
    ),
    ("packing={scope: epoch, rows_per_step: 2, mode: padded}", ["packing.scope: epoch needs packing.mode"]),
]


@pytest.mark.usefixtures("everything_available")
@pytest.mark.parametrize(("override", "fragments"), BROKEN_RULES_OF_WHAT_IS_NOT_BUILT)
def test_rules_of_features_that_are_not_built_hold_already(
    load: Load, override: str, fragments: list[str]
) -> None:
    message = message_of(lambda: load(override))
    for fragment in fragments:
        assert fragment in message


@pytest.mark.usefixtures("everything_available")
def test_every_option_is_accepted_where_it_is_used(load: Load) -> None:
    assert load("loss={type: exo_pair, label_smoothing: 0.1}").loss.label_smoothing == 0.1
    assert load("loss={type: discopop, discopop_tau: 0.1}").loss.discopop_tau == 0.1
    assert load("loss={type: simpo, simpo_gamma: 0}").loss.simpo_gamma == 0.0
    assert load("loss={f_divergence: alpha_divergence, f_alpha: 0.3}").loss.f_alpha == 0.3
    assert load("packing={scope: epoch, rows_per_step: 2, window_pairs: 9}").packing.rows_per_step == 2
    message = message_of(lambda: load("loss.type=simpo", "reference.path=org/model"))
    assert "reference.path:" in message and "simpo" in message


def test_a_system_prompt_is_refused_only_when_no_source_can_be_conversational(load: Load) -> None:
    load("data.system_prompt=Be kind.")
    load("data.system_prompt=Be kind.", "data.train=[{path: a, format: preference}, b]")
    message = message_of(lambda: load("data.system_prompt=Be kind.", "data.train.0.format=preference"))
    assert "data.system_prompt:" in message and "conversational" in message


def test_missing_required_keys_are_all_named_with_an_instance(load: Load) -> None:
    message = message_of(lambda: load(text="seed: 1\n"))
    assert "output_dir: required" in message and "runs/my-run" in message
    assert "2 more: model.path, data.train" in message


def test_the_first_problem_is_told_and_the_other_keys_are_named(load: Load) -> None:
    message = message_of(lambda: load("optim.lr=x", "optim.eps=0", "train.epochs=0"))
    assert message.startswith("optim.lr: must be a number > 0, not 'x' (and 2 more: optim.eps, train.epochs)")


def test_a_long_or_odd_value_is_shortened_and_escaped(load: Load) -> None:
    message = message_of(lambda: load(f'optim.lr="{"long " * 1000}\\nline"'))
    assert len(message) < 200
    assert "\\n" in message_of(lambda: load('optim.lr="a\\nb"'))
    assert "new\\nline" in message_of(lambda: load('optim={"new\\nline": 1}'))


# --------------------------------------------------------------------------------------- refused as a file


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ["recipe.yaml: the recipe is empty", "--defaults"]),
        ("# only a comment\n", ["recipe.yaml: the recipe is empty"]),
        ("- a\n- b\n", ["recipe.yaml: a recipe is a mapping", "not ['a', 'b']"]),
        ("just text", ["recipe.yaml: a recipe is a mapping", "'just text'"]),
        ("seed: 1\nmodel: [1\n", ["recipe.yaml, line 3, column 1: invalid YAML"]),
        ("seed: 1\n\tmodel: 2\n", ["recipe.yaml, line 2, column 1: invalid YAML"]),
        ("seed: 1\nmodel: {}\nseed: 2\n", ["line 3, column 1", "key 'seed' is given twice, first on line 1"]),
        (
            "optim:\n  lr: 1\n  eps: 2\n  lr: 3\n",
            ["line 4, column 3", "key 'lr' is given twice, first on line 2"],
        ),
        ("seed: 1\n---\nseed: 2\n", ["line 2, column 1", "another document"]),
        ("1: 2\n", ["line 1, column 1", "a key must be text"]),
        ("? [a]\n: 1\n", ["line 1, column 3", "a key must be text"]),
        ("seed: !!python/object:os.system x\n", ["line 1, column 7", "is not supported"]),
        ("seed: !!int x\n", ["line 1, column 7", "cannot be read as int"]),
        (f"seed: {'9' * 5000}\n", ["line 1, column 7", "cannot be read as int"]),
        ("seed: 1\nmodel: \x07\n", ["recipe.yaml, line 2: invalid YAML", "character"]),
        ("seed: *nowhere\n", ["line 1, column 7", "nowhere"]),
        ("seed: &a [*a]\n", ["recipe.yaml: invalid YAML: nested too deeply"]),
        ("seed: " + "[" * 2000, ["recipe.yaml: invalid YAML: nested too deeply"]),
        ("optim.lr: 1e-6\n", ["optim.lr: unknown key", "in YAML write optim: {lr: ...}"]),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_its_name_and_place(
    load: Load, text: str, fragments: list[str]
) -> None:
    message = message_of(lambda: load(text=text))
    for fragment in fragments:
        assert fragment in message


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    assert "missing.yaml: no such recipe" in message_of(lambda: load_recipe(tmp_path / "missing.yaml"))
    assert "cannot read the recipe: Is a directory" in message_of(lambda: load_recipe(tmp_path))
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"seed: 1\n# caf\xe9\n")
    message = message_of(lambda: load_recipe(path))
    assert "latin.yaml: not UTF-8 (byte 0xe9 at 13)" in message


def test_a_byte_order_mark_is_no_part_of_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALLEST.encode())
    assert load_recipe(path).model.path == "org/model"


YAML_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "sigmoid"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=5)
            | st.sampled_from(["path", "type", "weight", "fraction", "columns", "lr", "train"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
KEYS = sorted(recipe_module._all_keys(Recipe))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(key=st.sampled_from(KEYS), value=YAML_VALUES)
def test_any_value_at_any_key_is_accepted_or_refused_in_one_line(key: str, value: Any) -> None:
    tree = yaml.safe_load(SMALLEST)
    *parents, name = key.removesuffix(".0").replace(".0.", ".").split(".")
    section = tree
    for parent in parents:
        if not isinstance(section.get(parent), dict):
            section[parent] = {}
        section = section[parent]
    section[name] = value
    try:
        recipe = parse_recipe(tree)
    except RecipeError:
        message_of(lambda: parse_recipe(tree))
    else:
        assert parse_recipe(recipe_module._read_yaml(dump_recipe(recipe), where="dump")) == recipe


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=st.text(alphabet="ab:-{}[],&*!|>'\"%@#\n \t01.e\x00é", max_size=30))
def test_any_text_is_a_recipe_or_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    message_of(lambda: load_recipe(path))
    message_of(lambda: parse_recipe({}, [text]))


# -------------------------------------------------------------------------------------------------- paths


def test_recipe_dir_and_home_are_expanded_in_every_path(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    here = "${recipe_dir}"
    recipe = load(
        f"output_dir={here}/out",
        f"model.path={here}/model",
        f"tokenizer={{path: '{here}/tokenizer', chat_template: ~/t.jinja}}",
        f"reference={{path: '{here}/reference', cache_dir: '~/cache'}}",
        f"data.train=['{here}/a.jsonl', ~/b.jsonl]",
        f"data.eval={here}/e.jsonl",
        f"checkpoint.resume={here}/step-1",
        f"data.system_prompt={here}",
    )
    assert recipe.output_dir == tmp_path / "out" and recipe.model.path == f"{tmp_path}/model"
    assert recipe.tokenizer.path == f"{tmp_path}/tokenizer"
    assert recipe.tokenizer.chat_template == Path("/home/me/t.jinja")
    assert recipe.reference.path == f"{tmp_path}/reference"
    assert recipe.reference.cache_dir == Path("/home/me/cache")
    assert [source.path for source in recipe.data.train] == [f"{tmp_path}/a.jsonl", "/home/me/b.jsonl"]
    assert isinstance(recipe.data.eval, tuple) and recipe.data.eval[0].path == f"{tmp_path}/e.jsonl"
    assert recipe.checkpoint.resume == f"{tmp_path}/step-1"
    assert recipe.data.system_prompt == here


def test_recipe_dir_is_absolute_though_the_recipe_path_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(SMALLEST)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Path("recipe.yaml"), ["output_dir=${recipe_dir}/out", "model.path=local/model"])
    assert recipe.output_dir == tmp_path / "out" and recipe.model.path == "local/model"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a model, a tokenizer, data files and things that are none of these."""
    root = tmp_path / "workplace"
    for directory in ("model", "tokenizer", "empty", "dataset", "step-000001"):
        (root / directory).mkdir(parents=True)
    for name in (
        "model/config.json",
        "tokenizer/tokenizer.json",
        "pairs.jsonl",
        "pairs.csv.gz",
        "pairs.txt",
        "t.jinja",
    ):
        (root / name).touch()
    monkeypatch.chdir(root)
    yield root


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "override",
    [
        "model.path=model",
        "model.path=./model",
        "model.path=gpt2",
        "model.path=Qwen/Qwen3-0.6B",
        "tokenizer.path=tokenizer",
        "tokenizer.chat_template=t.jinja",
        "reference.path=model",
        "data.train=pairs.csv.gz",
        "data.train=dataset",
        "data.train=trl-lib/ultrafeedback_binarized",
        "data.eval=pairs.jsonl",
        "data.eval={fraction: 0.1}",
        "output_dir=a/b/c",
        "output_dir=dataset",
        "reference.cache_dir=new/cache",
        "checkpoint.resume=never",
        "checkpoint.resume=step-000001",
    ],
)
def test_paths_that_exist_or_can_be_made_and_hub_ids_pass(load: Load, override: str) -> None:
    check_paths(load(override))


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["data.train=missing.jsonl"], ["data.train.0.path: no such file", "'missing.jsonl'", "workplace"]),
        (["data.train=[pairs.jsonl, ./x]"], ["data.train.1.path: no such file", "'./x'"]),
        (["data.train=missing.json.gz"], ["data.train.0.path: no such file"]),
        (["data.train=missing.txt"], ["data.train.0.path: no such file"]),
        (["data.train=a/b/c"], ["data.train.0.path:", "not a hub id: 'a/b/c'"]),
        (["data.train=hf://a/b"], ["data.train.0.path:", "not a hub id"]),
        (["data.train=pairs.txt"], ["data.train.0.path: a data file ends in .jsonl", "'pairs.txt'"]),
        (["data.eval=missing.jsonl"], ["data.eval.0.path: no such file"]),
        (["model.path=./none"], ["model.path: no such directory, and not a hub id: './none'"]),
        (["model.path=empty"], ["model.path: directory 'empty' has no config.json"]),
        (["model.path=t.jinja"], ["model.path: must be a directory or a hub id", "'t.jinja' is a file"]),
        (["model={path: model, revision: main}"], ["model.revision:", "leave it out"]),
        (["tokenizer.path=empty"], ["tokenizer.path: directory 'empty' has no tokenizer.json"]),
        (["tokenizer.chat_template=none.jinja"], ["tokenizer.chat_template: no such file: 'none.jinja'"]),
        (["reference.path=/none"], ["reference.path: no such directory"]),
        (["output_dir=pairs.jsonl"], ["output_dir: 'pairs.jsonl' is in the way"]),
        (["output_dir=pairs.jsonl/run"], ["output_dir: 'pairs.jsonl' is in the way"]),
        (["reference.cache_dir=t.jinja"], ["reference.cache_dir: 't.jinja' is in the way"]),
        (["checkpoint.resume=atuo"], ["checkpoint.resume: must be auto, never or", "'atuo'"]),
        ([f"data.train={'x' * 5000}.jsonl"], ["data.train.0.path: no such file"]),
        (['data.train="a\\0.jsonl"'], ["data.train.0.path: no such file"]),
        (["data.train=no.jsonl", "model.path=/no"], ["model.path: no such", "1 more: data.train.0.path"]),
    ],
)
def test_paths_that_are_not_there_are_refused_naming_the_key(
    load: Load, overrides: list[str], fragments: list[str]
) -> None:
    recipe = load("data.train=pairs.jsonl", *overrides)
    message = message_of(lambda: check_paths(recipe))
    assert message == message_of(lambda: check_environment(recipe))
    for fragment in fragments:
        assert fragment in message


@pytest.mark.usefixtures("workplace")
def test_a_directory_that_cannot_be_written_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    message = message_of(lambda: check_paths(load("output_dir=a/b")))
    assert "output_dir: no permission to write in '.'" in message


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"tensorboardX", "wandb"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    check_trackers(load("logging.trackers=[tensorboard, wandb]"))
    message = message_of(lambda: check_trackers(load("logging.trackers=[wandb, comet_ml]")))
    assert "logging.trackers: 'comet_ml' is not installed; pip install comet-ml" in message
    assert "comet-ml" in message_of(
        lambda: check_environment(load("logging.trackers=[comet_ml]", "data.train=a/b"))
    )


# --------------------------------------------------------------------------------------------- generated


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    system_prompt=st.text()
    | st.sampled_from(["5e-7", "no", "~", "null", "0x10", "2026-11-20", "1:30", "", " a ", "=", "<<"]),
    run_name=st.text(min_size=1) | st.sampled_from(["1e5", "true", "010", "1_000", ".inf"]),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    fraction=st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
)
def test_a_dumped_recipe_loads_as_the_same_recipe(
    system_prompt: str, run_name: str, lr: float, fraction: float
) -> None:
    tree = yaml.safe_load(SMALLEST)
    tree["data"] |= {"eval": {"fraction": fraction}, "system_prompt": system_prompt}
    recipe = parse_recipe({**tree, "logging": {"run_name": run_name}, "optim": {"lr": lr}})
    text = dump_recipe(recipe)
    assert parse_recipe(recipe_module._read_yaml(text, where="dump")) == recipe
    # Whoever reads it with plain PyYAML sees the same values.
    assert yaml.safe_load(text) == recipe.model_dump(mode="json")


def test_a_dump_holds_every_key_in_the_order_of_the_schema(load: Load) -> None:
    tree = yaml.safe_load(dump_recipe(load("optim.schedule=constant", "loss.type=[{type: ipo}]")))
    assert list(tree) == list(Recipe.model_fields)
    assert list(tree["optim"]) == list(type(load().optim).model_fields)
    assert tree["optim"]["warmup_ratio"] == 0.0 and tree["loss"]["type"] == [{"type": "ipo", "weight": 1.0}]


def test_the_commented_defaults_are_a_recipe_of_defaults(load: Load) -> None:
    text = recipe_defaults()
    required = ["output_dir=runs/x", "model.path=org/model", "data.train=pairs.jsonl"]
    assert load(*required, text=text) == load()
    assert load(text=text).model.path == "Qwen/Qwen3-0.6B"
    assert max(map(len, text.splitlines())) <= 100


def test_the_commented_defaults_hold_every_key_below_a_comment() -> None:
    lines = recipe_defaults().splitlines()
    for key in KEYS:
        if key.startswith(("data.eval.", "loss.type.", "model.lora.")):  # what a value of these can hold
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
    assert len(objects) == 16
    for section in objects:
        assert section["additionalProperties"] is False
        for name, key in section["properties"].items():
            referred = schema["$defs"][key["$ref"].removeprefix("#/$defs/")] if "$ref" in key else key
            assert referred["description"] and ("title" in referred or "anyOf" in referred), name


def test_the_json_schema_holds_choices_ranges_defaults_and_shorthands() -> None:
    definitions = recipe_schema()["$defs"]
    optim = definitions["OptimRecipe"]["properties"]
    assert optim["schedule"]["enum"][:2] == ["linear", "cosine"] and optim["schedule"]["default"] == "linear"
    assert optim["lr"]["exclusiveMinimum"] == 0 and optim["lr"]["default"] == 5e-7
    train = definitions["DataRecipe"]["properties"]["train"]["anyOf"]
    assert [option.get("type", "source") for option in train] == ["string", "source", "array"]
    evaluation = definitions["DataRecipe"]["properties"]["eval"]["anyOf"]
    assert {"$ref": "#/$defs/EvalFraction"} in evaluation


def test_the_reference_in_docs_is_up_to_date() -> None:
    script = REPOSITORY / "scripts" / "make_recipe_reference.py"
    spec = importlib.util.spec_from_file_location("make_recipe_reference", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (REPOSITORY / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert written == module.reference(), f"run python {script.relative_to(REPOSITORY)}"


def test_every_available_value_is_one_the_schema_knows(load: Load) -> None:
    for key, values in recipe_module.AVAILABLE_SO_FAR.items():
        assert key in KEYS
        for value in values:
            load(f"{key}={'null' if value is None else str(value).lower()}")


# ----------------------------------------------------------------------------------------- running again


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ([], []),
        (["optim.lr=1e-6", "seed=1"], ["seed", "optim.lr"]),
        (["optim.betas=[0.9, 0.95]"], ["optim.betas"]),
        (["output_dir=elsewhere", "logging.every_steps=5", "checkpoint.resume=never"], []),
        (["logging.trackers=[wandb]", "checkpoint.every_steps=3", "distributed.num_processes=1"], []),
        (["model.attention=sdpa", "model.gradient_checkpointing=true"], []),
        (["model.dtype=bfloat16"], ["model.dtype"]),
        (["reference.cache_dir=c", "reference.token_budget=5", "data.num_workers=0"], []),
        (["reference.path=org/other"], ["reference.path"]),
        (["packing.token_budget=64", "packing.algorithm=next_fit", "packing.share_prompt=false"], []),
        (["packing.mode=padded"], []),
        (["packing.pairs_per_step=8"], ["packing.pairs_per_step"]),
        (["data.eval=e.jsonl", "train.eval_every_steps=4"], []),
        (["data.eval.fraction=0.1"], ["data.eval"]),
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
        (["train.max_steps=3", "train.epochs=2"], ["train.epochs", "train.max_steps"]),
    ],
)
def test_changed_keys_are_those_that_change_training(
    load: Load, overrides: list[str], changed: list[str]
) -> None:
    assert changed_keys(load(), load(*overrides)) == changed
    assert sorted(changed_keys(load(*overrides), load())) == sorted(changed)


def test_a_changed_fraction_is_named_by_its_key(load: Load) -> None:
    old, new = load("data.eval.fraction=0.1"), load("data.eval.fraction=0.2")
    assert changed_keys(old, new) == ["data.eval.fraction"]


@pytest.mark.usefixtures("everything_available")
def test_in_scope_epoch_the_row_layout_changes_training(load: Load) -> None:
    old = load("packing={scope: epoch, rows_per_step: 2}")
    new = load("packing={scope: epoch, rows_per_step: 2, token_budget: 64}")
    assert changed_keys(old, new) == ["packing.token_budget"]
    assert changed_keys(load(), load("packing={scope: epoch, rows_per_step: 2, token_budget: 64}")) == [
        "packing.token_budget", "packing.scope", "packing.rows_per_step",
    ]  # fmt: skip


def test_every_key_named_as_neutral_exists() -> None:
    for key in (*recipe_module.NEUTRAL_KEYS, *recipe_module.ROW_LAYOUT_KEYS):
        assert key in KEYS


# ------------------------------------------------------------------------------------------------ imports


def test_importing_recipes_is_quick_and_loads_none_of_the_heavy_packages() -> None:
    program = (
        "import sys, time; import dpo_pack.recipe;"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pyarrow', 'accelerate'} & set(sys.modules);"
        "assert not heavy, heavy; print(time.process_time())"
    )
    command = [sys.executable, "-c", program]
    seconds = [
        float(subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(seconds) < 0.3
