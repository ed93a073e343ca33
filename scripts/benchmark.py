"""Measure dpo-pack against TRL on the same token ids, model, steps and machine, in alternation.

    python scripts/benchmark.py --workload hh --pairs hh.jsonl.gz --output docs/benchmarks/cpu-hh-7m
    scripts/benchmark_gpu.sh

What is counted is the work: the reference log-probs (TRL runs them in its trainer's constructor or live in
each step, both are tried) and the training steps. What is not: imports, model loading, tokenisation,
compiling. Short runs first try TRL at every micro-batch size, live and precomputed, in the given order and
grouped by length, the batch size of its precomputed reference, and the fastest of these with eager
attention, compiled and with other settings of malloc. The fastest of all take turns with us, and the
fastest in the turns is its best, which we compare with. All contenders must agree in every step's loss,
gradient norm and log-probs, but those that group by length: their steps hold other pairs. How often
everything is measured is fixed before the start, and every measurement is on the page. Results are kept
after every measurement: run the same command again and it goes on. Needs `pip install -e '.[benchmark]'`.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from benchmarking.contenders import (
    MALLOCS,
    SERIES_LEARNING_RATES,
    Contender,
    Measurement,
    Setting,
    ablations,
    ours,
    trl_references,
    trl_sweep,
    trl_variants,
)
from benchmarking.kinds import OPTIMIZER
from benchmarking.process import (
    OUT_OF_MEMORY,
    measure,
    measure_peak,
    measure_series,
    profile,
    save_model,
    visible_devices,
)
from benchmarking.projection import roofline
from benchmarking.report import PADDED, TRL_BEST, Profile, Report, markdown
from benchmarking.results import TOLERANCES, Results, largest_differences, machine, other_work
from benchmarking.shapes import SHAPES, flops_shape
from benchmarking.work import Work, work_of
from benchmarking.workloads import HH_VOCABULARY, WORKLOADS, Workload, make_workload

from dpo_pack.packing.flops import ADAPTER_PASSES, TRAINING_PASSES, ModelShape, pair_flops
from dpo_pack.packing.lengths import PairLengths
from dpo_pack.system.machine import git_commit

FEWEST_STEPS = 4  # timed steps of every run that ranks settings
# Only for the estimate that is printed before the start: measured on these models, on two cores.
ASSUMED_MFU = {"dpo-pack": 0.35, "trl": 0.09}
ASSUMED_RECURRENT_MFU = {"dpo-pack": 0.1, "trl": 0.04}
PROCESS_SECONDS, COMPILING_SECONDS = 7.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, how often."""

    setting: Setting
    workload: Workload
    results: Results
    repeats: int
    sweep_pairs: int
    token_budgets: Sequence[int]
    microbatches: Sequence[int]
    reference_batches: Sequence[int]  # batch sizes for TRL's precomputed reference
    finalists: int  # how many of TRL's fastest settings are measured beside dpo-pack
    with_ablations: bool
    also: Sequence[str]  # more settings of dpo-pack to measure
    series: int = 0  # how often four runs on the same pairs are measured
    targets: dict[str, float] = field(default_factory=dict)  # contender -> our least speed-up
    prediction: str = ""  # what was expected, written before the measurement
    stop_at: float = float("inf")  # time.monotonic(): begin no measurement after it

    def __post_init__(self) -> None:
        step = self.setting.pairs_per_step
        uneven = [count for count in (self.setting.num_pairs, self.sweep_pairs) if count % step]
        if uneven:
            raise SystemExit(f"--num-pairs, --sweep-pairs: {uneven[0]} is no multiple of {step} pairs a step")
        timed = min(self.setting.num_pairs, self.sweep_pairs) // step - self.setting.warmup_steps
        if timed < FEWEST_STEPS:
            raise SystemExit(
                f"--num-pairs, --sweep-pairs: {timed} timed steps are too few to rank by; at least "
                f"{step * (FEWEST_STEPS + self.setting.warmup_steps)} pairs make {FEWEST_STEPS}"
            )
        if wrong := [size for size in self.microbatches if step % size]:
            raise SystemExit(f"--microbatches: {wrong[0]} does not divide {step} pairs a step")

    def counts(self) -> dict[str, object]:
        """What is fixed before the start: with other counts it is another benchmark."""
        measured = {"setting", "workload", "results", "stop_at"}
        return {name: getattr(self, name) for name in Plan.__dataclass_fields__ if name not in measured}

    @property
    def compute_dtype(self) -> str:
        """What matrix products are in."""
        return "bfloat16" if self.setting.device == "cuda" else self.setting.parameters


