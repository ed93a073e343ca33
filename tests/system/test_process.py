"""A process: its place among ranks, the characters that it prints, and how long it takes to start."""

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
from rich.table import Table
from support.processor import slowness
from support.tiny_run import tiny_run

import dpo_pack
from dpo_pack.system.console import make_console, shown
from dpo_pack.system.endings import ending_of
from dpo_pack.system.errors import DataError, RecipeError
from dpo_pack.system.process import complain, first_host, many_imports, placement, say, tasks_on_node

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "200505", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "gpu[003-004]",
}  # fmt: skip
SRUN = {
    **BATCH_SCRIPT, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[003-004]",
}  # fmt: skip


def test_what_torchrun_says_is_taken_and_given_on_unchanged() -> None:
    place = placement(TORCHRUN)
    assert place is not None
    assert place.environment() == TORCHRUN
    assert placement({**SRUN, **TORCHRUN}) == place, "torchrun inside a step of SLURM"


def test_a_task_of_slurm_s_step_gets_what_torchrun_would_have_said() -> None:
    place = placement(SRUN)
    assert place is not None
    variables = place.environment()
    port = int(variables.pop("MASTER_PORT"))
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu003",
    }
    assert 1024 < port < 32768
    ranks = [{**SRUN, "SLURM_PROCID": str(rank)} for rank in range(4)]
    assert {(place.address, place.port) for rank in ranks if (place := placement(rank))} == {("gpu003", port)}
    for change in ({"SLURM_JOB_ID": "200506"}, {"SLURM_STEP_ID": "1"}):  # another job or step, another port
        other = placement({**SRUN, **change})
        assert other is not None and other.port != port


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("localhost", "localhost"),
        ("gpu[003-006,010],big1", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("big1,gpu[003-006]", "big1"),
        ("rack[1-2]node[08-15]", "rack1node08"),
        ("n[1-3]-ib.cluster", "n1-ib.cluster"),
        *((wrong, None) for wrong in ("", "gpu[1-", "gpu]1", ",a")),
    ],
)
def test_the_first_host_of_a_compressed_list(node_list: str, host: str | None) -> None:
    if host is not None:
        assert first_host(node_list) == host
    else:
        with pytest.raises(RecipeError, match="MASTER_ADDR"):
            first_host(node_list)


def test_tasks_of_each_node() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    assert tasks_on_node("8", 0) == 8
    for spec, node in (("2(x3),1", 4), ("many", 0)):
        with pytest.raises(RecipeError, match="SLURM_STEP_TASKS_PER_NODE"):
            tasks_on_node(spec, node)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher_is_named(missing: str) -> None:
    rest = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(RecipeError, match=f"but {missing} is not set; start the processes with"):
        placement(rest)


def test_nonsense_and_mpi_are_refused() -> None:
    for variables, name in (({**TORCHRUN, "RANK": "first"}, "RANK"), ({"PMI_SIZE": "2"}, "PMI_SIZE")):
        with pytest.raises(RecipeError, match=rf"distributed\.num_processes: {name}"):
            placement(variables)
    assert placement({"OMPI_COMM_WORLD_SIZE": "1"}) is None, "one process needs no ranks"


EVIL = "a\x1b[2Jb\rc\x07d\x9be\u202ef\udce9g\nh"
SHOWN = r"a\x1b[2Jb\rc\x07d\x9be\u202ef\udce9g\nh"


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own streams are back afterwards."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)


def test_our_lines_show_control_characters_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    complain(str(ending_of(DataError(f"{EVIL}: no such file")).message))
    told = capsys.readouterr()
    assert told.out == f"{SHOWN}\n"
    assert told.err == r"error: a\x1b[2Jb c\x07d\x9be\u202ef\udce9g h: no such file" + "\n"


def test_the_console_shows_them_as_escapes_in_lines_tables_and_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = make_console()
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    console.print(f"Data: {EVIL}")
    console.print(table)
    console.file = sys.stdout
    told = capsys.readouterr().out
    assert told.startswith(f"Data: {SHOWN}\n") and told.count(SHOWN) == 4
    assert all(line.isprintable() for line in told.splitlines())


def test_a_terminal_gets_the_console_s_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    assert console.is_terminal
    with shown(console, EVIL, "pairs", 2) as bar:
        bar.advance(1)
    told = capsys.readouterr().out
    assert r"a\x1b[2J" in told and "\x1b[2Jb" not in told and "\x1b[?25l" in told


def test_the_package_prints_in_one_place_and_elsewhere_only_json_and_recipes() -> None:
    for file in Path(dpo_pack.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and file.name != "process.py":
                made_by = ast.unparse(node.args[0]).partition("(")[0]
                json_or_recipe = ("json.dumps", "_json", "recipe_defaults", "text", "translated")
                assert made_by in json_or_recipe, f"{file.name}:{node.lineno}"


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


def prepared(recipe: Path) -> set[str]:
    """Everything up to the first step, in a process of its own: the modules it imported."""
    code = (
        "import json, sys\n"
        "import dpo_pack.commands.main\n"
        "from dpo_pack.api import load\n"
        f"recipe = load({str(recipe)!r}, trains=True)\n"
        "from dpo_pack.system.console import make_console\n"
        "from dpo_pack.trainer import find_run, prepare_run\n"
        "prepare_run(recipe, find_run(recipe, overwrite=False), make_console())\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def second_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], float]:
    """A start that finds the reference and the proofs of another one: what it imported, its CPU seconds."""
    recipe = tiny_run(tmp_path_factory.mktemp("started"))
    prepared(recipe)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = prepared(recipe)
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
