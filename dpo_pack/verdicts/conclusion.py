"""Sources of evidence -> a conclusion: the new model is better, worse, mixed, or one cannot tell.

Legend: n items (prompts, documents of a task), each answered by both models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpo_pack.packing.lengths import FloatArray
from dpo_pack.system.files import Json
from dpo_pack.training.health import SIDES_95
from dpo_pack.training.metrics import mean_intervals, wilson_interval
from dpo_pack.verdicts import statistics

LEVEL = 0.05  # a difference is shown if its p value, after Holm, is at most this
MOST_FAILED = 0.05  # of a source's items
_OF_RESULTS = ("interval", "ties", "p", "p_holm", "largest_loss", "prompts_needed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """One source of evidence: the same items, answered by the new model and by the start."""

    name: str  # unique, as shown: "judge 1 (llm)", "ifeval", "command"
    kind: Literal["function", "reward_model", "llm", "task", "command"]
    # [n] judges: the new model's value of a game, 0 to 1, a half for a tie; tasks, commands: new minus start
    values: FloatArray
    more_characters: FloatArray | None = None  # [n] of the new answer; llm and reward_model
    num_failed: int = 0  # items without a result, not in `values`

    @property
    def middle(self) -> float:
        """The value of no difference."""
        return 0.0 if self.kind in ("task", "command") else 0.5


Evidence = list[tuple[Source, list[Json]]]  # each source, and a line for each of its items


def conclude(
    sources: Sequence[Source],
    *,
    earlier: Sequence[float],
    number: int,
    primary: str | None = None,
    seed: int = 0,
) -> Json:
    """Returns `conclusion` ("better", "worse", "mixed", "cannot tell"), `sentence` and `sources`, a row each.
    earlier: `p` of every source in earlier verdicts against this start. number: this is the how-manieth.
    primary: the name of the source without which neither `better` nor `worse` is said."""
    num_tests = len(earlier) + sum(len(source.values) > 0 for source in sources)
    rows = [_measured(source, num_tests, seed) for source in sources]
    tested = [row for row in rows if row["p"] is not None]
    for row, p_holm in zip(tested, statistics.holm([row["p"] for row in tested], earlier), strict=True):
        row |= {"p_holm": p_holm, "says": row["says"] if p_holm <= LEVEL else "neither"}
    says = {row["name"]: row["says"] for row in rows}
    sides = {"above", "below"} & set(says.values())
    conclusion = "mixed" if len(sides) == 2 else "cannot tell"
    if len(sides) == 1 and (primary is None or says[primary] in sides):
        conclusion = "worse" if "below" in sides else "cannot tell" if any(map(_missing, rows)) else "better"
    sentence = " ".join(_sentences(conclusion, rows, primary, number))
    return {"conclusion": conclusion, "sentence": sentence, "sources": rows}


def _measured(source: Source, num_tests: int, seed: int) -> Json:
    """Returns a source's row, in which `says` is yet the side of its numbers, whether by chance or not.
    `largest_loss`: points that the intervals leave open (hundredths; units, if a difference is above 1).
    `prompts_needed`: how many items show {"2", "5", "10"} points in 8 of 10 cases."""
    values, n, is_judge = source.values, len(source.values), source.middle > 0
    row: Json = {"name": source.name, "kind": source.kind, "n": n, "num_failed": source.num_failed}
    row |= dict.fromkeys(("rate" if is_judge else "difference", *_OF_RESULTS))
    if not n:
        return row | {"says": "no result"}
    middle, mean = source.middle, float(values.mean())
    differences = values - middle
    largest = float(np.abs(differences).max()) or middle or 1.0
    # If most differences are 0, the few others do not say how rare those are that nobody has seen: one of the
    # largest size is added in either direction.
    widened = np.append(differences, (largest, -largest))
    if is_judge:
        bounds = wilson_interval(mean, n)
    else:
        resamples = statistics.NUM_RESAMPLES
        bounds = mean_intervals(widened[:, None], seed=seed, num_resamples=resamples)[0].tolist()
    p, spread = statistics.sign_flip_p(differences, seed=seed), float(widened.std())
    means, lows = [mean], [bounds[0]]
    if source.kind in ("llm", "reward_model"):
        assert source.more_characters is not None, source.name
        if reason := statistics.no_length_control(values, source.more_characters):
            row["length_controlled"], p = {"reason": reason}, 1.0
        else:
            longer = np.tanh(source.more_characters / source.more_characters.std())
            rate, (low, high) = statistics.length_controlled(values, longer, seed=seed)
            row["length_controlled"] = {"rate": rate, "interval": [low, high]}
            p = max(p, statistics.length_controlled_p(values, longer, seed=seed))
            means, lows = [mean, rate], [bounds[0], low]
            spread = max(spread, (high - low) / 2 / SIDES_95 * math.sqrt(n))
    point, level = 0.01 if largest <= 1 else 1.0, LEVEL / num_tests
    needed = {of: statistics.prompts_needed(of * point, spread, largest, level) for of in (2, 5, 10)}
    least = statistics.FEWEST_PROMPTS if "length_controlled" in row else 1
    side = "above" if min(means) > middle else "below" if max(means) < middle else "neither"
    row |= {"rate" if is_judge else "difference": mean, "interval": bounds, "p": p, "says": side}
    row |= {"ties": int((differences == 0).sum()), "largest_loss": max(0.0, middle - min(lows)) / point}
    return row | {"prompts_needed": {str(of): max(least, prompts) for of, prompts in needed.items()}}


def _missing(row: Mapping[str, Any]) -> str | None:
    """Returns the sentence about a source's missing results, None if it has enough."""
    if row["says"] == "no result":
        # The console says why. This is published, so it names no server and no path.
        why = "lm-eval gave no usable scores" if row["kind"] == "task" else "no judgement succeeded"
        return f"{row['name']} has no result: {why}."
    failed, every = row["num_failed"], row["n"] + row["num_failed"]
    if failed <= MOST_FAILED * every:
        return None
    return f"{row['name']} has no result for {failed} of {every} prompts, more than {MOST_FAILED:.0%}."


