"""Text to tree and back: scalars, overrides, files that are no YAML, and dumps."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.tiny_recipe import SMALLEST, load, message_of

from dpo_pack.recipe.data import SourceRecipe
from dpo_pack.recipe.load import dump_recipe, load_recipe, parse_recipe
from dpo_pack.recipe.text import read_yaml

# ----------------------------------------------------------------------------------------------- scalars


@pytest.mark.parametrize("text", ["5e-7", "5.0e-7", "5E-7", "0.0000005", ".0000005", "+5e-7", "5.e-7"])
def test_every_way_to_write_a_float_is_a_number(text: str) -> None:
    assert load(f"optim.lr={text}").optim.lr == 5e-7
    assert load(text=SMALLEST + f"optim: {{lr: {text}}}").optim.lr == 5e-7


def test_leading_zeros_are_decimal_and_words_such_as_no_are_text() -> None:
    assert load("seed=010").seed == 10
    assert load("logging.run_name=no").logging.run_name == "no"
    assert load("logging.run_name=2026-11-20").logging.run_name == "2026-11-20"
    assert load("logging.run_name=1:30").logging.run_name == "1:30"


# ---------------------------------------------------------------------------------------------- overrides


def test_an_override_reaches_into_an_item_of_a_list() -> None:
    assert load("data.train.0.max_pairs=100").data.train[0].max_pairs == 100
    recipe = load("data.train=[a.jsonl, b.jsonl]", "data.train.1.weight=0.5", "data.train.1.columns.prompt=q")
    assert [source.weight for source in recipe.data.train] == [1.0, 0.5]
    assert recipe.data.train[1].columns == {"prompt": "q"}


def test_an_override_changes_one_place_of_a_mapping_shared_by_a_yaml_alias() -> None:
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


def test_parse_recipe_leaves_its_argument_alone() -> None:
    tree = yaml.safe_load(SMALLEST)
    parse_recipe(tree, ["optim.lr=1e-6", "data.train.0.max_pairs=3", "data.train.path=x.jsonl"])
    assert tree == yaml.safe_load(SMALLEST)


MALFORMED_OVERRIDES = [
    ("optim.lr", "override 'optim.lr'", "optim.lr=1e-6"),
    ("=3", "override '=3'", "key=value"),
    ("logging.run_name=\udcff", "override 'logging.run_name=\\udcff'", "character"),
    ("optim..lr=3", "override 'optim..lr=3'", "key=value"),
    ("data.train=[a", "override 'data.train=[a', line 1, column 3", "YAML"),
    ("data.train=@x", "override 'data.train=@x', line 1, column 1", "YAML"),
    ("data.train.1.path=x", "data.train.1: ", "numbered from 0"),
    ("data.eval.path=x", "data.eval.path: ", "numbered from 0"),
    ("logging.trackers.wandb=x", "logging.trackers.wandb: ", "numbered from 0"),
    ("output_dir.x=1", "output_dir.x: ", "'runs/x'"),
    ('logging.run_name="a\\udcff"', "a recipe takes Unicode only", "'a\\udcff'"),
    ('data.columns={"a\\ud800": b}', "a recipe takes Unicode only", "'a\\ud800'"),
]


@pytest.mark.parametrize(("override", "beginning", "remedy"), MALFORMED_OVERRIDES)
def test_a_malformed_override_is_refused_with_the_form(override: str, beginning: str, remedy: str) -> None:
    lists = ("data.eval=[a.jsonl, b.jsonl]", "logging.trackers=[tensorboard]")
    message = message_of(lambda: load(*lists, override))
    assert message.startswith(beginning) and remedy in message


# --------------------------------------------------------------------------------------- refused as a file


# Ten lists; each names the one before nine times: 9 ** 10 values in 430 bytes.
ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("", "recipe.yaml: ", "--defaults"),
        ("# only a comment\n", "recipe.yaml: ", "mapping"),
        ("- a\n- b\n", "recipe.yaml: ", "['a', 'b']"),
        ("just text", "recipe.yaml: ", "'just text'"),
        ("seed: 1\nmodel: [1\n", "recipe.yaml, line 3, column 1: ", "YAML"),
        ("seed: 1\n\tmodel: 2\n", "recipe.yaml, line 2, column 1: ", "YAML"),
        ("seed: 1\nmodel: {}\nseed: 2\n", "line 3, column 1: ", "'seed' is given twice, first on line 1"),
        (
            "optim:\n  lr: 1\n  eps: 2\n  lr: 3\n",
            "line 4, column 3: ",
            "'lr' is given twice, first on line 2",
        ),
        ("seed: 1\n---\nseed: 2\n", "line 2, column 1: ", "another document"),
        ("1: 2\n", "line 1, column 1: ", "must be text"),
        ("? [a]\n: 1\n", "line 1, column 3: ", "must be text"),
        ("seed: !!python/object:os.system x\n", "line 1, column 7: ", "python/object"),
        ("seed: !!int x\n", "line 1, column 7: ", "int"),
        ("seed: !!bool 3\n", "line 1, column 7: ", "bool"),
        (f"seed: {'9' * 5000}\n", "line 1, column 7: ", "int"),
        ("seed: 1\nmodel: \x07\n", "recipe.yaml: ", "character"),
        ("seed: *nowhere\n", "line 1, column 7: ", "nowhere"),
        ("seed: &a [*a]\n", "recipe.yaml: ", "65,536"),
        ("seed: " + "[" * 2000, "recipe.yaml: ", "nested too deeply"),
        (ALIAS_BOMB, "recipe.yaml: ", "65,536"),
        ("seed: 1 #" + "x" * (1 << 17), "recipe.yaml: ", "131,072"),
        ("optim.lr: 1e-6\n", "optim.lr: ", "optim: {lr: ...}"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_its_place(text: str, place: str, problem: str) -> None:
    message = message_of(lambda: load(text=text))
    assert place in message and problem in message


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    assert "missing.yaml: cannot read the recipe: No such file" in message_of(
        lambda: load_recipe(tmp_path / "missing.yaml")
    )
    assert "no run, as it has no run.json" in message_of(lambda: load_recipe(tmp_path))
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"seed: 1\n# caf\xe9\n")
    message = message_of(lambda: load_recipe(path))
    assert "latin.yaml: not UTF-8 (byte 0xe9 at 13)" in message


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


# ------------------------------------------------------------------------------------------------- dumps


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    system_prompt=st.text()
    | st.sampled_from(["5e-7", "no", "~", "null", "0x10", "2026-11-20", "1:30", "", " a ", "=", "<<"]),
    run_name=st.text(min_size=1) | st.sampled_from(["1e5", "true", "010", "1_000", ".inf"]),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    fraction=st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
)
@example(system_prompt="\u2028", run_name="a\x85", lr=1.0, fraction=0.5)
def test_a_dumped_recipe_is_the_same(system_prompt: str, run_name: str, lr: float, fraction: float) -> None:
    tree = yaml.safe_load(SMALLEST)
    tree["data"] |= {"eval": {"fraction": fraction}, "system_prompt": system_prompt}
    recipe = parse_recipe({**tree, "logging": {"run_name": run_name}, "optim": {"lr": lr}})
    text = dump_recipe(recipe)
    assert parse_recipe(read_yaml(text, where="dump")) == recipe
    # Whoever reads it with plain PyYAML sees the same values.
    assert yaml.safe_load(text) == recipe.model_dump(mode="json")
