"""The log of a run: describes it, prints lines and warnings, and writes metrics.jsonl, totals, pairs.parquet
and the trackers that the recipe names.

pairs.parquet is a directory: the tables of many steps are one file of it, complete or absent. A checkpoint
first writes what is in memory, and a resumed run first removes the lines of steps after its checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch import Tensor

from dpo_pack.data.sources import HELD_OUT
from dpo_pack.data.store import PairTable, pair_lengths
from dpo_pack.losses.preference import PairLogps
from dpo_pack.model.config import routes_tokens
from dpo_pack.model.facts import router_sentence
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.packing.lengths import ADAPTER_PASSES, TRAINING_PASSES, FloatArray, pair_sizes
from dpo_pack.recipe.data import source_names
from dpo_pack.recipe.text import without_servers
from dpo_pack.recipe.training import LOSSES
from dpo_pack.run.models import Setup
from dpo_pack.run.run_dir import RunDir
from dpo_pack.run.setup import setting_warnings
from dpo_pack.run.state import TrainState
from dpo_pack.system import ranks
from dpo_pack.system.console import TrainingLines, format_count, print_detail
from dpo_pack.system.errors import RunError, first_line
from dpo_pack.system.files import Json, leaves, writing, written_aside
from dpo_pack.system.process import counted
from dpo_pack.training.batches import GlobalBatch, OfflineSource
from dpo_pack.training.health import RunFacts, examine
from dpo_pack.training.metrics import NAMES
from dpo_pack.training.optim import NonfiniteGuard
from dpo_pack.training.throughput import Meter, PhaseClock, device_peak

logger = logging.getLogger(__name__)

_MOST_WAITING = 16_384  # with this many pairs of all ranks in memory, they are written
_LOGPS = {
    "chosen_logps": "policy_chosen",
    "rejected_logps": "policy_rejected",
    "reference_chosen_logps": "reference_chosen",
    "reference_rejected_logps": "reference_rejected",
}
_PART = re.compile(r"part-(\d+)-(\d+)\.parquet")


class RunLog:
    """Writes and prints the results of steps and evaluations."""

    def __init__(
        self,
        setup: Setup,
        run: RunDir,
        state: TrainState,
        *,
        offset: int,
        begun: float,
        reference_seconds: float,
    ) -> None:
        """`offset`: so many bytes of metrics.jsonl are kept; those behind were written after the checkpoint
        from which the run resumes, and are written again. `begun`: time.monotonic() at the run's start."""
        self.setup, self.run, self.state, self.begun = setup, run, state, begun
        # A run that resumes from a checkpoint in another directory begins a new metrics.jsonl.
        self.offset = offset if run.has_own_checkpoint else 0
        recipe, self.sources = setup.recipe, source_names(setup.recipe.data.train)
        self.clock = PhaseClock(device=setup.device)
        self.startup_seconds, self.reference_seconds, self.eval_seconds = 0.0, reference_seconds, 0.0
        self.file: MetricsLog | None = None  # in a `writing` block
        self.lines = TrainingLines(setup.console, num_steps=state.source.num_steps)
        # FLOPs are not counted of an online run: generation and judges take most of its time.
        source, scorer, sizes, peak = state.source, state.scorer, None, None
        if isinstance(source, OfflineSource):
            builder, sizes, shape = source.builder, source.first_plan.sizes, setup.policy_facts.shape
            if scorer.adapter is not None or not builder.is_packed:
                shares = builder.is_packed and builder.share_prompt
                passes = TRAINING_PASSES if scorer.adapter is None else ADAPTER_PASSES
                lengths = pair_lengths(builder.table, shape)
                sizes = pair_sizes(lengths, shape, share_prompt=shares, passes=passes)
            peak = device_peak(setup.device, scorer.compute_dtype)
        self.meter = Meter(sizes=sizes, peak_flops=peak)
        self.guard = NonfiniteGuard(stops=recipe.train.stop_on_nonfinite)
        self.pairs: PairLog | None = None
        if recipe.logging.pairs:
            train, beta, has_reference = setup.data.train, recipe.loss.beta, setup.objective.needs_reference
            self.pairs = PairLog(run.pairs, train, self.sources, beta=beta, has_reference=has_reference)

    @functools.cached_property
    def facts(self) -> RunFacts:
        """What the rules of warnings need to know of the run."""
        recipe, objective, balance = self.setup.recipe, self.setup.objective, self.setup.policy_facts.balance
        losses = [LOSSES.get(name) for name, _ in recipe.loss.terms]
        initial_loss = None  # of a policy that equals its reference, if it does not depend on log-probs
        if objective.weighting is None and all(loss is not None and loss.needs_reference for loss in losses):
            zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
            same = PairLogps(chosen=zero, rejected=zero, chosen_tokens=one, rejected_tokens=one)
            initial_loss = float(objective(same, same, mean_chosen_tokens=1.0))
            initial_loss *= float(self.setup.data.train.weights.max())
        return RunFacts(
            num_steps=self.state.source.num_steps,
            beta=recipe.loss.beta,
            initial_loss=initial_loss,
            router_aux_coef=0.0 if balance is None else balance.coefficient,
        )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Opens metrics.jsonl for the `with` block, and first removes its lines after `offset` bytes."""
        log = MetricsLog(self.run.metrics, offset=self.offset)
        with contextlib.closing(log) as self.file, self.lines.moving():
            yield

    def begin_tracking(self) -> None:
        """Starts the recipe's trackers, or goes on with those of the run that resumes."""
        recipe, settings = self.setup.recipe, without_servers(self.setup.recipe.model_dump(mode="json"))
        name = recipe.logging.run_name or recipe.output_dir.name
        start_trackers(self.setup.accelerator, settings, self.run, name=name, step=self.state.step)

    def end_step(self, batch: GlobalBatch, values: Tensor) -> None:
        """Adds the step's time and FLOPs to the totals, and the values of this rank's pairs to `pairs`."""
        state, seconds = self.state, time.monotonic() - self.clock.begun
        state.train_seconds += seconds
        state.num_flops += self.meter.add(
            batch.row_pairs, pairs=batch.num_pairs, tokens=batch.num_tokens, seconds=seconds
        )
        self.lines.advance(state.step, state.train_seconds)
        if self.pairs is not None:
            scores = np.concatenate([np.zeros(0), *(row.score_margins for row in batch.rows)])
            pairs = np.column_stack((batch.pair_indices, scores))
            self.pairs.add(state.step, batch.epoch, pairs, values, num_pairs=batch.num_pairs)

    def write_step(self, record: Json) -> None:
        """Writes and prints the line of a logged step; prints warnings that follow from the lines so far."""
        record |= self.meter.take()
        self.state.health, warnings = examine(self.state.health, record, self.facts)
        self._write(record | ({"warnings": warnings} if warnings else {}))
        self.lines.show(record)
        for warning in warnings:
            self.setup.console.print(f"  Warning: {warning}")

    def write_evaluation(self, name: str, result: Mapping[str, Any], sentence: str) -> None:
        """Writes the result of one held-out set to metrics.jsonl and trackers, and prints `sentence`."""
        seen = {"step": self.state.step, "pairs_seen": self.state.num_pairs}
        self._write({"split": "eval", "source": name, **seen, **result})
        where = "" if name == HELD_OUT else f" ({name})"
        self.setup.console.print(f"  held out{where} after step {self.state.step}: {sentence}")

    def _write(self, record: Json) -> None:
        assert self.file is not None
        self.file.write(record)
        if self.setup.recipe.logging.trackers:
            sources = list(self.setup.data.eval_prompts or self.setup.data.eval)
            track(self.setup.accelerator, record, sources)

    def report_nonfinite(self) -> None:
        """Prints the steps without an update, or raises RunError. Every rank must call it; it waits."""
        for message in self.guard.report(self.run.root, self.setup.data.train, self.sources):
            if self.guard.stops:
                raise RunError(message)
            self.setup.console.print(f"  {message}")

    def totals(self) -> Json:
        """Returns run.json's totals. All seconds except `train_seconds` are those of this process only."""
        state, peak = self.state, self.meter.peak_flops
        train_seconds = max(state.train_seconds, 1e-9)
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