def main(
    output: Annotated[Path, typer.Option(help="Writes OUTPUT.json and OUTPUT.md.")],
    workload: Annotated[str, typer.Option(help=", ".join(WORKLOADS))] = "hh-like",
    pairs: Annotated[Path | None, typer.Option(help="HH-RLHF's transcript rows, for --workload hh.")] = None,
    model: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "7m",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    parameters: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    lora: Annotated[bool, typer.Option(help="Train adapters of rank 16 on all linear layers.")] = False,
    gradient_checkpointing: Annotated[bool, typer.Option(help="In every contender.")] = False,
    num_pairs: Annotated[int, typer.Option(help="Pairs of each measurement.")] = 256,
    pairs_per_step: Annotated[int, typer.Option()] = 32,
    repeats: Annotated[int, typer.Option(help="Measurements of each contender.")] = 5,
    sweep_pairs: Annotated[int, typer.Option(help="Pairs of each run of the sweeps.")] = 160,
    microbatches: Annotated[
        str, typer.Option(help="TRL's sweep, pairs; empty: TRL is left out.")
    ] = "1,2,4,8",
    reference_batches: Annotated[
        str, typer.Option(help="Sweep of the batch size of TRL's precomputed reference, pairs.")
    ] = "1,2,4,8",
    finalists: Annotated[
        int, typer.Option(min=1, help="So many of TRL's fastest settings of the sweep take turns with ours.")
    ] = 2,
    token_budgets: Annotated[str, typer.Option(help="Ours; the best of several is used.")] = "8192",
    warmup_steps: Annotated[
        int, typer.Option(help="Steps at the start that are not timed; with 0, nothing of TRL's is compiled.")
    ] = 1,
    with_ablations: Annotated[bool, typer.Option("--ablations/--no-ablations")] = True,
    also: Annotated[
        list[str] | None, typer.Option(help="A recipe setting to measure as well: model.compile=true")
    ] = None,
    series: Annotated[
        int,
        typer.Option(help="Measurements of four runs on the same pairs, of ours and of TRL's best for it."),
    ] = 0,
    target_trl: Annotated[float, typer.Option(help="Ours is to be so many times as fast as TRL's best.")] = 0,
    target_padded: Annotated[float, typer.Option(help="The same of our padded mode.")] = 0,
    prediction: Annotated[
        Path | None, typer.Option(help="A text for the page, committed before the start: what is expected.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Begin no measurement after so many; the same command goes on.")
    ] = float("inf"),
    with_profile: Annotated[bool, typer.Option("--profile/--no-profile")] = True,
    work: Annotated[Path | None, typer.Option(help="Keep pairs and models here for other runs.")] = None,
) -> None:
    """Run the sweeps and the comparison; prints as it goes. Exits with 1 where contenders disagree."""
    _check_choices(workload, pairs, model, device, parameters)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(device)  # the page names the device
    with tempfile.TemporaryDirectory(prefix="dpo-pack-benchmark-") as scratch:
        directory = work or Path(scratch)
        pairs_made = make_workload(
            workload,
            directory / f"{workload}-{model}-{num_pairs}",
            num_pairs=max(num_pairs, sweep_pairs),
            vocabulary=SHAPES[model]["vocab_size"],
            hh_pairs=pairs,
        )
        model_directory = directory / f"model-{model}-{parameters}"
        save_model(model, model_directory, parameters=parameters, device=device)
        setting = Setting(
            workload=str(pairs_made.directory),
            model=str(model_directory),
            num_pairs=num_pairs,
            pairs_per_step=pairs_per_step,
            max_length=pairs_made.max_length,
            device=device,
            parameters=parameters,
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
            warmup_steps=warmup_steps,
        )
        plan = Plan(
            setting=setting,
            workload=pairs_made,
            results=Results(output.with_suffix(".json"), {}),
            repeats=repeats,
            sweep_pairs=sweep_pairs,
            token_budgets=_numbers(token_budgets),
            microbatches=_numbers(microbatches),
            reference_batches=_numbers(reference_batches),
            finalists=finalists,
            with_ablations=with_ablations,
            also=also or [],
            series=series,
            targets={
                name: times for name, times in ((TRL_BEST, target_trl), (PADDED, target_padded)) if times
            },
            prediction="" if prediction is None else prediction.read_text(encoding="utf-8").strip(),
            stop_at=time.monotonic() + 60 * minutes,
        )
        identity = _identity(plan, model)
        plan = replace(plan, results=Results.open(output.with_suffix(".json"), identity))
        report = run_plan(plan, model, with_profile=with_profile)
    page = markdown(report)
    output.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)
    if report.disagreements:
        raise SystemExit("\n".join(report.disagreements))


