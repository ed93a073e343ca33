"""Reads the rank of this process and the number of ranks from variables of torchrun, accelerate or SLURM."""

import os
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from dpo_pack.system.errors import RecipeError

_KEY = "distributed.num_processes"
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
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if _number(environ, name, 1) > 1:
            what = f"{name} is set, but dpo-pack does not read MPI's variables"
            raise RecipeError(f"{_KEY}: {what}; {_LAUNCHERS}")
    return None


def first_host(node_list: str) -> str:
    """Returns the first host of SLURM's compressed list: gpu003 for `gpu[003-006,010],big1`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", node_list)
    if first is None:
        what = f"cannot read SLURM's list of nodes, '{node_list}'"
        raise RecipeError(f"{_KEY}: {what}; set MASTER_ADDR to the host of rank 0")
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
        raise RecipeError(f"{_KEY}: {what}; start the ranks with torchrun instead")
    return tasks[node]


def is_set(variable: str) -> bool:
    """Whether an environment variable of accelerate says yes."""
    return os.environ.get(variable, "false").lower() in ("true", "1")


def _value(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        what = f"the environment says that this is one of several processes, but {name} is not set"
        raise RecipeError(f"{_KEY}: {what}; {_LAUNCHERS}")
    return value


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = _value(environ, name) if default is None else environ.get(name) or str(default)
    if not value.isdecimal():
        raise RecipeError(f"{_KEY}: {name} must be a whole number, not '{value}'")
    return int(value)
