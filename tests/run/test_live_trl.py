"""TRL itself beside dpo-pack: tiny models of most families take three steps with both, and logs the same.

tests/run/test_conformance.py compares with numbers that TRL left, of one family and every loss.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.live_trl import METRICS, NUM_STEPS, our_steps, save_models, trl_steps
from support.tiny_models import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL: pip install -e '.[benchmark]'"),
    # TRL and what it calls warn of their own names, which change.
    pytest.mark.filterwarnings("ignore"),
]

# Relative above 1, and for the norm of a gradient always. The largest differences measured, on one
# CPU, were 3e-7, 1e-5, 7e-7 and 2e-7. AdamW's epsilon of 1e-6 keeps it from following a gradient's rounding.
BOUNDS = {"loss": 2e-6, "grad_norm": 5e-5, "rewards": 5e-6, "logps": 2e-6}
# Families whose own arithmetic rounds a gradient by more, with the bound of their grad_norm. mamba: 1.4e-4.
COARSE = {"mamba": 7e-4}
# The tiny mamba2 has gradients of norm 18, so its log-probs follow rounding: after two steps they differ from
# TRL's by 8e-5 nats in packed rows, and by 4e-5 in padded ones. Its rewards have the bound of every packed
# family's log-probs, 1e-4 nats, times beta.
COARSE_REWARDS = {"mamba2": 1e-5}
# Families of which fewer steps are compared. The gradient of the tiny rwkv has the norm 46,845, so its later
# steps follow the rounding of the first. In the third step of mamba2, whose rows call transformers' own
# recurrence on roots and tails, a log-prob differs from TRL's by 1.2e-4 nats, more than 1e-4.
COMPARED_STEPS = {"rwkv": 1, "mamba2": 2}
# Families that TRL 1.16 trains otherwise or not at all. It multiplies the last hidden states with the head
# itself, so it leaves out a softcap of the logits that it does not know. A plain loop without the cap has
# TRL's log-probs, and with it ours.
NOT_BY_TRL = {
    "llama4_text": "'MoeCausalLMOutputWithPast' object has no attribute 'last_hidden_state'",
    "recurrent_gemma": "without `logits_soft_cap`",
    "xlstm": "without `output_logit_soft_cap`",
}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_BY_TRL])
def test_trl_takes_the_same_steps(family: str, tmp_path: Path) -> None:
    save_models(family, tmp_path)
    theirs, ours = trl_steps(family, tmp_path), our_steps(family, tmp_path)
    assert len(theirs) == len(ours) == NUM_STEPS
    num_compared = COMPARED_STEPS.get(family, NUM_STEPS)
    for number, (expected, step) in enumerate(list(zip(theirs, ours, strict=True))[:num_compared], start=1):
        for name in METRICS:
            kind = name.split("/")[0]
            coarse = {"grad_norm": COARSE, "rewards": COARSE_REWARDS}.get(kind, {})
            bound = coarse.get(family, BOUNDS[kind])
            near = pytest.approx(expected[name], rel=bound, abs=0.0 if name == "grad_norm" else bound)
            assert step[name] == near, f"step {number}: {name}"
