"""The log of a run: describes it, writes metrics.jsonl, trackers and totals, prints lines and warnings."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpo_pack.data.sources import HELD_OUT
from dpo_pack.data.store import PairTable
from dpo_pack.losses.objective import Objective, PairLogps
from dpo_pack.model.config import routes_tokens
from dpo_pack.model.facts import router_sentence
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.recipe.load import source_names
from dpo_pack.recipe.training import LOSSES
from dpo_pack.run.pairs import trained_pair_sizes
from dpo_pack.run.run_dir import RunDir
from dpo_pack.run.setup import Setup
from dpo_pack.run.state import TrainState
from dpo_pack.system.console import TrainingLines, format_count, print_detail
from dpo_pack.system.errors import RunError
from dpo_pack.training.batches import GlobalBatch, OfflineSource
from dpo_pack.training.health import RunFacts, examine
from dpo_pack.training.optim import NonfiniteGuard
from dpo_pack.training.records import MetricsLog, PairLog, end_trackers, start_trackers, track
from dpo_pack.training.throughput import Meter, PhaseClock, device_peak


class RunLog:
    """Writes and prints the results of steps and evaluations."""

    def __init__(
        self,
        setup: Setup,
        run: RunDir,
        loaded: LoadedModel,
        planned: OfflineSource | None,
        *,
        num_steps: int,
        offset: int,
        begun: float,
    ) -> None:
        """`offset`: the bytes of metrics.jsonl that an earlier process wrote and that stay. `begun`:
        time.monotonic() at the start of the run. `planned`: None for an online run."""
        recipe, train, balance = setup.recipe, setup.data.train, setup.policy_facts.balance
        self.setup, self.run, self.offset, self.begun = setup, run, offset, begun
        self.clock = PhaseClock(device=setup.device)
        self.startup_seconds = self.reference_seconds = self.eval_seconds = 0.0
        self.file: MetricsLog | None = None  # in a `writing` block
        self.lines = TrainingLines(setup.console, num_steps=num_steps)
        self.guard = NonfiniteGuard(stops=recipe.train.stop_on_nonfinite, device=setup.device)
        self.facts = RunFacts(
            num_steps=num_steps,
            beta=recipe.loss.beta,
            initial_loss=initial_loss(setup.objective, train, [name for name, _ in recipe.loss.terms]),
            router_aux_coef=0.0 if balance is None else balance.coefficient,
        )
        self.meter = Meter()  # generation and judges take most of an online run's time
        if planned is not None:
            is_adapter = loaded.adapter is not None
            self.meter = Meter(
                sizes=trained_pair_sizes(setup, planned, trains_adapter=is_adapter),
                peak_flops=device_peak(setup.device, loaded.scorer.compute_dtype),
            )
        self.pairs: PairLog | None = None  # writes pairs.parquet
        if recipe.logging.pairs:
            self.pairs = PairLog(
                directory=run.pairs,
                table=train,
                source_names=source_names(recipe.data.train),
                beta=recipe.loss.beta,
                has_reference=setup.objective.needs_reference,
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Opens metrics.jsonl for the `with` block, and first removes its lines after `offset` bytes."""
        log = MetricsLog(self.run.metrics, offset=self.offset)
        with contextlib.closing(log) as self.file, self.lines.moving():
            yield

    def begin_tracking(self, step: int) -> None:
        """Starts the recipe's trackers, or goes on with those of the run that resumes after `step`."""
        run, recipe = self.run, self.setup.recipe
        if "tracking_id" not in run.info:  # it stays the same each time the run resumes
            run.update(tracking_id=uuid.uuid4().hex[:8])
        mlflow_run = start_trackers(
            self.setup.accelerator,
            recipe.model_dump(mode="json"),
            run.trackers,
            name=recipe.logging.run_name or recipe.output_dir.name,
            run_id=str(run.info["tracking_id"]),
            mlflow_run=run.info.get("mlflow_run") if run.has_own_checkpoint else None,
            resumed_after=step if run.has_own_checkpoint else None,
        )
        if mlflow_run is not None:
            run.update(mlflow_run=mlflow_run)

    def end_step(self, state: TrainState, batch: GlobalBatch, values: Tensor) -> None:
        """Adds the step's time and FLOPs to the totals, and the values of this rank's pairs to `pairs`."""
        seconds = time.monotonic() - self.clock.begun
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
            self.setup.console.print(f"  Warning: {warning}")

    def write_evaluation(self, step: int, name: str, result: Mapping[str, Any], sentence: str) -> None:
        """Writes the result of one held-out set to metrics.jsonl and trackers, and prints `sentence`."""
        self._write({"split": "eval", "source": name, "step": step, **result})
        where = "" if name == HELD_OUT else f" ({name})"
        self.setup.console.print(f"  held out{where} after step {step}: {sentence}")

    def _write(self, record: dict[str, Any]) -> None:
        assert self.file is not None
        self.file.write(record)
        if self.setup.recipe.logging.trackers:
            sources = list(self.setup.data.eval_prompts or self.setup.data.eval)
            track(self.setup.accelerator, record, sources)

    def report_nonfinite(self) -> None:
        """Prints each step that made no update because of a non-finite value; writes its pairs to a file.

        Waits for the device; every rank must call it. With `train.stop_on_nonfinite` it does not print the
        first such step, but raises RunError.
        """
        sources = source_names(self.setup.recipe.data.train)
        for message in self.guard.report(self.run.root, self.setup.data.train, sources):
            if self.guard.stops:
                raise RunError(message)
            self.setup.console.print(f"  {message}")

    def totals(self, state: TrainState) -> dict[str, Any]:
        """Returns run.json's totals. All seconds except `train_seconds` are those of this process only."""
        train_seconds = max(state.train_seconds, 1e-9)
        peak = self.meter.peak_flops
        return {
            **self.run.info.get("totals", {}),
            "steps": state.step,
            "pairs": state.num_pairs,
            "tokens": state.num_tokens,
            "seconds": time.monotonic() - self.begun,
            "startup_seconds": self.startup_seconds,
            "reference_seconds": self.reference_seconds,
            "train_seconds": state.train_seconds,
            "eval_seconds": self.eval_seconds,
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
        end_trackers(self.setup.accelerator)


def initial_loss(objective: Objective, table: PairTable, loss_names: Sequence[str]) -> float | None:
    """Returns the loss of a policy that equals its reference; None if this loss depends on log-probs."""
    depends = any(name not in LOSSES or not LOSSES[name].needs_reference for name in loss_names)
    if objective.weighting is not None or depends:
        return None
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    same = PairLogps(chosen=zero, rejected=zero, chosen_tokens=one, rejected_tokens=one)
    return float(objective(same, same, mean_chosen_tokens=1.0)) * float(table.weights.max())


def describe_training(setup: Setup, plan: PackingPlan | None, *, num_steps: int) -> None:
    """Prints the steps, and notes on surprising settings. `plan`: of the first epoch, if any."""
    recipe, console = setup.recipe, setup.console
    optim, packing = recipe.optim, recipe.packing
    loss = " + ".join(f"{weight:g} {name}" if weight != 1 else name for name, weight in recipe.loss.terms)
    warmup = optim.num_warmup_steps(num_steps)
    warm_up = f", {warmup:,} step{'s' if warmup > 1 else ''} of warm-up" if warmup else ", no warm-up"
    console.print(
        f"Training: {num_steps:,} steps of {packing.pairs_per_step} pairs, "
        f"{packing.mode} rows of up to {packing.token_budget:,} tokens; "
        f"loss {loss}, beta {recipe.loss.beta:g}, lr {optim.lr:g} {optim.schedule}{warm_up}"
    )
    if recipe.checkpoint.every_steps is None:
        console.print(
            "  checkpoints: only if interrupted; after a crash the run begins anew (checkpoint.every_steps)"
        )
    if packing.share_prompt and not recipe.shares_prompts:
        console.print("Note: prompts are not shared, because model.lora.dropout is above 0")
    oversize = () if plan is None else plan.oversize_pairs
    if plan is not None and len(oversize):
        longest = int(plan.sizes.tokens[oversize].max())
        console.print(
            f"Note: {len(oversize):,} pairs exceed packing.token_budget ({packing.token_budget:,}), so "
            f"each of them gets its own row; the longest has {longest:,} tokens; nothing is cut"
        )


def describe_policy(setup: Setup, loaded: LoadedModel) -> None:
    """Prints the policy as it is loaded, and how it computes."""
    console, facts, quantize = setup.console, setup.policy_facts, setup.policy_facts.settings.quantize
    precision, attention = facts.precision, loaded.attention
    parameters = list(loaded.scorer.parameters())
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    # Of weights in 4 bits, two count as one element.
    num_parameters = sum(p.numel() for p in parameters)
    size = format_count(num_parameters if quantize is None else facts.num_parameters + num_trained)
    size += " parameters"
    if loaded.adapter is not None:
        size += f", of which the adapter's {format_count(num_trained)} are trained"
    numbers = str(precision.parameters)
    numbers += "" if quantize is None else f" with linear layers in {quantize}"
    numbers += "" if precision.autocast is None else f" with {precision.autocast} autocast"
    numbers += "" if precision.gathered is None else f" gathered in {precision.gathered}"
    console.print(
        f"Policy: {setup.recipe.model.path}, {size}, {numbers.replace('torch.', '')} on {setup.device}; "
        f"attention: {attention.name}{'; layers: compiled' if loaded.scorer.is_compiled else ''}"
    )
    for note in () if loaded.adapter is None else loaded.adapter.notes:
        console.print(note)
    # On a GPU a slower attention backend costs money, so the reason is always printed there.
    say_why = console.print if setup.device.type == "cuda" else functools.partial(print_detail, console)
    say_why(f"  attention is {attention.name}: {attention.reason}")
    if loaded.not_compiled is not None:
        say_why(f"  torch.compile failed, so the model runs uncompiled: {loaded.not_compiled}")
    for kernel in loaded.kernels:
        say_why(f"  recurrent layers: {kernel}")
    if routes_tokens(loaded.model.config):
        console.print(router_sentence(loaded.model, setup.recipe.loss.router_aux_coef, facts.balance))
