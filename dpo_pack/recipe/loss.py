"""The `loss` section of a recipe, and for each loss a declaration of its options and of what it needs.

The losses' functions need torch, which this file must not import, so they are in dpo_pack/losses/.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from dpo_pack.recipe.types import (
    MODULE_FUNCTION,
    Allowed,
    Fraction,
    NonNegativeNumber,
    PositiveNumber,
    Problem,
    Section,
    is_changed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDeclaration:
    """What a loss reads and needs. The checks of the `loss` section and dpo_pack/losses/ use this."""

    options: tuple[str, ...] = ()  # keys of section `loss` that it reads, besides beta
    needs_reference: bool = True
    couples_pairs: bool = False  # a pair's loss depends on the other pairs of the step
    has_likelihood: bool = False  # the loss has the likelihood of the chosen completion as a term
    # True: the loss takes every f_divergence. False: it takes reverse_kl only, because each reward under an
    # f-divergence has a term beta x log Z(prompt), and this term would not cancel in the loss.
    takes_divergences: bool = False


LOSS_DECLARATIONS: dict[str, LossDeclaration] = {
    "sigmoid": LossDeclaration(options=("label_smoothing",), takes_divergences=True),
    "robust": LossDeclaration(options=("label_smoothing",), takes_divergences=True),
    "hinge": LossDeclaration(takes_divergences=True),
    "ipo": LossDeclaration(takes_divergences=True),
    "exo_pair": LossDeclaration(options=("label_smoothing",), takes_divergences=True),
    "nca_pair": LossDeclaration(),
    "bco_pair": LossDeclaration(),
    "sppo_hard": LossDeclaration(),
    "aot": LossDeclaration(options=("label_smoothing",), couples_pairs=True),
    "aot_unpaired": LossDeclaration(options=("label_smoothing",), couples_pairs=True),
    "apo_zero": LossDeclaration(),
    "apo_down": LossDeclaration(),
    "discopop": LossDeclaration(options=("discopop_tau",), takes_divergences=True),
    "sigmoid_norm": LossDeclaration(takes_divergences=True),
    # sft has no rewards, so a divergence changes nothing.
    "sft": LossDeclaration(needs_reference=False, has_likelihood=True, takes_divergences=True),
    "simpo": LossDeclaration(options=("simpo_gamma", "label_smoothing"), needs_reference=False),
    "orpo": LossDeclaration(needs_reference=False, has_likelihood=True),
    "cpo": LossDeclaration(
        options=("cpo_alpha", "label_smoothing"), needs_reference=False, has_likelihood=True
    ),
}


def losses_with(option: str) -> str:
    """Returns the names of the losses that take an option, with commas between them."""
    return ", ".join(name for name, loss in LOSS_DECLARATIONS.items() if option in loss.options)


_LOSS_NAMES = list(LOSS_DECLARATIONS)


def _loss_name(value: object) -> object:
    if isinstance(value, str) and (value in LOSS_DECLARATIONS or MODULE_FUNCTION.fullmatch(value)):
        return value
    raise PydanticCustomError("loss_name", "neither a loss type nor module:function")


LossName = Annotated[
    str,
    BeforeValidator(_loss_name),
    WithJsonSchema({"anyOf": [{"enum": _LOSS_NAMES}, {"pattern": f"^{MODULE_FUNCTION.pattern}$"}]}),
    Allowed(f"one of {', '.join(_LOSS_NAMES)}, or module:function of your own"),
]


class LossTerm(Section):
    """One term of a weighted sum of losses."""

    type: LossName
    """A loss type."""
    weight: PositiveNumber = 1.0
    """The loss of this term is multiplied by it."""


class LossRecipe(Section):
    """The objective."""

    type: Annotated[
        Annotated[LossName, Tag("(name)")]
        | Annotated[tuple[LossTerm, ...], Strict(False), MinLen(1), Tag("(terms)")],
        Discriminator(lambda value: "(terms)" if isinstance(value, (list, tuple)) else "(name)"),
        Allowed(
            f"one of {', '.join(_LOSS_NAMES)}, module:function of your own, "
            "or a list as [{type: sigmoid, weight: 1.0}]"
        ),
    ] = "sigmoid"
    """A loss, or a weighted sum of several; see docs/losses.md."""
    beta: PositiveNumber = 0.1
    """How strongly the loss keeps the policy near the reference; larger: nearer."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = Field(
        default=0.0, description=f"Assumed part of swapped labels ({losses_with('label_smoothing')})."
    )
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Which divergence keeps the policy near the reference (arXiv 2309.16240)."""
    f_alpha: Fraction = 0.5
    """The alpha of f_divergence alpha_divergence: near 1 it is close to reverse_kl, near 0 to forward_kl."""
    ld_alpha: Annotated[float, Ge(0), Le(1)] | None = None
    """LD-DPO: multiplies the log-probs of the tokens by which the longer completion exceeds the shorter one;
    null: off."""
    weighting: Literal["wpo"] | None = None
    """wpo: weight pairs by their probability under the policy; null: off."""
    discopop_tau: PositiveNumber = 0.05
    """Temperature of discopop."""
    simpo_gamma: NonNegativeNumber = 0.5
    """Target reward margin of simpo."""
    cpo_alpha: NonNegativeNumber = 1.0
    """Factor of the likelihood of chosen completions in cpo; TRL's name."""
    router_aux_coef: NonNegativeNumber | None = None
    """Factor of the load-balancing loss of a mixture of experts; null: as in the model's config; 0: none."""

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """The (type, factor) of each term. If `type` is a single name, it is one term with factor 1."""
        if isinstance(self.type, str):
            return ((self.type, 1.0),)
        return tuple((term.type, term.weight) for term in self.type)

    @property
    def options(self) -> dict[str, Any]:
        """The values of the keys that loss functions read. Other code reads the keys in `around`."""
        around = ("type", "ld_alpha", "weighting", "router_aux_coef")
        return {name: value for name, value in self if name not in around}

    def terms_that(self, holds: Callable[[LossDeclaration], bool]) -> str:
        """Returns the names of the built-in losses in `type` for which `holds` is true, with commas."""
        declared = [(name, LOSS_DECLARATIONS[name]) for name, _ in self.terms if name in LOSS_DECLARATIONS]
        return ", ".join(name for name, loss in declared if holds(loss))

    @property
    def needs_reference(self) -> bool:
        """Whether a loss in `type` uses the reference. Losses that the user wrote are assumed to use it."""
        free = {name for name, loss in LOSS_DECLARATIONS.items() if not loss.needs_reference}
        return any(name not in free for name, _ in self.terms)

    def broken_rules(self) -> Iterator[Problem]:
        names = [name for name, _ in self.terms]
        types = ", ".join(names)
        has_own = any(MODULE_FUNCTION.fullmatch(name) for name in names)  # it may use all options
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "type", f"'{name}' is given twice; add up their weights"
        for option in self.options:
            if option in ("beta", "f_divergence", "f_alpha") or has_own or not is_changed(self, option):
                continue
            if not any(option in LOSS_DECLARATIONS[name].options for name in names):
                yield option, f"not used by loss.type {types}, only by {losses_with(option)}"
        if "exo_pair" in names and self.label_smoothing == 0:
            yield "label_smoothing", "must be > 0 for loss.type exo_pair, which takes its logarithm"
        if is_changed(self, "f_alpha") and self.f_divergence != "alpha_divergence":
            yield "f_alpha", "only used by loss.f_divergence: alpha_divergence"
        if self.f_divergence != "reverse_kl":
            if refusing := self.terms_that(lambda loss: not loss.takes_divergences):
                yield "f_divergence", f"loss.type {refusing} is defined for reverse_kl only; leave it out"
            elif not self.needs_reference:
                yield "f_divergence", f"loss.type {types} uses no reference; leave it out"
        if self.weighting and (sorting := self.terms_that(lambda loss: loss.couples_pairs)):
            yield (
                "weighting",
                f"loss.type {sorting} sorts over pairs, so pairs have no weights; leave it out",
            )
        if self.weighting and (likelihoods := self.terms_that(lambda loss: loss.has_likelihood)):
            what = f"loss.type {likelihoods}, which has a likelihood as a term"
            yield "weighting", f"wpo weights preferences; it is not defined for {what}; leave it out"
        if self.ld_alpha is not None and (free := self.terms_that(lambda loss: not loss.needs_reference)):
            what = f"loss.type {free} uses no reference"
            yield "ld_alpha", f"changes log-ratios to the reference, and {what}; leave it out"
