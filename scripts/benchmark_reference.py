"""Measure our reference pass against TRL's `precompute_ref_log_probs` on the same pairs, model and machine.

    python scripts/benchmark_reference.py --pairs hh.jsonl.gz --output docs/benchmarks/reference-cpu-hh

Every measurement is a process of its own, in alternation. Counted is the pass from looking up what is cached
(nothing) to log-probs on disk; not counted are imports, model loading, tokenisation and our start-up proof.
TRL runs at its default batch size and at every other of a sweep; its best is the one compared with. Every
pair's two sums are compared as well. Needs `pip install -e '.[benchmark]'`.
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
from benchmarking.contenders import Setting, ours, trl
from benchmarking.process import save_model
from benchmarking.results import hardware, machine
from benchmarking.shapes import SHAPES
from benchmarking.workloads import make_workload

CHILD = "--measure-in-this-process"
OURS = "dpo-pack"
TRL_DEFAULT_BATCH = 8
TOKEN_BUDGET = 8192
LARGEST_DIFFERENCE = 1e-3  # nats between our sums and TRL's, in fp32

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
) -> None:
    """Run the sweep and the comparison; prints as it goes."""
    with tempfile.TemporaryDirectory(prefix="dpo-pack-benchmark-") as work:
        setting = make_setting(Path(work), pairs, num_pairs=max(num_pairs, sweep_pairs), model=model)
        sweep = {}
        for batch_size in map(int, batch_sizes.split(",")):
            sweep[batch_size] = sweep_pairs / measure(batch_size, setting, sweep_pairs)[0]
            print(f"{name_of(batch_size)}: {sweep[batch_size]:.1f} pairs/s", flush=True)
        best = max(sweep, key=lambda batch_size: sweep[batch_size])
        contenders = dict.fromkeys([0, best, TRL_DEFAULT_BATCH])  # 0: ours; the default may be the best
        rates: dict[str, list[float]] = {name_of(contender): [] for contender in contenders}
        difference = 0.0
        for repeat in range(repeats):
            ours: Values | None = None
            for contender in contenders:
                seconds, values = measure(contender, setting, num_pairs)
                rates[name_of(contender)].append(num_pairs / seconds)
                print(
                    f"run {repeat + 1}: {name_of(contender)}: {num_pairs / seconds:.1f} pairs/s", flush=True
                )
                ours = values if ours is None else ours
                difference = max(difference, float(np.abs(values - ours).max()))
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "workload": {"pairs": num_pairs, "model": model},
        "sweep": {name_of(batch_size): rate for batch_size, rate in sweep.items()},
        "best_of_trl": name_of(best),
        "default_of_trl": name_of(TRL_DEFAULT_BATCH),
        "pairs_per_second": rates,
        "largest_difference_nats": difference,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    output.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    if difference > LARGEST_DIFFERENCE:
        sys.exit(f"the log-probs differ by {difference:.2g} nats, more than {LARGEST_DIFFERENCE}")


def name_of(batch_size: int) -> str:
    """A contender's name; 0 is ours."""
    return OURS if batch_size == 0 else f"TRL, batch {batch_size}"


def make_setting(work: Path, pairs: Path | None, *, num_pairs: int, model: str) -> Setting:
    """Pairs and model on disk, the same as in the whole run's benchmark."""
    workload = make_workload(
        "hh-like" if pairs is None else "hh",
        work / "pairs",
        num_pairs=num_pairs,
        vocabulary=SHAPES[model]["vocab_size"],
        hh_pairs=pairs,
    )
    save_model(model, work / "model", parameters="float32", device="cpu")
    return Setting(
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


def measure(batch_size: int, setting: Setting, num_pairs: int) -> tuple[float, Values]:
    """(seconds, log-probs) of one pass over the first `num_pairs` in a process of its own."""
    fields = json.dumps(asdict(replace(setting, num_pairs=num_pairs)))
    values = Path(setting.workload, "values.npy")
    command = [sys.executable, __file__, CHILD, str(batch_size), fields, str(values)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["TQDM_DISABLE"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["HF_DATASETS_CACHE"] = f"{setting.workload}/datasets"
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        sys.exit(f"{name_of(batch_size)} failed:\n{result.stderr[-4000:]}")
    return float(result.stdout.strip().splitlines()[-1]), np.load(values)


def measure_here(batch_size: int, setting: Setting, target: Path) -> None:
    """Run one pass in this process, leave its log-probs in `target`, print its seconds."""
    with tempfile.TemporaryDirectory(dir=setting.workload) as scratch:
        run = run_dpo_pack if batch_size == 0 else run_trl
        seconds, values = run(batch_size, setting, Path(scratch))
    assert values.shape == (setting.num_pairs, 2), values.shape
    np.save(target, values)
    print(seconds)


def run_dpo_pack(batch_size: int, setting: Setting, scratch: Path) -> tuple[float, Values]:
    """(seconds, log-probs [pairs, 2]); `batch_size` is TRL's and not read."""
    from benchmarking.run_dpo_pack import make_recipe

    from dpo_pack.run.prepare import load_policy, prepare
    from dpo_pack.run.reference_stage import prepare_reference
    from dpo_pack.system.console import make_console

    recipe = make_recipe(ours(TOKEN_BUDGET), setting, scratch)
    prepared = prepare(recipe, make_console(quiet=True))
    policy = load_policy(prepared)
    begun = time.perf_counter()
    filled = prepare_reference(prepared, policy)
    seconds = time.perf_counter() - begun
    reference = filled.values().of(prepared.data.train)
    return seconds, np.stack((reference.chosen, reference.rejected), axis=1)


def run_trl(batch_size: int, setting: Setting, scratch: Path) -> tuple[float, Values]:
    """(seconds, log-probs [pairs, 2]) of the pass that TRL's constructor runs."""
    from benchmarking.run_trl import Clock, build_trainer

    clock = Clock(setting, microbatches_a_step=1)
    # Its steps are never run: one of `batch_size` pairs each is as good as any.
    setting = replace(setting, pairs_per_step=batch_size)
    trainer = build_trainer(trl(batch_size, precompute=True), setting, scratch, clock)
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
            f"{hardware(machine)}; {versions}.",
            "",
            "| | pairs/s, median | spread | ours is so many times as fast, run by run |",
            "|---|---|---|---|",
            *(row(name) for name in rates),
            "",
            f"Best of TRL: {report['best_of_trl']}; its default: {report['default_of_trl']}. "
            "Its sweep (pairs/s, one short run each): "
            + "; ".join(f"{name.removeprefix('TRL, ')}: {rate:.1f}" for name, rate in report["sweep"].items())
            + ".",
            "",
            f"Largest difference between our sums and TRL's: {report['largest_difference_nats']:.1e} nats.",
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        measure_here(int(sys.argv[2]), Setting(**json.loads(sys.argv[3])), Path(sys.argv[4]))
    else:
        typer.run(main)