# -------------------------------------------------------------------------------------------------- the files


class MetricsLog:
    """Writes `metrics.jsonl`, one JSON object a line, on rank 0. A checkpoint holds `offset`, the length of
    the file in bytes, and `crc32` of these bytes; a resumed run opens the log there, without later lines."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path, self.offset, self.crc32 = path, offset, 0
        with writing(path):
            self._file: TextIO | None = ranks.only_first_does(lambda: path.open("a", encoding="utf-8"))
            if self._file is not None:
                assert self._file.tell() >= offset
                self._file.truncate(offset)
                self.crc32 = zlib.crc32(path.read_bytes())

    def write(self, record: Json) -> None:
        """Writes a line. Numbers that are not finite become null, because JSON has no such numbers."""
        if self._file is None:
            return
        finite = json.loads(json.dumps(record), parse_constant=lambda constant: None)
        line = json.dumps(finite, allow_nan=False) + "\n"
        with writing(self.path):
            self._file.write(line)
            self._file.flush()
        self.offset += len(line.encode())
        self.crc32 = zlib.crc32(line.encode(), self.crc32)

    def close(self) -> None:
        if self._file is not None:
            with writing(self.path):  # `close` writes what is still in memory
                self._file.close()


@dataclass(slots=True)
class PairLog:
    """Writes a line for each time a pair was trained on, on rank 0 for all ranks. `source`, `row`: where the
    pair came from. `margin`: beta x (policy - reference), chosen minus rejected; without a reference, of the
    policy, and its columns are null. `loss`: with the pair's weight. Log-probs are sums in nats."""

    directory: Path
    table: PairTable  # the training pairs
    source_names: Sequence[str]
    beta: float
    has_reference: bool
    # Of each step in memory: [P, 4] step, epoch, pair and score margin of each line, and [P, numbers kept].
    _waiting: list[tuple[FloatArray, Tensor]] = field(default_factory=list)
    _num_waiting: int = 0

    def cut_after(self, step: int) -> None:
        """Removes the lines of the steps after `step`; only rank 0 must call this. Raises CacheError."""
        for path in self.directory.glob("part-*.parquet"):
            steps = _PART.fullmatch(path.name)
            if steps is None or int(steps[2]) <= step:
                continue
            with writing(path):
                if int(steps[1]) <= step:  # this file also has lines that must stay
                    kept = pq.read_table(path)
                    self._write(kept.filter(pc.field("step") <= step))
                path.unlink()

    def add(self, step: int, epoch: float, pairs: FloatArray, values: Tensor, *, num_pairs: int) -> None:
        """Keeps `pair_values` of this rank's `pairs`, [P, (index, score margin)], of `num_pairs` on all
        ranks, which must call it."""
        facts = np.column_stack((np.full(len(pairs), step), np.full(len(pairs), epoch), pairs))
        self._waiting.append((facts, values))
        self._num_waiting += num_pairs
        if self._num_waiting >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Writes the values in memory; waits for the device. Every rank must call it. Raises CacheError."""
        if not self._waiting:
            return
        facts = torch.from_numpy(np.concatenate([facts for facts, _ in self._waiting]))
        numbers = torch.cat([values for _, values in self._waiting])
        every = ranks.gather_over_ranks(torch.cat([facts.to(numbers.device), numbers], dim=1)).cpu().numpy()
        ranks.first_does_for_all(lambda: self._write_values(every))
        self._waiting, self._num_waiting = [], 0  # a disk that was full may have room later

    def _write_values(self, every: FloatArray) -> None:
        # By step, then by pair: this order does not depend on the number of ranks.
        every = every[np.lexsort((every[:, 2], every[:, 0]))]
        step, epoch, pair, scores = every[:, :4].T
        pairs = pair.astype(np.int64)
        columns = {name: every[:, 4 + NAMES.index(kept)] for name, kept in _LOGPS.items()}
        margins = columns["chosen_logps"] - columns["rejected_logps"]
        if self.has_reference:
            margins = margins - (columns["reference_chosen_logps"] - columns["reference_rejected_logps"])
        columns = {"margin": self.beta * margins, **columns, "loss": every[:, 4 + NAMES.index("loss")]}
        arrays = {name: pa.array(column.astype(np.float32)) for name, column in columns.items()}
        if not self.has_reference:
            arrays |= {name: pa.nulls(len(pairs), pa.float32()) for name in _LOGPS if "reference" in name}
        sources = pa.array(self.table.source_indices[pairs].astype(np.int32))
        lines = {
            "source": pa.DictionaryArray.from_arrays(sources, pa.array(self.source_names)),
            "row": pa.array(self.table.row_numbers[pairs].astype(np.int64)),
            "step": pa.array(step.astype(np.int64)),
            "epoch": pa.array(epoch),
            **arrays,
            "score_margin": pa.array(scores, from_pandas=True),  # NaN: null
        }
        self._write(pa.table(lines))

    def _write(self, lines: pa.Table) -> None:
        steps = pc.min_max(lines["step"])
        name = f"part-{steps['min'].as_py():06d}-{steps['max'].as_py():06d}.parquet"
        with written_aside(self.directory / name) as temporary:
            pq.write_table(lines, temporary, write_page_checksum=True)


# ----------------------------------------------------------------------------------------------- the trackers


def start_trackers(
    accelerator: Accelerator, settings: Mapping[str, Any], run: RunDir, *, name: str, step: int
) -> None:
    """Starts the trackers of `Accelerator(log_with=...)`, which show `settings`. A run that resumes after
    `step` has the same ids in run.json, and is the same run there. Raises RunError if a tracker fails."""
    run.trackers.mkdir(exist_ok=True)
    if "tracking_id" not in run.info:
        run.update(tracking_id=uuid.uuid4().hex[:8])
    resumes, run_id, directory = run.has_own_checkpoint, str(run.info["tracking_id"]), str(run.trackers)
    key = hashlib.sha256(run_id.encode()).hexdigest()
    options: dict[str, Json] = {
        "wandb": {"name": name, "id": run_id, "resume": "allow", "dir": directory},
        "trackio": {"name": name, "resume": "allow" if resumes else "never"},
        "mlflow": {"run_name": name, "run_id": run.info.get("mlflow_run") if resumes else None},
        "comet_ml": {"experiment_key": key[:32]},
        "swanlab": {"name": name, "id": key[:21], "resume": "allow", "log_dir": directory},
    }
    for number, kind in enumerate(map(str, accelerator.log_with)):
        if kind in options:  # else accelerate would name the project after the run
            variable = "COMET_PROJECT_NAME" if kind == "comet_ml" else f"{kind.upper()}_PROJECT"
            project = os.environ.get(variable, "dpo-pack")
            accelerator.log_with[number] = LOGGER_TYPE_TO_CLASS[kind](project, **options[kind])
    # MLflow refuses a second value of a setting. TensorBoard hides what was sent of later steps.
    config = {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in leaves(settings, separator=".")
    }
    purge = {"tensorboard": {"purge_step": step + 1}} if resumes else {}
    try:
        accelerator.init_trackers(name, None if resumes else config, purge)
    except Exception as error:  # each tracker raises its own errors: no login, no server
        raise RunError(
            f"logging.trackers: one cannot be started ({first_line(error)}); log in to it"
        ) from error
    begun = ranks.only_first_does(lambda: {one.name: one.tracker for one in accelerator.trackers}) or {}
    if "comet_ml" in begun:
        begun["comet_ml"].set_name(name)
    if "mlflow" in begun:  # which makes the id itself
        run.update(mlflow_run=begun["mlflow"].info.run_id)


def end_trackers(accelerator: Accelerator) -> None:
    """Sends unsent lines, closes trackers; accelerate's `end_training` would also end the process group."""
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:  # the model is saved, so the run must not fail
            _warn_once(first_line(error))


