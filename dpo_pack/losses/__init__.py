"""Preference losses: pure functions of policy and reference log-probs, and the objective of a run."""

from dpo_pack.losses.preference import LossOptions, PairLogps

__all__ = ["LossOptions", "PairLogps"]  # the arguments of a user's own loss
