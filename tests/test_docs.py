"""The documentation: pages, recipes, commands and promises in it are true."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from support.tiny_recipe import KEYS, SMALLEST, load

from dpo_pack.commands.main import app
from dpo_pack.losses.preference import LossOptions
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.training import LOSSES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

# What a block of a page leaves out.
OFFLINE = yaml.safe_load(SMALLEST) | {"data": {"train": "pairs.jsonl", "eval": "more.jsonl"}}
ONLINE = OFFLINE | {
    "train": {"max_steps": 9},
    "online": {"judges": [{"type": "reward_model", "path": "org/judge"}]},
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        key
        for key in base.keys() & over.keys()
        if isinstance(base[key], dict) and isinstance(over[key], dict)
    }
    return base | over | {key: merged(base[key], over[key]) for key in both}


def blocks(page: Path, *languages: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [re.sub(f"^{indent}", "", text, flags=re.M) for indent, kind, text in found if kind in languages]


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `dpopack` in the page's shell blocks."""
    lines = [line for text in blocks(page, "bash") for line in text.replace("\\\n", " ").splitlines()]
    calls = [re.match(r"(?:\.venv/bin/)?dpopack (.*)", line) for line in lines]
    return [shlex.split(call[1].partition(" > ")[0], comments=True) for call in calls if call]


def test_the_site_has_every_page() -> None:
    def pages(nav: Any) -> list[str]:
        return [nav] if isinstance(nav, str) else [page for part in nav for page in pages(_inside(part))]

    def _inside(part: Any) -> Any:
        return part if isinstance(part, str) else list(part.values())[0]

    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(pages(site["nav"])) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_in_pages_have_keys_and_values_that_a_recipe_takes(page: Path) -> None:
    for text in blocks(page, "yaml"):
        values = yaml.safe_load(text)
        if isinstance(values, dict) and values.keys() <= set(Recipe.model_fields):
            load(text=yaml.safe_dump(merged(ONLINE if "online" in values else OFFLINE, values)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_pages_have_options_and_keys_that_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for name, *arguments in commands(page):
        command = group.commands[name]
        if hasattr(command, "commands"):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        command.make_context(name, list(arguments), resilient_parsing=True)
        for override in arguments:
            key, equals, _ = override.partition("=")
            if equals and not override.startswith("-"):
                assert re.sub(r"\.\d+(?=\.)", ".N", key) in {*KEYS, "model.lora"}, override


def test_the_page_of_commands_has_every_command_and_option() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(app)
    todo = [(name, command) for name, command in group.commands.items()]
    for name, command in todo:
        if command.hidden:
            continue
        assert f"`dpopack {name}`" in page, f"make docs/commands.md anew: {name}"
        if hasattr(command, "commands"):
            todo += [(f"{name} {each}", inner) for each, inner in command.commands.items()]
        section = page.partition(f" `dpopack {name}`")[2].partition("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert parameter.opts[0] in section, f"make docs/commands.md anew: {name} {parameter.opts[0]}"


def test_the_page_of_losses_has_every_loss_with_its_options_and_every_option_of_your_own_loss() -> None:
    page = (DOCS / "losses.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:] for line in page.splitlines() if line.startswith("| `")]
    written = {
        name[1]: set(re.findall(r"`(\w+)`", cells[3]))
        for cells in rows
        if len(cells) == 6 and (name := re.fullmatch(r" `(\w+)` ", cells[0]))
    }
    declared = {
        name: {*loss.options, *(["f_divergence"] if loss.takes_divergences and loss.needs_reference else [])}
        for name, loss in LOSSES.items()
    }
    wrong = {name: declared[name] for name in declared if written.get(name) != declared[name]}
    assert not wrong, f"the table of docs/losses.md must have these losses with these options: {wrong}"
    assert written == declared, f"remove {written.keys() - declared} from the table of docs/losses.md"
    (sentence,) = re.findall(r"`LossOptions` has these keys of the `loss` section: (.*?)\.", page, re.DOTALL)
    names = {field.name for field in dataclasses.fields(LossOptions)} - {"mean_chosen_tokens"}
    differ = names ^ set(re.findall(r"\w+", sentence.replace(" and ", " ")))
    assert not differ, f"LossOptions and its list in docs/losses.md differ in {differ}"


@pytest.mark.parametrize("file", sorted((DOCS / "examples").iterdir()), ids=lambda file: file.name)
def test_examples_for_clusters_parse_and_call_this_program(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        ast.parse(text)
    elif file.suffix == ".yaml":
        values = yaml.safe_load(text)
        script = values.get("run")
        if script is not None:
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    else:
        subprocess.run(["bash", "-n", str(file)], check=True)
    assert "dpopack train recipe.yaml" in text or re.search(r"-m\W+dpo_pack\W+train\W", text)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "zensical.toml").write_bytes((ROOT / "zensical.toml").read_bytes())
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "recipe.html").is_file()


@pytest.mark.slow
def test_the_commands_of_the_tutorials_and_the_notebook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16 pairs and for two steps each; the pages' own numbers of pairs take minutes."""
    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "scripts/make_quickstart.py", "runs/quickstart/assets"], check=True)
    few = [f"data.{key}.max_pairs=16" for key in ("train.0", "eval.0", "eval.1")]
    short = [*few, "train.max_steps=2", "train.eval_every_steps=2", "packing.pairs_per_step=4"]
    calls = [["train", "configs/quickstart.yaml"]]
    for page in ("tutorial.md", "lora.md", "online.md"):
        assert blocks(DOCS / page, "bash")[0].startswith("source .venv/bin/activate")
        calls += [call for call in commands(DOCS / page) if "ultrafeedback" not in " ".join(call)]
    assert len(calls) >= 8
    for name, *arguments in calls:
        overrides = {"train": short, "show": few, "evaluate": few}.get(name, [])
        if "configs/online_function.yaml" in arguments:
            overrides = [each for each in short if "eval.1" not in each]
        app([name, *arguments, *overrides], prog_name="dpopack", standalone_mode=False)
    cells = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    # Its functions live in __main__, as in a notebook.
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert Path("runs/notebook-own-loss/report.html").is_file()


TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "dev" / "reliability.md"


def test_every_promise_has_a_test_that_is_there() -> None:
    promises = [
        line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "| test |" not in line
    ]
    assert len(promises) > 20
    for promise in promises:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", promise)
        assert named, promise
        for file, name in named:
            assert f"\ndef {name}(" in (TESTS / file).read_text(), f"{file} has no {name}"