def run_plan(plan: Plan, model: str, *, with_profile: bool) -> Report:
    """Measure what the results lack, and put the report together."""
    lengths = plan.workload.lengths().select(np.arange(plan.setting.num_pairs))
    shape = flops_shape(model)
    work = work_of(shape, lengths, lora=plan.setting.lora)
    peaks = [_peak(plan, 0)]
    if plan.setting.device == "cpu":
        minutes = estimated_minutes(plan, work, peaks[0]["best"], is_recurrent=shape.kept_numbers > 0)
        print(f"estimated: {minutes:.0f} minutes in all, on an idle machine", flush=True)
    best_budget = best_own_budget(plan)
    finalists, for_series = fastest_of_trl(plan)
    contenders = [ours(best_budget), *finalists]
    contenders += ablations(best_budget) if plan.with_ablations else ()
    contenders += [ours(best_budget, setting, name=f"dpo-pack, {setting}") for setting in plan.also]
    for repeat in range(plan.repeats):
        peaks[repeat:] = [_peak(plan, repeat)]
        for contender in contenders:
            _measure_missing(plan, {f"run/{repeat}/{contender.name}": contender}, plan.setting)
    if with_profile and "profile" not in plan.results:
        _check_time(plan)
        plan.results.put("profile", profile(contenders[0], plan.setting))
    runs: dict[str, Sequence[Measurement]] = {
        contender.name: [
            plan.results.measurement(f"run/{repeat}/{contender.name}") for repeat in range(plan.repeats)
        ]
        for contender in contenders
    }
    differences, disagreements = compare_work(plan, contenders, runs)
    return Report(
        title=f"{plan.workload.name}, {model} model, {plan.setting.device}",
        command=" ".join(["python", *sys.argv]),
        date=datetime.date.today().isoformat(),
        machine=machine(),
        setting={
            name: getattr(plan.setting, name) for name in Setting.__dataclass_fields__ if name != "workload"
        },
        origin=plan.workload.origin,
        work=work,
        peaks=peaks,
        sweep=list(_sweeps(plan)),
        sweep_pairs=plan.sweep_pairs,
        runs=runs,
        series={
            contender.name: list(_measure_series(plan, contender))
            for contender in (contenders[0], for_series)
            if contender is not None and plan.series
        },
        finalists=[contender.name for contender in finalists],
        targets=plan.targets,
        prediction=plan.prediction,
        differences=differences,
        disagreements=disagreements,
        profile=profile_of(plan, shape, lengths, plan.results.get("profile"), peaks[0]),
    )


def profile_of(
    plan: Plan,
    shape: ModelShape,
    lengths: PairLengths,
    found: dict[str, dict[str, float]] | None,
    peak: dict[str, float],
) -> Profile | None:
    """The profiled steps beside what they take at the least; None where there is no profile."""
    if not found:
        return None
    pairs_per_step, lora = plan.setting.pairs_per_step, plan.setting.lora
    first, counted = (int(found["steps"][name]) for name in ("first", "counted"))
    profiled = lengths.select(np.arange(first * pairs_per_step, counted * pairs_per_step))
    others = lengths.select(np.arange(counted * pairs_per_step, (counted + 1) * pairs_per_step))
    tokens, other_tokens = (float(some.row_tokens(share_prompt=True).sum()) for some in (profiled, others))
    # The optimizer moves its bytes once a step; the bytes of the other kinds grow with the tokens.
    moved = {
        kind: value * (counted - first if kind == OPTIMIZER else tokens / other_tokens)
        for kind, value in found["bytes"].items()
    }
    passes = ADAPTER_PASSES if lora else TRAINING_PASSES
    return Profile(
        num_steps=counted - first,
        seconds=found["seconds"],
        flops=float(pair_flops(shape, profiled, share_prompt=True, passes=passes).sum()),
        bytes_a_second=peak["copied"],
        least=roofline(
            shape, profiled, moved, peak_flops=peak["best"], bytes_a_second=peak["copied"], lora=lora
        )
        if moved
        else {},
    )


