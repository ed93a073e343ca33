"""A phase of an online run: prompts -> completions -> scores -> pairs. Each prompt counts once.

Legend: n completions of a prompt, P pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dpo_pack.online.interface import Completion, Draw, Failure, Generator, Judge, Rollout, Scores
from dpo_pack.packing.lengths import Group
from dpo_pack.recipe.online import PairingRecipe
from dpo_pack.system.files import written_aside
from dpo_pack.system.process import printable

Position = tuple[int, int]  # (better, worse): positions in a prompt's completions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The result of one prompt in a phase."""

    draw: Draw
    completions: tuple[Completion, ...] = ()  # (): the generator failed
    failure: str | None = None  # the reason, if the generator or the judge failed
    scores: Scores | None = None  # [n] minus missing_eos_penalty; None: the generator or the judge failed
    pairs: tuple[Position, ...] = ()  # without ties and duplicates
    num_ties: int = 0  # proposed pairs whose scores differ by min_margin or less
    num_duplicates: int = 0  # completions with the same tokens as an earlier one


def make_pairs(
    draw: Draw, completions: tuple[Completion, ...], scores: Scores, rules: PairingRecipe, *, seed: int
) -> Outcome:
    """Pairs a prompt's completions, without those that equal an earlier one. scores: [n].

    The method `random` draws with `seed` and the number of the draw."""
    assert scores.shape == (len(completions),)
    is_finished = np.array([completion.is_finished for completion in completions])
    scores = scores - rules.missing_eos_penalty * ~is_finished
    first_places: dict[bytes, int] = {}
    for position, completion in enumerate(completions):
        first_places.setdefault(completion.ids.tobytes(), position)
    distinct = list(first_places.values())
    if len(distinct) > 1 and rules.type == "best_vs_worst":
        by_score = sorted(distinct, key=lambda position: (-scores[position], position))
        proposed = [(by_score[0], by_score[-1])]
    elif len(distinct) > 1 and rules.type == "random":
        rng = np.random.default_rng([seed, draw.number])
        one, other = rng.choice(distinct, 2, replace=False).tolist()
        proposed = [(one, other)]
    else:
        proposed = list(combinations(distinct, 2))
    ordered = [(one, other) if scores[one] >= scores[other] else (other, one) for one, other in proposed]
    pairs = tuple(pair for pair in ordered if scores[pair[0]] - scores[pair[1]] > rules.min_margin)
    return Outcome(
        draw=draw,
        completions=completions,
        scores=scores,
        pairs=pairs,
        num_ties=len(proposed) - len(pairs),
        num_duplicates=len(completions) - len(distinct),
    )


def run_phase(
    draws: Sequence[Draw], generator: Generator, judge: Judge, rules: PairingRecipe, *, seed: int
) -> list[Outcome]:
    outcomes = []
    answers = generator.generate(draws)
    for draw, answer, scores in zip(draws, answers, score_answers(draws, answers, judge), strict=True):
        completions = () if isinstance(answer, Failure) else answer
        if isinstance(scores, Failure):
            outcomes.append(Outcome(draw=draw, completions=completions, failure=printable(scores.reason)))
        else:
            outcomes.append(make_pairs(draw, completions, scores, rules, seed=seed))
    return outcomes


def score_answers(
    draws: Sequence[Draw], answers: Sequence[tuple[Completion, ...] | Failure], judge: Judge
) -> list[Scores | Failure]:
    """Returns the scores of each draw's completions, or the Failure of the generator or the judge."""
    rollouts = [
        Rollout(draw=draw, completions=answer)
        for draw, answer in zip(draws, answers, strict=True)
        if not isinstance(answer, Failure)
    ]
    remaining = iter(judge.score(rollouts) if rollouts else [])
    return [answer if isinstance(answer, Failure) else next(remaining) for answer in answers]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts over the run so far. A prompt counts once: as paired, unpaired, or one of the two failures."""

    prompts: int = 0
    paired: int = 0  # prompts with at least one pair
    unpaired: int = 0  # prompts without a pair: the completions are equal, or scores differ too little
    generator_failures: int = 0
    judge_failures: int = 0
    pairs: int = 0
    ties: int = 0
    duplicates: int = 0
    stale_pairs: int = 0  # pairs dropped because they were older than max_staleness_steps

    def add(self, outcomes: Sequence[Outcome]) -> None:
        self.prompts += len(outcomes)
        for outcome in outcomes:
            if not outcome.completions:
                self.generator_failures += 1
            elif outcome.scores is None:
                self.judge_failures += 1
            else:
                self.paired += bool(outcome.pairs)
                self.unpaired += not outcome.pairs
            self.pairs += len(outcome.pairs)
            self.ties += outcome.num_ties
            self.duplicates += outcome.num_duplicates


def phase_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns averages over a phase's completions, or (best, worst) over its prompts; {} if all failed."""
    answers = [outcome.completions for outcome in outcomes if outcome.completions]
    scores = [outcome.scores for outcome in outcomes if outcome.scores is not None]
    metrics: dict[str, float] = {}
    if answers:
        completions = [completion for answer in answers for completion in answer]
        distinct = [len({completion.ids.tobytes() for completion in answer}) for answer in answers]
        metrics |= {
            "online/completion_tokens": float(np.mean([len(c.ids) for c in completions])),
            "online/eos_rate": float(np.mean([c.is_finished for c in completions])),
            "online/distinct_rate": sum(distinct) / len(completions),
        }
    if scores:
        metrics |= {
            "online/scores": float(np.concatenate(scores).mean()),
            "online/scores_std": float(np.concatenate(scores).std()),
            "online/scores_best": float(np.mean([s.max() for s in scores])),
            "online/scores_worst": float(np.mean([s.min() for s in scores])),
        }
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingPair:
    """A pair that no step has trained on yet."""

    ids: Group
    prompt_index: int  # position in the training prompts
    margin: float  # score of chosen - score of rejected
    weights_step: int  # how many steps the policy had taken when it wrote the pair


