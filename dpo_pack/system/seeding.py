"""Seeds random numbers from the recipe's seed, the step and the rank, so checkpoints need no random state."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds the random numbers before the first step, mainly weights of new adapters. seed < 2**32."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_step(seed: int, *, step: int, rank: int) -> None:
    """Seeds the random numbers of a step: the dropout in adapters. Each rank has a different seed."""
    # In the key, 3 stands for dropout and 2 for completions (online/), so no numbers are the same.
    state = np.random.SeedSequence(seed, spawn_key=(3, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0] >> np.uint64(1)))