def estimated_minutes(plan: Plan, work: Work, peak_flops: float, *, is_recurrent: bool) -> float:
    """Of all that is planned, by assumed MFU."""
    assumed = ASSUMED_RECURRENT_MFU if is_recurrent else ASSUMED_MFU
    own, trl = (work.flops / (peak_flops * assumed[trainer]) for trainer in ("dpo-pack", "trl"))
    reference = work.reference_flops / work.flops * trl
    grouped = [size for size in plan.microbatches if size > 1]
    mallocs = len(MALLOCS) - 1
    num_trl = 2 * (len(plan.microbatches) + len(grouped) + 2 + mallocs) if plan.microbatches else 0
    num_finalists = plan.finalists if plan.microbatches else 0
    num_own = 1 + 2 * plan.with_ablations + len(plan.also)
    sweeps = plan.sweep_pairs * (num_trl * trl + len(plan.reference_batches) * reference)
    sweeps += plan.sweep_pairs * own * (len(plan.token_budgets) + 1 + mallocs)
    turns = plan.repeats * plan.setting.num_pairs * (num_own * own + num_finalists * trl)
    series = plan.series * len(SERIES_LEARNING_RATES) * plan.sweep_pairs * (own + trl)
    processes = 4 + 4 * mallocs + plan.repeats * (2 + num_own + num_finalists) + 2 * plan.series
    return (sweeps + turns + series + PROCESS_SECONDS * processes + 2 * COMPILING_SECONDS) / 60


def best_own_budget(plan: Plan) -> int:
    """The token budget of ours that is fastest in a short run."""
    if len(plan.token_budgets) == 1:
        best = plan.token_budgets[0]
    else:
        tried = {
            ours(budget, name=f"dpo-pack, token budget {budget}"): budget for budget in plan.token_budgets
        }
        rates = _sweep(plan, list(tried))
        if not rates:
            raise SystemExit("--token-budgets: none of them fits in memory; lower them")
        best = tried[max(rates, key=lambda contender: rates[contender])]
    if plan.setting.device == "cpu" and plan.microbatches:  # TRL is tried with these settings too
        names = {malloc: f", {malloc}" if malloc else ", malloc as it sets it" for malloc in MALLOCS}
        own = [replace(ours(best, name=f"dpo-pack{name}"), malloc=malloc) for malloc, name in names.items()]
        _sweep(plan, own)
    return best


def fastest_of_trl(plan: Plan) -> tuple[list[Contender], Contender | None]:
    """TRL at its fastest settings in a short run, and at that which is fastest for several runs on the same
    pairs; empty and None where it ran at none, or was not asked for.
    """
    if not plan.microbatches:
        return [], None
    alone = _sweep(plan, list(trl_references(plan.reference_batches)))
    reference_batch = max(alone, key=lambda contender: alone[contender]).reference_batch if alone else 0
    sweep = list(
        trl_sweep(
            plan.microbatches,
            reference_batch=reference_batch,
            gradient_checkpointing=plan.setting.gradient_checkpointing,
        )
    )
    rates = _sweep(plan, sweep)
    runs = {contender: plan.results.measurement(f"sweep/{contender.name}") for contender in sweep}
    failed = [contender for contender, run in runs.items() if run.failure == OUT_OF_MEMORY]
    sides = [[contender for contender in rates if contender.grouped is side] for side in (False, True)]
    fastest = [max(side, key=lambda contender: rates[contender]) for side in sides if side]
    # Compiling is no part of the work, so a compiled contender needs a step that is not timed.
    compiled = plan.setting.warmup_steps > 0
    variants = trl_variants(fastest, failed, device=plan.setting.device, compiled=compiled)
    rates |= _sweep(plan, list(variants))
    finalists = sorted(rates, key=lambda contender: -rates[contender])[: plan.finalists]

    def seconds_of_series(contender: Contender) -> float:
        run = plan.results.measurement(f"sweep/{contender.name}")
        training = run.train_seconds(warmup_steps=plan.setting.warmup_steps)
        return len(SERIES_LEARNING_RATES) * training + run.reference_seconds

    return finalists, min(rates, key=seconds_of_series, default=None)