def _sentences(
    conclusion: str, rows: Sequence[Mapping[str, Any]], primary: str | None, number: int
) -> Iterator[str]:
    sides = {"better": "above", "worse": "below"}
    words = {word: [row["name"] for row in rows if row["says"] == side] for word, side in sides.items()}
    first = ", ".join(f"{word} by {' and '.join(names)}" for word, names in words.items() if names)
    if conclusion == "cannot tell" and first:
        needs = primary is not None and primary not in words["better"] + words["worse"]
        first += f", but not by {primary}" if needs else ", but results are missing"
    if conclusion not in words:
        first = f"{conclusion}: {first or 'no source shows a difference'}"
    losses = [
        f"{row['name']} may have lost up to {row['largest_loss']:,.1f} points"
        for row in rows
        if row["largest_loss"] is not None and row["largest_loss"] >= 0.05
    ]
    yield "; ".join([first, *losses]) + "."
    yield from filter(None, map(_missing, rows))
    for row in rows:
        if reason := row.get("length_controlled", {}).get("reason"):
            yield f"{row['name']} does not count, because it may only like the length of answers: {reason}."
    able = [row for row in rows if row["prompts_needed"] and primary in (None, row["name"])]
    if conclusion == "cannot tell" and able:
        least = min(able, key=lambda row: row["prompts_needed"]["5"])
        two, five, ten = (f"{float(f'{n:.2g}'):,.0f}" for n in least["prompts_needed"].values())
        yield f"{least['name']} needs about {two}, {five} or {ten} items to show 2, 5 or 10 points."
    if number > 1:
        yield f"This is verdict number {number}: the more often one looks, the larger a difference must be."
