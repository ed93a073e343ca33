"""Recipes that are refused key by key: in one line that names the key, its value and the remedy."""

import functools
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_recipe import KEYS, SMALLEST, load, message_of

from dpo_pack.recipe.load import dump_recipe, parse_recipe
from dpo_pack.recipe.text import read_yaml
from dpo_pack.system.errors import RecipeError

NOT_A_KEY = [
    # override, unknown key, the nearest key
    ("optim.lrr=1", "optim.lrr", "optim.lr"),
    ("optim={lr: 1, shedule: cosine}", "optim.shedule", "optim.schedule"),
    ("lr=1", "lr", "optim.lr"),
    ("data.train.0.formt=x", "data.train.0.formt", "data.train.0.format"),
    ("data.train=[a, {pth: x}]", "data.train.1.pth", "data.train.1.path"),
    ("data.train.max_lenght=3", "data.train.0.max_lenght", "data.max_length"),
    ("max_lenght=3", "max_lenght", "data.max_length"),
]
NOTHING_IS_NEAR = [
    # override, unknown key, what the message lists
    ("model.lora={rank: 8}", "model.lora.rank", "r, alpha, dropout, target_modules"),
    ("data.train.columns={zz: q}", "data.train.0.columns.zz", "prompt, chosen, rejected"),
    ("data.train.columns={question: prompt}", "data.train.0.columns.question", "{FIELD: column}"),
    ("per_device_batch=4", "per_device_batch", "output_dir, seed"),
    ("optim.warmup=3", "optim.warmup", "warmup_ratio, warmup_steps"),
]
# key, its values in YAML that are refused, and a part of what is allowed
NOT_A_VALUE: list[tuple[str, list[str], str]] = [
    ("optim.lr", ["'abc'", "true", "null", "[1]", "{'x': 1}", "0", "nan", "inf"], "a number > 0"),
    ("seed", ["true", "1.0", "'1'", "-1"], "a whole number >= 0 and < 4294967296"),
    ("data.shuffle", ["'yes'", "1"], "true or false"),
    ("model.revision", ["123"], "text or null"),
    ("model.path", ["3"], "a path or a hub id"),
    ("optim", ["3"], "a mapping with keys among name, lr, schedule"),
    ("optim.betas", ["[0.9]", "0.9", "[0.9, 1]"], "a list of two numbers, each >= 0 and < 1"),
    ("data.train", ["3", "[]"], "a path, a source"),
    ("data.train.0.columns", ["['a']", "{'prompt': 3}"], "a mapping from prompt"),
    ("data.eval", ["3"], "{fraction: 0.02}"),
    ("data.train.0.format", ["'hh'"], "one of auto, preference"),
    ("loss.type", ["'dpo'", "[]"], "one of sigmoid"),
    ("loss.type.0", ["'dopo'"], "or a list as [{type: sigmoid, weight: 1.0}]"),
    ("loss.type.0.weight", ["0"], "a number > 0"),
    ("loss.label_smoothing", ["0.5"], "a number >= 0 and < 0.5"),
    ("logging.trackers", ["'tensorbord'", "['foo']"], "one or a list of tensorboard"),
    ("optim.warmup_steps", ["-1"], "a whole number >= 0 or null"),
    ("optim.max_grad_norm", ["0"], "a number > 0 or null"),
    ("packing.token_budget", ["0", "9999999999"], "a whole number >= 1 and <= 2147483647"),
    ("distributed.num_processes", ["0", "'none'"], "auto or a whole number >= 1"),
]
IN_ITEMS = {
    "data.train.0": "data.train=[{}]",
    "loss.type.0": "loss.type=[{}]",
    "loss.type.0.weight": "loss.type=[{{type: ipo, weight: {}}}]",
}


@pytest.mark.parametrize(("override", "key", "nearest"), NOT_A_KEY)
def test_an_unknown_key_is_refused_with_the_nearest_one(override: str, key: str, nearest: str) -> None:
    message = message_of(lambda: load(override))
    assert message.startswith(f"{key}: ") and f"{nearest}?" in message


@pytest.mark.parametrize(("override", "key", "known"), NOTHING_IS_NEAR)
def test_an_unknown_key_that_is_like_no_other_is_refused_with_those_that_can_stand_there(
    override: str, key: str, known: str
) -> None:
    message = message_of(lambda: load(override))
    assert message.startswith(f"{key}: ") and known in message and "did you mean" not in message


@pytest.mark.parametrize(
    ("peer", "text"),
    [
        ("trl", "model_name_or_path: a\nlearning_rate: 1e-6\noutput_dir: b\nbf16: true\n"),
        ("axolotl", "base_model: a\nrl: dpo\ndatasets: []\n"),
        ("llamafactory", "model_name_or_path: a\nstage: dpo\npref_beta: 0.1\n"),
    ],
)
def test_a_file_of_another_trainer_is_refused_with_the_command_to_translate(peer: str, text: str) -> None:
    message = message_of(lambda: load(text=text))
    assert f"dpopack recipe --from {peer}" in message and "required" not in message


@pytest.mark.parametrize(("key", "values", "allowed"), NOT_A_VALUE)
def test_a_wrong_value_is_refused_with_what_is_allowed(key: str, values: list[str], allowed: str) -> None:
    for value in values:
        text = {"nan": ".nan", "inf": "1e999"}.get(value, value)
        override = IN_ITEMS.get(key, f"{key}={{}}").format(text)
        message = message_of(functools.partial(load, override))
        assert message.startswith(f"{key}: ") and allowed in message
        if value in ("'abc'", "-1", "null", "nan"):
            assert f"not {value}" in message


@pytest.mark.parametrize(
    ("override", "value"), [("output_dir=''", ""), ("model.path=${HOME}/m", "'${HOME}/m'")]
)
def test_a_path_that_cannot_be_is_refused(override: str, value: str) -> None:
    message = message_of(lambda: load(override))
    assert message.startswith(override.partition("=")[0]) and value in message


def test_missing_required_keys_are_all_named_with_an_instance() -> None:
    message = message_of(lambda: load(text="seed: 1\n"))
    assert "output_dir: required" in message and "runs/my-run" in message
    assert "2 more: model.path: required" in message and "; data.train: required" in message


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
