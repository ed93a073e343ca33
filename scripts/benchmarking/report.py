"""The benchmark's results as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarking.contenders import Measurement
from benchmarking.results import hardware
from benchmarking.shapes import Work

GIB = 2**30
# benchmark_gpu.sh looks for these two.
NOT_COMPARABLE = "**These times cannot be compared:**"
NOT_WHOLE = "**Not everything is measured.**"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Some training steps of ours under torch's profiler."""

    num_steps: int
    seconds: float  # of all of them
    flops: dict[str, float]  # of their pairs, prompts once, by part of the model
    table: str  # torch's, by operator and kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything the page says."""

    title: str
    command: str
    date: str
    machine: dict[str, Any]
    setting: dict[str, Any]
    origin: str  # where the pairs come from
    work: Work
    peaks: Sequence[dict[str, float]]  # FLOPs a second, one measurement for each repeat
    sweep: Sequence[Measurement]
    sweep_pairs: int  # pairs in each run of the sweep
    runs: dict[str, Sequence[Measurement]]  # contender (dpo-pack first) -> its repeats in order
    finalists: Sequence[str]  # TRL's fastest settings; empty: TRL ran at no setting
    differences: dict[str, dict[str, float]]  # contender -> its differences from dpo-pack
    disagreements: Sequence[str]  # contenders that did other work, and the proof
    profile: Profile | None
    missing: Sequence[str]  # what is yet to be measured
    is_quick: bool  # whether dpo-pack was measured before TRL's sweep
    prediction: str = ""  # what was expected
    beside: dict[str, Measurement] = field(default_factory=dict)  # contender -> its first turn in fp32

    @property
    def warmup_steps(self) -> int:
        return int(self.setting["warmup_steps"])

    @property
    def peak_flops(self) -> float:
        """Median over the repeats of the best product of each."""
        return statistics.median(peak["best"] for peak in self.peaks)

    @property
    def best_trl(self) -> str | None:
        """The finalist with the highest median rate; None where each failed, or there is none."""
        whole = [name for name in self.finalists if not any(run.failure for run in self.runs[name])]
        return max(whole, key=lambda name: statistics.median(self.rates(name)), default=None)

    def rate(self, run: Measurement) -> float:
        """Pairs a second."""
        return 1 / run.seconds_a_pair(warmup_steps=self.warmup_steps)

    def rates(self, contender: str) -> list[float]:
        """Those of each repeat."""
        return [self.rate(run) for run in self.runs[contender]]

    def ratios(self, contender: str) -> list[float]:
        """Of a contender's rates to those of TRL's best, repeat by repeat."""
        assert self.best_trl is not None
        return [own / its for own, its in zip(self.rates(contender), self.rates(self.best_trl), strict=True)]

    def mfu(self, contender: str) -> float:
        """The work's FLOPs over time and the measured peak: padding and repetition earn nothing."""
        return statistics.median(self.rates(contender)) * self.work.flops / self.peak_flops

    def training_mfu(self, contender: str) -> float:
        """The same of the steps alone, reference pass left out."""
        rates = [
            run.pairs / run.train_seconds(warmup_steps=self.warmup_steps) for run in self.runs[contender]
        ]
        return statistics.median(rates) * self.work.training_flops / self.peak_flops


def markdown(report: Report) -> str:
    """The page."""
    sections = [
        _heading(report),
        _prediction(report),
        _missing(report),
        _disagreements(report),
        _table(report),
        _turns(report),
        _same_work(report),
        _losses(report) if report.beside else "",
        _profile(report) if report.profile else "",
        _sweep(report),
    ]
    return "\n".join(section for section in sections if section)


