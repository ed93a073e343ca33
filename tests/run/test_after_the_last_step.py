"""What fails after the last step, or on the way there, loses nothing that is trained."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.limits import no_file_beyond
from support.marks import slow
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks
from support.whole_runs import (
    assert_same_run,
    at_step,
    checkpoint_steps,
    num_computed,
    stop_after,
    text,
    whole_run,
)

from dpo_pack import trainer as train_module
from dpo_pack.run import checkpoint, checkpoint_files, export, log
from dpo_pack.run.checkpoint import Saver
from dpo_pack.run.run_dir import RunDir
from dpo_pack.system import files
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.files import read_json
from dpo_pack.trainer import train

BEST = (
    *("optim.lr=0.05", "optim.schedule=constant", "train.eval_every_steps=1", "loss.beta=1"),
    *("checkpoint.keep_best=1", "checkpoint.load_best=true"),
)


@pytest.fixture(scope="module")
def best_of_a_run(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that leaves its best weights, which are not the last. Nobody may write there."""
    run = tmp_path_factory.mktemp("best") / "run"
    train(whole_run(assets, run, *BEST), Console(quiet=True))
    assert read_json(run / "run.json")["best"]["step"] < 8
    return run


def raising(error: Exception, *, where: Callable[..., bool] = lambda *words, **named: True) -> Any:
    """Makes of a function one that raises `error` where `where` says so."""

    def change(function: Any) -> Any:
        def act(*words: Any, **named: Any) -> Any:
            if where(*words, **named):
                raise error
            return function(*words, **named)

        return act

    return change


FULL = OSError(errno.ENOSPC, "No space left on device")
FINISHED = raising(CacheError("cannot write run.json"), where=lambda run, **facts: "model_files" in facts)


def once(pairs: log.PairLog, lines: Any) -> bool:
    """The disk is full for the last state, which needs the pairs first, and at the end; then it has room."""
    refused.append(pairs)
    return refused.count(pairs) <= 2 and lines["step"][-1].as_py() == 8


def full_at(name: str) -> Any:
    """The disk is full when the export writes the file `name`."""

    def change(save: Any) -> Any:
        def act(loaded: Any, tokenizer: Any, target: Path, **settings: Any) -> Any:
            if name == "model.safetensors":  # transformers removes what has this name
                with no_file_beyond(10_000):
                    return save(loaded, tokenizer, target, **settings)
            (target / name).symlink_to("/dev/full")
            return save(loaded, tokenizer, target, **settings)

        return act

    return change


refused: list[log.PairLog] = []
EXPORTED = ("model.safetensors", "config.json", "tokenizer.json", "README.md")
FAILURES = {
    **{f"a full disk at {name}": (export, "save_model", full_at(name), ()) for name in EXPORTED},
    "a library's error": (export, "save_model", raising(ValueError("no such type")), ()),
    "the last pairs": (log.PairLog, "_write", raising(FULL, where=once), ()),
    "the last word on the run": (RunDir, "update", FINISHED, ()),
    "load_best": (checkpoint, "load_trained", raising(RunError("it cannot be read")), BEST),
    "a full disk after load_best": (export, "save_model", raising(FULL), BEST),
}
LIKE_OTHERS = (*(f"a full disk at {name}" for name in EXPORTED[1:]), "a full disk after load_best")


