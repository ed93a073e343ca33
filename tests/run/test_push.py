"""Uploading a run's model to the hub: what arrives there, what its card says, and a hub that refuses."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from rich.console import Console
from support.marks import slow
from support.refusals import refusal
from support.stub_hub import TOKEN, StubHub, stub_hub
from support.tiny_recipe import load, message_of
from support.tiny_run import tiny_run
from typer.testing import CliRunner

from dpo_pack.commands.main import app
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.checkpoint import model_of
from dpo_pack.run.export import merge_adapter
from dpo_pack.system.endings import ending_of
from dpo_pack.system.errors import RunError
from dpo_pack.system.files import read_json, write_json_atomically
from dpo_pack.system.hub import upload_model
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.trainer import train

REPO = "somebody/my-model"
LORA = "model.lora={r: 4, alpha: 8}"
SAMPLES = "logging.samples={num: 1, max_new_tokens: 4}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with stub_hub(monkeypatch) as served:
        yield served


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory to push for each kind of export; nobody may write there."""
    directory = tmp_path_factory.mktemp("push")
    recipe = tiny_run(directory)
    runs = {"full": directory / "full", "adapter": directory / "adapter", "merged": directory / "merged"}
    train(load_recipe(recipe, [f"output_dir={runs['full']}", SAMPLES]), Console(quiet=True))
    train(load_recipe(recipe, [f"output_dir={runs['adapter']}", LORA]), Console(quiet=True))
    merge_adapter(runs["adapter"], runs["merged"], base=None, dtype="auto", trust_remote_code=False)
    return runs


def files_of(model: Path) -> dict[str, bytes]:
    return {
        path.relative_to(model).as_posix(): path.read_bytes() for path in model.rglob("*") if path.is_file()
    }


def push(source: Path, repo: str, *, private: bool) -> tuple[str, list[str]]:
    with model_of(str(source), Console(quiet=True)) as model:
        return upload_model(Path(model), source / "report.html", repo, private=private)


def refused(source: Path, **options: Any) -> str:
    return refusal(lambda: push(source, REPO, **{"private": True, **options}), RunError)


KINDS = pytest.mark.parametrize("kind", ["adapter", *slow("full", "merged")])


@KINDS
def test_the_hub_gets_the_model_the_card_and_the_page_and_a_second_push_changes_nothing(
    kind: str, exported: dict[str, Path], hub: StubHub
) -> None:
    source = exported[kind]
    model = source if kind == "merged" else source / "model"
    url, lines = push(source, REPO, private=True)
    assert (url, hub.private) == (f"{hub.url}/{REPO}", {REPO: True}) and "(private)" in lines[-1]
    expected = files_of(model)
    if kind != "merged":
        expected["report.html"] = (source / "report.html").read_bytes()
    arrived = dict(hub.repos[REPO])
    card = expected.pop("README.md").decode()
    assert arrived.pop("README.md").decode() == re.sub("model_id = .*", f'model_id = "{REPO}"', card)
    assert arrived == expected
    assert len(hub.large) == 1, "weights go to the storage of large files"
    push(source, REPO, private=True)
    assert len(hub.commits) == 1 and hub.repos[REPO].keys() == {*expected, "README.md"}


@KINDS
def test_the_example_of_the_card_works(kind: str, exported: dict[str, Path]) -> None:
    card = ModelCard.load(
        exported[kind] / "README.md" if kind == "merged" else exported[kind] / "model/README.md"
    )
    assert card.data.library_name == ("peft" if kind == "adapter" else "transformers")
    assert ("lora" in card.data.tags) == (kind == "adapter")
    code = card.text.split("```python\n")[1].split("```")[0]
    assert (" peft" in code) == (kind == "adapter")
    values: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        exec(code, values)
    assert values["output"].shape[1] > values["inputs"]["input_ids"].shape[1]


@pytest.mark.slow
def test_a_public_repository_gets_no_private_upload_and_a_private_one_stays_private(
    exported: dict[str, Path], hub: StubHub
) -> None:
    assert "(public)" in push(exported["full"], REPO, private=False)[1][-1]
    before = dict(hub.repos[REPO])
    message = refused(exported["adapter"])
    assert f"{REPO} is public" in message and "--public" in message
    assert hub.repos[REPO] == before
    hub.private[REPO] = True
    assert "(private)" in push(exported["full"], REPO, private=False)[1][-1]


@pytest.mark.slow
def test_weights_of_an_earlier_push_are_not_left_beside_the_new_ones(
    exported: dict[str, Path], hub: StubHub
) -> None:
    note, _ = push(exported["adapter"], REPO, private=True)[1]
    assert "only on this machine" in note
    hub.repos[REPO]["own.txt"] = b"kept"
    assert "adapter_config.json" in hub.repos[REPO]
    push(exported["full"], REPO, private=True)
    assert hub.repos[REPO].keys() == {*files_of(exported["full"] / "model"), "report.html", "own.txt"}