def _heading(report: Report) -> str:
    machine, work, setting = report.machine, report.work, report.setting
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    trained = "LoRA" if setting["lora"] else "all weights"
    warmup = ""
    if report.warmup_steps:
        warmup = (
            f" The first {report.warmup_steps} steps of each run are not timed, and taken to be as fast, "
            "token by token, as the others."
        )
    common = ""
    if work.least_tokens < work.shared_tokens:
        common = f"{work.least_tokens:,.0f} with what prompts of a step begin with in common once, too, "
    in_bf16 = setting["autocast"] or (setting["device"] == "cuda" and setting["parameters"] == "float32")
    return (
        f"# {report.title}\n\n<!-- Written by scripts/benchmark.py. -->\n\n"
        f"`{report.command}`, {report.date}, commit {machine['git_commit']}, {hardware(machine)}; "
        f"{versions}.\n\n"
        f"{setting['num_pairs']} pairs in steps of {setting['pairs_per_step']}, {trained} trained, "
        f"{setting['parameters']} parameters"
        f"{', bf16 autocast' if in_bf16 else ''}. "
        f"A pair has {work.unshared_tokens:,.0f} tokens, {work.shared_tokens:,.0f} with its prompt once, "
        f"{common}{work.scored_tokens:,.0f} of them scored: {work.flops / 1e9:,.2f} GFLOPs, of which the "
        f"reference {work.reference_flops / work.flops:.0%}.{warmup} Pairs: {report.origin}.\n\n"
        f"Square matrix products {'in bf16 ' if setting['autocast'] else ''}on this machine, measured in the "
        f"same run: {report.peak_flops / 1e12:,.3g} TFLOP/s (median of {len(report.peaks)}, "
        f"{min(peak['best'] for peak in report.peaks) / 1e12:,.3g} to "
        f"{max(peak['best'] for peak in report.peaks) / 1e12:,.3g}). MFU is the FLOPs above over time and "
        "this peak, for every contender the same FLOPs: what it computes beyond them earns nothing.\n"
        f"{_unlike(report)}"
    )


def _unlike(report: Report) -> str:
    """What contenders do not have in common, where that is not the point."""
    setting, notes = report.setting, []
    if setting["parameters"] == "bfloat16" and not setting["lora"]:
        notes.append("TRL's AdamW has bf16 moments of bf16 weights; ours works in fp32, 14 bytes a weight.")
    if setting["device"] == "cuda" and "flash-attn" not in report.machine["versions"]:
        notes.append("TRL runs without FlashAttention: the package flash-attn is not installed.")
    return "".join(f"\n{note}\n" for note in notes)


def _prediction(report: Report) -> str:
    if not report.prediction:
        return ""
    lines = (f"> {line}".rstrip() for line in report.prediction.strip().splitlines())
    return "\n".join(["Written and committed before anything was measured:", "", *lines, ""])


def _losses(report: Report) -> str:
    """Of the first turn, step by step, beside those of the same pairs in fp32."""
    lines = [
        "Losses of the steps (nats), in bf16 here and in fp32 where the same pairs were measured so:",
        "",
    ]
    for dtype, runs in (
        ("bf16", {name: runs[0] for name, runs in report.runs.items()}),
        ("fp32", report.beside),
    ):
        lines += [
            f"- {name}, {dtype}: {', '.join(f'{loss:.4f}' for loss in run.losses)}"
            for name, run in runs.items()
            if "grouped by length" not in name and not run.failure  # grouped, steps hold other pairs
        ]
    return "\n".join([*lines, ""])


def _disagreements(report: Report) -> str:
    if not report.disagreements:
        return ""
    return "\n".join([f"{NOT_COMPARABLE}\n", *(f"- {line}" for line in report.disagreements), ""])


def _missing(report: Report) -> str:
    lines = []
    if report.missing:
        lines += [f"{NOT_WHOLE} Missing:", "", *(f"- {name}" for name in report.missing), ""]
    if report.is_quick:
        lines += ["Little time: dpo-pack was measured before TRL's sweep, not in turns with TRL.", ""]
    return "\n".join(lines)


