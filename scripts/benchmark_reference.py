"""Measure our reference pass against TRL's `precompute_ref_log_probs` on the same pairs, model and machine.

    python scripts/benchmark_reference.py --pairs hh.jsonl.gz --output docs/benchmarks/reference-cpu-hh

Every measurement is a process of its own, in alternation. Counted is the pass from looking up what is cached
(nothing) to log-probs on disk; not counted are imports, model loading, tokenisation and our start-up proof.
TRL runs at its default batch size and at every other of a sweep, and at the fastest with eager attention and
other settings of malloc; its best is the one compared with. Every pair's two sums are compared as well.
Results are kept after every measurement: run the same command again and it goes on. Needs
`pip install -e '.[benchmark]'`.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from benchmarking.contenders import MALLOCS, Contender, Setting, changed, ours, trl_references
from benchmarking.process import save_model
from benchmarking.results import Results, hardware, machine
from benchmarking.shapes import SHAPES
from benchmarking.workloads import Workload, make_workload

from dpo_pack.system.machine import git_commit

CHILD = "--measure-in-this-process"
OURS = "dpo-pack"
TRL_DEFAULT_BATCH = 8
TOKEN_BUDGET = 8192
PROCESS_SECONDS = 8.0
LARGEST_DIFFERENCE = 1e-3  # nats between dpo-pack's sums and TRL's, in fp32

Values = npt.NDArray[np.float64]  # [pairs, (chosen, rejected)]


def main(
    output: Annotated[Path, typer.Option(help="Writes OUTPUT.json and OUTPUT.md.")],
    pairs: Annotated[
        Path | None, typer.Option(help="HH-RLHF's transcript rows; default: lengths like them.")
    ] = None,
    num_pairs: Annotated[int, typer.Option(help="The first so many usable rows.")] = 512,
    model: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "7m",
    repeats: Annotated[int, typer.Option(help="Measurements of each contender.")] = 5,
    sweep_pairs: Annotated[int, typer.Option(help="Pairs in TRL's sweep over batch sizes.")] = 256,
    batch_sizes: Annotated[str, typer.Option(help="TRL's sweep.")] = "1,2,4,8,16,32",
    target: Annotated[float, typer.Option(help="Ours is to be so many times as fast as TRL's best.")] = 0,
) -> None:
    """Run the sweep and the comparison; prints as it goes."""
    with tempfile.TemporaryDirectory(prefix="dpo-pack-benchmark-") as work:
        setting, workload = make_setting(
            Path(work), pairs, num_pairs=max(num_pairs, sweep_pairs), model=model
        )
        sizes = [int(size) for size in batch_sizes.split(",")]
        identity = {
            "digest": workload.digest, "pairs": num_pairs, "model": model, "repeats": repeats,
            "sweep_pairs": sweep_pairs, "batch_sizes": sizes, "target": target, "git_commit": git_commit(),
            "devices": [device["name"] for device in machine()["devices"]],
        }  # fmt: skip
        results = Results.open(output.with_suffix(".json"), identity)
        runs = len(sizes) + len(MALLOCS) + 2 * repeats
        print(f"at least {runs} measurements, each {PROCESS_SECONDS:.0f} s and its pass", flush=True)
        swept = {size: of_trl(size) for size in sizes}
        rates = {one.name: kept(results, "sweep", one, setting, sweep_pairs) for one in swept.values()}
        fastest = max(swept.values(), key=lambda one: rates[one.name])
        variants = [changed(fastest, attention="eager")]
        variants += [changed(fastest, malloc=malloc) for malloc in MALLOCS if malloc]
        rates |= {one.name: kept(results, "sweep", one, setting, sweep_pairs) for one in variants}
        best = max([*swept.values(), *variants], key=lambda one: rates[one.name])
        contenders = [ours(TOKEN_BUDGET), best]
        contenders += [of_trl(TRL_DEFAULT_BATCH)] if best != of_trl(TRL_DEFAULT_BATCH) else []
        turns = {
            one.name: [kept(results, f"run/{repeat}", one, setting, num_pairs) for repeat in range(repeats)]
            for one in contenders
        }
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "workload": {"pairs": num_pairs, "model": model, "origin": workload.origin, "swept": sweep_pairs},
        "sweep": rates,
        "best_of_trl": best.name,
        "default_of_trl": of_trl(TRL_DEFAULT_BATCH).name,
        "target": target,
        "pairs_per_second": turns,
        "largest_difference_nats": max(
            entry["difference"] for key, entry in results.content["entries"].items() if key.startswith("run/")
        ),
    }
    output.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    if report["largest_difference_nats"] > LARGEST_DIFFERENCE:
        sys.exit(f"the log-probs differ by more than {LARGEST_DIFFERENCE} nats")


def of_trl(batch_size: int) -> Contender:
    """TRL's pass alone."""
    return next(trl_references([batch_size]))


def kept(results: Results, key: str, contender: Contender, setting: Setting, num_pairs: int) -> float:
    """Pairs a second, measured unless it is known. Each is compared with our first run's log-probs."""
    key = f"{key}/{contender.name}"
    if key not in results:
        seconds, values = measure(contender, setting, num_pairs)
        if key == f"run/0/{OURS}":
            results.put("log-probs", values.round(6).tolist())
        own = results.get("log-probs") if key.startswith("run/") else None
        difference = 0.0 if own is None else float(np.abs(values - np.array(own)).max())
        results.put(key, {"pairs_per_second": num_pairs / seconds, "difference": difference})
        print(f"{key}: {num_pairs / seconds:.1f} pairs/s", flush=True)
    return float(results[key]["pairs_per_second"])


