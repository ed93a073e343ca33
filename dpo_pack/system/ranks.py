"""Communication between ranks, and their random numbers. Every rank makes the same calls in the same order.

If there is only one process, these functions return at once. Objects go from host to host by gloo, so they
wait for no device. Tensors go from device to device.
"""

import contextlib
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpo_pack.system.errors import DpoPackError, RunError, one_line
from dpo_pack.system.files import path_aside, writing
from dpo_pack.system.machine import release_memory
from dpo_pack.system.process import is_set

Item = TypeVar("Item")
Value = TypeVar("Value")

_host_groups: dict[Any, Any] = {}  # by default group, of which a test makes several


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is rank 0, which prints and writes files."""
    return rank() == 0


def uses_cuda() -> bool:
    """Whether ranks compute on CUDA devices. Under `accelerate launch --cpu` they do not."""
    return torch.cuda.is_available() and not is_set("ACCELERATE_USE_CPU")


def host_group() -> Any:
    """Returns the gloo group. The first call creates it, so all ranks must make that call together."""
    default = dist.group.WORLD
    if default not in _host_groups:
        # Ranks wait for rank 0, which may tokenise for hours. They notice at once that a rank has ended.
        _host_groups[default] = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    return _host_groups[default]


def leave() -> None:
    """Destroys this process's groups. Afterwards it cannot reach other ranks."""
    dist.destroy_process_group()
    _host_groups.clear()  # else threads of a group, while the interpreter shuts down, could abort the process


def first_says(value: Value) -> Value:
    """Returns rank 0's value on every rank. The value is an object that can be pickled."""
    values = [value]
    if num_ranks() > 1:
        dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]


def every_rank_says(value: Value, group: Any = None) -> list[Value]:
    """Returns the values of all ranks, in their order. Threads beside the main one have their own `group`."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value, group=group or host_group())
    return values


def every_rank_does(work: Callable[[], Value], group: Any = None) -> list[Value]:
    """Runs `work` on every rank; returns all values. All ranks raise the lowest rank's DpoPackError."""
    try:
        outcome: tuple[Any, DpoPackError | None] = work(), None
    except DpoPackError as error:
        outcome = None, error
    except Exception as error:
        if hasattr(error, "on_all_ranks"):  # the others have a RunError, and take part in this exchange
            every_rank_says((None, RunError(f"rank {rank()} ended: {one_line(error)}")), group)
        raise
    outcomes = every_rank_says(outcome, group)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [value for value, _ in outcomes]


def first_does_for_all(work: Callable[[], Value]) -> Value:
    """Runs `work` on rank 0 only; all ranks return its value, or raise the DpoPackError that it raises."""
    if num_ranks() == 1:
        return work()
    return every_rank_does(lambda: only_first_does(work))[0]  # type: ignore[return-value]


def of_node(work: Callable[[], Value]) -> Value:
    """Runs `work` on rank 0, then on the first rank of each other node; returns its value on every rank.
    Nobody may write to large arrays in it, which ranks of a node share. Raises DpoPackError on all ranks."""
    return work() if num_ranks() == 1 else _on_nodes(work)


def _on_nodes(work: Callable[[], Value]) -> Value:
    """Shares large arrays on a node: a file without a name holds them, in $TMPDIR."""
    directory = Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        files = list[Any]()

        def begin() -> tuple[str, str]:
            with writing(directory):
                files.append(stack.enter_context(tempfile.NamedTemporaryFile(prefix="dpo_pack-")))
            return socket.gethostname(), files[0].name

        nodes = every_rank_does(begin)  # containers may have one host name, and a $TMPDIR each
        first = [host == nodes[rank()][0] and Path(name).exists() for host, name in nodes].index(True)

        def share() -> list[_Place]:
            arrays: list[pickle.PickleBuffer] = []

            def is_small(array: pickle.PickleBuffer) -> bool:
                if array.raw().nbytes >= 2**16:
                    arrays.append(array)
                return array.raw().nbytes < 2**16

            content = pickle.dumps(work(), protocol=5, buffer_callback=is_small)
            parts: list[bytes | pickle.PickleBuffer] = [content, *arrays]
            with writing(directory):
                places = [_place(files[0], part) for part in parts]
                files[0].flush()
            return places

        of_first = first_does_for_all(share)
        places = every_rank_does(lambda: share() if rank() == first > 0 else of_first)[first]
        release_memory()
        mapped = [np.memmap(path, np.uint8, "r", begin, (size,)) for path, begin, size in places]
        value: Value = pickle.loads(mapped[0].data, buffers=mapped[1:])
        wait_for_all()
    return value


