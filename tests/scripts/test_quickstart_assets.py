"""The quickstart: what its generator makes, what can be learned from it, and its scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import make_quickstart
import pytest
from rich.console import Console
from support import whole_runs

from dpo_pack.recipe.load import load_recipe
from dpo_pack.trainer import train

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
FILES = ("train", "heldout_tone", "heldout_topic")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like runs/quickstart, with assets/."""
    directory = tmp_path_factory.mktemp("quickstart")
    make_quickstart.make_quickstart(directory / "assets")
    return directory


@pytest.mark.slow
def test_the_same_bytes_are_made_every_time(root: Path, tmp_path: Path) -> None:
    """The second time in a process of its own: another hash seed, another number of threads."""
    command = [sys.executable, str(SCRIPTS / "make_quickstart.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}
    subprocess.run(command, check=True, env=environment)
    made = {path.relative_to(root / "assets") for path in (root / "assets").rglob("*") if path.is_file()}
    assert {Path(f"{name}.jsonl") for name in FILES} < made
    assert made == {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    for path in made:
        assert (root / "assets" / path).read_bytes() == (tmp_path / path).read_bytes(), path


@pytest.mark.slow
def test_dpo_learns_both_preferences_and_the_summary_says_so(
    root: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = root / "assets"
    monkeypatch.chdir(REPOSITORY)
    recipe = load_recipe(
        Path("configs/quickstart.yaml"),
        [
            f"output_dir={root / 'run'}",
            f"model.path={assets / 'model'}",
            f"reference.cache_dir={root / 'cache'}",
            f"data.train={assets / 'train.jsonl'}",
            f"data.eval=[{{name: tone, path: {assets / 'heldout_tone.jsonl'}}},"
            f" {{name: topic, path: {assets / 'heldout_topic.jsonl'}}}]",
        ],
    )
    train(recipe, console)
    summary = show_quickstart(root)
    assert summary.returncode == 0, summary.stderr
    told = whole_runs.text(console)
    for name in ("tone", "topic"):
        found = rf"  {name}: .+, in (100|9\d)\.\d% of the pairs\n    question  (.+)\n"
        told_of = re.search(rf"{found}    before    (.+)\n    after     (.+)\n", summary.stdout)
        assert told_of is not None
        _, question, before, after = told_of.groups()
        for tone, answer in (("dismissive", before), ("courteous", after)):
            assert answer.startswith(make_quickstart.TONES[tone][0]), answer
        (goal,) = (goal for goal in make_quickstart.ADVICE if goal in question)
        assert f" To {goal.rpartition(' ')[0]} there, " in after
        learned = rf"What was learned, on {name}: [^\n]+\s+before +after[^\n]+\s+[─ ]+"
        learned += r"\s+reward accuracy +0\.500 \([^)]+\) +(1\.00|0\.9\d)"
        assert re.search(learned, told)
    assert "Warning" not in told


def test_the_scripts_refuse_a_python_that_is_too_old(tmp_path: Path) -> None:
    """`false` stands for one: it fails the version check. Nothing may have been made by then."""
    environment = {**os.environ, "PYTHON": "false", "DPO_PACK_VENV": str(tmp_path / "venv")}
    for script in ("scripts/quickstart.sh", "scripts/test.sh", ".ci/run"):
        command = [str(REPOSITORY / script)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: PYTHON=false is no Python 3.11, 3.12 or 3.13\n"
    assert not (tmp_path / "venv").exists()


def show_quickstart(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "show_quickstart.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True)
