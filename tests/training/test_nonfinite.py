"""Steps that are not finite: nothing of them reaches the parameters, and the host waits for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_reads import no_reads
from torch import Tensor, nn
from torch.optim import Optimizer

from dpo_pack.data.store import PairTable, join_pairs, open_store, write_store
from dpo_pack.packing.lengths import Group
from dpo_pack.training.optim import NonfiniteGuard, build_optimizer, clip_gradients

CPU = torch.device("cpu")
PAIRS = np.array([4, 7])


def new_guard(*, stops: bool, device: torch.device = CPU) -> tuple[nn.Module, Optimizer, NonfiniteGuard]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).to(device)
    optimizer = build_optimizer("adamw", network, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    return network, optimizer, NonfiniteGuard(stops=stops)


def take_step(
    network: nn.Module, optimizer: Optimizer, guard: NonfiniteGuard, number: int, *, bad: str | None = None
) -> None:
    """A step whose gradients depend on its number; `bad`: where something is not finite."""
    generator = torch.Generator().manual_seed(number)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
    if bad == "gradient":
        next(network.parameters()).grad.view(-1)[1] = torch.nan  # type: ignore[union-attr]
    device = next(network.parameters()).device
    losses = torch.tensor([0.5, torch.inf if bad == "loss" else 0.5], dtype=torch.float64, device=device)
    guard.skip_if_nonfinite(optimizer, losses, clip_gradients(network, 1.0), step=number, pairs=PAIRS)
    optimizer.step()
    optimizer.zero_grad()


def state(network: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Copies of parameters, moments and step counts."""
    moments = [v for values in optimizer.state_dict()["state"].values() for v in values.values()]
    return [torch.as_tensor(value).clone() for value in [*network.state_dict().values(), *moments]]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) and all(map(torch.equal, one, other))


def table(directory: Path) -> PairTable:
    """Nine pairs, of rows 11 to 19."""
    ids = np.array([1, 2], dtype=np.int32)
    pairs = [Group(context=ids, completions=(ids + n, ids + n + 1)) for n in range(9)]
    tokenized = join_pairs(pairs, [1.0] * 9, list(range(11, 20)))
    write_store(directory / "store", [tokenized], dict)
    store = open_store(directory / "store")
    assert store is not None
    return PairTable.of([store])


def reported(guard: NonfiniteGuard, directory: Path) -> list[int]:
    """The steps that the guard reports."""
    messages = guard.report(directory, table(directory), ("hh",))
    return [int(message.split(":")[0].removeprefix("step ")) for message in messages]


@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_a_skipped_step_leaves_parameters_moments_and_counts_as_they_were(bad: str, tmp_path: Path) -> None:
    network, optimizer, guard = new_guard(stops=False)
    for number in (1, 2, 3):
        take_step(network, optimizer, guard, number, bad=bad if number == 2 else None)
    other, other_optimizer, other_guard = new_guard(stops=False)
    for number in (1, 3):
        take_step(other, other_optimizer, other_guard, number)
    assert_equal(state(network, optimizer), state(other, other_optimizer))
    assert reported(guard, tmp_path) == [2]
    assert reported(guard, tmp_path) == []


def test_when_it_stops_later_steps_change_nothing_until_the_host_knows(tmp_path: Path) -> None:
    network, optimizer, guard = new_guard(stops=True)
    take_step(network, optimizer, guard, 1)
    before = state(network, optimizer)
    take_step(network, optimizer, guard, 2, bad="gradient")
    take_step(network, optimizer, guard, 3)
    take_step(network, optimizer, guard, 4)
    assert_equal(state(network, optimizer), before)
    assert reported(guard, tmp_path) == [2]
    assert json.loads((tmp_path / "nonfinite-step-000002.json").read_text())["grad_norm"] == "nan"


def test_a_step_reads_nothing_from_the_device() -> None:
    network, optimizer, guard = new_guard(stops=True)
    take_step(network, optimizer, guard, 1)  # a first step makes the moments
    with no_reads():
        take_step(network, optimizer, guard, 2, bad="gradient")
    with pytest.raises(AssertionError, match="waits"), no_reads():
        bool(torch.ones(()) > 0)


def test_a_report_names_the_step_and_lists_its_pairs_the_suspects_first(tmp_path: Path) -> None:
    network, optimizer, guard = new_guard(stops=False)
    take_step(network, optimizer, guard, 1)
    take_step(network, optimizer, guard, 2, bad="loss")
    (message,) = guard.report(tmp_path, table(tmp_path), ("hh",))
    path = tmp_path / "nonfinite-step-000002.json"
    assert message.startswith("step 2: loss or gradient is not finite") and message.isprintable()
    assert "(15, 18)" in message and message.endswith(str(path))
    dumped = json.loads(path.read_text())
    assert dumped["step"] == 2 and dumped["grad_norm"] > 0
    assert dumped["pairs"] == [
        {"source": "hh", "row": 18, "pair": 7, "loss": "inf"},
        {"source": "hh", "row": 15, "pair": 4, "loss": 0.5},
    ]


@pytest.mark.parametrize("stops", [True, False])
def test_an_optimizer_that_is_not_fused_skips_the_same_steps(stops: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = build_optimizer("adafactor", network, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    guard = NonfiniteGuard(stops=stops)
    take_step(network, optimizer, guard, 1)
    before = state(network, optimizer)
    for number, bad in ((2, "gradient"), (3, "loss")):
        take_step(network, optimizer, guard, number, bad=bad)
        assert_equal(state(network, optimizer), before)
    take_step(network, optimizer, guard, 4)
    assert torch.equal(state(network, optimizer)[0], before[0]) is stops
    assert reported(guard, tmp_path) == [2, 3]