def track(accelerator: Accelerator, record: Json, held_out_names: Sequence[str] = ()) -> None:
    """Sends the numbers of a metrics line to the trackers, under the names of transformers' Trainer and TRL.
    A tracker's error does not end training."""
    prefix = "train/"
    if record["split"] != "train":
        prefix = "eval/" if len(held_out_names) == 1 else f"eval/{record['source']}_"
    numbers = {prefix + name: value for name, value in record.items() if isinstance(value, int | float)}
    # transformers' Trainer sends the step under this name, so W&B can show both runs over one x-axis.
    numbers = {name: value for name, value in numbers.items() if name != f"{prefix}step"}
    try:
        accelerator.log(numbers | {"train/global_step": record["step"]}, step=record["step"])
    except Exception as error:
        _warn_once(first_line(error))


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "logging.trackers: a tracker failed (%s); training continues, and metrics.jsonl has all metrics",
        reason,
    )


# ---------------------------------------------------------------------- what is printed before the first step


def describe_training(setup: Setup, planned: OfflineSource | None) -> None:
    """Prints the steps, and notes on surprising settings. `planned`: None for an online run."""
    recipe, console = setup.recipe, setup.console
    optim, packing = recipe.optim, recipe.packing
    num_steps = planned.num_steps if planned is not None else recipe.train.max_steps or 0
    budget = setup.token_budget
    loss = " + ".join(f"{weight:g} {name}" if weight != 1 else name for name, weight in recipe.loss.terms)
    steps, warmup = (counted(number, "step") for number in (num_steps, optim.num_warmup_steps(num_steps)))
    console.print(
        f"Training: {steps} of {counted(packing.pairs_per_step, 'pair')}, {packing.mode} rows of up to "
        f"{budget:,} tokens; loss {loss}, beta {recipe.loss.beta:g}, lr {optim.lr:g} "
        f"{optim.schedule}, {warmup} of warm-up"
    )
    for warning in setting_warnings(recipe.loss, optim.lr, setup.policy_facts):
        console.print(warning)
    if recipe.checkpoint.every_steps is None:
        console.print(
            "  checkpoints: only if interrupted, and of the last step until the model is verified; after a "
            "crash before that the run begins anew (checkpoint.every_steps)"
        )
    if recipe.sharing_note:
        console.print(f"Note: {recipe.sharing_note}")
    if planned is not None and recipe.shares_prompts and setup.policy_facts.is_packed:
        plan = planned.first_plan
        unshared = int(pair_lengths(setup.data.train).row_tokens()[plan.order].sum())
        alone, computed = int(plan.sizes.tokens[plan.order].sum()), plan.count_tokens()
        about = "" if plan.sizes.beginnings is None else "about "
        console.print(
            f"  an epoch computes {about}{computed:,} of {unshared:,} tokens: {unshared - alone:,} are "
            f"shared within pairs, {alone - computed:,} between pairs"
        )
    if planned is not None and len(oversize := planned.first_plan.oversize_pairs):
        longest = int(planned.first_plan.sizes.tokens[oversize].max())
        console.print(
            f"Note: {counted(len(oversize), 'pair')} above packing.token_budget ({budget:,}), so each is a "
            f"row of its own; the longest has {longest:,} tokens; nothing is cut"
        )


