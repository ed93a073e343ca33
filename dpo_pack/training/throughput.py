"""Measures seconds of each phase of a step, pairs and tokens a second, and MFU (used part of peak FLOPs)."""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dpo_pack.model.fast_layers import times_transposed
from dpo_pack.packing.lengths import IntArray, PairSizes
from dpo_pack.system.ranks import num_ranks

PHASES = ("data", "forward", "backward", "optimizer")


@dataclass(slots=True, kw_only=True)
class PhaseClock:
    """Measures the seconds of each phase of a step. On CUDA a phase ends at an event; `seconds` waits."""

    device: torch.device
    begun: float = 0.0  # time.monotonic() when the step began
    _laps: list[tuple[str, float, torch.cuda.Event | None]] = field(default_factory=list)

    def restart(self) -> None:
        """Starts the clock of a step. The time to build the step's rows counts too."""
        self.begun, self._laps = time.monotonic(), []
        self.lap("")

    def lap(self, phase: str) -> None:
        """Ends `phase`, which began at the previous call of `lap` or `restart`."""
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._laps.append((phase, time.monotonic(), event))

    def seconds(self) -> dict[str, float]:
        """Returns `seconds/<phase>` of the step. Waits for the device."""
        totals = dict.fromkeys(PHASES, 0.0)
        for (_, begun, start), (phase, ended, end) in itertools.pairwise(self._laps):
            # The host makes rows, the device does the rest.
            if start is None or end is None or phase == "data":
                totals[phase] += ended - begun
            else:
                end.synchronize()
                totals[phase] += start.elapsed_time(end) / 1000.0
        return {f"seconds/{phase}": total for phase, total in totals.items()}


@dataclass(slots=True, kw_only=True)
class Meter:
    """Adds up the steps since the newest logged line; time of evaluations and checkpoints is left out."""

    sizes: PairSizes | None  # costs: FLOPs of the training set's pairs; None: unknown, so there is no `mfu`
    peak_flops: float | None  # FLOPs a second that the device can do; None: unknown
    _steps: list[tuple[int, int, float, float]] = field(default_factory=list)  # pairs, tokens, FLOPs, seconds

    def add(self, rows: Iterable[IntArray], *, pairs: int, tokens: int, seconds: float) -> float:
        """Counts a step. rows: the pairs of each row of all ranks. Returns the step's FLOPs on one device, a
        mean."""
        flops = 0.0
        if self.sizes is not None:
            flops = sum(self.sizes.of_row(row).cost for row in rows) / num_ranks()
        self._steps.append((pairs, tokens, flops, seconds))
        return flops

    def take(self) -> dict[str, float]:
        """Returns rates of the steps since the previous call, and mean seconds a step; begins anew."""
        pairs, tokens, flops, seconds = map(sum, zip(*self._steps, strict=True))
        rates = {
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "pairs_per_second": pairs / max(seconds, 1e-9),
            "seconds": seconds / len(self._steps),
        }
        if self.peak_flops is not None:
            rates["mfu"] = flops / max(seconds, 1e-9) / self.peak_flops
        self._steps = []
        return rates


@functools.cache
def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOPs a second in dense matrix products of `dtype`; None if it is not known. For a CPU
    it is that of large square matrices, the best in a tenth of a second."""
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), dtype)
    if device.type != "cpu":
        return None
    size, best = 768, math.inf
    left, right = (torch.full((size, size), 0.5, dtype=dtype) for _ in range(2))
    times_transposed(left, right)  # the first product is slow: it also starts threads
    begun = time.monotonic()
    while best == math.inf or time.monotonic() - begun < 0.1:
        started = time.perf_counter()
        times_transposed(left, right)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def gpu_peak(name: str, dtype: torch.dtype) -> float | None:
    """Returns the peak of a GPU by its `name` in CUDA; None if unknown, as of a MIG slice or in a laptop."""
    if "MIG" in name or "Laptop" in name:
        return None
    for words, teraflops in PEAK_TERAFLOPS.items():
        if re.search(rf"(?<!\w)({words})(?!\w)(?! (Ti|D)\b)", name):  # not A100 in RTX A1000, nor T4 in T400
            half, single = teraflops
            known = {torch.bfloat16: half, torch.float16: half, torch.float32: single}.get(dtype)
            return None if known is None else known * 1e12
    return None


# Words of a GPU's name, with the teraFLOPs a second of dense matrix products in bf16 (and fp16), and in fp32
# (not TF32), from the makers' data sheets. A GPU has the first entry whose words are in its name.
PEAK_TERAFLOPS: dict[str, tuple[float | None, float]] = {
    "GB300|GB200": (2500.0, 80.0),
    "B300|B200": (2250.0, 75.0),
    "H200 NVL|H100 NVL": (835.5, 60.0),
    "H100 PCIe|H800 PCIe": (756.0, 51.2),
    "H200|GH200|H100|H800": (989.4, 66.9),
    "H20": (148.0, 44.0),
    "A100|A800": (312.0, 19.5),
    "A30": (165.0, 10.3),
    "A40": (149.7, 37.4),
    "A10G": (70.0, 31.5),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX 6000 Ada": (364.2, 91.1),
    "RTX A6000": (154.8, 38.7),
    "RTX PRO 6000 Blackwell": (503.8, 125.0),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "T4": (None, 8.1),  # it has no bf16 units
    "MI355X": (2516.6, 157.3),
    "MI325X|MI300X": (1307.4, 163.4),
    "MI250X": (191.5, 47.9),  # for one half: a card is two devices
}
