"""Seconds by phase, rates over logged steps, and the part of a device's peak."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dpo_pack.training.throughput as throughput
from dpo_pack.packing.lengths import CutGroup, GroupSize, IntArray, PairSizes, PromptMerging
from dpo_pack.training.throughput import PHASES, Meter, PhaseClock, device_peak, gpu_peak

CPU = torch.device("cpu")


class Clock:
    """Stands in for the module's `time`."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def test_a_lap_gives_its_phase_the_time_since_the_last_one(clock: Clock) -> None:
    phases = PhaseClock(device=CPU)
    for _ in range(2):  # the second step forgets the first
        phases.restart()
        for seconds, phase in (
            (1, "data"), (2, "forward"), (4, "backward"), (8, "forward"), (16, "backward"), (32, "optimizer")
        ):  # fmt: skip
            clock.now += seconds
            phases.lap(phase)
    assert phases.seconds() == {
        "seconds/data": 1.0,
        "seconds/forward": 10.0,
        "seconds/backward": 20.0,
        "seconds/optimizer": 32.0,
    }
    assert [f"seconds/{phase}" for phase in PHASES] == list(phases.seconds())


@pytest.mark.gpu
def test_on_cuda_phases_are_what_the_device_took() -> None:
    phases = PhaseClock(device=torch.device("cuda"))
    left = torch.randn(4096, 4096, device="cuda")
    left @ left
    torch.cuda.synchronize()
    phases.restart()
    phases.lap("data")
    for _ in range(20):
        left @ left
    phases.lap("forward")
    left @ left
    phases.lap("backward")
    seconds = phases.seconds()
    assert seconds["seconds/forward"] > 5 * seconds["seconds/backward"] > 0


def meter(peak: float | None, merging: PromptMerging | None = None) -> Meter:
    costs = np.array([10.0, 20.0, 30.0, 40.0])
    sizes = PairSizes(tokens=np.ones(4, dtype=np.int64), costs=costs, merging=merging)
    return Meter(sizes=sizes, peak_flops=peak)


def test_rates_are_of_all_steps_since_the_last_logged_one() -> None:
    meters = meter(100.0)
    assert meters.add([np.array([0, 1]), np.array([3])], pairs=3, tokens=30, seconds=0.5) == 70.0
    meters.add([np.array([2])], pairs=1, tokens=10, seconds=1.5)
    assert meters.take() == {
        "tokens_per_second": 20.0,
        "pairs_per_second": 2.0,
        "seconds": 1.0,
        "mfu": 100.0 / 2.0 / 100.0,
    }
    meters.add([np.array([0])], pairs=1, tokens=4, seconds=0.5)
    assert meters.take() == {"tokens_per_second": 8.0, "pairs_per_second": 2.0, "seconds": 0.5, "mfu": 0.2}


def test_without_a_known_peak_there_is_no_mfu() -> None:
    meters = meter(None)
    meters.add([np.array([0])], pairs=1, tokens=4, seconds=0.5)
    assert "mfu" not in meters.take()


class Merging:
    """Pairs 0 and 1 have one prompt; a group costs 7 a pair."""

    prompts = np.array([5, 5, 6, 7])

    def groups_of(self, pairs: IntArray) -> list[IntArray]:
        return [np.flatnonzero(self.prompts[pairs] == prompt) for prompt in np.unique(self.prompts[pairs])]

    def measure(self, pairs: IntArray) -> GroupSize:
        return GroupSize(tokens=1, cost=7.0 * len(pairs))

    def cut(self, pairs: IntArray, token_budget: int) -> list[CutGroup]:
        return []


def test_merged_pairs_cost_what_their_group_costs() -> None:
    # Pairs 0 and 1 are one group of 14; pairs 2 and 3 are alone.
    rows = [np.array([0, 1, 2]), np.array([3])]
    assert meter(None, Merging()).add(rows, pairs=4, tokens=4, seconds=1.0) == 14 + 30 + 40


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A10", torch.bfloat16, 125.0),
        ("NVIDIA L4", torch.bfloat16, 121.0),
        ("NVIDIA RTX A6000", torch.bfloat16, 154.8),
        ("NVIDIA GB200", torch.bfloat16, 2500.0),
        ("NVIDIA B300 SXM6 AC", torch.bfloat16, 2250.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", torch.bfloat16, 503.8),
        ("AMD Instinct MI325X", torch.bfloat16, 1307.4),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H20-3e", torch.bfloat16, 148.0),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, 364.2),
        ("AMD Instinct MI250X", torch.bfloat16, 191.5),  # a device is one of two halves
    ],
)
def test_peaks_of_gpus_by_the_names_cuda_gives(name: str, dtype: torch.dtype, teraflops: float) -> None:
    assert gpu_peak(name, dtype) == teraflops * 1e12


def test_a_device_or_type_that_is_not_known_has_no_peak() -> None:
    assert gpu_peak("NVIDIA Something 9000", torch.bfloat16) is None
    assert gpu_peak("NVIDIA H200 MIG 1g.18gb", torch.bfloat16) is None  # a part of the device
    assert gpu_peak("Tesla T4", torch.bfloat16) is None
    assert gpu_peak("Tesla T4", torch.float32) == 8.1e12
    assert gpu_peak("NVIDIA H100 80GB HBM3", torch.float64) is None
    assert device_peak(torch.device("meta"), torch.float32) is None


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000", "NVIDIA RTX A3000 Laptop GPU", "NVIDIA RTX A4000", "NVIDIA RTX A400",
        "NVIDIA T400 4GB", "NVIDIA T4G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)  # fmt: skip
def test_a_gpu_whose_name_holds_another_s_has_no_peak(name: str) -> None:
    assert gpu_peak(name, torch.bfloat16) is gpu_peak(name, torch.float32) is None


def test_a_cpu_s_peak_is_measured_once_and_no_product_is_faster() -> None:
    peak = device_peak(CPU, torch.float32)
    assert peak is not None and 1e8 < peak < 1e14
    assert device_peak(CPU, torch.float32) == peak
