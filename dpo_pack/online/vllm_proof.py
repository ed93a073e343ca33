"""Proof, before the first step, that vLLM writes what the policy would write.

A tensor that vLLM did not take would go unnoticed otherwise: its completions would be those of other weights.

Legend: L tokens written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpo_pack.errors import ModelError
from dpo_pack.layout import Group, layout_row, packed_row, padded_row
from dpo_pack.models import CompletionLogps, RowLogps
from dpo_pack.online.vllm_engine import KEY, OTHERS, VllmEngine, one_line

# Nats, mean over the tokens: rounding is well below, see docs/online.md; other weights are far above.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_PROMPT_TOKENS = 64
_WRITTEN_TOKENS = 32


def prove_agreement(
    engine: VllmEngine,
    policy: CompletionLogps,
    prompt: npt.NDArray[np.int32],
    *,
    max_new_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """vLLM, which has the policy's weights, writes after the start of `prompt`; the policy scores that.

    Returns the mean difference of the log-probs of what was written, in nats. Raises ModelError when it is
    more than rounding in `dtype`, the activations', explains.
    """
    start = prompt[:_PROMPT_TOKENS]
    options = {
        "max_tokens": min(max_new_tokens, _WRITTEN_TOKENS),
        "seed": 0,
        "logprobs": 0,
        "ignore_eos": True,
    }
    try:
        (output,) = engine.answer([start], [options])
    except Exception as error:  # of any kind: some kernels are chosen, and refuse, only now
        raise ModelError(f"{KEY}: vLLM cannot run this policy: {one_line(error)}; {OTHERS}") from error
    written = np.array(output.token_ids, dtype=np.int32)
    theirs = torch.tensor(_written_logps(output), dtype=torch.float64)  # [L]
    ours = _policy_logps(policy, Group(context=start, completions=(written,)), device)  # [L]
    difference = float((ours - theirs).abs().mean())
    if not difference <= TOLERANCES[dtype]:  # NaN is none
        raise ModelError(
            f"{KEY}: vLLM's log-probs differ from the policy's by {difference:.2g} nats a token, rounding "
            f"explains {TOLERANCES[dtype]:g}: it does not run this model as training does; use transformers"
        )
    return difference


def _written_logps(output: Any) -> list[float]:
    """[L] of the tokens written, before temperature."""
    return [
        float(logprobs[token].logprob)
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
    ]


@torch.no_grad()
def _policy_logps(policy: CompletionLogps, group: Group, device: torch.device) -> torch.Tensor:
    """[L] float64, of a group's one completion, as training computes them."""
    if policy.backend is None:
        row = padded_row([group], pad_token_id=0, device=device)
    else:
        row = packed_row(layout_row([group], share_prompt=False), device)
    output: RowLogps = policy(row)
    return output.token_logps.double().cpu()
