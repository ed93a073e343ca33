"""Measure dpo-pack against TRL on the same token ids, model, steps and machine, in alternation.

    python scripts/benchmark.py --workload hh --pairs hh.jsonl.gz --output docs/benchmarks/cpu-hh-7m
    scripts/benchmark_gpu.sh

Counted are the reference log-probs, in TRL's constructor or live in each step, and the training steps. A
sweep of short runs finds TRL's fastest settings, which take turns with ours; docs/dev/performance.md has the
rules. Results are kept after every measurement: run the same command again and it goes on. Needs
`pip install -e '.[benchmark]'`.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from benchmarking.contenders import (
    MALLOCS,
    Contender,
    Measurement,
    Setting,
    ablations,
    ours,
    trl_references,
    trl_sweep,
    trl_variants,
)
from benchmarking.process import (
    COMPILED_LIMIT_SECONDS,
    OUT_OF_MEMORY,
    TimeIsUp,
    measure,
    measure_peak,
    profile,
    save_model,
    seconds_until,
    visible_devices,
)
from benchmarking.report import Profile, Report, markdown
from benchmarking.results import TOLERANCES, Results, largest_differences, machine, other_work
from benchmarking.shapes import SHAPES, Work, flops_shape, forward_parts, shape_config, work_of
from benchmarking.workloads import HH_VOCABULARY, HH_WORKLOADS, WORKLOADS, Workload, make_workload

from dpo_pack.packing.lengths import ADAPTER_PASSES, TRAINING_PASSES, ModelShape, PairLengths
from dpo_pack.system.files import write_text_atomically
from dpo_pack.system.machine import git_commit

FEWEST_STEPS = 4  # timed steps of every run that ranks settings, unless --fewest-steps says otherwise


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
    with_ablations: bool
    also: Sequence[str]  # more settings of dpo-pack to measure
    fewest_steps: int = FEWEST_STEPS
    with_variants: bool = True
    finalists: int = 2  # so many of TRL's fastest settings of the sweep take turns with ours
    # Little time: ours and its profile come first, and each part takes at most half of the time that is left.
    quick: bool = False
    stop_at: float = float("inf")  # time.monotonic(): no measurement goes on after it
    compiled_seconds: float = COMPILED_LIMIT_SECONDS  # the most for a setting of TRL's that compiles

    def __post_init__(self) -> None:
        steps = self.setting, self.of_sweep
        uneven = [one for one in steps if one.num_pairs % one.pairs_per_step]
        if uneven:
            raise SystemExit(
                f"--num-pairs, --sweep-pairs: {uneven[0].num_pairs} is no multiple of "
                f"{uneven[0].pairs_per_step} pairs a step"
            )
        timed = min(one.num_pairs // one.pairs_per_step for one in steps) - self.setting.warmup_steps
        if timed < self.fewest_steps:
            raise SystemExit(
                f"--num-pairs, --sweep-pairs: {timed} timed steps are too few to rank by; at least "
                f"{self.setting.pairs_per_step * (self.fewest_steps + self.setting.warmup_steps)} pairs make "
                f"{self.fewest_steps}, or set --fewest-steps"
            )
        if wrong := [size for size in self.microbatches if any(one.pairs_per_step % size for one in steps)]:
            raise SystemExit(f"--microbatches: {wrong[0]} does not divide the pairs of a step")

    @property
    def of_sweep(self) -> Setting:
        """The setting of a run that ranks: fewer pairs than a step has are one step."""
        pairs_per_step = min(self.setting.pairs_per_step, self.sweep_pairs)
        return replace(self.setting, num_pairs=self.sweep_pairs, pairs_per_step=pairs_per_step)

    def counts(self) -> dict[str, object]:
        """What is fixed before the start: with other counts it is another benchmark."""
        measured = {"setting", "workload", "results", "stop_at", "compiled_seconds"}
        return {name: getattr(self, name) for name in Plan.__dataclass_fields__ if name not in measured}

    @property
    def compute_dtype(self) -> str:
        """What matrix products are in."""
        in_bf16 = self.setting.device == "cuda" or self.setting.autocast
        return "bfloat16" if in_bf16 else self.setting.parameters


def main(
    output: Annotated[Path, typer.Option(help="Writes OUTPUT.json and OUTPUT.md.")],
    workload: Annotated[str, typer.Option(help=", ".join(WORKLOADS))] = "hh-like",
    pairs: Annotated[Path | None, typer.Option(help="HH-RLHF's transcript rows, for hh and hh-chat.")] = None,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(SHAPES)}, or a directory with a model and its tokenizer.")
    ] = "7m",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    parameters: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    autocast: Annotated[
        bool, typer.Option("--autocast", help="On a CPU, too: products in bf16, parameters as they are.")
    ] = False,
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
        int, typer.Option(min=1, help="So many of TRL's fastest settings take turns with ours.")
    ] = 2,
    with_variants: Annotated[
        bool,
        typer.Option(
            "--variants/--no-variants",
            help="In TRL's sweep: eager attention, which takes memory, compiled, other kernels and malloc.",
        ),
    ] = True,
    fewest_steps: Annotated[
        int, typer.Option(min=1, help="Timed steps of a run that ranks settings; fewer are refused.")
    ] = FEWEST_STEPS,
    token_budgets: Annotated[str, typer.Option(help="Ours; the best of several is used.")] = "8192",
    warmup_steps: Annotated[
        int, typer.Option(help="Steps at the start that are not timed; with 0, nothing of TRL's is compiled.")
    ] = 1,
    with_ablations: Annotated[bool, typer.Option("--ablations/--no-ablations")] = True,
    also: Annotated[
        list[str] | None, typer.Option(help="A recipe setting to measure as well: model.compile=true")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Ends after so many minutes; the same command goes on.")
    ] = float("inf"),
    compiled_seconds: Annotated[
        float, typer.Option(help="TRL's settings that compile end after so many.")
    ] = COMPILED_LIMIT_SECONDS,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Little time: ours and its profile come first, and TRL's sweep has half of the rest.",
        ),
    ] = False,
    prediction: Annotated[
        Path | None, typer.Option(help="A text for the page: what was expected, committed beforehand.")
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(help="OUTPUT.json of the same pairs in fp32, whose losses stand beside these."),
    ] = None,
    with_profile: Annotated[bool, typer.Option("--profile/--no-profile")] = True,
    work: Annotated[Path | None, typer.Option(help="Keep pairs and models here for other runs.")] = None,
) -> None:
    """Run the sweeps and the comparison; prints as it goes. Exits with 1 where contenders disagree."""
    _check_choices(workload, pairs, model, device, parameters)
    stop_at = time.monotonic() + 60 * minutes
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(device)  # the page names the device
    with tempfile.TemporaryDirectory(prefix="dpo-pack-benchmark-") as scratch:
        directory = work or Path(scratch)
        pairs_made = make_workload(
            workload,
            directory / f"{workload}-{Path(model).name}-{num_pairs}",
            num_pairs=max(num_pairs, sweep_pairs),
            vocabulary=shape_config(model).vocab_size,
            hh_pairs=pairs,
            tokenizer="" if model in SHAPES else model,
        )
        model_directory = Path(model)
        if model in SHAPES:
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
            autocast=autocast,
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
            with_ablations=with_ablations,
            also=also or [],
            fewest_steps=fewest_steps,
            with_variants=with_variants,
            finalists=finalists,
            quick=quick,
            stop_at=stop_at,
            compiled_seconds=compiled_seconds,
        )
        identity = _identity(plan, model)
        plan = replace(plan, results=Results.open(output.with_suffix(".json"), identity))

        def write(report: Report) -> None:
            write_text_atomically(output.with_suffix(".md"), markdown(report))

        report = run_plan(
            plan,
            model,
            with_profile=with_profile,
            show=write,
            prediction=prediction.read_text(encoding="utf-8") if prediction else "",
            beside=losses_of(beside, pairs_made) if beside else {},
        )
    write(report)
    print(markdown(report))
    lines = [*report.disagreements, *(f"not measured: {name}" for name in report.missing)]
    if lines:
        raise SystemExit("\n".join(lines))


def losses_of(path: Path, workload: Workload) -> dict[str, Measurement]:
    """By contender: its first turn in an earlier benchmark. Exits if that was of other pairs."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["setting"]["digest"] != workload.digest:
        raise SystemExit(f"--beside: {path} has measurements of other pairs; take one of the same pairs")
    first = "run/0/"
    runs = {key: Measurement(**run) for key, run in content["entries"].items() if key.startswith(first)}
    return {key.removeprefix(first): run for key, run in runs.items() if not run.failure}