_Place = tuple[str, int, int]  # file, first byte, number of bytes


def _place(file: Any, part: bytes | pickle.PickleBuffer) -> _Place:
    """Writes a part of a value into the file, unless another file has it: the tokens of a store."""
    array: Any = memoryview(part).obj
    mapped = getattr(array, "base", None)
    if isinstance(mapped, np.memmap) and mapped.nbytes == array.nbytes:
        return str(mapped.filename), mapped.offset, array.nbytes
    begin = file.seek(-file.tell() % 64, 1)
    return file.name, begin, file.write(part if isinstance(part, bytes) else part.raw())


def only_first_does(work: Callable[[], Value]) -> Value | None:
    """Runs `work` on rank 0 and returns its value there; the other ranks go on with None and do not wait."""
    return work() if is_first() else None


def share_out(items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Value]]) -> list[Value]:
    """Splits `items` over ranks; returns `work`'s values, one for each item, in their order, on every rank.
    All ranks raise the DpoPackError of one. A rank without items does not call `work`."""
    own = items[rank() :: num_ranks()]
    results: list[Any] = [None] * len(items)
    for other, values in enumerate(every_rank_does(lambda: list(work(own)) if own else [])):
        results[other :: num_ranks()] = values
    return results


def wait_for_all() -> None:
    if num_ranks() > 1:
        dist.barrier(group=host_group())


@contextlib.contextmanager
def first_goes_first() -> Iterator[None]:
    """Rank 0 runs the block first; then the others run it, or raise rank 0's error, as a DpoPackError.
    Rank 0's own, if it is another one, gets `on_all_ranks`."""
    if not is_first() and (failure := first_says(None)) is not None:
        raise failure
    outcome: DpoPackError | None = None
    try:
        yield
    except DpoPackError as error:
        outcome = error
        raise
    except Exception as error:
        outcome = RunError(f"rank {rank()} ended: {one_line(error)}")
        error.on_all_ranks = True  # type: ignore[attr-defined]
        raise
    finally:
        if is_first():
            first_says(outcome)


def require_same(facts: Mapping[str, Any], remedy: str) -> None:
    """Raises the same RunError on every rank if a fact differs between ranks. facts: name -> value."""
    outcomes = every_rank_says((socket.gethostname(), dict(facts)))
    host, expected = outcomes[0]
    for other, (other_host, found) in enumerate(outcomes):
        names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            theirs, ours = (repr(each.get(names[0]))[:40] for each in (found, expected))
            raise RunError(
                f"rank {other} (on {other_host}) and rank 0 (on {host}) differ in {names[0]}{more}: "
                f"{theirs} and {ours}; {remedy}"
            )


def require_shared(directory: Path, recipe_key: str) -> None:
    """Raises the same RunError on every rank if a node does not see rank 0's files in `directory`."""
    if num_ranks() == 1:
        return
    hosts = every_rank_says(socket.gethostname())
    with contextlib.ExitStack() as stack:

        def leave_mark() -> Path:
            mark = path_aside(directory / "shared")
            with writing(directory):
                directory.mkdir(parents=True, exist_ok=True)
                mark.touch()
                stack.callback(mark.unlink)
            return mark

        mark = first_does_for_all(leave_mark)
        seen = every_rank_says(mark.exists())
    blind = [host for host, is_seen in zip(hosts, seen, strict=True) if not is_seen]
    if blind:
        raise RunError(
            f"{recipe_key}: {blind[0]} does not see a file that rank 0 (on {hosts[0]}) wrote in {directory}; "
            "use a directory on a file system that all nodes share"
        )


def gather_over_ranks(rows: Tensor) -> Tensor:
    """Returns the rows of all ranks, [sum of n over ranks, ...]; rows: [n, ...]. Waits for the device."""
    if num_ranks() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(num_ranks())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    sizes: list[int] = torch.cat(counts).tolist()  # ranks may have different numbers of rows
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the elementwise sum. The host does not wait for the device."""
    if num_ranks() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Seeds the random numbers of a step: the dropout in adapters. Checkpoints need no state of them."""
    # In the key, 3 stands for dropout; completions have 2 (online/transformers_generator.py).
    state = np.random.SeedSequence(seed, spawn_key=(3, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0] >> np.uint64(1)))
