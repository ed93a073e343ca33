"""Where randomness comes from: the recipe's seed, the step and the rank, and nothing that must be saved."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """For what is drawn before the first step: new adapters, above all."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """For what is drawn in a step, which is dropout in adapters: each rank draws its own.

    A run that goes on draws what it would have drawn; on another number of ranks it draws otherwise.
    """
    # 2 is what rollouts draw from, see online/sampling.py.
    state = np.random.SeedSequence(seed, spawn_key=(3, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0] >> np.uint64(1)))
