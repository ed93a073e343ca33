"""In which order an epoch goes through the pairs, and how often each comes. P pairs, E pairs of an epoch."""

import numpy as np

from dpo_pack.data.lengths import AnyIntArray, FloatArray, IntArray
from dpo_pack.errors import DataError

# Streams of the epoch's random numbers: one never repeats another, whatever seed and epoch.
_SHUFFLE_STREAM = 0
_MIXTURE_STREAM = 1
NO_PAIR = "data.train: the sources' weights leave no pair of an epoch; raise data.train.*.weight"


def epoch_order(
    num_pairs: int,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    source_indices: AnyIntArray | None = None,
    source_weights: FloatArray | None = None,
) -> IntArray:
    """The pairs of one epoch in the order they are trained on, [E].

    source_indices: [P] which source a pair comes from; source_weights: one a source, not negative. Every
    pair comes floor(weight) times; of a source with n pairs, the nearest whole number to
    n x (weight - floor(weight)) come once more, drawn anew each epoch, so every epoch is equally long.
    Without weights every pair comes once. Without `shuffle` the order of the files is kept.

    Drawn from PCG64's raw output, which numpy keeps the same in all versions: a resumed run continues the
    same order. A pure function of its arguments.
    """
    order = np.arange(num_pairs, dtype=np.int64)
    if source_indices is not None and source_weights is not None:
        order = np.repeat(order, _copies(source_indices, source_weights, seed=seed, epoch=epoch))
    if shuffle:
        keys = _random_stream(seed, epoch, _SHUFFLE_STREAM).random_raw(len(order))
        order = order[np.argsort(keys, kind="stable")]
    return order


def check_weights(source_indices: AnyIntArray, source_weights: FloatArray) -> None:
    """Raises DataError where a mixture of at least one pair leaves none to an epoch."""
    num_pairs = np.bincount(source_indices, minlength=len(source_weights))
    num_extra = [_num_extra(count, weight) for count, weight in zip(num_pairs, source_weights, strict=True)]
    if not (np.floor(source_weights) * num_pairs + num_extra).any():
        raise DataError(NO_PAIR)


def _num_extra(num_pairs: int, weight: float) -> int:
    """How many of a source's pairs come once more than floor(weight) times."""
    return int(np.floor(num_pairs * (weight - np.floor(weight)) + 0.5))


def _copies(source_indices: AnyIntArray, source_weights: FloatArray, *, seed: int, epoch: int) -> IntArray:
    """How often each pair comes in the epoch, [P]."""
    assert len(source_weights) and np.all(np.asarray(source_weights) >= 0), source_weights
    copies = np.floor(source_weights).astype(np.int64)[source_indices]
    keys = _random_stream(seed, epoch, _MIXTURE_STREAM).random_raw(len(source_indices))
    for source, weight in enumerate(source_weights):
        pairs = np.flatnonzero(source_indices == source)
        drawn = np.argsort(keys[pairs], kind="stable")[: _num_extra(len(pairs), weight)]
        copies[pairs[drawn]] += 1
    return copies


def _random_stream(seed: int, epoch: int, stream: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, epoch)))