@pytest.mark.parametrize(
    "name", [*slow(*LIKE_OTHERS), *(name for name in FAILURES if name not in LIKE_OTHERS)]
)
def test_the_same_command_finishes_what_failed_after_the_last_step(
    name: str,
    straight: Path,
    best_of_a_run: Path,
    assets: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, function, change, overrides = FAILURES[name]
    recipe = whole_run(assets, tmp_path / "run", *overrides)
    errors = (CacheError, RunError, OSError, ValueError)
    with monkeypatch.context() as patch, pytest.raises(errors) as raised:
        patch.setattr(place, function, change(getattr(place, function)))
        train(recipe, Console(quiet=True))
    assert ("export.path=DIR" in str(raised.value)) == name.startswith("a full disk")  # else it does not help
    assert read_json(tmp_path / "run" / "run.json")["status"] == "failed"
    assert max(checkpoint_steps(tmp_path / "run")) == 8
    train(recipe, console)
    assert "Going on after step 8 of 8" in text(console) and "step 1/8" not in text(console)
    assert read_json(tmp_path / "run" / "run.json")["status"] == "finished"
    assert_same_run(best_of_a_run if overrides else straight, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_last_step_is_saved_when_a_library_fails_on_rank_0_alone(
    strategy: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = whole_run(assets, tmp_path / "run", f"distributed.strategy={strategy}")

    def fails() -> None:
        with pytest.raises((ValueError, RunError), match="no such type"):
            train(recipe, Console(quiet=True))

    with monkeypatch.context() as patch:
        patch.setattr(export, "save_model", raising(ValueError("no such type"))(None))
        run_on_ranks(fails)
    assert max(checkpoint_steps(tmp_path / "run")) == 8
    run_on_ranks(train, recipe, Console(quiet=True))
    assert read_json(tmp_path / "run" / "run.json")["status"] == "finished"


@pytest.mark.parametrize(
    ("number", "error", "is_raised"),
    [(1, ValueError("odd"), False), (2, ValueError("odd"), True), (2, CacheError("full"), False)],
)
def test_what_only_one_rank_cannot_save_ends_the_run(
    number: int, error: Exception, is_raised: bool, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it went on, its collectives would not be those of the others. All have a CacheError."""
    saver: Any = object.__new__(Saver)
    saver.writer, saver.saved = SimpleNamespace(wait=lambda: None), None
    saver.resume_point = saver.state = SimpleNamespace(step=8)
    saver.setup = SimpleNamespace(console=console)
    monkeypatch.setattr(Saver, "save_on_the_way_out", raising(error)(None))
    monkeypatch.setattr("dpo_pack.system.ranks.num_ranks", lambda: number)
    with pytest.raises(ValueError, match="odd") if is_raised else contextlib.nullcontext():
        saver.save_last()
    assert ("Warning: the last step is not saved" in text(console)) != is_raised


@pytest.mark.parametrize("background", ["false", *slow("true")])
def test_a_disk_without_room_for_the_last_state_still_gets_the_best_model(
    background: str,
    best_of_a_run: Path,
    assets: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = raising(CacheError("no room"), where=lambda content, *words: content.step == 8)
    monkeypatch.setattr(checkpoint_files, "_write", full(checkpoint_files._write))
    saves = ("checkpoint.every_steps=8", f"checkpoint.asynchronous={background}") * (background == "true")
    train(whole_run(assets, tmp_path / "run", *BEST, *saves), console)
    assert "Warning: the last step is not saved: no room" in text(console)
    assert_same_run(best_of_a_run, tmp_path / "run")


def test_a_model_that_the_disk_has_no_room_for_goes_elsewhere_without_training_again(
    straight: Path, assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, big = tmp_path / "run", tmp_path / "big" / "model"
    verifies = "export.verify=tensors"
    with (
        monkeypatch.context() as patch,
        pytest.raises(CacheError, match=r"export\.path=DIR.*trains nothing"),
    ):
        patch.setattr(export, "save_model", raising(FULL)(None))
        train(whole_run(assets, run, verifies, f"export.path={tmp_path}/small"), Console(quiet=True))
    assert (
        checkpoint_steps(run) == [8] and not list(tmp_path.glob(".small*")) and not (run / "model").exists()
    )
    (left := tmp_path / ".small.0a1b2c3d.tmp").mkdir()  # by a kill
    (mine := tmp_path / "mine").write_text("of another program")
    with pytest.raises(RunError, match=rf"export\.path: {mine} exists already; give a path that"):
        train(whole_run(assets, run, verifies, f"export.path={mine}"), console)
    with monkeypatch.context() as patch:  # the process that reads the model has no memory
        patch.setattr(train_module, "verify_model", lambda *words: False)
        train(whole_run(assets, run, verifies, f"export.path={big}"), console)
    assert "Going on after step 8 of 8" in text(console) and "step 1/8" not in text(console)
    assert checkpoint_steps(run) == [8] and (run / "model").readlink() == big and not left.exists()
    assert str(big) in (big / "README.md").read_text()
    assert_same_run(straight, run)
    again = f"checkpoint.resume={run}/checkpoints/step-000008"
    train(whole_run(assets, run, verifies, f"export.path={big}", again), console)
    assert checkpoint_steps(run) == []
    train(whole_run(assets, run, verifies, f"export.path={big}"), console)
    assert "This run is finished" in text(console)
    assert_same_run(straight, run)


@pytest.mark.parametrize(
    ("free", "overrides", "needed"),
    [  # in weights of the model; AdamW's checkpoint has three, and two are kept beside the last
        (3.9, (), "needs up to"),
        (4.1, (), None),
        (9.9, ("checkpoint.every_steps=2",), "needs up to"),
        (10.1, ("checkpoint.every_steps=2",), None),
        (10.1, ("checkpoint.every_steps=2", "checkpoint.export=true"), "needs up to"),
        (3.9, ("export.path=elsewhere",), "needs up to"),  # on the same disk
        (0.9, ("model.lora={r: 1}",), None),
    ],
)
def test_a_run_warns_once_if_its_disk_has_no_room_for_what_it_will_write(
    free: float,
    overrides: tuple[str, ...],
    needed: str | None,
    assets: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = sum(tensor.nbytes for tensor in load_file(assets / "model" / "model.safetensors").values())
    usage = shutil.disk_usage(tmp_path)._replace(free=int(free * weights))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ZeroDivisionError):
        train(whole_run(assets, tmp_path / "run", *overrides), console, after_step=lambda trainer: 1 / 0)
    assert text(console).count("and the run needs up to") == int(needed is not None)


@pytest.mark.parametrize(("function", "is_saved"), [("accumulate_gradients", True), ("train_step", False)])
def test_an_error_in_a_step_saves_the_step_before_unless_parameters_have_changed(
    function: str,
    is_saved: bool,
    straight: Path,
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, act = whole_run(assets, tmp_path / "run"), getattr(train_module.Trainer, function)

    def fail(trainer: Any, *words: Any) -> Any:
        result = act(trainer, *words) if trainer.state.step != 3 or not is_saved else None
        if result is None or (trainer.state.step == 4 and not is_saved):
            raise RuntimeError("out of memory")
        return result

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(train_module.Trainer, function, fail)
        train(recipe, Console(quiet=True))
    saved = tmp_path / "run" / "checkpoints"
    assert [path.name for path in saved.glob("*")] == (["step-000003"] if is_saved else [])
    train(recipe, Console(quiet=True))
    assert_same_run(straight, tmp_path / "run")


# --------------------------------------------------------------------------------- file systems that refuse


def only(number: int, where: Callable[..., bool]) -> Any:
    return raising(OSError(number, os.strerror(number)), where=where)


def crosses(source: Any, target: Any, **more: Any) -> bool:
    return Path(source).parent.resolve() != Path(target).parent.resolve()


MOUNTS = {
    "chmod": {"chmod": only(errno.EPERM, lambda *words, **more: True)},
    "fsync of directories": {
        "fsync": only(errno.EINVAL, lambda number: Path(f"/proc/self/fd/{number}").is_dir())
    },
    "fsync": {"fsync": only(errno.EOPNOTSUPP, lambda number: True)},
    "rename across directories": {name: only(errno.EXDEV, crosses) for name in ("rename", "replace")},
    "rename of directories": {
        name: only(errno.EXDEV, lambda source, *words, **more: Path(source).is_dir())
        for name in ("rename", "replace")
    },
}
SLOW_MOUNTS = slow("fsync", "rename across directories")


@pytest.mark.parametrize("refused", ["chmod", "fsync of directories", "rename of directories", *SLOW_MOUNTS])
def test_a_run_goes_on_where_a_mount_refuses_a_call_and_says_so_once(
    refused: str,
    straight: Path,
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files._say_once.cache_clear()
    saves = ("checkpoint.every_steps=1", "checkpoint.keep=1", f"reference.cache_dir={tmp_path}/cache")
    recipe = whole_run(assets, tmp_path / "run", *saves)
    with monkeypatch.context() as patch:
        for name, change in MOUNTS[refused].items():
            patch.setattr(os, name, change(getattr(os, name)))
        stop_after(3, recipe)
        train(recipe, Console(quiet=True))
    assert_same_run(straight, tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == [8]
    told = [record.message for record in caplog.records if "the file system refuses" in record.message]
    kinds = {line.partition("refuses ")[2].partition(" (")[0] for line in told}
    expected = {"rename of directories": {"rename"}, "rename across directories": set()}
    expected["fsync"] = {"fsync of files", "fsync of directories"}
    assert kinds == expected.get(refused, {refused}) and len(told) == len(kinds)


# ------------------------------------------------------------------------------------- inputs that have moved


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path]:
    """A run that was stopped after step 3, and the new place of all that its recipe names."""
    tiny_run(tmp_path / "old")
    recipe = whole_run(tmp_path / "old", tmp_path / "run")
    stop_after(3, recipe)
    (tmp_path / "old").rename(tmp_path / "new")
    return tmp_path / "run", tmp_path / "new"


def test_a_run_goes_on_when_model_and_data_have_moved(
    moved: tuple[Path, Path], straight: Path, console: Console
) -> None:
    run, new = moved
    elsewhere = f"checkpoint.resume={run}/checkpoints/step-000003"
    train(whole_run(new, run.with_name("next"), elsewhere), Console(quiet=True))
    train(whole_run(new, run), console)
    assert "Going on after step 3" in text(console)
    assert_same_run(straight, run)
    shutil.copytree(new, new.with_name("newer"))
    train(whole_run(new.with_name("newer"), run), console)
    assert "This run is finished" in text(console)


def test_what_has_moved_and_changed_is_refused(moved: tuple[Path, Path]) -> None:
    run, new = moved
    rows = (new / "pairs.jsonl").read_text().splitlines()
    (new / "pairs.jsonl").write_text("\n".join(rows[::-1]))
    with pytest.raises(RunError, match=r"another data\.train\.0\.path"):
        train(whole_run(new, run), Console(quiet=True))
    (new / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    tiny_model = new / "model" / "model.safetensors"
    content = bytearray(tiny_model.read_bytes())
    content[-1] ^= 1
    tiny_model.write_bytes(content)
    with pytest.raises(RunError, match=r"another model\.path"):
        train(whole_run(new, run), Console(quiet=True))


def test_tensorboard_shows_each_step_once_after_a_crash(assets: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = whole_run(assets, tmp_path / "run", "logging.trackers=[tensorboard]", "checkpoint.every_steps=2")
    with pytest.raises(ZeroDivisionError):  # after the lines of step 5, so they are sent again
        train(recipe, Console(quiet=True), after_step=at_step(6, lambda: 1 / 0))
    train(recipe, Console(quiet=True))
    shown = events.EventAccumulator(str(tmp_path / "run" / "trackers" / "run")).Reload()
    for tag, steps in (("train/loss", range(1, 9)), ("eval/loss", range(0, 9, 2))):
        assert Counter(event.step for event in shown.Scalars(tag)) == Counter(steps)


def test_a_finished_run_with_a_constant_rate_goes_on_as_if_it_had_been_longer(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    constant = ("optim.schedule=constant", "train.eval_every_steps=4", "checkpoint.every_steps=4")
    train(whole_run(assets, tmp_path / "long", *constant), Console(quiet=True))
    short = ("train.epochs=1", "train.max_steps=4", *constant)
    train(whole_run(assets, tmp_path / "run", *short), Console(quiet=True))
    with pytest.raises(RunError, match="see dpopack train "):  # its steps depend on their number
        train(whole_run(assets, tmp_path / "run", *constant, "optim.schedule=linear"), console)
    shutil.copytree(assets / "model", tmp_path / "moved")
    train(whole_run(assets, tmp_path / "run", *constant, f"model.path={tmp_path / 'moved'}"), console)
    assert "Going on after step 4 of 8" in text(console)
    assert_same_run(tmp_path / "long", tmp_path / "run")


def test_max_steps_limits_the_reference_pass_and_a_longer_run_adds_the_rest(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    """Also after an error at its first new step, when the checkpoint is still the shorter run's."""
    often = ("train.eval_every_steps=1", "checkpoint.every_steps=2")
    keys = ("optim.schedule=constant", f"reference.cache_dir={tmp_path}/cache", *often)
    run, third = tmp_path / "run", ("train.max_steps=3", *keys)
    train(whole_run(assets, run, "train.max_steps=2", *keys), Console(quiet=True))
    assert num_computed(run) == 2 * (8 + 6)
    with pytest.raises(ZeroDivisionError):
        train(whole_run(assets, run, *third), Console(quiet=True), after_step=at_step(3, lambda: 1 / 0))
    assert checkpoint_steps(run) == [2]
    train(whole_run(assets, run, *third), console)
    assert "Going on after step 2 of 3" in text(console) and num_computed(run) == 2 * (12 + 6)
    train(whole_run(assets, run, *keys), Console(quiet=True))
    assert num_computed(run) == 2 * (16 + 6)
    train(whole_run(assets, tmp_path / "long", *keys), Console(quiet=True))
    assert num_computed(tmp_path / "long") == 0
    assert_same_run(tmp_path / "long", run)


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ((), "train.max_steps=3", "new steps or of other held-out pairs"),
        ((), "data.eval={more}", "new steps or of other held-out pairs"),
        (
            ("model.autocast=bfloat16", "train.eval_precision=training"),
            "train.eval_precision=float32",
            "float32",
        ),
    ],
)
def test_a_changed_model_gives_a_resumed_run_no_reference(
    first: tuple[str, ...], then: str, told: str, assets: Path, tmp_path: Path
) -> None:
    shutil.copytree(assets / "model", tmp_path / "model")
    constant = ("optim.schedule=constant", "checkpoint.every_steps=1", "train.eval_every_steps=null")
    own = (f"model.path={tmp_path / 'model'}", f"reference.cache_dir={tmp_path / 'cache'}")
    keys = (*own, "train.max_steps=2", *constant, *first)
    begun = whole_run(assets, tmp_path / "run", *keys)
    train(begun, Console(quiet=True)) if "max_steps" in then else stop_after(1, begun)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    (more := tmp_path / "more.jsonl").write_text('{"prompt": "ask", "chosen": " yes", "rejected": " no"}\n')
    recipe = whole_run(assets, tmp_path / "run", *keys, then.format(more=more))
    with pytest.raises(CacheError, match=rf"^output_dir: .*{told}.* the reference model.* has changed since"):
        train(recipe, Console(quiet=True))
    train(begun, Console(quiet=True))  # nothing is to be computed


def test_held_out_pairs_in_float32_go_on_with_another_release_of_the_model_s_code(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("model.autocast=bfloat16", "train.eval_precision=float32", "train.max_steps=2")
    recipe = whole_run(assets, tmp_path / "run", *keys, f"reference.cache_dir={tmp_path / 'cache'}")
    stop_after(1, recipe)
    monkeypatch.setattr("dpo_pack.model.facts.modelling_source", lambda architecture: "of a newer release")
    train(recipe, Console(quiet=True))
    assert read_json(tmp_path / "run" / "run.json")["status"] == "finished"


def test_weights_beyond_float16_are_written_in_float32_and_told_once(assets: Path, tmp_path: Path) -> None:
    shutil.copytree(assets / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][0, 0] = 1e5  # of padding
    save_file(weights, file, metadata={"format": "pt"})
    printed, short = (
        io.StringIO(),
        ("train.max_steps=1", "export.dtype=float16", "checkpoint.every_steps=null"),
    )
    recipe = whole_run(assets, tmp_path / "run", f"model.path={tmp_path / 'model'}", *short)
    train(recipe, Console(file=printed, width=300))
    assert printed.getvalue().count("model.embed_tokens.weight has values beyond float16") == 1
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
