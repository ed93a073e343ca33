"""Where the time of a step goes, by kind of operation, and which bytes it moves.

The profiler slows steps: no rate is from here.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dpo_pack.trainer
from benchmarking.contenders import Contender, Setting
from benchmarking.kinds import KINDS, OUTSIDE, kind_of
from benchmarking.run_dpo_pack import make_recipe, train_without_export

PROFILED_STEPS = 3
MARK = "moves "  # before a number of bytes: the name of a mark inside an operator
# These read as much of their first tensor as they write, and these write it without reading it.
GATHERS = frozenset({"aten::embedding", "aten::index", "aten::index_select", "aten::gather"})
OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


def profile_steps(contender: Contender, setting: Setting, scratch: Path) -> dict[str, dict[str, float]]:
    """`seconds` of some steps by KINDS, which add up to their wall time; `bytes` that one more step moves.

    `steps`: the numbers (from 0) of the `first` profiled step, and of the one that is `counted`, after the
    last profiled one. `bytes` is empty if counting failed.
    """
    num_steps = setting.num_pairs // setting.pairs_per_step
    first = min(max(setting.warmup_steps, 1), num_steps - 1)
    counted = min(first + PROFILED_STEPS, num_steps - 1)
    settings = (*contender.settings, f"train.max_steps={counted + 1}")
    recipe = make_recipe(replace(contender, settings=settings), setting, scratch)
    steps = ProfiledSteps(first=first, counted=counted, on_cuda=setting.device == "cuda")
    with patch.object(
        dpo_pack.trainer.Trainer, "train_step", steps.around(dpo_pack.trainer.Trainer.train_step)
    ):
        try:
            train_without_export(recipe)
        except Exception:
            if not sum(steps.seconds.values()):
                raise
            traceback.print_exc()  # seconds without bytes are better than nothing
    return {"seconds": steps.seconds, "bytes": steps.bytes, "steps": {"first": first, "counted": counted}}


class ProfiledSteps:
    """Runs steps under the profiler, from the one numbered `first` (from 0) on."""

    def __init__(self, *, first: int, counted: int, on_cuda: bool) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.bytes: dict[str, float] = {}
        self._first, self._counted = first, counted
        self._on_cuda = on_cuda
        self._step = -1

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def profiled(*arguments: Any) -> Any:
            self._step += 1
            if self._step < self._first:
                return train_step(*arguments)
            if self._step == self._counted:
                with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler, MarksBytes():
                    outcome = train_step(*arguments)
                self.bytes = bytes_of_kinds(profiler.events())
                return outcome
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._on_cuda else []
            with torch.profiler.profile(activities=activities) as profiler:
                begun = self._now()
                outcome = train_step(*arguments)
                wall_seconds = self._now() - begun
            inside = 0.0
            for kind, duration in kinds_of(profiler.events(), on_cuda=self._on_cuda):
                self.seconds[kind] += duration
                inside += duration
            self.seconds[OUTSIDE] += max(wall_seconds - inside, 0.0)
            return outcome

        return profiled

    def _now(self) -> float:
        if self._on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def kinds_of(events: Any, *, on_cuda: bool) -> Iterator[tuple[str, float]]:
    """(kind, seconds) of each operator, what it called left out: its own on the host, or its kernels'."""
    for event in events:
        if event.device_type.name != "CPU":
            continue
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if microseconds > 0:
            yield kind_of(lineage(event)), microseconds * 1e-6


class MarksBytes(TorchDispatchMode):
    """Puts a mark into each operator, without views and allocations: how many bytes it reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
        arguments |= kwargs or {}
        inputs, outputs = _tensors(arguments), _tensors(result)
        if func._schema.is_mutable and not outputs:
            written = [
                one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write
            ]
            outputs = _tensors([arguments.get(name) for name in written])
        memory = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_view = all(tensor.untyped_storage()._cdata in memory for tensor in outputs)
        name = func.name().partition(".")[0]
        if "empty" not in name and (func._schema.is_mutable or not is_view):
            read = outputs if name in GATHERS else inputs[1:] if name in OVERWRITES else inputs
            with record_function(f"{MARK}{sum(tensor.nbytes for tensor in (*read, *outputs))}"):
                pass
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_of_kinds(events: Any) -> dict[str, float]:
    """Adds up marks by the kind of the operators that they are in."""
    moved = dict.fromkeys(KINDS, 0.0)
    for event in events:
        if str(event.name).startswith(MARK):
            operators = [name for name in lineage(event)[1:] if name != "PythonDispatchMode"]
            moved[kind_of(operators)] += int(event.name.removeprefix(MARK))
    return moved


def lineage(event: Any) -> list[str]:
    """Names of an operator and of what called it, innermost first."""
    names = []
    while event is not None:
        names.append(str(event.name))
        event = event.cpu_parent
    return names
