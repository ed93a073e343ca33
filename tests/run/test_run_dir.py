"""What a run finds in its output_dir and is not its own: nothing of it is replaced."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.refusals import refusal
from support.whole_runs import kill_after, text, whole_run

from dpo_pack.recipe.load import RECIPE_FILE, Recipe, dump_recipe, load_recipe, parse_recipe
from dpo_pack.run import run_dir
from dpo_pack.run.inputs import prepare_run
from dpo_pack.run.run_dir import PARTS, begin_run, find_run, only_run, way_on
from dpo_pack.system.errors import RunError
from dpo_pack.system.files import read_json
from dpo_pack.trainer import train


def recipe_in(root: Path, **data: str) -> Recipe:
    return parse_recipe(
        {"output_dir": str(root), "model": {"path": "org/model"}, "data": {"train": "org/pairs", **data}}
    )


def refused(recipe: Recipe, *, overwrite: bool = False) -> str:
    return refusal(lambda: find_run(recipe, overwrite=overwrite), RunError)


DIRECTORIES = ("checkpoints", "model", "trackers", "rollouts.parquet", "pairs.parquet")


@pytest.mark.parametrize("name", [*PARTS.values(), RECIPE_FILE])
def test_what_no_run_json_speaks_for_is_nobody_s_to_replace(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if name in DIRECTORIES:
        path.mkdir()
        find_run(recipe_in(tmp_path), overwrite=False)  # one that is empty holds nothing to lose
        (path / "weights").touch()
    else:
        path.write_text("of another program")
    for overwrite in (False, True):
        message = refused(recipe_in(tmp_path), overwrite=overwrite)
        assert f"would replace {path}, and there is no run.json" in message and "move it away" in message


def test_a_process_killed_at_its_very_start_is_in_nobody_s_way(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert find_run(recipe, overwrite=False).checkpoint is None


def test_checkpoints_without_their_run_json_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step-000100"
    path.mkdir(parents=True)
    (path / "checkpoint.json").touch()
    recipe = recipe_in(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert "would replace" in refused(recipe) and "would replace" in refused(recipe, overwrite=True)
    named = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"resume": str(path)})}
    )
    assert find_run(named, overwrite=False).checkpoint == path


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1]", '["status"]', '{"other": "program"}', None, '{"status": ' * 10**5),
        *('{"status": "finjshed"}', '{"status": "failed", "totals": [1]}', '{"status": ["failed"]}'),
    ],
)
def test_a_run_json_that_says_nothing_is_no_leave_to_delete(content: str | None, tmp_path: Path) -> None:
    if content is None:
        (tmp_path / "run.json").mkdir()  # as good as any file that cannot be opened
    else:
        (tmp_path / "run.json").write_text(content)
    (tmp_path / "checkpoints").mkdir()
    assert "run.json cannot be read" in refused(recipe_in(tmp_path))
    assert find_run(recipe_in(tmp_path), overwrite=True).checkpoint is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["model.path={root}/model", "reference.path=org/base", "output_dir={root}-2"]),
        (
            {"model.lora": {"r": 4}, "reference.path": "org/ref"},
            ["reference.path=org/ref", "model.lora=null"],
        ),
        ({"model.revision": "abc"}, ["reference.path=FILL-IN/org/base@abc", "model.revision=null"]),
        ({"loss.type": "simpo"}, ["model.path={root}/model"]),
        ({"export.path": "/big/model"}, ["model.path={root}/model", "export.path=null"]),
    ],
)
def test_the_command_that_trains_on_keeps_the_reference(
    settings: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    tree: dict[str, Any] = {"model": {"path": "org/base"}, "data": {"train": "org/pairs"}}
    tree["output_dir"] = str(root)
    for key, value in settings.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    words = shlex.split(way_on(parse_recipe(tree)).partition(", run ")[2])
    assert {word.format(root=root) for word in expected} <= set(words)
    assert any(word.startswith("reference.path=") for word in words) == ("loss.type" not in settings)


def test_inputs_are_never_replaced_whichever_key_names_them(tmp_path: Path) -> None:
    root = tmp_path / "run"
    rollouts = root / "rollouts.parquet"
    rollouts.mkdir(parents=True)
    (root / "run.json").write_text(json.dumps({"status": "finished"}))
    for name, recipe in {
        "data.train.0.path": recipe_in(root, train=str(rollouts)),
        "data.eval.0.path": recipe_in(root, eval=str(rollouts)),
    }.items():
        for overwrite in (False, True):
            assert f"would replace {rollouts}, which {name} names" in refused(recipe, overwrite=overwrite)

    adapter, base = tmp_path / "adapter", root / "model"
    adapter.mkdir()
    base.mkdir()
    for name in ("model.path", "tokenizer.path", "reference.path"):
        named = parse_recipe(recipe_in(root).model_dump(mode="json"), [f"{name}={base}"])
        for overwrite in (False, True):
            assert f"would replace {base}, which {name} names" in refused(named, overwrite=overwrite)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    recipe = parse_recipe(
        {"output_dir": str(root), "model": {"path": str(adapter)}, "data": {"train": "org/pairs"}}
    )
    assert f"would replace {base}, which the adapter of model.path names" in refused(recipe, overwrite=True)


@pytest.mark.parametrize("length", [3, 40, 74, 180])
def test_a_used_output_dir_is_told_in_a_line_of_at_most_200_characters(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (root := Path("runs", "o" * length)).mkdir(parents=True)
    (root / "run.json").write_text(json.dumps({"status": "finished"}))
    (root / "recipe.yaml").write_text(dump_recipe(earlier := recipe_in(root)))
    keys = ["seed=7", "optim.lr=0.5", "loss.beta=0.25", "data.shuffle=false", "train.epochs=9"]
    keys += ["data.max_length=99", "optim.weight_decay=0.5", "packing.pairs_per_step=7"]
    for num, told in ((1, "another seed"), (2, " optim.lr"), (3, "loss.beta"), (8, " more keys; ")):
        message = refused(parse_recipe(earlier.model_dump(mode="json"), keys[:num]))
        assert told in message and (str(root) in message) == (length < 74)
        assert message.endswith(("(see dpopack train RUN)", f"see dpopack train {root})"))
        assert len(f"error: {message}") <= 200 and " 1 more keys" not in message
        assert (" more key" in message) == bool(re.search(r"[a-z_]+ and \d more keys?; ", message))


@pytest.mark.parametrize("content", ["[1]", "", "[" * 10**3, "output_dir: there\nlearning: rate\n", None])
def test_a_run_whose_recipe_cannot_be_read_is_refused(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "interrupted"}))
    if content is not None:
        (tmp_path / "recipe.yaml").write_text(content)
    message = refused(recipe_in(tmp_path))
    assert f"output_dir: the recipe of the run in {tmp_path}" in message
    assert f"; correct {tmp_path}/recipe.yaml, or use another output_dir" in message


def test_a_run_killed_while_it_removes_an_earlier_one_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, earlier = recipe_in(tmp_path), recipe_in(tmp_path).model_copy(update={"seed": 7})
    (tmp_path / "run.json").write_text(json.dumps({"status": "interrupted"}))
    (tmp_path / "recipe.yaml").write_text(dump_recipe(earlier))
    (tmp_path / "metrics.jsonl").touch()

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_dir, "write_text_atomically", killed)
        begin_run(find_run(recipe, overwrite=True), dump_recipe(recipe), "cpu", None)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert find_run(recipe, overwrite=True).checkpoint is None
    assert "another seed" in refused(recipe)


# ----------------------------------------------------------------------------------------------- export.path


def exporting_to(place: Path, root: Path) -> Recipe:
    return parse_recipe(recipe_in(root).model_dump(mode="json"), [f"export.path={place}"])


def test_a_place_for_the_model_is_no_disk_and_no_other_run_s(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").symlink_to("/proc")
    assert f"export.path: {disk}: a disk is mounted there" in refused(exporting_to(disk, tmp_path / "run"))
    (run := find_run(exporting_to(tmp_path / "qwen2", tmp_path / "run"), overwrite=False)).root.mkdir()
    (tmp_path / "behind").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    assert run.place_model(tmp_path / "link") == run.model.resolve() == tmp_path / "behind"
    assert run.place_model(tmp_path / "qwen2") == run.model.resolve() == tmp_path / "qwen2"
    for left in (mine := tmp_path / ".qwen2.0a1b2c3d.tmp", other := tmp_path / ".qwen2.5.0a1b2c3d.tmp"):
        left.mkdir()
    run.remove_leftovers()
    assert other.exists() and not mine.exists()
    (tmp_path / "behind" / "config.json").touch()  # another run of a sweep has meanwhile ended
    message = refusal(lambda: run.place_model(tmp_path / "behind"), RunError)
    assert "behind exists already" in message and run.model.resolve() == tmp_path / "qwen2"


@pytest.mark.parametrize(("is_named", "is_there"), [(True, True), (False, True), (True, False)])
def test_overwrite_discards_the_model_at_export_path_but_none_that_a_user_has_linked(
    is_named: bool, is_there: bool, tmp_path: Path
) -> None:
    root, model = tmp_path / "run", tmp_path / "model"
    root.mkdir()
    if is_there:
        model.mkdir()
        (model / "config.json").touch()
    (root / "model").symlink_to(model)
    (root / "run.json").write_text(json.dumps({"status": "finished"}))
    recipe = exporting_to(model if is_named else tmp_path / "new", root)
    begin_run(find_run(recipe, overwrite=True), dump_recipe(recipe), "cpu", recipe.export.path)
    assert not (root / "model").is_symlink() and model.exists() == (not is_named)
    assert find_run(recipe, overwrite=False).checkpoint is None  # it was killed and goes on


# --------------------------------------------------------------------------------------------- one at a time


def test_a_second_run_is_refused(assets: Path, tmp_path: Path, console: Console) -> None:
    recipe = whole_run(assets, tmp_path / "run")
    with only_run(recipe.output_dir):
        with pytest.raises(RunError, match=f"output_dir: .* in use by another run, process {os.getpid()} on"):
            train(recipe, console)
        assert [path.name for path in recipe.output_dir.iterdir()] == ["run.lock"]
    assert not recipe.output_dir.exists()


def test_a_run_that_was_killed_before_a_checkpoint_says_that_it_begins_anew(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = whole_run(assets, tmp_path / "run", "checkpoint.every_steps=null")
    kill_after(1, recipe, console)
    begun = read_json(tmp_path / "run" / "run.json")["begun"]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(begun)) < timedelta(minutes=9)
    assert "checkpoints: only" in text(console) and "anew: " not in text(console)
    run = find_run(recipe, overwrite=False)
    prepare_run(recipe, run, console)
    run.info["begun"] = "2000-01-01T00:00:00+00:00"  # by the attempt that is lost
    begin_run(run, dump_recipe(recipe), "cpu", None)
    assert read_json(tmp_path / "run" / "run.json")["begun"] >= begun
    monkeypatch.setattr(run_dir, "datetime", None)  # when it began is kept
    run.checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    begin_run(run, dump_recipe(recipe), "cpu", None)
    assert "Beginning anew: the earlier run here ended without a checkpoint" in text(console)


# -------------------------------------------------------------------------------------------------- finished


def finished_run(straight: Path, root: Path) -> Recipe:
    """A copy of a finished run in `root`, with a checkpoint after step 4."""
    shutil.copytree(straight, root)
    (root / "checkpoints" / "step-000004").mkdir(parents=True)
    (root / "checkpoints" / "step-000004" / "checkpoint.json").touch()
    return load_recipe(root / "recipe.yaml", [f"output_dir={root}"])


def test_a_finished_run_whose_model_is_whole_is_finished(straight: Path, tmp_path: Path) -> None:
    recipe = finished_run(straight, tmp_path / "run")
    (recipe.output_dir / "model" / "README.md").write_text("my own card")
    (recipe.output_dir / "model" / "model.gguf").touch()
    assert find_run(recipe, overwrite=False).is_finished
    best = read_json(straight / "run.json")["best"]
    assert best["step"] == 8 and best["checkpoint"] is None  # that of the last step is removed


@pytest.mark.parametrize("fault", ["gone", "empty", "cut", "a changed byte"])
def test_a_finished_run_without_its_whole_model_offers_its_newest_checkpoint(
    fault: str, straight: Path, tmp_path: Path
) -> None:
    recipe = finished_run(straight, tmp_path / "run")
    weights = recipe.output_dir / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if fault in ("gone", "empty"):
        shutil.rmtree(weights.parent)
    if fault == "empty":
        weights.parent.mkdir()
    elif fault == "cut":
        weights.write_bytes(content[:-1])
    elif fault == "a changed byte":
        content[-1] ^= 1
        weights.write_bytes(content)
    message = refused(recipe)
    assert "this run is finished, but" in message and "/run/model is not whole (" in message
    newest = recipe.output_dir / "checkpoints" / "step-000004"
    assert f"write it again with checkpoint.resume={newest}, use another output_dir" in message
    named = load_recipe(
        recipe.output_dir / "recipe.yaml", [f"output_dir={recipe.output_dir}", f"checkpoint.resume={newest}"]
    )
    assert find_run(named, overwrite=False).checkpoint == newest
