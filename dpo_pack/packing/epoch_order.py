"""The order of the pairs of an epoch. Legend: P pairs of the data set, E pairs of an epoch (with copies)."""

import numpy as np

from dpo_pack.packing.lengths import AnyIntArray, FloatArray, IntArray
from dpo_pack.system.errors import DataError

# Numbers of two random streams, so that the two streams differ for the same seed and epoch.
_SHUFFLE_STREAM = 0
_MIXTURE_STREAM = 1
NO_PAIR = "data.train: with the sources' weights an epoch has no pair; raise data.train.*.weight"


def epoch_order(
    num_pairs: int,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    source_indices: AnyIntArray | None = None,
    source_weights: FloatArray | None = None,
) -> IntArray:
    """Returns the pairs of one epoch in the order in which they are trained, [E].

    source_indices: [P] the source of each pair; source_weights: one number per source, not negative. Every
    pair occurs floor(weight) times. Of a source with n pairs, n x (weight - floor(weight)) pairs, rounded to
    the nearest whole number, occur once more. Each epoch draws these pairs anew; all epochs are equally long.
    Without weights every pair occurs once. Without `shuffle` the pairs keep the order of the files.

    This is a pure function of its arguments. It draws from the raw output of PCG64, which is the same in all
    versions of numpy, so a resumed run continues the same order.
    """
    order = np.arange(num_pairs, dtype=np.int64)
    if source_indices is not None and source_weights is not None:
        order = np.repeat(order, _copies(source_indices, source_weights, seed=seed, epoch=epoch))
    if shuffle:
        keys = _random_stream(seed, epoch, _SHUFFLE_STREAM).random_raw(len(order))
        order = order[np.argsort(keys, kind="stable")]
    return order


def check_weights(source_indices: AnyIntArray, source_weights: FloatArray) -> None:
    """Raises DataError if an epoch has no pair under the weights of the sources."""
    num_pairs = np.bincount(source_indices, minlength=len(source_weights))
    num_extra = [_num_extra(count, weight) for count, weight in zip(num_pairs, source_weights, strict=True)]
    if not (np.floor(source_weights) * num_pairs + num_extra).any():
        raise DataError(NO_PAIR)


def _num_extra(num_pairs: int, weight: float) -> int:
    """Returns how many pairs of a source occur floor(weight) + 1 times."""
    return int(np.floor(num_pairs * (weight - np.floor(weight)) + 0.5))


def _copies(source_indices: AnyIntArray, source_weights: FloatArray, *, seed: int, epoch: int) -> IntArray:
    """Returns how often each pair occurs in the epoch, [P]."""
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
