"""Measure dpo-pack against TRL on the same pairs, model, steps and machine, in alternation.

    python scripts/benchmark.py --pairs hh.jsonl.gz --output docs/benchmarks/cpu-hh

Every measurement is a process of its own. What is counted is the work: the reference log-probs (TRL runs
them in its trainer's constructor or live in each step, both are tried) and the training steps. What is not:
imports, model loading, tokenisation. TRL runs at every micro-batch size first, live and precomputed; its
best is what we compare with. Needs `pip install -e '.[benchmark]'`.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

CHILD = "--measure-in-this-process"
PAIRS_PER_STEP = 32
LEARNING_RATE = 1e-5
BETA = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of doing the work; `settings` are recipe overrides for us, TRL's options for TRL."""

    name: str
    trainer: str  # "dpo-pack" or "trl"
    settings: tuple[str, ...] = ()
    microbatch_pairs: int = 0
    precompute: bool = False


OURS = Contender(name="dpo-pack", trainer="dpo-pack")
ABLATIONS = (
    Contender(
        name="dpo-pack, prompts not shared", trainer="dpo-pack", settings=("packing.share_prompt=false",)
    ),
    Contender(name="dpo-pack, padded", trainer="dpo-pack", settings=("packing.mode=padded",)),
)


def main(
    output: Annotated[Path, typer.Option(help="Writes OUTPUT.json and OUTPUT.md.")],
    pairs: Annotated[
        Path | None, typer.Option(help="Transcript rows, e.g. HH-RLHF; default: made up.")
    ] = None,
    num_pairs: Annotated[int, typer.Option(help="The first so many usable rows.")] = 256,
    vocabulary: Annotated[int, typer.Option(help="Rows of the model's embedding.")] = 8192,
    repeats: Annotated[int, typer.Option(help="Measurements of each contender.")] = 5,
    sweep_pairs: Annotated[int, typer.Option(help="Pairs in TRL's sweep over micro-batch sizes.")] = 128,
) -> None:
    """Run the sweep and the comparison; prints as it goes."""
    with tempfile.TemporaryDirectory(prefix="dpo-pack-benchmark-") as work:
        workload = _make_workload(Path(work), pairs, num_pairs, vocabulary)
        sweep = {}
        for precompute in (False, True):
            for microbatch in (1, 2, 4, 8):
                name = f"TRL, micro-batch {microbatch}, {'precomputed' if precompute else 'live'} reference"
                contender = Contender(
                    name=name, trainer="trl", microbatch_pairs=microbatch, precompute=precompute
                )
                sweep[contender] = _measure(contender, workload, sweep_pairs)["pairs_per_second"]
                print(f"{name}: {sweep[contender]:.2f} pairs/s", flush=True)
        best = max(sweep, key=lambda contender: sweep[contender])
        contenders = (OURS, best, *ABLATIONS)
        runs: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
        for repeat in range(repeats):
            for contender in contenders:
                runs[contender.name].append(_measure(contender, workload, num_pairs))
                rate = runs[contender.name][-1]["pairs_per_second"]
                print(f"run {repeat + 1}: {contender.name}: {rate:.2f} pairs/s", flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "workload": {"pairs": num_pairs, "pairs_per_step": PAIRS_PER_STEP, "vocabulary": vocabulary},
        "sweep": {contender.name: rate for contender, rate in sweep.items()},
        "best_of_trl": best.name,
        "runs": runs,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    output.with_suffix(".md").write_text(_markdown(report))
    print(_markdown(report))


def measure_here(contender_json: str, workload: Path, num_pairs: int) -> None:
    """Measure one contender in this process and print its numbers as JSON."""
    fields = json.loads(contender_json)
    contender = Contender(**{**fields, "settings": tuple(fields["settings"])})
    run = _run_dpo_pack if contender.trainer == "dpo-pack" else _run_trl
    numbers = run(contender, workload, num_pairs)
    numbers["pairs_per_second"] = num_pairs / (numbers["reference_seconds"] + numbers["train_seconds"])
    print(json.dumps(numbers))


def _measure(contender: Contender, workload: Path, num_pairs: int) -> dict[str, float]:
    command = [sys.executable, __file__, CHILD, json.dumps(asdict(contender)), str(workload), str(num_pairs)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_DATASETS_CACHE"] = str(workload / "datasets")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        sys.exit(f"{contender.name} failed:\n{result.stderr[-4000:]}")
    numbers: dict[str, float] = json.loads(result.stdout.strip().splitlines()[-1])
    return numbers


def _run_dpo_pack(contender: Contender, workload: Path, num_pairs: int) -> dict[str, float]:
    from dpo_pack.console import make_console
    from dpo_pack.recipe import parse_recipe
    from dpo_pack.train import train

    with tempfile.TemporaryDirectory(dir=workload) as scratch:
        # Tokenised once for all runs; the reference log-probs are computed by each anew.
        cache = Path(scratch, "cache")
        recipe = parse_recipe(
            {
                "output_dir": f"{scratch}/run",
                "model": {"path": str(workload / "model")},
                "reference": {"cache_dir": str(cache)},
                "data": {
                    "train": {"path": str(workload / "pairs.jsonl"), "max_pairs": num_pairs},
                    "max_length": 1024,
                },
                "packing": {"pairs_per_step": PAIRS_PER_STEP},
                "loss": {"beta": BETA},
                "optim": {"lr": LEARNING_RATE},
            },
            contender.settings,
        )
        train(recipe, make_console(quiet=True))
        totals = json.loads(Path(scratch, "run", "run.json").read_text())["totals"]
    assert totals["pairs"] == num_pairs
    return {key: totals[key] for key in ("reference_seconds", "train_seconds")}


def _run_trl(contender: Contender, workload: Path, num_pairs: int) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (workload / "pairs.jsonl").read_text().splitlines()][:num_pairs]
    seconds = {"reference_seconds": 0.0}
    precompute = DPOTrainer._precompute_ref_logps

    def timed_precompute(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        result = precompute(*arguments, **options)
        seconds["reference_seconds"] += time.perf_counter() - begun
        return result

    DPOTrainer._precompute_ref_logps = timed_precompute
    with tempfile.TemporaryDirectory(dir=workload) as scratch:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(workload / "model", dtype=torch.float32),
            args=DPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=contender.microbatch_pairs,
                gradient_accumulation_steps=PAIRS_PER_STEP // contender.microbatch_pairs,
                precompute_ref_log_probs=contender.precompute,
                precompute_ref_batch_size=contender.microbatch_pairs,
                learning_rate=LEARNING_RATE,
                beta=BETA,
                max_length=1024,
                num_train_epochs=1,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        )
        begun = time.perf_counter()
        trainer.train()
        seconds["train_seconds"] = time.perf_counter() - begun
    return seconds


def _make_workload(directory: Path, pairs: Path | None, num_pairs: int, vocabulary: int) -> Path:
    """Prompt, chosen and rejected as strings both trainers read the same way, and a 4-layer model."""
    rows = _hh_rows(pairs, num_pairs) if pairs is not None else _made_up_rows(num_pairs)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "pairs.jsonl").write_text(text, encoding="utf-8")
    _save_model(directory / "model", [value for row in rows for value in row.values()], vocabulary)
    return directory


