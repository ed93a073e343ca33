"""Signals to stop: where they wait, where they do not, what is saved, and that nothing is lost."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.marks import slow
from support.tiny_online import online_recipe
from support.whole_runs import (
    assert_same_run,
    at_step,
    checkpoint_steps,
    lines,
    saved_weights,
    text,
    whole_run,
)

import dpo_pack.online.source as online_source
import dpo_pack.run.checkpoint_files as checkpoint_writer
import dpo_pack.run.evaluate as evaluate_module
import dpo_pack.system.interrupts as interrupts
import dpo_pack.trainer as train_module
from dpo_pack.recipe.load import Recipe
from dpo_pack.system.endings import end_soon
from dpo_pack.system.files import read_json
from dpo_pack.system.interrupts import Interrupted, Interruption, interruptible
from dpo_pack.trainer import train

TERM = signal.SIGTERM


@pytest.fixture(autouse=True)
def _handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in interrupts.STOP_SIGNALS]
    yield
    after = [signal.getsignal(number) for number in interrupts.STOP_SIGNALS]
    assert after == before


def stopped(recipe: Recipe, console: Console, after_step: Any = None) -> Interrupted:
    with pytest.raises(Interrupted) as caught:
        train(recipe, console, after_step=after_step)
    assert read_json(recipe.output_dir / "run.json")["status"] == "interrupted"
    return caught.value


def signal_at(
    patch: pytest.MonkeyPatch, number: int, module: Any, name: str, signum: int = TERM
) -> list[int]:
    """The module's function sends a signal at its call `number`, from 1; returns the numbers of calls."""
    function = vars(module)[name]
    calls: list[int] = []

    def with_signal(*arguments: Any, **settings: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == number:
            signal.raise_signal(signum)
        return function(*arguments, **settings)

    patch.setattr(module, name, with_signal)
    return calls


# --------------------------------------------------------------------------------------- one signal, or two


@pytest.mark.parametrize(
    ("number", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143), ("SIGHUP", 143)]
)
def test_a_signal_raises_at_once_where_nothing_defers_it(number: str, status: int) -> None:
    with pytest.raises(Interrupted, match=number) as caught, interruptible():
        signal.raise_signal(signal.Signals[number])
    assert caught.value.exit_status == status and not caught.value.is_urgent


def test_sighup_that_was_ignored_at_the_start_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interruptible() as interruption, interrupts.recorded() as received:
            signal.raise_signal(signal.SIGHUP)
            end_soon(ValueError())
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert interruption.signum is None and received == []
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGHUP, before)


SAVING = """
import fcntl, pathlib, sys, termios, time
from dpo_pack.system.console import make_console
from dpo_pack.system.interrupts import interruptible
from dpo_pack.system.process import complain
with interruptible() as interruption, interruption.waiting_for_poll():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the end of this terminal is a signal for this process
    print("ready", flush=True)
    while interruption.signum is None:
        time.sleep(0.01)
    make_console().print("saving")
    complain("stopped")
    pathlib.Path(sys.argv[1]).write_text(str(interruption.signum))
"""


def test_a_run_whose_terminal_is_closed_can_still_print_and_save(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-c", SAVING, str(tmp_path / "saved")]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    assert b"ready" in os.read(ours, 1000)
    os.close(ours)
    assert process.wait(30.0) == 0
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGHUP))


def test_a_signal_waits_for_the_poll() -> None:
    with interruptible() as interruption:
        with interruption.waiting_for_poll():
            interruption.poll()
            signal.raise_signal(TERM)
            with pytest.raises(Interrupted):
                interruption.poll()
        with interruption.waiting_for_poll(), pytest.raises(Interrupted), interruption.ending_at_once():
            raise AssertionError("what may be left anywhere is not even begun")


