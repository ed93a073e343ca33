"""AdamW in fp32 for parameters in bfloat16: 14 bytes a parameter instead of 16.

A step of DPO changes a weight of about 1e-2 by about 5e-7, and rounding to bfloat16 would undo nearly every
update. So the optimizer updates fp32 master weights (mixed precision, Micikevicius et al. 2017, arXiv
1710.03740). The parameter is the upper half of the master's bits, and only the lower 16 bits are stored
beside it (Split-SGD, Kalamkar et al. 2020, arXiv 2005.04680). Split-SGD truncates the master; here the
parameter is the nearest bfloat16 number (half-way, the one of larger magnitude), and the low bits are signed:

    bits(master) = bits(parameter) * 2^16 + low_bits,    -2^15 <= low_bits < 2^15
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpo_pack.model.parallel import local_part

# Of fp32 masters and gradients at any time: enough work to hide the launches of a GPU's kernels, and little
# enough for a CPU's caches.
TEMPORARY_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
_TEMPORARY_BYTES_PER_ELEMENT = 8
# Slices begin at multiples of this many elements, as SIMD vectors of any width do: slicing changes no bit.
_ALIGNMENT = 1024


def split_master(master: Tensor, parameter: Tensor, low_bits: Tensor) -> None:
    """Splits fp32 masters into bfloat16 parameters and int16 low bits, as above; overwrites `master`."""
    bits = master.view(torch.int32)
    low_bits.copy_(bits)  # the lower half of the bits
    torch.bitwise_right_shift(bits.add_(0x8000), 16, out=parameter.view(torch.int16))


def join_master(parameter: Tensor, low_bits: Tensor) -> Tensor:
    """Returns the fp32 master that `split_master` split into parameters and low bits, bit for bit."""
    bits = parameter.view(torch.int16).to(torch.int32)
    return torch.add(low_bits, bits, alpha=1 << 16, out=bits).view(torch.float32)


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of one parameter: flat views of what its update reads and writes, [n] each but for the step."""

    step: Tensor  # []
    parameter: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low_bits: Tensor | None = None  # None: the parameter is fp32 and is itself the master


class SplitAdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) in fp32, over bfloat16 and fp32 parameters together.

    Its updates, and what `found_inf` means, equal those of torch's fused AdamW over fp32 masters, bit for
    bit. The host does not wait. The state of a parameter, sharded like it, is `step`, `exp_avg` and
    `exp_avg_sq` in fp32; a bfloat16 parameter also has `low_bits` in int16."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        # `fused` tells torch that the optimizer itself reads `found_inf`.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(params, defaults)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. A parameter is in bfloat16 or fp32."""
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state in its own dtypes; torch's method would cast all state to the parameter's dtype."""
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
        """Yields this rank's part of a parameter, in slices of at most `num_elements`."""
        state = self._state(parameter)
        assert parameter.grad is not None and parameter.dtype in (torch.bfloat16, torch.float32)
        # A gradient may be strided.
        flat = [local_part(parameter).view(-1), local_part(parameter.grad).reshape(-1)]
        names = ("exp_avg", "exp_avg_sq", "low_bits")
        flat += [local_part(state[name]).view(-1) for name in names if name in state]
        length = max(_ALIGNMENT, num_elements // _ALIGNMENT * _ALIGNMENT)
        for parts in zip(*(tensor.split(length) for tensor in flat), strict=True):
            if len(parts[0]):  # this rank may have no part of the parameter
                yield _Slice(state["step"], *parts)


def _batches(slices: Iterable[_Slice], num_elements: int) -> Iterator[list[_Slice]]:
    """Yields slices in order, up to `num_elements` together: one launch updates many small parameters."""
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
