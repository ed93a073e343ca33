"""Autocast for kernels that have no rule of their own for it."""

from __future__ import annotations

import torch
from torch import Tensor


def as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In autocast's dtype where it is on, as `scaled_dot_product_attention` takes them.

    Values leave a linear layer in that dtype, but rotary embeddings and norms make queries and keys fp32.
    Called behind the gather, not before it in the seam: so the gradients of keys that segments share add up
    in fp32.
    """
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)