def test_a_second_signal_is_not_put_off_and_one_that_comes_with_the_first_is_none() -> None:
    now = [100.0]
    interruption = Interruption(clock=lambda: now[0])
    with interruption.waiting_for_poll():
        for _ in range(3):  # as a terminal and a launcher together do
            interruption.handle(signal.SIGINT, None)
        now[0] += interrupts.SAME_REQUEST_SECONDS
        with pytest.raises(Interrupted) as caught:
            interruption.handle(TERM, None)
    assert caught.value.is_urgent and caught.value.exit_status == 143


# ----------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_a_step_is_left_after_the_row_and_the_state_before_it_is_saved(
    straight: Path, assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("packing.token_budget=1", "train.max_steps=5")  # a row for each pair
    recipe = whole_run(assets, tmp_path / "run", *settings)
    train(whole_run(assets, tmp_path / "other", *settings), console)
    with monkeypatch.context() as patch:
        rows = signal_at(patch, 4 * 4 + 2, train_module, "pair_losses")  # in step 5's second row
        assert stopped(recipe, console).exit_status == 143
    assert len(rows) == 4 * 4 + 2  # this row was the last one
    assert checkpoint_steps(tmp_path / "run") == [4]
    train(recipe, console)
    assert_same_run(tmp_path / "other", tmp_path / "run")


TWO_SETS = (
    'data.eval=[{path: "${recipe_dir}/heldout.jsonl"}, {path: "${recipe_dir}/pairs.jsonl", name: p}]',
    "reference.token_budget=512",
)


@pytest.fixture(scope="module")
def with_two_sets(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("with-two-sets") / "run"
    train(whole_run(assets, run, *TWO_SETS), Console(quiet=True))
    return run


@pytest.mark.parametrize("row", [3, *slow(5)])
def test_an_evaluation_is_left_after_the_row_and_made_anew(
    row: int,
    with_two_sets: Path,
    assets: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are two rows each time: the one after step 2 is left, then the one after step 4, half done."""
    recipe = whole_run(assets, tmp_path / "run", *TWO_SETS)
    with monkeypatch.context() as patch:
        calls = signal_at(patch, row, evaluate_module, "evaluate_pairs")
        stopped(recipe, console)
    assert len(calls) == row
    step = {3: 2, 5: 4}[row]
    assert checkpoint_steps(tmp_path / "run") == [step]
    assert [record["step"] for record in lines(tmp_path / "run", "train")][-1] == step
    train(recipe, console)
    assert_same_run(with_two_sets, tmp_path / "run")


@pytest.mark.parametrize("asynchronous", ["true", *slow("false")])
def test_a_second_signal_leaves_at_once_and_what_was_saved_stays(
    asynchronous: str,
    straight: Path,
    assets: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes while the first one's checkpoint is written."""
    saving = ("checkpoint.every_steps=3", f"checkpoint.asynchronous={asynchronous}")
    recipe = whole_run(assets, tmp_path / "run", *saving)
    monkeypatch.setattr(interrupts, "SAME_REQUEST_SECONDS", 0.0)

    def first_signal() -> None:
        signal_at(monkeypatch, 1, checkpoint_writer, "path_aside", signal.SIGINT)
        signal.raise_signal(TERM)

    ended = stopped(recipe, console, at_step(5, first_signal))
    assert ended.is_urgent and ended.exit_status == 130
    assert checkpoint_steps(tmp_path / "run") == [3]
    train(recipe, console)
    assert "Going on after step 3" in text(console)
    assert_same_run(straight, tmp_path / "run")


@pytest.mark.slow
def test_a_phase_of_rollouts_is_left_at_once_and_answered_anew(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = tmp_path / "assets"
    recipes = [online_recipe(assets, tmp_path / name) for name in ("straight", "run")]
    train(recipes[0], console)
    with monkeypatch.context() as patch:
        phases = signal_at(patch, 3, online_source, "run_phase")
        stopped(recipes[1], console)
    assert len(phases) == 3
    (step,) = checkpoint_steps(tmp_path / "run")
    assert 0 < step < 6
    train(recipes[1], console)
    assert_same_run(tmp_path / "straight", tmp_path / "run")
    assert saved_weights(tmp_path / "straight" / "model") != saved_weights(assets / "model")
