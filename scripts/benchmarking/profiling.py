"""Which operators and kernels the time of a step goes to. The profiler slows steps: no rate is from here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import dpo_pack.trainer
from benchmarking.contenders import Contender, Setting
from benchmarking.run_dpo_pack import make_recipe, train_without_export

PROFILED_STEPS = 3
TABLE_LINES = 25


def profile_steps(contender: Contender, setting: Setting, scratch: Path) -> dict[str, Any]:
    """`first` and `end` of the profiled steps (from 0), their wall `seconds`, and torch's `table` of them."""
    num_steps = setting.num_pairs // setting.pairs_per_step
    first = min(max(setting.warmup_steps, 1), num_steps - 1)
    end = min(first + PROFILED_STEPS, num_steps)
    settings = (*contender.settings, f"train.max_steps={end}")
    recipe = make_recipe(replace(contender, settings=settings), setting, scratch)
    on_cuda = setting.device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_cuda else []
    profiler = torch.profiler.profile(activities=activities)
    num_taken, begun, seconds = 0, 0.0, 0.0

    def now() -> float:
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def around(train_step: Callable[..., Any]) -> Callable[..., Any]:
        def profiled(*arguments: Any) -> Any:
            nonlocal num_taken, begun, seconds
            if num_taken == first:
                profiler.start()
                begun = now()
            outcome = train_step(*arguments)
            num_taken += 1
            if num_taken == end:
                seconds = now() - begun
                profiler.stop()
            return outcome

        return profiled

    with patch.object(dpo_pack.trainer.Trainer, "train_step", around(dpo_pack.trainer.Trainer.train_step)):
        train_without_export(recipe)
    table = profiler.key_averages().table(
        sort_by="self_device_time_total" if on_cuda else "self_cpu_time_total",
        row_limit=TABLE_LINES,
        max_name_column_width=60,
    )
    return {"first": first, "end": end, "seconds": seconds, "table": table}
