"""Records a run: writes metrics.jsonl, trackers and totals; prints lines and warnings on the console."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from dpo_pack.data.store import PairTable
from dpo_pack.losses import Objective, PairLogps, ScoredPairs, weighted_losses
from dpo_pack.recipe.load import source_names
from dpo_pack.run.checkpoint.state import TrainState
from dpo_pack.run.prepare import Prepared
from dpo_pack.run.run_dir import RunDir
from dpo_pack.system.errors import RunError
from dpo_pack.system.progress import TrainingLines
from dpo_pack.training.batches import GlobalBatch
from dpo_pack.training.health import RunFacts, examine
from dpo_pack.training.metrics import PairValues
from dpo_pack.training.nonfinite import NonfiniteGuard
from dpo_pack.training.pair_log import PairLog
from dpo_pack.training.throughput import Meter, PhaseClock
from dpo_pack.training.trackers import MetricsLog, end_trackers, track, tracked_prefix


@dataclass(slots=True, kw_only=True)
class Seconds:
    """The start time of this process, and the seconds that it spent outside of steps."""

    begun: float  # time.monotonic() at the start of the run
    startup: float = 0.0
    reference: float = 0.0
    evaluation: float = 0.0


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Writes and prints the results of steps and evaluations."""

    prepared: Prepared
    console: Console
    run: RunDir
    every_steps: int  # number of steps from one logged step to the next
    lines: TrainingLines
    clock: PhaseClock
    meter: Meter
    facts: RunFacts
    guard: NonfiniteGuard
    seconds: Seconds
    pairs: PairLog | None  # writes pairs.parquet
    offset: int  # bytes of metrics.jsonl that an earlier process wrote and that stay
    log: MetricsLog | None = None
    step_begun: float = 0.0

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Opens metrics.jsonl for the `with` block, and first removes its lines after `offset` bytes."""
        log = MetricsLog(self.run.metrics, offset=self.offset)
        with contextlib.closing(log) as self.log, self.lines.moving():
            yield

    @property
    def written(self) -> tuple[int, int]:
        """The present length of metrics.jsonl in bytes, and the CRC-32 of these bytes."""
        assert self.log is not None
        return self.log.offset, self.log.crc32

    def begin_step(self) -> None:
        """Starts the clock of the next step. The time to build the step's rows counts too."""
        self.step_begun = time.monotonic()
        self.clock.restart()

    def end_step(self, state: TrainState, batch: GlobalBatch, values: PairValues) -> None:
        """Adds the step's time and FLOPs to the totals, and the values of this rank's pairs to `pairs`."""
        seconds = time.monotonic() - self.step_begun
        state.train_seconds += seconds
        state.num_flops += self.meter.add(
            batch.row_pairs, pairs=batch.num_pairs, tokens=batch.num_tokens, seconds=seconds
        )
        self.lines.advance(state.step, state.train_seconds)
        if self.pairs is not None:
            self.pairs.add(state.step, batch.epoch, batch.pair_indices, values, num_pairs=batch.num_pairs)

    def write_step(self, state: TrainState, record: dict[str, Any]) -> None:
        """Writes and prints the line of a logged step; prints warnings that follow from the lines so far."""
        record |= self.meter.take()
        state.health, warnings = examine(state.health, record, self.facts)
        self._write(record | ({"warnings": warnings} if warnings else {}))
        self.lines.show(record)
        for warning in warnings:
            self.console.print(f"  Warning: {warning}")

    def write_evaluation(self, step: int, name: str, result: Mapping[str, Any], sentence: str) -> None:
        """Writes the result of one held-out set to metrics.jsonl and trackers, and prints `sentence`."""
        self._write({"split": "eval", "source": name, "step": step, **result})
        self.console.print(f"  held out ({name}) after step {step}: {sentence}")

    def _write(self, record: dict[str, Any]) -> None:
        assert self.log is not None
        self.log.write(record)
        prefix = tracked_prefix(record, self.prepared.eval_names)
        breakdowns = self.prepared.recipe.logging.breakdowns
        track(self.prepared.accelerator, record, prefix=prefix, breakdowns=breakdowns)

    def report_nonfinite(self) -> None:
        """Prints each step that made no update because of a non-finite value; writes its pairs to a file.

        Waits for the device; every rank must call it. With `train.stop_on_nonfinite` it does not print the
        first such step, but raises RunError.
        """
        sources = source_names(self.prepared.recipe.data.train)
        for message in self.guard.report(self.run.root, self.prepared.data.train, sources):
            if self.guard.stops:
                raise RunError(message)
            self.console.print(f"  {message}")

    def totals(self, state: TrainState) -> dict[str, Any]:
        """Returns run.json's totals. All seconds except `train_seconds` are those of this process only."""
        train_seconds = max(state.train_seconds, 1e-9)
        peak = self.meter.peak_flops
        return {
            **self.run.info.get("totals", {}),
            "steps": state.step,
            "pairs": state.num_pairs,
            "tokens": state.num_tokens,
            "seconds": time.monotonic() - self.seconds.begun,
            "startup_seconds": self.seconds.startup,
            "reference_seconds": self.seconds.reference,
            "train_seconds": state.train_seconds,
            "eval_seconds": self.seconds.evaluation,
            "pairs_per_second": state.num_pairs / train_seconds,
            "tokens_per_second": state.num_tokens / train_seconds,
            **({} if peak is None else {"mfu": state.num_flops / train_seconds / peak}),
        }

    def flush_pairs(self) -> None:
        """Writes the pairs in memory to pairs.parquet. Every rank must call it."""
        if self.pairs is not None:
            self.pairs.flush()

    def close(self) -> None:
        """Writes the remaining pairs, sends the remaining metrics to the trackers and closes them."""
        self.flush_pairs()
        end_trackers(self.prepared.accelerator)


def initial_loss(objective: Objective, table: PairTable, loss_names: Sequence[str]) -> float | None:
    """Returns the loss of a policy that equals its reference; None if this loss depends on log-probs."""
    has_own_loss = any(":" in name for name in loss_names)
    uses_reference = all(loss.needs_reference for loss, _ in objective.terms)
    if objective.weighting is not None or has_own_loss or not uses_reference:
        return None
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    same = PairLogps(chosen=zero, rejected=zero, chosen_tokens=one, rejected_tokens=one)
    weight = torch.from_numpy(table.weights.max(keepdims=True)).double()
    pair = ScoredPairs(policy=same, reference=same, pair_weights=weight)
    return float(weighted_losses(objective, pair, mean_chosen_tokens=1.0))
