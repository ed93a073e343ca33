"""A script for test_plan.py: plans a million pairs in a process of its own, so that memory is the plan's.

Prints as JSON the processor seconds to the first step of an epoch and to all its steps, and the most memory
in bytes that was resident beyond what imports take.
"""

from __future__ import annotations

import json
import time

import numpy as np

from dpo_pack.packing.lengths import AttentionKind, ModelShape, PairLengths, pair_flops
from dpo_pack.packing.plan import epoch_order
from support.limits import resident_bytes
from support.plans import make_plan

NUM_PAIRS, NUM_RANKS = 1_000_000, 8
# The shape of a 7B Llama: attention is a small part of short pairs and a large one of long pairs.
SEVEN_B = ModelShape(
    token_weights=6.5e9,
    head_weights=32000 * 4096,
    attention=(AttentionKind(num_layers=32, width=32 * 256, window=None),),
)


def log_normal_lengths() -> PairLengths:
    random = np.random.default_rng(0)
    prompt, chosen, rejected = (
        np.clip(random.lognormal(median, spread, NUM_PAIRS), 4, 4096).astype(np.int32)
        for median, spread in ((4.8, 0.75), (3.4, 0.9), (3.5, 0.9))
    )
    return PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)


def main() -> None:
    imported = resident_bytes("VmHWM")
    lengths = log_normal_lengths()
    tokens = lengths.row_tokens(share_prompt=True)
    costs = pair_flops(SEVEN_B, lengths, share_prompt=True)
    begun = time.process_time()
    order = epoch_order(np.zeros(NUM_PAIRS, dtype=np.int16), np.ones(1), shuffle=True, seed=0, epoch=0)
    plan = make_plan(
        tokens, order=order, token_budget=8192, pairs_per_step=64, num_ranks=NUM_RANKS, row_costs=costs
    )
    assert len(plan.pack_step(0)) == NUM_RANKS
    first_step_s = time.process_time() - begun
    assert sum(len(rows) for step in plan for rows in step) >= NUM_RANKS * len(plan)
    epoch_s = time.process_time() - begun

    print(
        json.dumps(
            {
                "first_step_s": first_step_s,
                "epoch_s": epoch_s,
                "plan_bytes": resident_bytes("VmHWM") - imported,
            }
        )
    )


if __name__ == "__main__":
    main()