def make_setting(work: Path, pairs: Path | None, *, num_pairs: int, model: str) -> tuple[Setting, Workload]:
    """Pairs and model on disk, the same as in the whole run's benchmark."""
    workload = make_workload(
        "hh-like" if pairs is None else "hh",
        work / "pairs",
        num_pairs=num_pairs,
        vocabulary=SHAPES[model]["vocab_size"],
        hh_pairs=pairs,
    )
    save_model(model, work / "model", parameters="float32", device="cpu")
    setting = Setting(
        workload=str(workload.directory),
        model=str(work / "model"),
        num_pairs=num_pairs,
        pairs_per_step=1,
        max_length=workload.max_length,
        device="cpu",
        parameters="float32",
        lora=False,
        gradient_checkpointing=False,
        warmup_steps=0,
    )
    return setting, workload


def measure(contender: Contender, setting: Setting, num_pairs: int) -> tuple[float, Values]:
    """(seconds, log-probs) of one pass over the first `num_pairs` in a process of its own."""
    fields = json.dumps(asdict(replace(setting, num_pairs=num_pairs)))
    values = Path(setting.workload, "values.npy")
    command = [sys.executable, __file__, CHILD, json.dumps(asdict(contender)), fields, str(values)]
    environment = {**os.environ, **contender.environment}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["TQDM_DISABLE"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["HF_DATASETS_CACHE"] = f"{setting.workload}/datasets"
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        sys.exit(f"{contender.name} failed:\n{result.stderr[-4000:]}")
    return float(result.stdout.strip().splitlines()[-1]), np.load(values)


def measure_here(contender: Contender, setting: Setting, target: Path) -> None:
    """Run one pass in this process, leave its log-probs in `target`, print its seconds."""
    with tempfile.TemporaryDirectory(dir=setting.workload) as scratch:
        run = run_dpo_pack if contender.trainer == "dpo-pack" else run_trl
        seconds, values = run(contender, setting, Path(scratch))
    assert values.shape == (setting.num_pairs, 2), values.shape
    np.save(target, values)
    print(seconds)


def run_dpo_pack(contender: Contender, setting: Setting, scratch: Path) -> tuple[float, Values]:
    """(seconds, log-probs [pairs, 2])."""
    from benchmarking.run_dpo_pack import make_recipe

    from dpo_pack.run.pairs import prepare_reference
    from dpo_pack.run.setup import load_policy, prepare
    from dpo_pack.system.console import make_console

    recipe = make_recipe(contender, setting, scratch)
    prepared = prepare(recipe, make_console(quiet=True))
    policy = load_policy(prepared)
    begun = time.perf_counter()
    filled = prepare_reference(prepared, policy)
    seconds = time.perf_counter() - begun
    return seconds, filled.values.of(prepared.data.train).sums


def run_trl(contender: Contender, setting: Setting, scratch: Path) -> tuple[float, Values]:
    """(seconds, log-probs [pairs, 2]) of the pass that TRL's constructor runs."""
    from benchmarking.run_trl import Clock, build_trainer

    clock = Clock(setting, microbatches_a_step=1)
    # Its steps are never run, so any size of a step will do.
    setting = replace(setting, pairs_per_step=contender.microbatch_pairs)
    trainer = build_trainer(contender, setting, scratch, clock)
    names = ("ref_chosen_logps", "ref_rejected_logps")
    values = np.stack([np.asarray(trainer.train_dataset[name]) for name in names], axis=1)
    return clock.reference_seconds, values.astype(np.float64)


def markdown(report: dict[str, Any]) -> str:
    """The report for people: medians, spreads and ratios run by run."""
    rates: dict[str, list[float]] = report["pairs_per_second"]
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())

    def row(name: str) -> str:
        ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[name], strict=True)]
        return (
            f"| {name} | {statistics.median(rates[name]):.1f} | {min(rates[name]):.1f} to "
            f"{max(rates[name]):.1f} | {statistics.median(ratios):.2f}x ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) |"
        )

    return "\n".join(
        [
            f"# Reference log-probs of {report['workload']['pairs']} pairs, "
            f"{report['workload']['model']} model",
            "",
            f"`{report['command']}`, {report['date']}, commit {machine['git_commit']}, "
            f"{hardware(machine)}; {versions}. Pairs: {report['workload']['origin']}.",
            "",
            "| | pairs/s, median | spread | ours is so many times as fast, run by run |",
            "|---|---|---|---|",
            *(row(name) for name in rates),
            "",
            f"Best of TRL: {report['best_of_trl']}; its default: {report['default_of_trl']}.",
            "",
            *_target(report),
            "Every turn, pairs/s, in the order of measuring:",
            "",
            *(f"- {name}: {', '.join(f'{rate:.1f}' for rate in turns)}" for name, turns in rates.items()),
            "",
            f"TRL's sweep, one run of {report['workload']['swept']} pairs each, pairs/s:",
            "",
            *(f"- {name}: {rate:.1f}" for name, rate in report["sweep"].items()),
            "",
            f"Largest difference between our sums and TRL's: {report['largest_difference_nats']:.1e} nats.",
            "",
        ]
    )


def _target(report: dict[str, Any]) -> list[str]:
    if not report["target"]:
        return []
    own, best = (report["pairs_per_second"][name] for name in (OURS, report["best_of_trl"]))
    ratio = statistics.median(mine / its for mine, its in zip(own, best, strict=True))
    verdict = "met" if ratio >= report["target"] else "**missed**"
    return [f"Target: at least {report['target']:g}x TRL's best: {ratio:.2f}x: {verdict}.", ""]


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        measure_here(
            Contender.from_json(json.loads(sys.argv[2])),
            Setting(**json.loads(sys.argv[3])),
            Path(sys.argv[4]),
        )
    else:
        typer.run(main)