def pairs_of(outcomes: Sequence[Outcome], *, weights_step: int) -> list[PendingPair]:
    return [
        PendingPair(
            ids=Group(
                context=outcome.draw.prompt.ids,
                completions=(outcome.completions[chosen].ids, outcome.completions[rejected].ids),
            ),
            prompt_index=outcome.draw.prompt_index,
            margin=float(outcome.scores[chosen] - outcome.scores[rejected]),
            weights_step=weights_step,
        )
        for outcome in outcomes
        if outcome.scores is not None
        for chosen, rejected in outcome.pairs
    ]


def pending_state(pairs: Sequence[PendingPair]) -> dict[str, Any]:
    """Returns the pairs as tensors: checkpoints are read without unpickling other objects."""
    parts = [part for pair in pairs for part in (pair.ids.context, *pair.ids.completions)]
    return {
        "tokens": torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *parts])),
        "lengths": torch.tensor([len(part) for part in parts], dtype=torch.int64),  # [3 P]
        "prompt_indices": torch.tensor([pair.prompt_index for pair in pairs], dtype=torch.int64),
        "margins": torch.tensor([pair.margin for pair in pairs], dtype=torch.float64),
        "weights_steps": torch.tensor([pair.weights_step for pair in pairs], dtype=torch.int64),
    }


def load_pending(state: dict[str, Any]) -> list[PendingPair]:
    ends = np.cumsum(state["lengths"].numpy())
    parts = np.split(state["tokens"].numpy(), ends)
    columns = (state[name].tolist() for name in ("prompt_indices", "margins", "weights_steps"))
    return [
        PendingPair(
            ids=Group(context=parts[3 * n], completions=(parts[3 * n + 1], parts[3 * n + 2])),
            prompt_index=prompt_index,
            margin=margin,
            weights_step=weights_step,
        )
        for n, (prompt_index, margin, weights_step) in enumerate(zip(*columns, strict=True))
    ]


_IDS = pa.list_(pa.int32())
# A row is a prompt with its completions and scores. `prompt_ids`, `chosen_ids` and `rejected_ids` are the
# tokens of its first pair; without a pair the last two are null. So `data.train` can read the directory, too
# (format `tokenized`; `data.on_bad_row: skip` leaves out prompts without a pair).
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # optimizer steps that the policy had taken
        ("draw", pa.int64()),  # number of the prompt's draw in the run, from 0
        ("row_number", pa.int64()),  # of the prompt in its data source, from 1
        ("prompt", pa.string()),
        ("completions", pa.list_(pa.string())),
        ("scores", pa.list_(pa.float64())),  # minus the missing-EOS penalty; null if the prompt failed
        ("is_finished", pa.list_(pa.bool_())),
        ("failure", pa.string()),
        ("completion_ids", pa.list_(_IDS)),
        ("prompt_ids", _IDS),
        ("chosen_ids", _IDS),
        ("rejected_ids", _IDS),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLog:
    """Writes a run's rollouts into a directory: one Parquet file for each phase, complete or absent."""

    directory: Path

    def write(self, phase: int, step: int, outcomes: Sequence[Outcome]) -> None:
        """Writes the outcomes of phase `phase`, from 0; replaces a file of that phase. Raises CacheError."""
        rows = []
        for outcome in outcomes:
            draw, completions = outcome.draw, outcome.completions
            ids = [completion.ids.tolist() for completion in completions]
            chosen, rejected = (ids[n] for n in outcome.pairs[0]) if outcome.pairs else (None, None)
            rows.append(
                {
                    "step": step,
                    "draw": draw.number,
                    "row_number": draw.prompt.row_number,
                    "prompt": draw.prompt.text,
                    "completions": [completion.text for completion in completions],
                    "scores": None if outcome.scores is None else outcome.scores.tolist(),
                    "is_finished": [completion.is_finished for completion in completions],
                    "failure": outcome.failure,
                    "completion_ids": ids,
                    "prompt_ids": draw.prompt.ids.tolist(),
                    "chosen_ids": chosen,
                    "rejected_ids": rejected,
                }
            )
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        with written_aside(self.directory / f"part-{phase:06d}.parquet") as temporary:
            pq.write_table(table, temporary, write_page_checksum=True)

    def drop_from(self, phase: int) -> None:
        """Deletes the files of `phase` and of later phases, because a resumed run writes them again."""
        for part in self.directory.glob("part-*.parquet"):
            if int(part.stem.removeprefix("part-")) >= phase:
                part.unlink()
