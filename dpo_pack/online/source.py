"""Global batches of pairs that the current policy has written.

A phase answers `rollouts_per_update` prompts and puts the pairs into a queue. A step takes `pairs_per_step`
pairs from the front; the next phase runs when the queue has too few. The ranks divide the prompts of a phase,
and every rank gets all outcomes, so all have the same queue and counts.

Legend: P pairs of a step, N prompts.
"""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dpo_pack.data.beginnings import table_of
from dpo_pack.data.sources import Data
from dpo_pack.data.store import PairTable, content_key, join_pairs
from dpo_pack.online.interface import Draw, Generator, Judge
from dpo_pack.online.phases import (
    Outcome,
    PendingPair,
    RolloutLog,
    Tally,
    load_pending,
    pairs_of,
    pending_state,
    phase_metrics,
    run_phase,
)
from dpo_pack.packing.lengths import IntArray, ModelShape
from dpo_pack.packing.plan import epoch_order, plan_epoch
from dpo_pack.recipe.online import OnlineRecipe
from dpo_pack.recipe.schema import Recipe
from dpo_pack.system import ranks
from dpo_pack.system.errors import RunError
from dpo_pack.training.batches import GlobalBatch, RowBuilder, global_batch

# The run stops after this many successive phases without a pair, because otherwise it might never end.
FRUITLESS_PHASES = 10


