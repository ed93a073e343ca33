"""This process: its place among the ranks, output that is safe to print, and quick imports.

Variables of torchrun, accelerate or SLURM give the place. Control characters in names of files or in models'
answers never reach a terminal or a log: `say` (stdout), `complain` (stderr) and console.py print our lines.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from dpo_pack.system.errors import RecipeError, one_line

KEY = "distributed.num_processes"
BEGUN = "DPO_PACK_BEGUN"  # variable: when the command began, as time.time()
_LAUNCHERS = "start the processes with dpopack itself, torchrun, accelerate launch or srun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The numbers of one rank, and the address and port to which all ranks connect first."""

    rank: int
    num_ranks: int
    local_rank: int  # on this node
    num_local_ranks: int
    address: str
    port: int

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that torch and accelerate read, in the order of the fields."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return dict(zip(names, map(str, astuple(self)), strict=True))


ALONE = Placement(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, address="127.0.0.1", port=0)


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Returns this process's place; None if no launcher started it. Raises RecipeError if variables lack."""
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        num_ranks = _number(environ, "WORLD_SIZE")
        if num_ranks == 1:
            return ALONE
        return Placement(
            rank=_number(environ, "RANK"),
            num_ranks=num_ranks,
            local_rank=_number(environ, "LOCAL_RANK"),
            num_local_ranks=_number(environ, "LOCAL_WORLD_SIZE", num_ranks),
            address=_value(environ, "MASTER_ADDR"),
            port=_number(environ, "MASTER_PORT"),
        )
    # A batch script has SLURM_PROCID and SLURM_NTASKS, too. Only srun starts a step of several tasks.
    if _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _placement_by_slurm(environ)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if _number(environ, name, 1) > 1:
            raise RecipeError(f"{KEY}: {name} is set, but MPI's variables are not read; {_LAUNCHERS}")
    return None


def _placement_by_slurm(environ: Mapping[str, str]) -> Placement:
    nodes = environ.get("SLURM_STEP_NODELIST") or _value(environ, "SLURM_JOB_NODELIST")
    tasks = _value(environ, "SLURM_STEP_TASKS_PER_NODE")
    # A job may run several steps at once, each with its port, below those of outgoing connections.
    step = _number(environ, "SLURM_JOB_ID") + 127 * _number(environ, "SLURM_STEP_ID", 0)
    return Placement(
        rank=_number(environ, "SLURM_PROCID"),
        num_ranks=_number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        num_local_ranks=tasks_on_node(tasks, _number(environ, "SLURM_NODEID")),
        address=environ.get("MASTER_ADDR") or first_host(nodes),
        port=_number(environ, "MASTER_PORT", 12_000 + step % 20_000),
    )


def first_host(node_list: str) -> str:
    """Returns the first host of SLURM's compressed list: gpu003 for `gpu[003-006,010],big1`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", node_list)
    if first is None:
        raise RecipeError(f"{KEY}: cannot read SLURM's nodes '{node_list}'; set MASTER_ADDR to rank 0's host")
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", first[0])


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Returns how many tasks SLURM starts on node number `node`: `2(x3),1` means 2, 2, 2, 1."""
    tasks: list[int] = []
    for entry in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            break
        tasks += [int(match[1])] * int(match[2] or 1)
    if node >= len(tasks):
        what = f"SLURM_STEP_TASKS_PER_NODE, '{tasks_per_node}', does not say how many tasks this node has"
        raise RecipeError(f"{KEY}: {what}; start the ranks with torchrun instead")
    return tasks[node]


def environment_alone() -> dict[str, str]:
    """Returns this process's environment for a process that is no rank."""
    names = (*ALONE.environment(), "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return {name: value for name, value in os.environ.items() if name not in names}


def is_set(variable: str) -> bool:
    """Whether an environment variable of accelerate says yes."""
    return os.environ.get(variable, "false").lower() in ("true", "1")


def _value(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise RecipeError(f"{KEY}: this is one of several processes, but {name} is not set; {_LAUNCHERS}")
    return value


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = _value(environ, name) if default is None else environ.get(name) or str(default)
    if not value.isdecimal():
        raise RecipeError(f"{KEY}: {name} must be a whole number, not '{value}'")
    return int(value)


def printable(text: str) -> str:
    r"""Returns the text with an escape, such as \x1b or \n, for each character that cannot be printed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(count: int, word: str) -> str:
    """Returns the count with its word: "1 pair", "1,200 pairs"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def lone_half(text: str) -> str:
    """Returns half of a surrogate pair, or a byte that is no UTF-8, and characters around it; "": none."""
    found = None if text.isascii() else re.search('[^"]{,20}[\ud800-\udfff][^"]{,20}', text)
    return "" if found is None else ascii(found[0])


def wrapped(line: str, width: int) -> str:
    """Returns the line as `printable`, wrapped at words. Long words, such as paths, are not broken."""
    line = printable(line)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.TextWrapper(width, subsequent_indent=indent, **whole).fill(line)


def say(line: str, *, file: Any = None) -> None:
    """Prints a line, wrapped in a terminal, to stdout or `file`."""
    file = file or sys.stdout
    text = wrapped(line, shutil.get_terminal_size().columns) if file.isatty() else printable(line)
    print(text, file=file, flush=file is sys.stderr)


def complain(line: str) -> None:
    say(line, file=sys.stderr)


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """Collects no garbage while torch and transformers are imported, which would take a sixth of the time."""
    if "transformers" in sys.modules or not gc.isenabled():  # a freeze would keep garbage
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_function(name: str, recipe_key: str) -> Callable[..., Any]:
    """Returns the function that `name` gives as module:function. Raises RecipeError."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(name)
        if not callable(function):
            raise TypeError(f"it is {type(function).__name__}, not a function")
    except (Exception, SystemExit) as error:
        why = f"{one_line(error)} (looked in {here} and among installed modules)"
        raise RecipeError(f"{recipe_key}: cannot import {name}: {why}") from error
    finally:
        sys.path.remove(here)
    return function
