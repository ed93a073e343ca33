"""Recipes that are refused key by key: in one line that names the key, its value and the remedy."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_recipe import KEYS, SMALLEST, load, message_of

from dpo_pack.recipe.load import dump_recipe, parse_recipe
from dpo_pack.recipe.text import read_yaml
from dpo_pack.system.errors import RecipeError

REFUSED: list[tuple[str, list[str]]] = [
    # unknown keys
    ("optim.lrr=1", ["optim.lrr: unknown key", "optim.lr?"]),
    ("optm.lr=1", ["optm: unknown key", "optim?"]),
    ("optim={lr: 1, shedule: cosine}", ["optim.shedule: unknown key", "optim.schedule?"]),
    ("lr=1", ["lr: unknown key", "optim.lr?"]),
    ("train.lr=1", ["train.lr: unknown key", "optim.lr?"]),
    ("optim.qqqqqqqq=1", ["optim.qqqqqqqq: unknown key", "known here: name, lr, schedule"]),
    ("zzz=1", ["zzz: unknown key", "output_dir, seed, model"]),
    ("data.train.0.formt=x", ["data.train.0.formt: unknown key", "data.train.0.format?"]),
    (
        "data.train={pth: x}",
        ["data.train.0.pth: unknown key", "data.train.0.path?", "1 more: data.train.0.path"],
    ),
    ("data.eval={fractoin: 0.1}", ["data.eval.fractoin: unknown key", "data.eval.fraction?"]),
    ("data.train.0.columns={promt: q}", ["data.train.0.columns.promt: not a field of a pair", "prompt?"]),
    ("loss.type=[{type: ipo, weigth: 2}]", ["loss.type.0.weigth: unknown key", "loss.type.0.weight?"]),
    ("reference.synch=1", ["reference.synch: unknown key", "reference.sync?"]),
    ("reference.sync=1", ["reference.sync: must be a mapping with keys among every_steps, mixup"]),
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
    ("optim=3", ["optim: must be a mapping with keys among name, lr, schedule", "not 3"]),
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
        "logging.trackers=tensorbord",
        ["logging.trackers: must be one or a list of tensorboard", "not 'tensorbord'"],
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
    ("logging.trackers=[foo]", ["logging.trackers: must be one or a list of tensorboard", "not ['foo']"]),
    # paths
    ("output_dir=''", ["output_dir: must not be empty"]),
    ("model.path=${HOME}/m", ["model.path: only ${recipe_dir} is expanded", "'${HOME}/m'"]),
]


@pytest.mark.parametrize(("override", "fragments"), REFUSED, ids=[override[:60] for override, _ in REFUSED])
def test_a_wrong_value_is_refused_naming_key_value_and_remedy(override: str, fragments: list[str]) -> None:
    message = message_of(lambda: load(override))
    for fragment in fragments:
        assert fragment in message


def test_missing_required_keys_are_all_named_with_an_instance() -> None:
    message = message_of(lambda: load(text="seed: 1\n"))
    assert "output_dir: required" in message and "runs/my-run" in message
    assert "2 more: model.path, data.train" in message


def test_the_first_problem_is_told_and_the_other_keys_are_named() -> None:
    message = message_of(lambda: load("optim.lr=x", "optim.eps=0", "train.epochs=0"))
    assert message.startswith("optim.lr: must be a number > 0, not 'x' (and 2 more: optim.eps, train.epochs)")


def test_a_long_or_odd_value_is_shortened_and_escaped() -> None:
    message = message_of(lambda: load(f'optim.lr="{"long " * 1000}\\nline"'))
    assert len(message) < 200
    assert "\\n" in message_of(lambda: load('optim.lr="a\\nb"'))
    assert "new\\nline" in message_of(lambda: load('optim={"new\\nline": 1}'))


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


@settings(max_examples=150, deadline=None, derandomize=True)
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
        assert parse_recipe(read_yaml(dump_recipe(recipe), where="dump")) == recipe
