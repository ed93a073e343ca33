"""AdamW on bfloat16 parameters: fp32 masters kept to the bit, as if the parameters were fp32."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device_reads import no_reads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import dpo_pack.training.split_adamw as split_adamw
from dpo_pack.training.optim import build_optimizer, clip_gradients
from dpo_pack.training.split_adamw import SplitAdamW, join_master, split_master

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((40, 33), (2100,), (7,), (1, 1))


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    parameter = torch.empty(master.shape, dtype=torch.bfloat16)
    low_bits = torch.empty(master.shape, dtype=torch.int16)
    split_master(master.clone(), parameter, low_bits)
    return parameter, low_bits


def bit_patterns() -> Tensor:
    """fp32 numbers: every high half with low halves around all that could carry, and random ones."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int64)[:, None] * 2**16
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (2**20,), generator=generator)
    return torch.cat([(high + low).flatten(), drawn]).to(torch.int32).view(torch.float32)


def test_every_master_comes_back_bit_for_bit() -> None:
    masters = bit_patterns()
    joined = join_master(*split(masters))
    assert torch.equal(joined.view(torch.int32), masters.view(torch.int32))


def test_the_parameter_is_the_nearest_bfloat16_number() -> None:
    masters = bit_patterns()
    masters = masters[masters.isfinite()]
    parameter, low_bits = split(masters)
    is_tie = low_bits == -(2**15)
    torch_rounds = masters.bfloat16()
    assert torch.equal(parameter[~is_tie], torch_rounds[~is_tie])
    assert is_tie.any() and (parameter[is_tie].abs() >= torch_rounds[is_tie].abs()).all()


def network(dtype: torch.dtype, seed: int = 0) -> nn.ParameterList:
    """Parameters that are the same numbers in every type."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [0.02 * torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    return nn.ParameterList(nn.Parameter(tensor.to(dtype)) for tensor in tensors)


def put_gradients(parameters: nn.Module, number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters.parameters():
        grad = scale * torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad = grad.to(parameter.dtype)


def masters_of(optimizer: SplitAdamW) -> list[Tensor]:
    return [
        join_master(parameter.detach(), optimizer.state[parameter]["low_bits"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("temporary_bytes", [split_adamw.TEMPORARY_BYTES["cpu"], 8 * 1024])
def test_it_is_bitwise_adamw_over_fp32_masters(temporary_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of 1,024 elements as well, which end in the middle of parameters."""
    monkeypatch.setitem(split_adamw.TEMPORARY_BYTES, "cpu", temporary_bytes)
    ours, theirs = network(torch.bfloat16), network(torch.float32)
    optimizer, reference = SplitAdamW(ours.parameters(), **SETTINGS), AdamW(
        theirs.parameters(), fused=True, **SETTINGS
    )  # fmt: skip
    for number in range(20):
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] = 1e-3 / (number + 1)
        put_gradients(ours, number)
        put_gradients(theirs, number)
        optimizer.step()
        reference.step()
    assert_equal(masters_of(optimizer), [p.detach() for p in theirs.parameters()])
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        state, expected = optimizer.state[parameter], reference.state[other]
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_found_inf_leaves_parameters_moments_low_bits_and_counts_as_they_were() -> None:
    parameters = network(torch.bfloat16)
    optimizer = SplitAdamW(parameters.parameters(), **SETTINGS)
    put_gradients(parameters, 0)
    optimizer.step()
    before = copy.deepcopy([*parameters.state_dict().values(), *_state(optimizer)])
    for parameter in parameters.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert_equal(before, [*parameters.state_dict().values(), *_state(optimizer)])
    optimizer.found_inf = torch.zeros(())
    put_gradients(parameters, 1)
    optimizer.step()
    assert optimizer.state[next(iter(parameters.parameters()))]["step"] == 2.0


def _state(optimizer: SplitAdamW) -> list[Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in state.values()]


def test_a_step_reads_nothing_from_the_device() -> None:
    parameters = network(torch.bfloat16)
    optimizer = SplitAdamW(parameters.parameters(), **SETTINGS)
    optimizer.found_inf = torch.zeros(())
    put_gradients(parameters, 0)
    with no_reads():
        clip_gradients(parameters, 1.0)
        optimizer.step()


def test_it_goes_on_bitwise_from_its_saved_state_whose_types_stay() -> None:
    parameters = network(torch.bfloat16)
    optimizer = SplitAdamW(parameters.parameters(), **SETTINGS)
    for number in range(3):
        put_gradients(parameters, number)
        optimizer.step()
    file = io.BytesIO()
    torch.save([parameters.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = network(torch.bfloat16, seed=1)
    resumed = SplitAdamW(other.parameters(), **SETTINGS)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    types = {name: tensor.dtype for name, tensor in next(iter(resumed.state.values())).items()}
    assert types == {
        "step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "low_bits": torch.int16
    }  # fmt: skip
    for each, its in ((parameters, optimizer), (other, resumed)):
        put_gradients(each, 3)
        its.step()
    assert_equal(masters_of(optimizer), masters_of(resumed))


def test_fp32_parameters_beside_bfloat16_ones_are_updated_in_place() -> None:
    mixed = nn.ModuleList([nn.Linear(8, 8, bias=False).bfloat16(), nn.Linear(8, 8, bias=False)])
    alone = copy.deepcopy(mixed[1])
    optimizer = build_optimizer("adamw", mixed, **SETTINGS)
    reference = AdamW(alone.parameters(), fused=True, **SETTINGS)
    assert isinstance(optimizer, SplitAdamW)
    put_gradients(mixed, 0)
    alone.weight.grad = mixed[1].weight.grad.clone()  # type: ignore[union-attr, operator]
    optimizer.step()
    reference.step()
    assert torch.equal(mixed[1].weight, alone.weight)  # type: ignore[arg-type]
    assert "low_bits" not in optimizer.state[mixed[1].weight]  # type: ignore[index]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_parameters_have_state_in_the_same_shards(one_rank: None) -> None:
    plain = nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 3)).bfloat16()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    optimizers = [SplitAdamW(module.parameters(), **SETTINGS) for module in (plain, sharded)]
    inputs = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(3):
        for module, optimizer in zip((plain, sharded), optimizers, strict=True):
            module(inputs).float().square().sum().backward()
            clip_gradients(module, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for parameter, shards in zip(plain.parameters(), sharded.parameters(), strict=True):
        state = optimizers[1].state[shards]
        assert isinstance(shards, DTensor)
        for name in ("exp_avg", "exp_avg_sq", "low_bits"):
            its = state[name]
            assert isinstance(its, DTensor) and its.placements == shards.placements
            assert torch.equal(its.full_tensor(), optimizers[0].state[parameter][name])
        assert torch.equal(shards.full_tensor(), parameter)