def run_plan(
    plan: Plan,
    model: str,
    *,
    with_profile: bool,
    show: Callable[[Report], object] = lambda _: None,
    prediction: str = "",
    beside: dict[str, Measurement] | None = None,
) -> Report:
    """Measure what the results lack, and put the report together.

    From the first run of ours on, `show` gets the report after each result.
    """
    facts = Facts.of(plan, model)
    facts.fields.update(prediction=prediction, beside=beside or {})
    _peak(plan, 0)
    best_budget = best_own_budget(plan)
    own = [ours(best_budget), *(ablations(best_budget) if plan.with_ablations else ())]
    own += [ours(best_budget, setting, name=f"dpo-pack, {setting}") for setting in plan.also]
    selection = Selection(own=own, with_profile=with_profile, is_trl_known=not plan.microbatches)

    def show_what_is_there() -> None:
        if f"run/0/{own[0].name}" in plan.results.entries:
            show(report_of(plan, facts, selection))

    plan.results.after_put = show_what_is_there
    if plan.quick:
        for contender in own:
            _measure_missing(_half(plan), {f"run/0/{contender.name}": contender}, plan.setting)
        if with_profile:
            _profile_missing(_half(plan), own[0])
    selection.finalists, selection.untried = fastest_of_trl(_half(plan) if plan.quick else plan)
    selection.is_trl_known = True
    for repeat in range(plan.repeats):
        _peak(plan, repeat)
        for contender in selection.contenders:
            _measure_missing(plan, {f"run/{repeat}/{contender.name}": contender}, plan.setting)
    if with_profile:
        _profile_missing(plan, own[0])
    if f"run/0/{own[0].name}" not in plan.results.entries:
        raise TimeIsUp  # there is nothing to report on
    return report_of(plan, facts, selection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known before anything is measured."""

    shape: ModelShape
    lengths: PairLengths
    work: Work
    fields: dict[str, Any]  # of the report

    @classmethod
    def of(cls, plan: Plan, model: str) -> Facts:
        setting = plan.setting
        lengths, shape = plan.workload.lengths(setting.num_pairs), flops_shape(model)
        work = work_of(shape, lengths, pairs_per_step=setting.pairs_per_step, lora=setting.lora)
        fields = {
            "title": f"{plan.workload.name}, {Path(model).name} model, {setting.device}"
            f"{', bf16' if setting.autocast else ''}",
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "setting": {
                name: getattr(setting, name) for name in Setting.__dataclass_fields__ if name != "workload"
            },
            "origin": plan.workload.origin,
            "work": work,
            "sweep_pairs": plan.sweep_pairs,
            "is_quick": plan.quick,
        }
        return cls(shape=shape, lengths=lengths, work=work, fields=fields)


@dataclass(slots=True, kw_only=True)
class Selection:
    """Who is to be on the page, as far as it is known by now."""

    own: list[Contender]
    with_profile: bool
    is_trl_known: bool  # whether TRL's sweep is over
    finalists: list[Contender] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)  # settings of TRL's that the sweep had no time for

    @property
    def contenders(self) -> list[Contender]:
        return [self.own[0], *self.finalists, *self.own[1:]]

    def missing(self, plan: Plan) -> list[str]:
        """What has no result yet."""
        wanted = {f"{one.name}, turn {repeat + 1}": f"run/{repeat}/{one.name}"
                  for repeat in range(plan.repeats) for one in self.contenders}  # fmt: skip
        if self.with_profile:
            wanted["the profile"] = "profile"
        missing = [name for name, key in wanted.items() if key not in plan.results.entries]
        missing += [] if self.is_trl_known else ["TRL"]
        return [*missing, *(f"{name}, in the sweep" for name in self.untried)]


def report_of(plan: Plan, facts: Facts, selection: Selection) -> Report:
    """The report on what there is. Of the turns it has those that all have had, or else the first."""
    results = plan.results
    contenders = [one for one in selection.contenders if f"run/0/{one.name}" in results.entries]
    turns = [
        repeat
        for repeat in range(plan.repeats)
        if not repeat or all(f"run/{repeat}/{one.name}" in results.entries for one in selection.contenders)
    ]
    runs: dict[str, Sequence[Measurement]] = {
        one.name: [results.measurement(f"run/{repeat}/{one.name}") for repeat in turns] for one in contenders
    }
    differences, disagreements = compare_work(plan, contenders, runs)
    peaks = [results.entries[f"peak/{repeat}"] for repeat in turns if f"peak/{repeat}" in results.entries]
    return Report(
        **facts.fields,
        peaks=peaks,
        sweep=list(_sweeps(plan)),
        runs=runs,
        finalists=[one.name for one in selection.finalists if one in contenders],
        differences=differences,
        disagreements=disagreements,
        missing=selection.missing(plan),
        profile=profile_of(plan, facts, results.entries.get("profile")),
    )


def profile_of(plan: Plan, facts: Facts, found: dict[str, Any] | None) -> Profile | None:
    """The profiled steps and their FLOPs; None where there is no profile."""
    if not found:
        return None
    step = plan.setting.pairs_per_step
    steps = [np.arange(step * number, step * (number + 1)) for number in range(found["first"], found["end"])]
    parts = forward_parts(facts.shape, facts.lengths, steps)
    passes = ADAPTER_PASSES if plan.setting.lora else TRAINING_PASSES
    return Profile(
        num_steps=found["end"] - found["first"],
        seconds=found["seconds"],
        flops={part: passes * flops for part, flops in parts.items()},
        table=found["table"],
    )


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
    is_swept = plan.microbatches and plan.with_variants and not plan.quick  # as TRL is
    if plan.setting.device == "cpu" and is_swept:
        names = {malloc: f", {malloc}" if malloc else ", malloc as it sets it" for malloc in MALLOCS}
        own = [replace(ours(best, name=f"dpo-pack{name}"), malloc=malloc) for malloc, name in names.items()]
        _sweep(plan, own)
    return best


def fastest_of_trl(plan: Plan) -> tuple[list[Contender], list[str]]:
    """(TRL at its fastest settings in a short run, none where it was not asked for; what there was no time to
    try)
    """
    if not plan.microbatches:
        return [], []
    reference_batch = plan.reference_batches[0]
    if len(plan.reference_batches) > 1:
        alone = _sweep(plan, list(trl_references(plan.reference_batches)))
        reference_batch = max(alone, key=lambda one: alone[one]).reference_batch if alone else 0
    sweep = list(
        trl_sweep(
            plan.microbatches,
            reference_batch=reference_batch,
            gradient_checkpointing=plan.setting.gradient_checkpointing,
        )
    )
    if plan.quick:
        sweep.reverse()  # those that are most often the fastest come first
    rates = _sweep(plan, sweep)
    tried = [contender for contender in sweep if f"sweep/{contender.name}" in plan.results.entries]
    failed = [
        contender
        for contender in tried
        if plan.results.measurement(f"sweep/{contender.name}").failure == OUT_OF_MEMORY
    ]
    sides = [[contender for contender in rates if contender.grouped is side] for side in (False, True)]
    fastest = [max(side, key=lambda contender: rates[contender]) for side in sides if side]
    # Compiling is no part of the work, so a compiled contender needs a step that is not timed.
    compiled = plan.setting.warmup_steps > 0
    variants = list(trl_variants(fastest, failed, device=plan.setting.device, compiled=compiled))
    variants = variants if plan.with_variants else []
    rates |= _sweep(plan, variants)
    untried = [one.name for one in (*sweep, *variants) if f"sweep/{one.name}" not in plan.results.entries]
    return sorted(rates, key=lambda contender: -rates[contender])[: plan.finalists], untried


def compare_work(
    plan: Plan, contenders: Sequence[Contender], runs: dict[str, Sequence[Measurement]]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(largest differences from ours, by contender; a line for each that only other work explains)."""
    own, found, disagreements = runs[contenders[0].name][0], {}, []
    tolerance = TOLERANCES["bf16" if plan.compute_dtype == "bfloat16" else "fp32"]
    # Grouped pairs make other steps, unless one step has them all.
    is_one_step = plan.setting.num_pairs == plan.setting.pairs_per_step
    for contender in contenders:
        run = runs[contender.name][0]
        if run.failure or own.failure:
            continue
        if run.digest != own.digest or run.pairs != plan.setting.num_pairs:
            disagreements.append(f"{contender.name} did not train on the same token ids as {own.contender}")
        elif contender is not contenders[0] and (is_one_step or not contender.grouped):
            # Adapters begin at random; TRL's AdamW rounds updates of bf16 weights, ours does not.
            updates_differ = plan.setting.lora or plan.setting.parameters == "bfloat16"
            found[contender.name] = largest_differences(own, run, first_step_only=updates_differ)
            disagreements += other_work(found[contender.name], tolerance, who=contender.name)
    return found, disagreements


def _sweep(plan: Plan, contenders: Sequence[Contender]) -> dict[Contender, float]:
    """Pairs a second of a short run of each; those that failed, or had no time, are left out."""
    setting = plan.of_sweep
    _measure_missing(plan, {f"sweep/{contender.name}": contender for contender in contenders}, setting)
    rates = {}
    for contender in contenders:
        run = plan.results.entries.get(f"sweep/{contender.name}")
        if run is not None and run["failure"] is None:
            rates[contender] = 1 / Measurement(**run).seconds_a_pair(warmup_steps=setting.warmup_steps)
    return rates


def _sweeps(plan: Plan) -> Iterator[Measurement]:
    for key in plan.results.entries:
        if key.startswith("sweep/"):
            yield plan.results.measurement(key)


def _half(plan: Plan) -> Plan:
    """With half of the time that is left."""
    now = time.monotonic()
    return replace(plan, stop_at=now + (plan.stop_at - now) / 2)


def _measure_missing(plan: Plan, wanted: dict[str, Contender], setting: Setting) -> None:
    """Measure what has no entry yet, and keep each result as soon as it is there.

    Raises TimeIsUp; in little time it leaves the rest, and the page says what is missing.
    """
    missing = {key: contender for key, contender in wanted.items() if key not in plan.results.entries}
    if not missing:
        return
    measured = measure(
        list(missing.values()), setting, stop_at=plan.stop_at, compiled_seconds=plan.compiled_seconds
    )
    with closing(measured), _leaving_the_rest(plan):
        for key in missing:
            seconds_until(plan.stop_at)
            run = next(measured)
            plan.results.put(key, asdict(run))
            rate = 0.0 if run.failure else 1 / run.seconds_a_pair(warmup_steps=setting.warmup_steps)
            print(f"{key}: {run.failure or f'{rate:.2f} pairs/s'}", flush=True)


def _profile_missing(plan: Plan, contender: Contender) -> None:
    if "profile" not in plan.results.entries:
        with _leaving_the_rest(plan):
            plan.results.put("profile", profile(contender, plan.setting, stop_at=plan.stop_at))


def _leaving_the_rest(plan: Plan) -> AbstractContextManager[object]:
    return suppress(TimeIsUp) if plan.quick else nullcontext()


def _peak(plan: Plan, repeat: int) -> None:
    key = f"peak/{repeat}"
    if key not in plan.results.entries:
        seconds_until(plan.stop_at)
        plan.results.put(key, measure_peak(plan.setting.device, plan.compute_dtype))


def _check_choices(workload: str, pairs: Path | None, model: str, device: str, parameters: str) -> None:
    choices = {
        "--workload": (workload, WORKLOADS),
        "--model": (model, (model,) if Path(model, "config.json").is_file() else tuple(SHAPES)),
        "--device": (device, ("cpu", "cuda")),
        "--parameters": (parameters, ("float32", "bfloat16")),
    }
    for option, (value, allowed) in choices.items():
        if value not in allowed:
            raise SystemExit(f"{option}: {value!r} is none of {', '.join(allowed)}")
    if (workload in HH_WORKLOADS) != (pairs is not None):
        raise SystemExit("--pairs: hh and hh-chat need HH-RLHF's rows, and no other workload takes any")
    if workload == "hh-chat" and model in SHAPES:
        raise SystemExit(
            "--model: hh-chat needs a chat template; give a directory with a model and its tokenizer"
        )
    if workload == "hh" and model in SHAPES and SHAPES[model]["vocab_size"] < HH_VOCABULARY:
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
