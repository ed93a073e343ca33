"""A command, and a recipe with everything that it needs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from support.dpopack import Dpopack, Outcome
from support.tiny_run import tiny_run

from dpo_pack.commands.main import main


@pytest.fixture
def dpopack(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Dpopack:
    """Runs a command in this process; what C code and other libraries print is captured as well."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dpopack", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing has touched; tests work on copies."""
    return tiny_run(tmp_path_factory.mktemp("pristine")).parent


@pytest.fixture
def recipe(pristine: Path, tmp_path: Path) -> Path:
    """A recipe with everything it needs, to be spoilt."""
    return Path(shutil.copytree(pristine, tmp_path / "job")) / "recipe.yaml"
