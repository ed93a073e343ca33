"""Where the time of a step goes, by kind of operation. The profiler slows steps: no rate is from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity

import dpo_pack.train
from benchmarking.contenders import Contender, Setting
from benchmarking.kinds import KINDS, OUTSIDE, kind_of
from benchmarking.run_dpo_pack import make_recipe, train_without_export

PROFILED_STEPS = 4


def profile_steps(contender: Contender, setting: Setting, scratch: Path) -> dict[str, float]:
    """Seconds of some steps by KINDS, which add up to their wall time. The first steps are not profiled."""
    num_steps = setting.num_pairs // setting.pairs_per_step
    first = min(max(setting.warmup_steps, 1), num_steps - 1)
    settings = (*contender.settings, f"train.max_steps={min(first + PROFILED_STEPS, num_steps)}")
    recipe = make_recipe(replace(contender, settings=settings), setting, scratch)
    steps = ProfiledSteps(first=first, on_cuda=setting.device == "cuda")
    with patch.object(dpo_pack.train, "train_step", steps.around(dpo_pack.train.train_step)):
        train_without_export(recipe)
    return steps.seconds


class ProfiledSteps:
    """Runs steps under the profiler, from the one numbered `first` (from 0) on."""

    def __init__(self, *, first: int, on_cuda: bool) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._steps_left = first
        self._on_cuda = on_cuda

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def profiled(*arguments: Any) -> Any:
            if self._steps_left > 0:
                self._steps_left -= 1
                return train_step(*arguments)
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


def lineage(event: Any) -> list[str]:
    """Names of an operator and of what called it, innermost first."""
    names = []
    while event is not None:
        names.append(str(event.name))
        event = event.cpu_parent
    return names
