"""How long a command takes to start, and what it does not import for that."""

from __future__ import annotations

import ast
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.processor import slowness
from support.tiny_run import tiny_run

import dpo_pack
from dpo_pack.system.process import many_imports

# What the libraries we use import where they can, and a run on a file of JSON lines does not need.
HEAVY = {"datasets", "IPython", "matplotlib", "pandas", "scipy", "sklearn", "tensorboard", "trl", "wandb"}
# CPU seconds on a machine like the one of tests/support/processor.py; about 3.5 on a quiet core.
MOST_CPU_SECONDS = 12.0


def test_nothing_is_collected_during_the_first_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers")
    before = gc.get_freeze_count()
    with many_imports():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > before


def test_collections_go_on_after_an_import_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers")
    with pytest.raises(ImportError), many_imports():
        raise ImportError("no such module")
    assert gc.isenabled()


def test_later_imports_change_nothing() -> None:
    before = gc.get_freeze_count()
    with many_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # frozen objects may go, and none may come


def dry_run(recipe: Path) -> set[str]:
    """Everything up to the first step, in a process of its own: the modules it imported."""
    code = (
        "import json, sys\n"
        "from dpo_pack.commands.main import main\n"
        f"sys.argv = ['dpopack', 'train', {str(recipe)!r}, '--dry-run']\n"
        "try:\n    main()\n"
        "finally:\n    print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def second_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], float]:
    """A dry run that finds the reference and the proofs of another one: what it imported, its CPU seconds."""
    recipe = tiny_run(tmp_path_factory.mktemp("started"))
    dry_run(recipe)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = dry_run(recipe)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return imported, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_a_run_imports_nothing_heavy_that_it_does_not_use(second_run: tuple[set[str], float]) -> None:
    imported, _ = second_run
    assert {"torch", "transformers", "accelerate"} <= imported
    assert not imported & HEAVY


@pytest.mark.slow
@pytest.mark.alone
def test_the_first_step_is_reached_in_seconds(second_run: tuple[set[str], float]) -> None:
    _, cpu_seconds = second_run
    assert cpu_seconds < MOST_CPU_SECONDS * slowness()


def test_no_file_of_the_package_imports_heavy_packages_before_they_are_used() -> None:
    """What others import is seen by the slow test of a whole run."""
    for path in sorted(Path(dpo_pack.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & HEAVY, f"{path}, line {node.lineno}"
