"""A hub id that cannot be had is refused at once, whatever the hub's client would try."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import datasets
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from support.refusals import refusal

from dpo_pack.data.sources import locate_source
from dpo_pack.model.loading import load_config, load_tokenizer
from dpo_pack.recipe.schema import SourceRecipe
from dpo_pack.system import hub
from dpo_pack.system.errors import DataError, ModelError


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(hub, "time", MagicMock())  # nobody waits between two questions
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub at a port of this machine where nobody listens; what it was asked for."""
    ask, asked = HfApi.repo_info, list[str]()

    def ask_nobody(api: HfApi, *arguments: Any, **options: Any) -> Any:
        asked.append(arguments[0])
        api.endpoint = "http://127.0.0.1:9"
        return ask(api, *arguments, **options)

    monkeypatch.setattr(HfApi, "repo_info", ask_nobody)
    return asked


@pytest.mark.parametrize("load", [load_config, partial(load_tokenizer, chat_template=None)])
def test_a_model_of_an_unreachable_hub_is_one_line_and_no_client_goes_on_asking(
    load: Callable[..., object], unreachable: list[str]
) -> None:
    message = refusal(
        lambda: load("models/tinny", revision=None, trust_remote_code=False, recipe_key="model.path"),
        ModelError,
    )
    assert message.startswith("model.path: ") and "models/tinny" in message
    assert unreachable == ["models/tinny"] * 2  # a network may fail once


def test_data_of_an_unreachable_hub_are_one_line_and_no_client_goes_on_asking(
    tmp_path: Path, unreachable: list[str]
) -> None:
    source = SourceRecipe(path="owner/pears")
    message = refusal(lambda: locate_source(source, "data.train.0", tmp_path / "hashes"), DataError)
    assert message.startswith("owner/pears: ") and "data.train.0.path" in message
    assert unreachable == ["owner/pears"] * 2


@pytest.mark.usefixtures("unreachable")
def test_what_is_cached_needs_no_hub(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--tiny"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    hub.check_model("owner/tiny", None, "model.path")
    refusal(lambda: hub.check_model("owner/tiny", "v2", "model.path"), ModelError)
    (tmp_path / "datasets" / "owner___pears").mkdir(parents=True)
    hub.check_dataset("owner/pears", "data.train.0.path")


def test_what_the_hub_answers_is_left_to_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answer(api: HfApi, path: str, *, repo_type: str, timeout: float) -> None:
        asked.append((repo_type, path))
        raise HfHubHTTPError("404", response=MagicMock())

    monkeypatch.setattr(HfApi, "repo_info", answer)
    hub.check_model("owner/nothing", None, "model.path")
    hub.check_dataset("owner/nothing", "data.train.0.path")
    hub.check_model("not/an/id", None, "model.path")
    assert asked == [("model", "owner/nothing"), ("dataset", "owner/nothing")]


def test_a_network_may_miss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [TimeoutError("timed out"), None]

    def answer(api: HfApi, path: str, *, repo_type: str, timeout: float) -> None:
        said = answers.pop(0)
        if said is not None:
            raise said

    monkeypatch.setattr(HfApi, "repo_info", answer)
    hub.check_model("owner/tiny", None, "model.path")
    assert not answers
