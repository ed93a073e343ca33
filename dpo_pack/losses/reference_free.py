"""Losses without a reference: no reference pass runs, and the `reference` log-probs are zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpo_pack.losses.contrastive import mixed_logistic
from dpo_pack.losses.objective import LossOptions, PairLogps


def sft(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """Negative log-likelihood of the chosen completions: a mean over the chosen tokens of the global step.

    -log pi(y_w|x) / mean chosen tokens of the step, so that its mean over pairs is a mean over tokens. The
    sum of `sigmoid` and `sft` is RPO, Liu et al. 2024 (arXiv 2405.16436), eq. 9, up to this normalisation.
    """
    return -policy.chosen / options.mean_chosen_tokens


def simpo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """SimPO, Meng et al. 2024 (arXiv 2405.14734), eq. 6:

    -log sigmoid(beta / |y_w| log pi(y_w|x) - beta / |y_l| log pi(y_l|x) - gamma), labels smoothed as in TRL.
    """
    chosen, rejected = _mean_logps(policy)
    logits = options.beta * (chosen - rejected) - options.simpo_gamma
    return mixed_logistic(logits, options.label_smoothing)


def orpo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """ORPO, Hong et al. 2024 (arXiv 2403.07691), eq. 6 and 7; beta is the paper's lambda:

    -log P(y_w|x) - beta * log sigmoid(log(odds(y_w|x) / odds(y_l|x))), where odds = P / (1 - P), and log P is
    the mean log-prob of a completion's tokens (eq. 3).
    """
    chosen, rejected = _mean_logps(policy)
    return -chosen - options.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def cpo(policy: PairLogps, reference: PairLogps, options: LossOptions) -> Tensor:
    """CPO, Xu et al. 2024 (arXiv 2401.08417), eq. 3 and 5: a preference term plus cpo_alpha times `sft`.

    -log sigmoid(beta * (log pi(y_w|x) - log pi(y_l|x))) - cpo_alpha * log pi(y_w|x). The second term is a
    mean over tokens, as in the authors' code and TRL. Labels are smoothed as in TRL.
    """
    logits = options.beta * (policy.chosen - policy.rejected)
    preference = mixed_logistic(logits, options.label_smoothing)
    if options.cpo_alpha == 0.0:
        return preference
    return preference + options.cpo_alpha * sft(policy, reference, options)


def _mean_logps(policy: PairLogps) -> tuple[Tensor, Tensor]:
    return policy.chosen / policy.chosen_tokens, policy.rejected / policy.rejected_tokens


def _log_odds(mean_logps: Tensor) -> Tensor:
    """Returns log(P / (1 - P)) of log P <= 0."""
    mean_logps = mean_logps.clamp(max=-1e-9)  # in fp32 P can round to 1, with infinite odds
    return mean_logps - torch.log(-torch.expm1(mean_logps))