def describe_policy(setup: Setup, loaded: LoadedModel) -> None:
    """Prints the policy as it is loaded, and how it computes."""
    console, facts, adapter = setup.console, setup.policy_facts, loaded.adapter
    precision, quantize = facts.precision, facts.settings.quantize
    parameters = list(loaded.scorer.parameters())
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    # Of weights in 4 bits, two count as one element.
    size = sum(p.numel() for p in parameters) if quantize is None else facts.num_parameters + num_trained
    trained = "" if adapter is None else f", of which the adapter's {format_count(num_trained)} are trained"
    numbers = f"{precision.parameters}{f' with linear layers in {quantize}' if quantize else ''}"
    numbers += f" with {precision.autocast} autocast" if precision.autocast else ""
    numbers += f" gathered in {precision.gathered}" if precision.gathered else ""
    console.print(
        f"Policy: {setup.recipe.model.path}, {format_count(size)} parameters{trained}, "
        f"{numbers.replace('torch.', '')} on {setup.device}; attention: {loaded.attention.name}"
        f"{'; layers: compiled' if loaded.scorer.is_compiled else ''}"
    )
    for note in () if adapter is None else adapter.notes:
        console.print(note)
    reasons = [f"attention is {loaded.attention.name}: {loaded.attention.reason}"]
    if loaded.not_compiled is not None:
        reasons.append(f"torch.compile failed, so the model runs uncompiled: {loaded.not_compiled}")
    # On a GPU a slower backend costs money, so the reason is always printed there.
    say = console.print if setup.device.type == "cuda" else functools.partial(print_detail, console)
    for reason in (*reasons, *(f"recurrent layers: {kernel}" for kernel in loaded.kernels)):
        say(f"  {reason}")
    if routes_tokens(loaded.model.config):
        console.print(router_sentence(facts))
