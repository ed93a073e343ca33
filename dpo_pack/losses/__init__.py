"""Preference losses: pure functions of policy and reference log-probs, and what a run makes of them.

A loss is a function, a line in LOSSES, a name in `LossType` of recipe_schema.py, and what the tables of
recipe_checks.py say of its options. `contrastive.py` holds those of a pair's log-ratios to the reference,
`reference_free.py` those without one, `transport.py` those that couple the pairs of a step, `custom.py` finds
your own.
"""

from __future__ import annotations

from dpo_pack.losses.contrastive import (
    apo_down,
    apo_zero,
    bco_pair,
    discopop,
    exo_pair,
    hinge,
    ipo,
    nca_pair,
    robust,
    sigmoid,
    sigmoid_norm,
    sppo_hard,
)
from dpo_pack.losses.custom import load_custom_loss
from dpo_pack.losses.interface import (
    CoupledLoss,
    Loss,
    LossOptions,
    PairLogps,
    chosen_logratio,
    rejected_logratio,
)
from dpo_pack.losses.objective import (
    Objective,
    ScoredPairs,
    concatenate_pairs,
    length_desensitized_sums,
    weighted_losses,
    wpo_weights,
)
from dpo_pack.losses.reference_free import cpo, orpo, sft, simpo
from dpo_pack.losses.transport import aot, aot_unpaired

__all__ = [
    "LOSSES", "CoupledLoss", "Loss", "LossOptions", "Objective", "PairLogps", "ScoredPairs",
    "chosen_logratio", "concatenate_pairs", "length_desensitized_sums", "load_loss", "rejected_logratio",
    "weighted_losses", "wpo_weights",
]  # fmt: skip


def load_loss(name: str, options: LossOptions) -> Loss | CoupledLoss:
    """The loss of a name in LOSSES or of `module:function`. Raises RecipeError when that cannot be used."""
    return load_custom_loss(name, options) if ":" in name else LOSSES[name]


LOSSES: dict[str, Loss | CoupledLoss] = {
    "sigmoid": Loss(function=sigmoid),
    "robust": Loss(function=robust),
    "hinge": Loss(function=hinge),
    "ipo": Loss(function=ipo),
    "exo_pair": Loss(function=exo_pair),
    "nca_pair": Loss(function=nca_pair),
    "bco_pair": Loss(function=bco_pair),
    "sppo_hard": Loss(function=sppo_hard),
    "aot": CoupledLoss(function=aot),
    "aot_unpaired": CoupledLoss(function=aot_unpaired),
    "apo_zero": Loss(function=apo_zero),
    "apo_down": Loss(function=apo_down),
    "discopop": Loss(function=discopop),
    "sigmoid_norm": Loss(function=sigmoid_norm),
    "sft": Loss(function=sft, needs_reference=False),
    "simpo": Loss(function=simpo, needs_reference=False),
    "orpo": Loss(function=orpo, needs_reference=False),
    "cpo": Loss(function=cpo, needs_reference=False),
}