@pytest.mark.parametrize("status", [401, *slow(403, 404, 500)])
def test_a_hub_that_refuses_is_one_line_without_the_token(
    status: int, exported: dict[str, Path], hub: StubHub, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.refusal = (status, "No")
    message = refused(exported["full"])
    assert REPO in message and str(status) in message and TOKEN not in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("most_requests", [0, 7, *slow(1, 5)])
def test_a_hub_that_vanishes_is_one_line_and_the_push_can_be_repeated(
    most_requests: int, exported: dict[str, Path], hub: StubHub, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.most_requests = most_requests
    assert REPO in refused(exported["full"])
    assert "Retrying" not in capfd.readouterr().err and not hub.commits
    hub.most_requests = None
    push(exported["full"], REPO, private=True)
    assert files_of(exported["full"] / "model").keys() <= hub.repos[REPO].keys()


def test_nothing_is_sent_without_a_token_or_offline_or_to_a_name_that_cannot_be(
    exported: dict[str, Path], hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for repo in ("name", "a/b/c", "a/-b", "a b/c", ""):
        with pytest.raises(RunError) as caught:
            push(exported["full"], repo, private=True)
        assert str(caught.value).isprintable()
    with monkeypatch.context() as without:
        without.setattr("huggingface_hub.get_token", lambda: None)
        assert "no token" in refused(exported["full"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(exported["full"])
    assert not hub.requests


def test_what_is_no_run_and_a_run_without_a_checkpoint_are_refused(hub: StubHub, tmp_path: Path) -> None:
    assert "no run and no model" in refused(tmp_path)
    write_json_atomically(tmp_path / "run.json", {"status": "interrupted"})
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    assert "(interrupted) has neither a model nor a checkpoint" in refused(tmp_path) and not hub.requests


# --------------------------------------------------------------------------------------------- with training


def trained(directory: Path, console: Console, *overrides: str) -> tuple[Path, str]:
    """Trains the tiny run; returns its directory and the last line that it printed."""
    recipe = load_recipe(tiny_run(directory), [f"export.push_to_hub={{repo: {REPO}}}", *overrides])
    train(recipe, console)
    assert read_json(recipe.output_dir / "run.json")["status"] == "finished"
    return recipe.output_dir, console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]


def test_a_run_pushes_its_model_privately_and_ends_with_its_address(
    hub: StubHub, tmp_path: Path, console: Console
) -> None:
    run, last = trained(tmp_path, console)
    assert last == f"Model on the hub: {hub.url}/{REPO} (private)"
    assert hub.private == {REPO: True}
    assert hub.repos[REPO]["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    assert hub.repos[REPO]["report.html"] == (run / "report.html").read_bytes()
    requests = len(hub.requests)
    train(load_recipe(run / "recipe.yaml"), console)
    assert len(hub.requests) == requests, "a finished run has nothing to do"


def test_a_failed_upload_ends_no_training_and_says_how_to_repeat_it(
    hub: StubHub, tmp_path: Path, console: Console
) -> None:
    hub.refusal = (403, "No")
    run, last = trained(tmp_path, console)
    assert last.startswith("Warning: the model is not on the hub: ") and "403" in last
    command = last.partition("To repeat the upload: dpopack ")[2].split()
    assert command == ["push", str(run), REPO]
    hub.refusal = None
    assert CliRunner().invoke(app, command).exit_code == 0 and "config.json" in hub.repos[REPO]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["/api/repos/create", "/api/models/somebody/my-model/commit/main"])
def test_a_signal_during_the_upload_says_that_the_run_is_finished_and_how_to_upload(
    asked: str, hub: StubHub, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = StubHub.answer

    def answer_and_signal(stub: StubHub, method: str, path: str, *others: Any) -> tuple[int, Any]:
        if path == asked:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(stub, method, path, *others)

    with monkeypatch.context() as patch:
        patch.setattr(StubHub, "answer", answer_and_signal)
        run = stopped_at_the_end(tmp_path, console)
    assert CliRunner().invoke(app, ["push", str(run), REPO]).exit_code == 0
    assert "config.json" in hub.repos[REPO]


def stopped_at_the_end(directory: Path, console: Console) -> Path:
    """Trains the tiny run, which a signal stops when its model is written; returns its directory."""
    recipe = load_recipe(tiny_run(directory), [f"export.push_to_hub={{repo: {REPO}}}"])
    with pytest.raises(Interrupted) as stopped:
        train(recipe, console)
    run = recipe.output_dir
    assert read_json(run / "run.json")["status"] == "finished"
    ending = ending_of(stopped.value)
    assert (ending.exit_status, ending.message) == (
        130,
        "stopped by SIGINT; the run is finished and its model is saved; to upload the model: "
        f"dpopack push {run} {REPO}",
    )
    return run


def test_a_run_that_cannot_push_says_so_before_it_trains(
    hub: StubHub, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    trained(tmp_path, console, "export.push_to_hub.private=false")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("Warning: export.push_to_hub: there is no token")
    assert lines[-1].endswith(f"{REPO} --public")


def test_a_name_that_the_hub_does_not_allow_is_refused_with_the_recipe() -> None:
    for repo in ("name", "a/b/c", "a/--b"):
        override = f"export.push_to_hub.repo={repo}"
        assert "export.push_to_hub.repo" in message_of(partial(load, override))
    settings = load("export.push_to_hub={repo: a/b}").export.push_to_hub
    assert settings is not None and settings.private
