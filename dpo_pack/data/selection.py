"""Chooses the pairs to train on: by the lengths of their answers, by scores, by a file that names them. A
store has the tokens of all pairs, whatever is chosen."""

from collections.abc import Mapping

import numpy as np

from dpo_pack.data.store import PairTable, distinct_keys, key_heads
from dpo_pack.packing.lengths import IntArray
from dpo_pack.recipe.data import KeepRecipe, SourceRecipe
from dpo_pack.system.errors import DataError, first_line
from dpo_pack.system.files import Json


def select_pairs(
    table: PairTable, sources: Mapping[str, SourceRecipe], seed: int, *, refuses_none: bool = True
) -> tuple[IntArray, list[Json]]:
    """Returns the positions of the chosen pairs, source by source, and of each source how many pairs a key
    leaves out of those that the keys before it have chosen. Raises DataError if a file cannot be used or,
    with `refuses_none`, if no pair is left. `sources`: by their keys in the recipe."""
    parts, reports = [], list[Json]()
    for number, (key, source) in enumerate(sources.items()):
        chosen = np.flatnonzero(table.source_indices == number)
        report: Json = {"pairs_before": len(chosen), "left_out": {}}
        for name in source.selecting_keys:
            some, value = table.select(chosen), getattr(source, name)
            if name == "keep":
                taken = _kept(some, value, f"{key}.keep", seed)
            elif name == "max_length_gap":
                taken = np.flatnonzero(np.abs(some.chosen_lengths - some.rejected_lengths) <= value)
            else:  # a pair without a score has the margin NaN, which is above no number
                taken = np.flatnonzero(some.score_margins >= value)
            if refuses_none and len(taken) == 0 < len(chosen):
                pairs = f"none of the {len(chosen):,} pairs of {source.path}"
                scores = f" or name scores in {key}.columns," if name == "min_margin" else ""
                raise DataError(f"{key}.{name}: it chooses {pairs}; choose more,{scores} or leave it out")
            report["left_out"][name] = len(chosen) - len(taken)
            chosen = chosen[taken]
        parts.append(chosen)
        reports.append({**report, "pairs_after": len(chosen)})
    return np.concatenate(parts), reports


def _kept(table: PairTable, keep: KeepRecipe, key: str, seed: int) -> IntArray:
    """Returns the positions of the pairs that `keep` chooses, ascending. A pair that is in the file several
    times has the mean of its numbers. Raises DataError."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(keep.file) as file:
            lines = file.read(["pair", *filter(None, [keep.by])])
        number = lines[keep.by].cast(pa.float64(), safe=False) if keep.by else np.zeros(len(lines))
        named = pa.table({"pair": lines["pair"].cast(pa.string()), "number": number})
    except (OSError, KeyError, pa.ArrowException) as error:
        needs = "it needs a column pair with names of pairs, as dpopack audit writes it"
        needs += f", and a column {keep.by} of numbers" if keep.by else ""
        raise DataError(f"{key}.from: {keep.file}: {first_line(error)}; {needs}") from error
    named = named.group_by("pair", use_threads=False).aggregate([("number", "mean")])
    places = pc.index_in(pa.array(table.pair_names, pa.string()), value_set=named["pair"])
    means = named["number_mean"].take(places).to_numpy()  # NaN: the pair is not in the file, or without one
    found = np.flatnonzero(~np.isnan(means))
    keys = table.pair_keys[found]
    first, name_of = distinct_keys(keys)  # copies of a pair are taken or left together
    means, is_taken = means[found[first]], np.ones(len(first), dtype=np.bool_)
    if keep.part is not None:
        # Names are hashes: times an odd number, they are in a random order, whatever the order of the file.
        odd = np.uint64(2 * int(np.random.default_rng(seed).integers(1 << 63)) + 1)
        sign = {"largest": -1.0, "smallest": 1.0}.get(keep.order or "random", 0.0)
        order = np.lexsort((key_heads(keys[first]) * odd, sign * means))
        is_taken[order[round(keep.part * len(first)) :]] = False
    for bound, beats in ((keep.above, np.greater), (keep.below, np.less)):
        if bound is not None:
            is_taken &= beats(means, bound)
    chosen: IntArray = found[is_taken[name_of]]
    return chosen