@dataclass(eq=False)
class OnlineSource:
    """Yields a global batch for each step."""

    data: Data
    _: KW_ONLY
    generator: Generator
    judge: Judge
    recipe: Recipe
    online: OnlineRecipe  # the section of `recipe`
    builder: Callable[[PairTable], RowBuilder]
    token_budget: int
    shape: ModelShape | None  # of the policy, to compute the FLOPs of rows; None: batches are padded
    equal_rows: bool  # True: a rank with fewer rows than another adds idle rows (gradient 0)
    log: RolloutLog | None  # None: another rank writes it
    tally: Tally = field(default_factory=Tally)
    pending: list[PendingPair] = field(default_factory=list)
    next_step: int = 0
    num_draws: int = 0
    num_phases: int = 0

    @property
    def num_steps(self) -> int:
        return self.recipe.train.max_steps or 0  # the recipe is refused without a number

    @property
    def steps_fingerprint(self) -> str:
        settings = {
            "pairs_per_step": self.recipe.packing.pairs_per_step,
            "rollouts_per_update": self.online.rollouts_per_update,
            "max_staleness_steps": self.online.max_staleness_steps,
            "num_steps": self.num_steps,
            "shuffle": self.recipe.data.shuffle,
            "seed": self.recipe.seed,
        }
        return content_key([self.data.fingerprint, settings])

    def __iter__(self) -> Iterator[GlobalBatch]:
        if self.log is not None:
            self.log.drop_from(self.num_phases)
        size = self.recipe.packing.pairs_per_step
        while self.next_step < self.num_steps:
            step = self.next_step
            metrics = self._refill(step)
            pairs, self.pending = self.pending[:size], self.pending[size:]
            self.next_step += 1
            yield self._batch(pairs, metrics, step)

    def prepare_next(self) -> None:
        """Nothing: the policy can write the next pairs only after this step's update."""

    def _refill(self, step: int) -> dict[str, float]:
        """Runs phases until the queue holds a step's pairs; returns averages of the last, or {}."""
        bound = self.online.max_staleness_steps
        if bound is not None:
            # Otherwise new pairs would be dropped at once. A server's weights get older with each step, but
            # recipe/schema.py refuses a bound that they would exceed.
            assert step - self.generator.weights_step(step) <= bound
            fresh = [pair for pair in self.pending if step - pair.weights_step <= bound]
            self.tally.stale_pairs += len(self.pending) - len(fresh)
            self.pending = fresh
        metrics: dict[str, float] = {}
        num_fruitless = 0
        while len(self.pending) < self.recipe.packing.pairs_per_step:
            outcomes = self._phase(step)
            made = pairs_of(outcomes, weights_step=self.generator.weights_step(step))
            self.pending += made
            metrics = phase_metrics(outcomes)
            num_fruitless = 0 if made else num_fruitless + 1
            if num_fruitless == FRUITLESS_PHASES:
                failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
                reason = (
                    "a prompt's completions are equal, or their scores differ by no more than "
                    "online.pairing.min_margin; raise online.temperature or online.completions_per_prompt"
                )
                if failures:
                    reason = f"{len(failures)} failed; repair what the first one names: {failures[0]}"
                raise RunError(
                    f"step {step + 1}: {len(outcomes)} prompts gave no pair, {FRUITLESS_PHASES} times in "
                    f"succession (rollouts.parquet has every answer and reason); the last time {reason}"
                )
        return metrics

    def _order(self, epoch: int) -> IntArray:
        sources, shuffle, seed = self.data.train.source_indices, self.recipe.data.shuffle, self.recipe.seed
        return epoch_order(sources, self.data.source_weights, shuffle=shuffle, seed=seed, epoch=epoch)

    @cached_property
    def _draws_each_epoch(self) -> int:
        return len(self._order(0))

    def _phase(self, step: int) -> list[Outcome]:
        draws = list[Draw]()
        for number in range(self.num_draws, self.num_draws + self.online.rollouts_per_update):
            epoch, place = divmod(number, self._draws_each_epoch)
            if place == 0 or not draws:
                order = self._order(epoch)
            index = int(order[place])
            draws.append(Draw(number=number, prompt_index=index, prompt=self.data.prompts[index]))
        rules, seed = self.online.pairing, self.recipe.seed
        outcomes = ranks.share_out(
            draws, lambda mine: run_phase(mine, self.generator, self.judge, rules, seed=seed)
        )
        self.tally.add(outcomes)
        if self.log is not None:
            self.log.write(self.num_phases, step, outcomes)
        self.num_draws += len(draws)
        self.num_phases += 1
        return outcomes

    def _batch(self, pairs: list[PendingPair], metrics: dict[str, float], step: int) -> GlobalBatch:
        ids, scores = [pair.ids for pair in pairs], [pair.margin for pair in pairs]
        table = table_of([join_pairs(ids, [1.0] * len(pairs), [0] * len(pairs), score_margins=scores)])
        builder = self.builder(table)
        plan = plan_epoch(
            builder.sizes(self.shape),
            order=np.arange(len(pairs)),
            token_budget=self.token_budget,
            pairs_per_step=len(pairs),
            num_ranks=ranks.num_ranks(),
            equal_rows=self.equal_rows,
        )
        batch = global_batch(builder, plan, 0, epoch=self.num_draws / self._draws_each_epoch)
        # Other code expects the pairs' positions in data.train. Here these are positions of their prompts.
        prompt_indices = np.array([pair.prompt_index for pair in pairs], dtype=np.int64)
        staleness = np.array([step - pair.weights_step for pair in pairs])
        return replace(
            batch,
            rows=[replace(row, pair_indices=prompt_indices[row.pair_indices]) for row in batch.rows],
            row_pairs=[prompt_indices[row] for row in batch.row_pairs],
            metrics={
                **metrics,
                "online/win_margin": float(np.mean([pair.margin for pair in pairs])),
                "online/staleness": float(staleness.mean()),
                "online/staleness_max": float(staleness.max()),
                "online/pending_pairs": float(len(self.pending)),
                **{f"online/total_{name}": float(count) for name, count in asdict(self.tally).items()},
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "next_step": self.next_step,
            "num_draws": self.num_draws,
            "num_phases": self.num_phases,
            "tally": asdict(self.tally),
            "pending": pending_state(self.pending),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_step = int(state["next_step"])
        self.num_draws = int(state["num_draws"])
        self.num_phases = int(state["num_phases"])
        self.tally = Tally(**state["tally"])
        self.pending = load_pending(state["pending"])
