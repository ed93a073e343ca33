"""Where a step's time goes, and how fast that is: seconds by phase, rates, part of the device's peak."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dpo_pack.cpu_products import times_transposed
from dpo_pack.data.lengths import IntArray
from dpo_pack.data.merging import PairSizes
from dpo_pack.ranks import num_ranks

PHASES = ("data", "forward", "backward", "optimizer")


@dataclass(slots=True, kw_only=True)
class PhaseClock:
    """Seconds of a step by phase.

    On CUDA the host runs ahead of the device, so there a phase ends where an event recorded on the stream
    is reached; nothing waits for the events until `seconds` is called.
    """

    device: torch.device
    _host: list[tuple[str, float]] = field(default_factory=list)
    _events: list[tuple[str, torch.cuda.Event]] = field(default_factory=list)

    def restart(self) -> None:
        """A step begins."""
        self._host, self._events = [], []
        self.lap("")

    def lap(self, phase: str) -> None:
        """What has happened since the last lap was `phase`."""
        self._host.append((phase, time.monotonic()))
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))

    def seconds(self) -> dict[str, float]:
        """`seconds/<phase>` of the step. Waits for the device."""
        totals = {phase: 0.0 for phase in PHASES}
        for (_, begun), (phase, ended) in zip(self._host, self._host[1:], strict=False):
            totals[phase] += ended - begun
        if self._events:
            # Laying out rows is the host's work; the rest is the device's.
            totals = {phase: totals[phase] if phase == "data" else 0.0 for phase in PHASES}
            self._events[-1][1].synchronize()
            for (_, start), (phase, end) in zip(self._events, self._events[1:], strict=False):
                if phase != "data":
                    totals[phase] += start.elapsed_time(end) / 1000.0
        return {f"seconds/{phase}": total for phase, total in totals.items()}


@dataclass(slots=True, kw_only=True)
class Meter:
    """What the steps since the last logged line took. Evaluations and checkpoints are not in it."""

    device: torch.device
    sizes: PairSizes  # of the pairs that are trained on; costs in FLOPs
    peak_flops: float | None  # of this device, a second; None: there is no MFU
    steps: int = 0
    pairs: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    def add(self, rows: Iterable[IntArray], *, pairs: int, tokens: int, seconds: float) -> float:
        """One step: the pairs of each row of all ranks; how many pairs and tokens those are.

        Returns a device's part of the FLOPs.
        """
        flops = rows_flops(self.sizes, rows) / num_ranks()
        self.steps += 1
        self.pairs += pairs
        self.tokens += tokens
        self.flops += flops
        self.seconds += seconds
        return flops

    def take(self) -> dict[str, float]:
        """Rates of the steps so far and mean seconds of one; begins anew."""
        seconds = max(self.seconds, 1e-9)
        rates = {
            "tokens_per_second": self.tokens / seconds,
            "pairs_per_second": self.pairs / seconds,
            "seconds": self.seconds / max(self.steps, 1),
        }
        if self.peak_flops is not None:
            rates["mfu"] = self.flops / seconds / self.peak_flops
        self.steps, self.pairs, self.tokens, self.flops, self.seconds = 0, 0, 0, 0.0, 0.0
        return rates


def rows_flops(sizes: PairSizes, rows: Iterable[IntArray]) -> float:
    """FLOPs of training on rows of pairs; `sizes.costs` are FLOPs. What merged pairs share counts once."""
    if sizes.merging is None:
        return sum(float(sizes.costs[row].sum()) for row in rows)
    return sum(sizes.measure(group)[1] for row in rows for group in sizes.groups_in(row))


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOPs a second of dense matrix products in `dtype`; None where it is not known.

    Of a GPU what its maker states, of a CPU what it does on the threads we have, measured once a process.
    """
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), dtype)
    return _measured_cpu_peak(dtype, torch.get_num_threads()) if device.type == "cpu" else None


def gpu_peak(name: str, dtype: torch.dtype) -> float | None:
    """`name` as CUDA gives it. A MIG slice has a part of the device, which its name does not say."""
    if "MIG" in name or "Laptop" in name:  # a laptop's chip is another one, at a power of its maker's choice
        return None
    for part, teraflops in PEAK_TERAFLOPS.items():
        if re.search(rf"(?<!\w){part}(?!\w)(?! (Ti|D)\b)", name):  # not A100 in RTX A1000, nor T4 in T400
            half, single = teraflops
            known = {torch.bfloat16: half, torch.float16: half, torch.float32: single}.get(dtype)
            return None if known is None else known * 1e12
    return None


@functools.cache
def _measured_cpu_peak(dtype: torch.dtype, num_threads: int) -> float:
    """The best of some products of square matrices, as the layers compute them, over a tenth of a second."""
    size = 768
    left, right = (torch.full((size, size), 0.5, dtype=dtype) for _ in range(2))
    best = float("inf")
    times_transposed(left, right)  # the first one also wakes threads up
    begun = time.monotonic()
    while best == float("inf") or time.monotonic() - begun < 0.1:
        started = time.perf_counter()
        times_transposed(left, right)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


# Dense matrix products by part of a GPU's name, bf16 (and fp16) and fp32 (not TF32, which is off unless
# asked for), teraFLOPs a second, from the makers' data sheets. The first that is in the name as words counts.
PEAK_TERAFLOPS: dict[str, tuple[float | None, float]] = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200 NVL": (835.5, 60.0),
    "H200": (989.4, 66.9),
    "GH200": (989.4, 66.9),
    "H100 NVL": (835.5, 60.0),
    "H100 PCIe": (756.0, 51.2),
    "H100": (989.4, 66.9),
    "H800 PCIe": (756.0, 51.2),
    "H800": (989.4, 66.9),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "A30": (165.0, 10.3),
    "A40": (149.7, 37.4),
    "A10G": (70.0, 31.5),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX 6000 Ada": (364.2, 91.1),
    "RTX A6000": (154.8, 38.7),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "T4": (None, 8.1),  # no bf16 units
    "MI300X": (1307.4, 163.4),
    "MI250X": (191.5, 47.9),  # of either half: a card is two devices
}
