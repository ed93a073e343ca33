"""Few combinations of many factors, in which each two values of two factors meet. Deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Combination = dict[str, str]  # factor -> value
Forbidden = Mapping[str, Sequence[str]]  # values that must not all meet, by factor


def forbids(rule: Forbidden, combination: Combination) -> bool:
    """Whether the combination, which may lack factors, has a value of each of the rule's factors."""
    return all(combination.get(factor) in values for factor, values in rule.items())


def pairwise(factors: Mapping[str, Sequence[str]], rules: Sequence[Forbidden] = ()) -> list[Combination]:
    """Combinations that no rule forbids; each two values that may meet do so in one of them or more.

    Greedy: each combination starts with the first two values that have not met, and takes for each further
    factor the value that meets the most values for the first time, among those that can be completed.
    """
    missing = {
        ((one, a), (other, b)): None  # a dict keeps the order
        for one, other in combinations(factors, 2)
        for a, b in product(factors[one], factors[other])
        if _complete(factors, rules, {one: a, other: b}) is not None
    }
    found = []
    while missing:
        combination = dict(next(iter(missing)))
        for factor in factors:
            if factor not in combination:
                candidates = [{**combination, factor: value} for value in factors[factor]]
                possible = [c for c in candidates if _complete(factors, rules, c) is not None]
                combination = max(possible, key=lambda c: len(_pairs(factors, c) & missing.keys()))
        for pair in _pairs(factors, combination):
            missing.pop(pair, None)
        found.append({factor: combination[factor] for factor in factors})
    return found


def _pairs(
    factors: Mapping[str, Sequence[str]], combination: Combination
) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    values = [(factor, combination[factor]) for factor in factors if factor in combination]
    return set(combinations(values, 2))


def _complete(
    factors: Mapping[str, Sequence[str]], rules: Sequence[Forbidden], combination: Combination
) -> Combination | None:
    """The first whole combination with these values that no rule forbids; None if there is none."""
    if any(forbids(rule, combination) for rule in rules):
        return None
    rest = [factor for factor in factors if factor not in combination]
    if not rest:
        return combination
    for value in factors[rest[0]]:
        whole = _complete(factors, rules, {**combination, rest[0]: value})
        if whole is not None:
            return whole
    return None