def compare_work(
    plan: Plan, contenders: Sequence[Contender], runs: dict[str, Sequence[Measurement]]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(largest differences from ours, by contender; a line for each that only other work explains)."""
    own, found, disagreements = runs[contenders[0].name][0], {}, []
    tolerance = TOLERANCES["bf16" if plan.compute_dtype == "bfloat16" else "fp32"]
    for contender in contenders:
        run = runs[contender.name][0]
        if run.failure or own.failure:
            continue
        if run.digest != own.digest or run.pairs != plan.setting.num_pairs:
            disagreements.append(f"{contender.name} did not train on the same token ids as {own.contender}")
        elif contender is not contenders[0] and not contender.grouped:  # grouped pairs make other steps
            # Adapters begin at random; TRL's AdamW rounds updates of bf16 weights, ours does not.
            updates_differ = plan.setting.lora or plan.setting.parameters == "bfloat16"
            found[contender.name] = largest_differences(own, run, first_step_only=updates_differ)
            disagreements += other_work(found[contender.name], tolerance, who=contender.name)
    return found, disagreements


def _sweep(plan: Plan, contenders: Sequence[Contender]) -> dict[Contender, float]:
    """Pairs a second of a short run of each, in one process; those that failed are left out."""
    setting = replace(plan.setting, num_pairs=plan.sweep_pairs)
    _measure_missing(plan, {f"sweep/{contender.name}": contender for contender in contenders}, setting)
    rates = {}
    for contender in contenders:
        run = plan.results.measurement(f"sweep/{contender.name}")
        if run.failure is None:
            rates[contender] = 1 / run.seconds_a_pair(warmup_steps=setting.warmup_steps)
    return rates


def _sweeps(plan: Plan) -> Iterator[Measurement]:
    for key in plan.results.content["entries"]:
        if key.startswith("sweep/"):
            yield plan.results.measurement(key)


def _measure_missing(plan: Plan, wanted: dict[str, Contender], setting: Setting) -> None:
    """Measure what has no entry yet, and keep each result as soon as it is there."""
    missing = {key: contender for key, contender in wanted.items() if key not in plan.results}
    if not missing:
        return
    with closing(measure(list(missing.values()), setting)) as measured:
        for key in missing:
            _check_time(plan)
            run = next(measured)
            plan.results.put(key, run.to_json())
            rate = 0.0 if run.failure else 1 / run.seconds_a_pair(warmup_steps=setting.warmup_steps)
            print(f"{key}: {run.failure or f'{rate:.2f} pairs/s'}", flush=True)


def _measure_series(plan: Plan, contender: Contender) -> Iterator[list[Measurement]]:
    """Each measurement of the runs on the same pairs: as many runs as learning rates."""
    for repeat in range(plan.series):
        key = f"series/{repeat}/{contender.name}"
        if key not in plan.results:
            _check_time(plan)
            runs = measure_series(contender, replace(plan.setting, num_pairs=plan.sweep_pairs))
            plan.results.put(key, [run.to_json() for run in runs])
            print(f"{key}: {len(runs)} runs", flush=True)
        yield [Measurement(**run) for run in plan.results[key]]


def _peak(plan: Plan, repeat: int) -> dict[str, float]:
    key = f"peak/{repeat}"
    if key not in plan.results:
        _check_time(plan)
        plan.results.put(key, measure_peak(plan.setting.device, plan.compute_dtype))
    found: dict[str, float] = plan.results[key]
    return found


def _check_time(plan: Plan) -> None:
    if time.monotonic() > plan.stop_at:
        raise SystemExit("--minutes: time is up; the same command goes on from here")


def _check_choices(workload: str, pairs: Path | None, model: str, device: str, parameters: str) -> None:
    choices = {
        "--workload": (workload, WORKLOADS),
        "--model": (model, tuple(SHAPES)),
        "--device": (device, ("cpu", "cuda")),
        "--parameters": (parameters, ("float32", "bfloat16")),
    }
    for option, (value, allowed) in choices.items():
        if value not in allowed:
            raise SystemExit(f"{option}: {value!r} is none of {', '.join(allowed)}")
    if (workload == "hh") != (pairs is not None):
        raise SystemExit("--pairs: --workload hh needs HH-RLHF's rows, and no other workload takes any")
    if workload == "hh" and SHAPES[model]["vocab_size"] < HH_VOCABULARY:
        raise SystemExit(
            f"--model: {model} has fewer tokens than HH's ids; --workload hh-like has ids for it"
        )


def _identity(plan: Plan, model: str) -> dict[str, object]:
    """What a results file must be of to be gone on with: another commit's times are another benchmark's."""
    setting, workload = plan.setting, plan.workload
    paths = {"workload", "model"}
    fields = {name: getattr(setting, name) for name in Setting.__dataclass_fields__ if name not in paths}
    made_of = {"workload": workload.name, "digest": workload.digest, "model": model}
    devices = [device["name"] for device in machine()["devices"]]
    return {**fields, **made_of, **plan.counts(), "git_commit": git_commit(), "devices": devices}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    typer.run(main)
