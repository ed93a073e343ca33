"""Seconds by phase, rates over logged steps, and the part of a device's peak."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dpo_pack.training.throughput as throughput
from dpo_pack.packing.lengths import PairSizes
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


def test_rates_are_of_all_steps_since_the_last_logged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = np.array([10.0, 20.0, 30.0, 40.0])
    meters = Meter(sizes=PairSizes(tokens=costs.astype(np.int64), costs=costs), peak_flops=100.0)
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


PEAKS = {
    "NVIDIA H200": 989.4, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H100 NVL": 835.5, "NVIDIA H100 PCIe": 756.0, "NVIDIA A10": 125.0, "NVIDIA L4": 121.0,
    "NVIDIA RTX A6000": 154.8, "NVIDIA GB200": 2500.0, "NVIDIA B300 SXM6 AC": 2250.0, "NVIDIA H20-3e": 148.0,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 503.8, "NVIDIA RTX 6000 Ada Generation": 364.2,
    "AMD Instinct MI325X": 1307.4, "AMD Instinct MI250X": 191.5,
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_gpus_by_the_names_cuda_gives(name: str) -> None:
    assert gpu_peak(name, torch.bfloat16) == PEAKS[name] * 1e12


def test_a_device_or_type_that_is_not_known_has_no_peak() -> None:
    # These names hold those of other GPUs.
    others = ("Something 9000", "RTX A4000", "RTX A400", "T400 4GB", "T4G", "GeForce RTX 4090 D")
    assert {gpu_peak(f"NVIDIA {name}", torch.bfloat16) for name in others} == {None}
    assert gpu_peak("NVIDIA H200 MIG 1g.18gb", torch.bfloat16) is None  # a part of the device
    assert gpu_peak("Tesla T4", torch.bfloat16) is None
    assert gpu_peak("Tesla T4", torch.float32) == 8.1e12
    assert gpu_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert gpu_peak("NVIDIA H100 80GB HBM3", torch.float64) is None
    assert device_peak(torch.device("meta"), torch.float32) is None
