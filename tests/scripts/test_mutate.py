"""scripts/mutate.py: what tests notice is counted, and what they do not notice is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mutate
import pytest

MODULE = """
LIMIT = 3
UNUSED = 5

def is_long(text):
    return len(text) > LIMIT

def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result

def added(number, by=5):
    return number + by
"""
TESTS = """
import pytest
from planted.module import added, is_long, total

@pytest.fixture(scope="module")
def long():
    return is_long("four") and not is_long("one")

def test_of_the_fixture_first(long):
    pass

def test_of_the_fixture_later(long):
    assert long

def test_total():
    assert total([1, 2]) == 3

def test_added():
    assert added(1, by=2) == 3

def test_fails_unchanged():
    assert total([]) == 1
"""
START = """
import sys
from pathlib import Path
import mutate
mutate.ROOT, mutate.PACKAGE, mutate.LIBRARIES = Path(sys.argv[1]), "planted", ()
del sys.argv[1]
sys.exit(mutate.main())
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one module, whose constants no test keeps."""
    root = tmp_path_factory.mktemp("planted")
    (root / "planted").mkdir()
    (root / "planted/module.py").write_text(MODULE)
    (root / "tests/support").mkdir(parents=True)
    (root / "tests/test_module.py").write_text(TESTS)
    (root / "docs/dev").mkdir(parents=True)
    unused = "planted/module.py | 5 to 6 | UNUSED = 5 || no code reads it\n"
    (root / mutate.EQUIVALENT).write_text(unused)
    return root


def mutated(root: Path) -> subprocess.CompletedProcess[str]:
    options = ["--per-module", "99", "--jobs", "2", "--report", "page.md"]
    scripts = Path(mutate.__file__).parent
    return subprocess.run(
        [sys.executable, "-c", START, str(root), *options],
        cwd=scripts,
        env={"PYTHONPATH": str(scripts), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_noticed_mutant_is_counted_and_a_survivor_is_named(root: Path) -> None:
    ended = mutated(root)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    said = ended.stdout.splitlines()
    assert "fails unchanged, and is not used: tests/test_module.py::test_fails_unchanged" in said
    assert [line for line in said if line.startswith("survived")] == [
        "survived: planted/module.py:14: 5 to 6: def added(number, by=5):"
    ]
    assert said[-1] == "5 of 6 mutants noticed, 83.3%"
    page = (root / "page.md").read_text()
    assert "- `planted/module.py`, line 14, 5 to 6: `def added(number, by=5):`" in page
    assert "**5 of 6 noticed, 83.3%**; 0 of them because the tests did not end." in page
    assert "1 more mean the same" in page

    # Both tests get the lines that the fixture executes in the first of them.
    lines = json.loads((root / "build/mutations.jsonl").read_text().splitlines()[0])[1]["tests"]
    name = "tests/test_module.py::test_of_the_fixture_"
    assert (
        lines[f"{name}first"][1] == lines[f"{name}later"][1] != lines["tests/test_module.py::test_total"][1]
    )

    again = mutated(root)  # everything is known
    assert again.stdout.splitlines()[-2:] == said[-2:] and (root / "page.md").read_text() == page
