"""A phase: the policy as it is answers prompts, the judge scores the answers, pairs come out.

Whatever a prompt comes to is in exactly one of the phase's outcomes, and so is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpo_pack.online.interface import Draw, Failure, Generator, Judge, Rollout, Scores
from dpo_pack.online.pairing import Pairing, PairingSettings, make_pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What became of one prompt."""

    draw: Draw
    rollout: Rollout | None  # None: the generator failed
    pairing: Pairing | None  # None: the generator or the judge failed
    failure: str | None  # why

    @property
    def scores(self) -> Scores | None:
        return None if self.pairing is None else self.pairing.scores


def run_phase(
    draws: Sequence[Draw], generator: Generator, judge: Judge, pairing: PairingSettings
) -> list[Outcome]:
    """The outcomes of `draws`, in their order."""
    answered = generator.generate(draws)
    rollouts = {
        place: Rollout(draw=draw, completions=completions)
        for place, (draw, completions) in enumerate(zip(draws, answered, strict=True))
        if not isinstance(completions, Failure)
    }
    scored = judge.score(list(rollouts.values())) if rollouts else []
    scores_by_place = dict(zip(rollouts, scored, strict=True))
    outcomes = []
    for place, draw in enumerate(draws):
        rollout = rollouts.get(place)
        if rollout is None:
            failed = answered[place]
            assert isinstance(failed, Failure)
            outcomes.append(Outcome(draw=draw, rollout=None, pairing=None, failure=failed.reason))
            continue
        scores = scores_by_place[place]
        if isinstance(scores, Failure):
            outcomes.append(Outcome(draw=draw, rollout=rollout, pairing=None, failure=scores.reason))
            continue
        pairs = make_pairs(rollout.completions, scores, pairing, draw_number=draw.number)
        outcomes.append(Outcome(draw=draw, rollout=rollout, pairing=pairs, failure=None))
    return outcomes


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of a run so far. Every prompt is in one of `paired`, `unpaired` and the failures."""

    prompts: int = 0
    paired: int = 0  # prompts with at least one pair
    unpaired: int = 0  # scored prompts whose completions are all equal or tied
    generator_failures: int = 0
    judge_failures: int = 0
    pairs: int = 0
    ties: int = 0
    duplicates: int = 0
    stale_pairs: int = 0  # made and never trained on: over the bound on staleness

    def add(self, outcomes: Sequence[Outcome]) -> None:
        self.prompts += len(outcomes)
        for outcome in outcomes:
            if outcome.rollout is None:
                self.generator_failures += 1
            elif outcome.pairing is None:
                self.judge_failures += 1
            else:
                pairing = outcome.pairing
                self.paired += bool(pairing.pairs)
                self.unpaired += not pairing.pairs
                self.pairs += len(pairing.pairs)
                self.ties += pairing.num_ties
                self.duplicates += pairing.num_duplicates


def phase_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Averages over the completions of a phase; empty where every prompt failed.

    Scores are after the missing-EOS penalty; `best` and `worst` are of each prompt's completions.
    """
    scored = [outcome for outcome in outcomes if outcome.pairing is not None]
    answered = [outcome.rollout for outcome in outcomes if outcome.rollout is not None]
    metrics: dict[str, float] = {}
    if answered:
        completions = [completion for rollout in answered for completion in rollout.completions]
        distinct = [len({c.ids.tobytes() for c in rollout.completions}) for rollout in answered]
        metrics |= {
            "online/completion_tokens": float(np.mean([len(c.ids) for c in completions])),
            "online/eos_rate": float(np.mean([c.is_finished for c in completions])),
            "online/distinct_rate": sum(distinct) / len(completions),
        }
    if scored:
        scores = [outcome.pairing.scores for outcome in scored if outcome.pairing is not None]
        metrics |= {
            "online/scores": float(np.concatenate(scores).mean()),
            "online/scores_std": float(np.concatenate(scores).std()),
            "online/scores_best": float(np.mean([s.max() for s in scores])),
            "online/scores_worst": float(np.mean([s.min() for s in scores])),
        }
    return metrics
