"""AdamW in fp32 on parameters held in bfloat16, at 14 bytes a parameter instead of 16.

A step of DPO moves a weight of some 1e-2 by some 5e-7, and bfloat16 numbers lie 2^-8 of their size apart: in
bfloat16 alone nearly every update would be rounded away. So the optimizer works on fp32 master weights, as
mixed precision does (Micikevicius et al. 2017, arXiv 1710.03740), but keeps of each no more than the 16 bits
that its bfloat16 half, the parameter itself, does not have, as Split-SGD does (Kalamkar et al. 2020, arXiv
2005.04680). There the parameter is the truncated master; here it is the nearest bfloat16 number, which is off
by half as much and by nothing on average, and the low half is signed:

    bits(master) = bits(parameter) * 2^16 + low_bits,    -2^15 <= low_bits < 2^15

which holds for every bit pattern. A master half-way between two parameters takes the larger one in magnitude:
were it the even one, as in torch's own conversion, low_bits would need to say +2^15 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Masters and gradients in fp32 exist for so many bytes of elements at a time. On a GPU that is long enough to
# hide the launches, on a CPU short enough to stay in its caches.
TEMPORARY_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
_TEMPORARY_BYTES_PER_ELEMENT = 8
# Slices begin at multiples of this, where vectors of any width do, so that slicing changes no bit.
_ALIGNMENT = 1024


def split_master(master: Tensor, parameter: Tensor, low_bits: Tensor) -> None:
    """Write fp32 masters into bfloat16 parameters, ties away from zero, and int16 low bits; uses them up."""
    bits = master.view(torch.int32)
    high = bits.add(0x8000).bitwise_right_shift_(16)
    parameter.view(torch.int16).copy_(high)
    low_bits.copy_(bits.sub_(high.bitwise_left_shift_(16)))


def join_master(parameter: Tensor, low_bits: Tensor) -> Tensor:
    """bfloat16 and int16 low bits -> the fp32 master they were split from, bit for bit."""
    bits = parameter.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(low_bits).view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """Part of one parameter: flat views of what its update reads and writes, [n] each."""

    parameter: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low_bits: Tensor | None  # None: the parameter is fp32, its own master
    step: Tensor  # []


class SplitAdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) in fp32, of bfloat16 and fp32 parameters together.

    Equal bit for bit to torch's fused AdamW over fp32 masters with the same gradients. Waits for nothing on
    the host; like the fused one it is handed `found_inf`, [] float32 on the device, and makes no update where
    that is 1. State of a parameter: `step`, `exp_avg`, `exp_avg_sq` in fp32 and, where it is bfloat16,
    `low_bits` in int16; sharded as the parameter is.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        # `fused` is how torch marks optimizers that honour `found_inf` themselves.
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        )
        self.found_inf: Tensor | None = None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient, bfloat16 or fp32, of the parameter's shape."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            steps = [self._state(parameter)["step"] for parameter in parameters]
            torch._foreach_add_(steps, 1)
            num_elements = TEMPORARY_BYTES[steps[0].device.type] // _TEMPORARY_BYTES_PER_ELEMENT
            slices = chain.from_iterable(self._slices(parameter, num_elements) for parameter in parameters)
            for batch in _batches(slices, num_elements):
                _update(batch, group, self.found_inf)
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its types: torch would cast all of it to the parameter's."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][name] = value.to(parameter.device)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.bfloat16:
                state["low_bits"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def _slices(self, parameter: Tensor, num_elements: int) -> Iterator[_Slice]:
        """The part of a parameter that is on this rank, in slices of at most `num_elements`."""
        state = self._state(parameter)
        assert parameter.grad is not None
        assert parameter.dtype in (torch.bfloat16, torch.float32)
        low_bits = state.get("low_bits")
        flat = [_local(t).view(-1) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        flat_grad = _local(parameter.grad).reshape(-1)  # the one that need not lie in one piece
        flat_low_bits = None if low_bits is None else _local(low_bits).view(-1)
        length = max(_ALIGNMENT, num_elements // _ALIGNMENT * _ALIGNMENT)
        for begin in range(0, flat[0].numel(), length):
            part = slice(begin, begin + length)
            yield _Slice(
                parameter=flat[0][part],
                grad=flat_grad[part],
                exp_avg=flat[1][part],
                exp_avg_sq=flat[2][part],
                low_bits=None if flat_low_bits is None else flat_low_bits[part],
                step=state["step"],
            )


def _local(tensor: Tensor) -> Tensor:
    """This rank's elements."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _batches(slices: Iterable[_Slice], num_elements: int) -> Iterator[list[_Slice]]:
    """Slices in order, up to `num_elements` together: one launch for many small parameters."""
    batch: list[_Slice] = []
    for part in slices:
        if batch and sum(len(other.parameter) for other in batch) + len(part.parameter) > num_elements:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _update(batch: list[_Slice], group: dict[str, Any], found_inf: Tensor | None) -> None:
    masters = [s.parameter if s.low_bits is None else join_master(s.parameter, s.low_bits) for s in batch]
    torch._fused_adamw_(
        masters,
        [part.grad.float() for part in batch],
        [part.exp_avg for part in batch],
        [part.exp_avg_sq for part in batch],
        [],
        [part.step for part in batch],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )
    for part, master in zip(batch, masters, strict=True):
        if part.low_bits is not None:
            split_master(master, part.parameter, part.low_bits)
