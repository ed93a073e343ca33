"""The load-balancing loss of a mixture of experts: which models have one, and what a row adds to its sums.

As in transformers and TRL (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6), over all layers together:

    aux loss = E * sum over experts e of f_e * p_e

f_e is the number of times that tokens choose expert e, and p_e the sum of e's probabilities, both divided by
tokens x layers. A token chooses the `top_k` experts of the largest probabilities.

Legend: T tokens of a row (padding included), E experts, R layers with a router.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dpo_pack.model.config import routes_tokens
from dpo_pack.system.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance:
    """The load-balancing loss of a run."""

    coefficient: float  # > 0
    num_experts: int
    top_k: int  # experts that a token chooses


class Routing(NamedTuple):
    """A row's sums over its tokens. A token counts once for each sequence that contains it."""

    counts: Tensor  # [R, E] float64: how many times each expert was chosen
    probabilities: Tensor  # [E] float64, over all layers; differentiable


def routing_sums(router_logits: Sequence[Tensor], token_copies: Tensor, top_k: int) -> Routing:
    """Adds up the choices of R routers: R tensors [T, E] of logits, [T] times that a token counts -> sums."""
    counts, probabilities = [], []
    copies = token_copies.double()
    for logits in router_logits:
        chances = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
        chosen = chances.detach().topk(top_k, dim=-1).indices  # [T, top_k]
        count = copies.new_zeros(chances.shape[-1])
        counts.append(count.index_add(0, chosen.flatten(), copies.repeat_interleave(top_k)))
        probabilities.append((chances * token_copies[:, None]).sum(dim=0, dtype=torch.float64))
    return Routing(counts=torch.stack(counts), probabilities=torch.stack(probabilities).sum(dim=0))


def router_balance(model: PreTrainedModel, coefficient: float | None) -> RouterBalance | None:
    """Returns the model's load-balancing loss; None if it has none.

    `coefficient` is `loss.router_aux_coef`; None means the coefficient of the model's config. Raises
    RecipeError if the model has no such loss but `coefficient` is not 0.
    """
    if not _returns_router_logits(model):
        if coefficient:
            what = "mixtures" if routes_tokens(model.config) else "models"
            raise RecipeError(
                f"loss.router_aux_coef: {coefficient:g} is set, but {model.config.model_type} {what} of "
                "transformers have no load-balancing loss; set it to 0 or null"
            )
        return None
    if coefficient is None:
        coefficient = own_coefficient(model)
    if not coefficient:
        return None
    parts: Any = model
    return RouterBalance(
        coefficient=coefficient, num_experts=parts.num_experts, top_k=parts.num_experts_per_tok
    )


def own_coefficient(model: PreTrainedModel) -> float:
    return float(getattr(model.config.get_text_config(), "router_aux_loss_coef", None) or 0.0)


def router_sentence(model: PreTrainedModel, given: float | None, balance: RouterBalance | None) -> str | None:
    """Returns a line for the user about the loss; None for models without experts. `given`: in the recipe."""
    own, has_loss = own_coefficient(model), _returns_router_logits(model)
    if balance is not None:
        source = "the model config's own" if given is None else "loss.router_aux_coef"
        return (
            f"Router: load-balancing loss x {balance.coefficient:g} ({source}), "
            f"{balance.num_experts} experts, {balance.top_k} a token"
        )
    if own and not has_loss and given is None:
        return (
            f"Router: the model config's router_aux_loss_coef ({own:g}) is left out, because "
            f"{model.config.model_type} models of transformers have no load-balancing loss"
        )
    if not has_loss and not routes_tokens(model.config):
        return None
    reason = "loss.router_aux_coef: 0" if given is not None else "the model's config has no coefficient"
    return f"Router: no load-balancing loss ({reason})"


def _returns_router_logits(model: PreTrainedModel) -> bool:
    """Whether the family's code computes the load-balancing loss, and so can return its routers' logits."""
    return hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func") and all(
        hasattr(model, name) for name in ("num_experts", "num_experts_per_tok")
    )
