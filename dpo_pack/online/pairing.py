"""Makes preference pairs from the completions of one prompt and their scores.

A method is a function that proposes pairs of positions. `make_pairs` puts the better one first, and drops
pairs whose scores differ too little. Legend: n completions of a prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from dpo_pack.online.interface import Completion, Scores
from dpo_pack.recipe.online import PairingRecipe

Position = tuple[int, int]  # (better, worse): positions in a prompt's completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The pairs of one prompt, without ties and duplicates."""

    pairs: tuple[Position, ...]
    scores: Scores  # [n] missing_eos_penalty is already subtracted
    num_ties: int  # proposed pairs whose scores differ by min_margin or less
    num_duplicates: int  # completions with the same tokens as an earlier one


def make_pairs(
    completions: Sequence[Completion], scores: Scores, rules: PairingRecipe, *, seed: int, draw_number: int
) -> Pairing:
    """Returns the pairs of a prompt's completions, without those that equal an earlier one. scores: [n].

    The method `random` draws with `seed` and `draw_number`."""
    assert scores.shape == (len(completions),)
    is_finished = np.array([completion.is_finished for completion in completions])
    scores = scores - rules.missing_eos_penalty * ~is_finished
    first_places: dict[bytes, int] = {}
    for position, completion in enumerate(completions):
        first_places.setdefault(completion.ids.tobytes(), position)
    distinct = list(first_places.values())
    rng = np.random.default_rng([seed, draw_number])
    proposed = METHODS[rules.type](scores, distinct, rng) if len(distinct) > 1 else []
    ordered = [(one, other) if scores[one] >= scores[other] else (other, one) for one, other in proposed]
    pairs = tuple(pair for pair in ordered if scores[pair[0]] - scores[pair[1]] > rules.min_margin)
    return Pairing(
        pairs=pairs,
        scores=scores,
        num_ties=len(proposed) - len(pairs),
        num_duplicates=len(completions) - len(distinct),
    )


def _best_vs_worst(scores: Scores, distinct: list[int], rng: np.random.Generator) -> list[Position]:
    by_score = sorted(distinct, key=lambda position: (-scores[position], position))
    return [(by_score[0], by_score[-1])]


def _all_pairs(scores: Scores, distinct: list[int], rng: np.random.Generator) -> list[Position]:
    return list(combinations(distinct, 2))


def _random(scores: Scores, distinct: list[int], rng: np.random.Generator) -> list[Position]:
    one, other = rng.choice(distinct, 2, replace=False).tolist()
    return [(one, other)]


METHODS: dict[str, Callable[[Scores, list[int], np.random.Generator], list[Position]]] = {
    "best_vs_worst": _best_vs_worst,
    "all_pairs": _all_pairs,
    "random": _random,
}