def _hh_rows(path: Path, num_pairs: int) -> list[dict[str, str]]:
    from dpo_pack.data.formats import FORMATS, BadRow

    rows: list[dict[str, str]] = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            try:
                pair = FORMATS["transcript"](json.loads(line))
            except BadRow:
                continue
            rows.append(
                {"prompt": str(pair.prompt), "chosen": str(pair.chosen), "rejected": str(pair.rejected)}
            )
            if len(rows) == num_pairs:
                return rows
    sys.exit(f"{path} has {len(rows)} usable rows, not {num_pairs}")


def _made_up_rows(num_pairs: int) -> list[dict[str, str]]:
    """Log-normal lengths with HH's medians and tails (prompt 98 and 542 tokens, completions 29 and 200)."""
    import numpy as np

    random = np.random.default_rng(0)
    words = [f"{a}{b}" for a in "bcdfghklmnprst" for b in ("an", "ert", "ilo", "oum", "us")]

    def text(median: float, spread: float) -> str:
        count = int(np.clip(random.lognormal(np.log(median), spread), 1, 400))
        return "".join(" " + words[i] for i in random.integers(0, len(words), count))

    return [
        {"prompt": "Q:" + text(98, 0.75), "chosen": text(29, 0.8), "rejected": text(38, 0.85)}
        for _ in range(num_pairs)
    ]


def _save_model(target: Path, texts: list[str], vocabulary: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(target)
    torch.manual_seed(0)
    wide = vocabulary > 8192
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=384 if wide else 256,
        intermediate_size=1024 if wide else 688,
        num_hidden_layers=6 if wide else 4,
        num_attention_heads=6 if wide else 4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(target)


def _machine() -> dict[str, Any]:
    from dpo_pack.doctor import describe_environment
    from dpo_pack.run_dir import git_commit

    return {**describe_environment(), "git_commit": git_commit(), "processor": _processor()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _markdown(report: dict[str, Any]) -> str:
    def row(name: str, runs: list[dict[str, float]], base: float) -> str:
        rates = [run["pairs_per_second"] for run in runs]
        reference = statistics.median(run["reference_seconds"] for run in runs)
        train = statistics.median(run["train_seconds"] for run in runs)
        median = statistics.median(rates)
        return (
            f"| {name} | {median:.2f} | {min(rates):.2f} to {max(rates):.2f} | {reference:.1f} | {train:.1f} "
            f"| {median / base:.2f}x |"
        )

    best = statistics.median(run["pairs_per_second"] for run in report["runs"][report["best_of_trl"]])
    machine = report["machine"]
    paired = [
        ours["pairs_per_second"] / theirs["pairs_per_second"]
        for ours, theirs in zip(report["runs"][OURS.name], report["runs"][report["best_of_trl"]], strict=True)
    ]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    devices = ", ".join(device["name"] for device in machine["devices"])
    return "\n".join(
        [
            f"# {report['workload']['pairs']} pairs, vocabulary {report['workload']['vocabulary']}",
            "",
            f"`{report['command']}`, {report['date']}, commit {machine['git_commit']}, "
            f"{machine['processor']}, {devices}; {versions}.",
            "",
            "| | pairs/s, median | spread | reference s | training s | against TRL's best |",
            "|---|---|---|---|---|---|",
            *(row(name, runs, best) for name, runs in report["runs"].items()),
            "",
            f"Ratio of ours to TRL's best run by run: median {statistics.median(paired):.2f}, "
            f"{min(paired):.2f} to {max(paired):.2f}.",
            "",
            "TRL's sweep (pairs/s, one short run each): "
            + "; ".join(f"{name.removeprefix('TRL, ')}: {rate:.2f}" for name, rate in report["sweep"].items())
            + ".",
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        measure_here(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        typer.run(main)
