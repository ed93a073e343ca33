"""Inverts many small triangular matrices at once, by products of matrices.

`torch.linalg.solve_triangular` solves one small system after the other on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def invert_unit_triangular(system: Tensor) -> Tensor:
    """Returns the inverses [..., C, C] of I + L; C is a power of two.

    L is what `system` [..., C, C] has below its diagonal. The rest of `system` is not read. The inverse of a
    matrix of 2b rows is made of those of its diagonal blocks of b rows:

        [A 0]^-1     [   A^-1        0  ]
        [B D]      = [-D^-1 B A^-1  D^-1]

    So the error is about that of forward substitution.
    """
    inverse: Tensor = _Invert.apply(system)  # type: ignore[no-untyped-call]
    return inverse


class _Invert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        size = system.shape[-1]
        inverse = torch.eye(size, dtype=system.dtype, device=system.device).expand_as(system).clone()
        block = 1
        while block < size:
            first, second = _blocks(inverse, block, 0, 0), _blocks(inverse, block, 1, 1)
            below = _blocks(system, block, 1, 0)
            _blocks(inverse, block, 1, 0).copy_(-(second @ below @ first))
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        grad: Tensor = -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)
        return grad


def _blocks(matrix: Tensor, size: int, row: int, column: int) -> Tensor:
    """Returns a view of the blocks (row, column) of all diagonal 2 x 2 blocks: [..., blocks, size, size]."""
    shape = (matrix.shape[-1] // size // 2, 2, size)
    parts = matrix.unflatten(-1, shape).unflatten(-4, shape)
    chosen: Tensor = parts.diagonal(dim1=-6, dim2=-3)[..., row, :, column, :, :].movedim(-1, -3)
    return chosen
