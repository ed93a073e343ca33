"""Measure dpo-pack against TRL on the same token ids, model, steps and machine, in alternation.

    python scripts/benchmark.py --workload hh --pairs hh.jsonl.gz --output docs/benchmarks/cpu-hh-7m
    scripts/benchmark_gpu.sh

Every measurement is a process of its own. What is counted is the work: the reference log-probs (TRL runs
them in its trainer's constructor or live in each step, both are tried) and the training steps. What is not:
imports, model loading, tokenisation. TRL first runs shortly at every micro-batch size, live and precomputed,
in the given order and grouped by length; the fastest of these take turns with us, and the fastest in the
turns is its best, which we compare with. All contenders must agree in every step's loss, gradient norm and
log-probs, but those that group by length: their steps hold other pairs. Results are kept after every
measurement: run the same command again and it goes on. Needs `pip install -e '.[benchmark]'`.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from benchmarking.contenders import Contender, Measurement, Setting, ablations, ours, trl_sweep, trl_variants
from benchmarking.process import measure, measure_peak, profile, save_model, visible_devices
from benchmarking.report import Report, markdown
from benchmarking.results import TOLERANCES, Results, largest_differences, machine, other_work
from benchmarking.shapes import SHAPES, flops_shape
from benchmarking.work import work_of
from benchmarking.workloads import WORKLOADS, Workload, make_workload

from dpo_pack.system.machine import git_commit


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
    finalists: int  # of TRL's settings, the fastest of the sweep, that are measured with ours
    with_ablations: bool
    also: Sequence[str]  # settings of ours that are measured too

    def __post_init__(self) -> None:
        step = self.setting.pairs_per_step
        uneven = [count for count in (self.setting.num_pairs, self.sweep_pairs) if count % step]
        if uneven:
            raise SystemExit(f"--num-pairs, --sweep-pairs: {uneven[0]} is no multiple of {step} pairs a step")
        if self.setting.warmup_steps >= min(self.setting.num_pairs, self.sweep_pairs) // step:
            raise SystemExit("--warmup-steps: no step would be timed; raise --num-pairs and --sweep-pairs")
        if wrong := [size for size in self.microbatches if step % size]:
            raise SystemExit(f"--microbatches: {wrong[0]} does not divide {step} pairs a step")

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
    sweep_pairs: Annotated[int, typer.Option(help="Pairs of each run of the sweeps.")] = 64,
    microbatches: Annotated[
        str, typer.Option(help="TRL's sweep, pairs; empty: TRL is left out.")
    ] = "1,2,4,8",
    finalists: Annotated[
        int, typer.Option(min=1, help="So many of TRL's fastest settings of the sweep take turns with ours.")
    ] = 2,
    token_budgets: Annotated[str, typer.Option(help="Ours; the best of several is used.")] = "8192",
    warmup_steps: Annotated[int, typer.Option(help="Steps at the start that are not timed.")] = 0,
    with_ablations: Annotated[bool, typer.Option("--ablations/--no-ablations")] = True,
    also: Annotated[
        list[str] | None, typer.Option(help="A recipe setting to measure as well: model.compile=true")
    ] = None,
    with_profile: Annotated[bool, typer.Option("--profile/--no-profile")] = True,
    work: Annotated[Path | None, typer.Option(help="Keep pairs and models here for other runs.")] = None,
) -> None:
    """Run the sweeps and the comparison; prints as it goes. Exits with 1 where contenders disagree."""
    _check_choices(workload, pairs, model, device, parameters)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(device)  # the page names what was measured on
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
            results=Results.open(output.with_suffix(".json"), _identity(setting, pairs_made, model)),
            repeats=repeats,
            sweep_pairs=sweep_pairs,
            token_budgets=_numbers(token_budgets),
            microbatches=_numbers(microbatches),
            finalists=finalists,
            with_ablations=with_ablations,
            also=also or (),
        )
        report = run_plan(plan, model, with_profile=with_profile)
    page = markdown(report)
    output.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)
    if report.disagreements:
        raise SystemExit("\n".join(report.disagreements))


def run_plan(plan: Plan, model: str, *, with_profile: bool) -> Report:
    """Measure what the results lack, and put the report together."""
    best_budget = best_own_budget(plan)
    finalists = fastest_of_trl(plan)
    contenders = [ours(best_budget), *finalists]
    contenders += ablations(best_budget) if plan.with_ablations else ()
    contenders += [ours(best_budget, setting, name=f"dpo-pack, {setting}") for setting in plan.also]
    peaks = []
    for repeat in range(plan.repeats):
        if f"peak/{repeat}" not in plan.results:
            plan.results.put(f"peak/{repeat}", measure_peak(plan.setting.device, plan.compute_dtype))
        peaks.append(plan.results[f"peak/{repeat}"])
        for contender in contenders:
            _measure_missing(plan, {f"run/{repeat}/{contender.name}": contender}, plan.setting)
    if with_profile and "profile" not in plan.results:
        plan.results.put("profile", profile(contenders[0], plan.setting))
    runs: dict[str, Sequence[Measurement]] = {
        contender.name: [
            plan.results.measurement(f"run/{repeat}/{contender.name}") for repeat in range(plan.repeats)
        ]
        for contender in contenders
    }
    differences, disagreements = compare_work(plan, contenders, runs)
    lengths = plan.workload.lengths().select(np.arange(plan.setting.num_pairs))
    return Report(
        title=f"{plan.workload.name}, {model} model, {plan.setting.device}",
        command=" ".join(["python", *sys.argv]),
        date=datetime.date.today().isoformat(),
        machine=machine(),
        setting={
            name: getattr(plan.setting, name) for name in Setting.__dataclass_fields__ if name != "workload"
        },
        origin=plan.workload.origin,
        work=work_of(flops_shape(model), lengths, lora=plan.setting.lora),
        peaks=peaks,
        sweep=list(_sweeps(plan)),
        runs=runs,
        finalists=[contender.name for contender in finalists],
        differences=differences,
        disagreements=disagreements,
        profile=plan.results.get("profile"),
    )


def best_own_budget(plan: Plan) -> int:
    """The token budget of ours that is fastest in a short run."""
    if len(plan.token_budgets) == 1:
        return plan.token_budgets[0]
    tried = {ours(budget, name=f"dpo-pack, token budget {budget}"): budget for budget in plan.token_budgets}
    rates = _sweep(plan, list(tried))
    if not rates:
        raise SystemExit("--token-budgets: none of them fits in memory; lower them")
    return tried[max(rates, key=lambda contender: rates[contender])]


def fastest_of_trl(plan: Plan) -> list[Contender]:
    """TRL at its fastest settings in a short run; empty where it ran at none, or was not asked for."""
    sweep = list(trl_sweep(plan.microbatches, gradient_checkpointing=plan.setting.gradient_checkpointing))
    rates = _sweep(plan, sweep)
    failed = [contender for contender in sweep if contender not in rates]
    compiled = "model.compile=true" in plan.also
    fastest = sorted(rates, key=lambda contender: -rates[contender])[: plan.finalists]
    rates |= _sweep(plan, list(trl_variants(fastest, failed, compiled=compiled)))
    return sorted(rates, key=lambda contender: -rates[contender])[: plan.finalists]


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
    """Measure what has no entry yet, in one process, and keep each result as soon as it is there."""
    missing = {key: contender for key, contender in wanted.items() if key not in plan.results}
    for key, run in zip(missing, measure(list(missing.values()), setting), strict=True) if missing else ():
        plan.results.put(key, run.to_json())
        rate = (
            "" if run.failure else f"{1 / run.seconds_a_pair(warmup_steps=setting.warmup_steps):.2f} pairs/s"
        )
        print(f"{key}: {run.failure or rate}", flush=True)


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


def _identity(setting: Setting, workload: Workload, model: str) -> dict[str, object]:
    """What a results file must be of to be gone on with: another commit's times are another benchmark's."""
    paths = {"workload", "model"}
    fields = {name: getattr(setting, name) for name in Setting.__dataclass_fields__ if name not in paths}
    made_of = {"workload": workload.name, "digest": workload.digest, "model": model}
    devices = [device["name"] for device in machine()["devices"]]
    return {**fields, **made_of, "git_commit": git_commit(), "devices": devices}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    typer.run(main)