def _table(report: Report) -> str:
    lines = [
        "| | pairs/s, median | spread | against TRL's best, run by run | tokens/s, none twice | "
        "tokens/s computed | MFU | MFU of the steps | reference | peak GiB | start-up s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in report.runs.items():
        failed = next((run.failure for run in runs if run.failure), None)
        if failed is not None:
            lines.append(f"| {name} | {failed} | | | | | | | | | |")
            continue
        rates = report.rates(name)
        rate = statistics.median(rates)
        computed = rate * runs[0].computed_tokens / runs[0].pairs
        share = statistics.median(run.reference_share(warmup_steps=report.warmup_steps) for run in runs)
        of_steps = f"{report.training_mfu(name):.1%}" if share else ""  # else it has the reference in it
        seconds = [run.startup_seconds for run in runs if run.startup_seconds is not None]
        startup = f"{statistics.median(seconds):.1f}" if seconds else ""
        lines.append(
            f"| {name} | {_text(rate)} | {_text(min(rates))} to {_text(max(rates))} | "
            f"{_ratio(report, name)} | {rate * report.work.least_tokens:,.0f} | {computed:,.0f} | "
            f"{report.mfu(name):.1%} | {of_steps} | {f'{share:.0%}' if share else 'in the steps'} | "
            f"{max(run.peak_memory_bytes for run in runs) / GIB:.2f} | {startup} |"
        )
    for name, runs in report.runs.items():
        compiled = sum(sum(run.step_graphs[report.warmup_steps :]) for run in runs)
        if compiled:
            slow = f"{compiled} graphs were compiled inside timed steps, so its rate is too low"
            lines.append(f"| {name}: {slow} | | | | | | | | | | |")
    where = "allocated on the GPU" if report.setting["device"] == "cuda" else "resident, the whole process"
    return "\n".join(
        [
            *lines,
            "",
            "Every row's time includes its reference log-probs. Start-up: from the start of the process to "
            f"the first step, the reference pass left out; peak memory: {where}.",
            "",
        ]
    )


def _text(rate: float) -> str:
    """Pairs a second; of slow ones two figures, too."""
    return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.2g}"


def _turns(report: Report) -> str:
    """Every measurement that the table's medians are of."""
    lines = ["Every turn, pairs/s, in the order of measuring, and CPU seconds of reference and steps:", ""]
    own = next(iter(report.runs.values()))
    for name, runs in report.runs.items():
        rates = [run.failure or _text(report.rate(run)) for run in runs]
        line = f"- {name}: {', '.join(rates)}"
        if all(run.cpu_seconds for run in (*own, *runs)):  # no run failed
            ratios = [its.cpu_seconds / ours.cpu_seconds for its, ours in zip(runs, own, strict=True)]
            line += f"; {', '.join(f'{run.cpu_seconds:.0f}' for run in runs)} CPU s"
            line += f", {statistics.median(ratios):.2f} times those of dpo-pack" if runs is not own else ""
        lines.append(line)
    return "\n".join([*lines, ""])


def _ratio(report: Report, name: str) -> str:
    if report.best_trl is None:
        return ""
    ratios = report.ratios(name)
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _same_work(report: Report) -> str:
    if len(report.runs) == 1:
        return ""
    same_ids = "A digest of the token ids that each contender trained on is compared"
    if not report.disagreements:
        same_ids = "Every contender trained on the same token ids (a digest of them is compared)"
    lines = [f"{same_ids}. Largest differences from dpo-pack over all steps:\n"]
    names = {
        "loss": "loss, nats",
        "grad_norm": "gradient norm, relative",
        "logps": "mean log-probs, relative",
    }
    for contender, found in report.differences.items():
        parts = ", ".join(f"{names[name]}: {value:.1e}" for name, value in found.items())
        lines.append(f"- {contender}: {parts}")
    lines += [
        f"- {name}: not compared; grouped by length its steps hold other pairs"
        for name, runs in list(report.runs.items())[1:]
        if "grouped by length" in name and name not in report.differences
        if not any(run.failure for run in runs)
    ]
    return "\n".join([*lines, ""])


def _profile(report: Report) -> str:
    """The profiled steps beside the least time of their products, and what torch's profiler says of them."""
    profile = report.profile
    assert profile is not None

    def ms(seconds: float) -> str:
        milliseconds = 1e3 * seconds / profile.num_steps
        return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"

    least = {part: flops / report.peak_flops for part, flops in profile.flops.items()}
    together = sum(least.values())
    parts = ", ".join(f"{part} {ms(seconds)}" for part, seconds in least.items())
    return (
        f"Steps of dpo-pack under torch's profiler, which slows them down, mean of {profile.num_steps}: "
        f"{ms(profile.seconds)} ms. At the measured peak, their products and attention would take "
        f"{ms(together)} ms ({parts}), so these steps have an MFU of {together / profile.seconds:.1%}. The "
        "profile by operator, and on a GPU by kernel:\n\n"
        f"```text\n{profile.table.strip()}\n```\n"
    )


def _sweep(report: Report) -> str:
    if not report.sweep:
        return ""
    parts = [f"- {run.contender}: {run.failure or _text(report.rate(run))}" for run in report.sweep]
    return "\n".join([f"Sweeps, one run of {report.sweep_pairs} pairs each, pairs/s:", "", *parts, ""])
