"""What the margins of models that have not seen a pair say of its label. Pure numpy.

Legend: P pairs, each in one fold. z: how sure a model is of a label, which is wrong with sigmoid(-z).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from dpo_pack.packing.lengths import Bools, FloatArray, IntArray

NUM_DRAWS, NEGATED, NUM_BINS = 200, 0.05, 10
_LARGEST_SLOPE = 100.0  # of margins that are all above 0, for which no slope is the best


def divide(groups: IntArray, num_folds: int, seed: int) -> IntArray:
    """Returns the fold of each pair, [P]: pairs of one group, [P], are in one fold. The largest group comes
    first, each into the smallest fold."""
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order, fold_of = np.random.default_rng(seed).permutation(len(sizes)), np.empty(len(sizes), dtype=np.int64)
    folds = [(0, fold) for fold in range(num_folds)]  # a heap: the smallest is its first
    for each in order[np.argsort(-sizes[order], kind="stable")].tolist():
        size, fold_of[each] = folds[0]
        heapq.heapreplace(folds, (size + int(sizes[each]), int(fold_of[each])))
    of_pairs: IntArray = fold_of[group]
    return of_pairs


def sigmoid(values: FloatArray) -> FloatArray:
    return np.exp(-np.logaddexp(0.0, -values))


def slope(values: FloatArray) -> float:
    """Returns a >= 0 with the largest likelihood of the labels, the product of sigmoid(a x value)."""
    low, high = 0.0, _LARGEST_SLOPE if values.mean() > 0 else 0.0
    for _ in range(60):  # the derivative, mean(value x sigmoid(-a x value)), falls with a
        middle = (low + high) / 2
        low, high = (middle, high) if (values * sigmoid(-middle * values)).mean() > 0 else (low, middle)
    return low


def certainty(values: FloatArray | IntArray, folds: IntArray) -> FloatArray:
    """Returns z, [P]: each value in standard deviations of its fold, times the slope of the other folds."""
    scaled: FloatArray = values.astype(np.float64)
    for fold in range(folds.max() + 1):
        scaled[folds == fold] /= scaled[folds == fold].std() or 1.0
    slopes = [slope(scaled[folds != fold]) for fold in range(folds.max() + 1)]
    scaled *= np.array(slopes)[folds]
    return scaled


def auroc(scores: FloatArray, is_wrong: Bools) -> float:
    """Returns how often a wrong pair has a higher score than a right one; a tie counts half."""
    right, wrong = np.sort(scores[~is_wrong]), scores[is_wrong]
    places = np.searchsorted(right, wrong, "left") + np.searchsorted(right, wrong, "right")
    return float(places.mean() / (2 * len(right)))


def swap_test(signed: Sequence[FloatArray], unsigned: FloatArray, seed: int) -> list[list[float]]:
    """Swaps a part of the labels at random, again and again. Returns of each score how well it finds them:
    the mean AUROC, its 2.5 and its 97.5 % quantile. signed: [P] scores that a swap negates, low for wrong
    labels; unsigned: [P] a score that a swap leaves as it is, high for wrong labels."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(NUM_DRAWS):
        is_wrong = np.zeros(len(unsigned), dtype=np.bool_)
        is_wrong[rng.permutation(len(unsigned))[: max(1, round(NEGATED * len(unsigned)))]] = True
        scores = [*(np.where(is_wrong, score, -score) for score in signed), unsigned]
        found.append([auroc(score, is_wrong) for score in scores])
    bounds = np.quantile(found, (0.025, 0.975), axis=0)
    rows: list[list[float]] = np.vstack((np.mean(found, axis=0), bounds)).T.tolist()
    return rows


def calibration(z: FloatArray) -> list[tuple[int, float, float]]:
    """Returns of tenths of the pairs, the least certain first: their number, the mean probability of the
    answer that the model takes for better, and how often the label says the same (z = 0 counts half)."""
    bins = (z[places] for places in np.array_split(np.argsort(np.abs(z)), NUM_BINS))
    return [(len(of), float(sigmoid(np.abs(of)).mean()), float((np.sign(of).mean() + 1) / 2)) for of in bins]
