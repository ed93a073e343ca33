r"""Measure the packing planner against other packers: rows, balance of ranks and time.

    python scripts/benchmark_packing.py --pairs hh.jsonl.gz --tokenizer MODEL \
        --output docs/benchmarks/packing.md

Contenders pack the same shuffled epoch of pairs, each pair one item of as many tokens as it takes in a row of
ours (its prompt once), into rows of at most the token budget. Peers pack the data set first and then deal
rows out: a step is the next R x k rows, row i to rank i mod R, as a distributed sampler does. Ours packs each
step of a fixed number of pairs (scope step), or windows of the epoch (scope epoch). Balance is the slowest
rank's FLOPs against the mean rank's, over the epoch's full steps, for a model of 7 billion parameters. Where
one pair is more than a rank's share of a step, nothing can balance it. TRL's seconds include its data set.

TRL's `pack_dataset` (bfd) needs `pip install -e '.[benchmark]'`; without it the line is left out.
"""

from __future__ import annotations

import datetime
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from dpo_pack.packing.bin_packing import fewest_rows_possible, next_fit
from dpo_pack.packing.flops import AttentionKind, ModelShape, pair_flops
from dpo_pack.packing.lengths import FloatArray, IntArray, PairLengths
from dpo_pack.packing.plan import PackingPlan, PlanSettings, epoch_order

TOKEN_BUDGET = 8192
PAIRS_PER_STEP = {1: 64, 8: 128, 64: 512}  # number of ranks -> pairs
# Llama 2 7B.
SHAPE = ModelShape(
    token_weights=32 * (4 * 4096**2 + 3 * 4096 * 11008),
    head_weights=32000 * 4096,
    attention=(AttentionKind(num_layers=32, width=32 * 256, window=None),),
)
Packer = Callable[[IntArray, int], list[IntArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Pairs and the order of the epoch."""

    name: str
    lengths: PairLengths
    order: IntArray  # [E]

    @property
    def tokens(self) -> IntArray:
        """[P] of each pair in a row."""
        return self.lengths.row_tokens(share_prompt=True)

    @property
    def costs(self) -> FloatArray:
        """[P] FLOPs."""
        return pair_flops(SHAPE, self.lengths, share_prompt=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One contender on one workload."""

    workload: str
    name: str
    num_rows: int
    bound: int
    fill: float
    balance: dict[int, float]  # by ranks
    seconds: float


def main(
    output: Annotated[Path, typer.Option(help="The page to write.")],
    pairs: Annotated[Path | None, typer.Option(help="Transcript rows, e.g. HH-RLHF.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of the tokenizer for --pairs.")] = None,
    num_synthetic: Annotated[int, typer.Option(help="Pairs with log-normal lengths.")] = 20_000,
    num_timed: Annotated[int, typer.Option(help="Pairs of the timing of our planner.")] = 1_000_000,
) -> None:
    """Measure and write the page."""
    workloads = [] if pairs is None else [hh_workload(pairs, tokenizer or sys.exit("--tokenizer is needed"))]
    workloads.append(log_normal_workload(num_synthetic))
    results = [result for workload in workloads for result in measure(workload)]
    timings = [time_planner(log_normal_workload(num_timed)), time_planner(hh_like_workload(num_timed))]
    page = markdown(results, list(chain(*timings)), num_timed)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    print(page)


# ---- Contenders


def measure(workload: Workload) -> list[Result]:
    """Every contender on a workload."""
    peers: dict[str, Packer] = {
        "modified first fit decreasing (NeMo)": modified_first_fit_decreasing,
        "next fit": next_fit,
    }
    if trl_version() is not None:
        peers = {"TRL pack_dataset, bfd": trl_pack_dataset, **peers}
    results = [_measure_ours(workload, scope) for scope in ("step", "epoch")]
    return results + [_measure_peer(workload, name, packer) for name, packer in peers.items()]


def _measure_ours(workload: Workload, scope: str) -> Result:
    def make_plan(num_ranks: int) -> PackingPlan:
        mean_row_pairs = TOKEN_BUDGET / workload.tokens.mean()
        rows = max(num_ranks, round(PAIRS_PER_STEP[num_ranks] / mean_row_pairs / num_ranks) * num_ranks)
        settings = PlanSettings(
            token_budget=TOKEN_BUDGET,
            pairs_per_step=PAIRS_PER_STEP[num_ranks],
            rows_per_step=rows if scope == "epoch" else None,
            algorithm="best_fit_decreasing",
        )
        order, costs = workload.order, workload.costs
        return settings.plan(workload.tokens, order=order, num_ranks=num_ranks, row_costs=costs)

    begun = time.perf_counter()
    plan = make_plan(1)
    rows = [row for (of_rank,) in plan for row in of_rank]
    seconds = time.perf_counter() - begun
    if scope == "step":  # two steps never share a row, so each step has its own bound
        bounds = [
            fewest_rows_possible(workload.tokens[plan.pairs(step)], TOKEN_BUDGET) for step in range(len(plan))
        ]
        bound = sum(bounds)
    else:
        bound = fewest_rows_possible(workload.tokens[workload.order], TOKEN_BUDGET)
    balance = {}
    for num_ranks in PAIRS_PER_STEP:
        steps = list(make_plan(num_ranks))[:-1] or list(make_plan(num_ranks))
        loads = [[sum(workload.costs[row].sum() for row in rank) for rank in step] for step in steps]
        balance[num_ranks] = _slowest_over_mean(loads)
    name = f"dpo-pack, scope {scope}"
    return _result(workload, name, rows, bound, balance, seconds)


def _measure_peer(workload: Workload, name: str, packer: Packer) -> Result:
    tokens, costs = workload.tokens[workload.order], workload.costs[workload.order]
    begun = time.perf_counter()
    rows = packer(tokens, TOKEN_BUDGET)
    seconds = time.perf_counter() - begun
    row_costs = np.array([costs[row].sum() for row in rows])
    shuffled = row_costs[np.random.default_rng(0).permutation(len(rows))]  # as a trainer shuffles its data
    balance = {}
    for num_ranks, pairs_per_step in PAIRS_PER_STEP.items():
        rows_a_rank = max(1, round(pairs_per_step * len(rows) / len(tokens) / num_ranks))
        num_steps = len(rows) // (num_ranks * rows_a_rank)
        steps = shuffled[: num_steps * num_ranks * rows_a_rank].reshape(num_steps, rows_a_rank, num_ranks)
        balance[num_ranks] = _slowest_over_mean(steps.sum(axis=1).tolist()) if num_steps else float("nan")
    bound = fewest_rows_possible(tokens, TOKEN_BUDGET)
    positions = [workload.order[row] for row in rows]
    return _result(workload, name, positions, bound, balance, seconds)


def _result(
    workload: Workload, name: str, rows: list[IntArray], bound: int, balance: dict[int, float], seconds: float
) -> Result:
    assert sorted(chain(*(row.tolist() for row in rows))) == sorted(workload.order.tolist()), name
    filled = np.array([workload.tokens[row].sum() for row in rows])
    assert all(len(row) == 1 or count <= TOKEN_BUDGET for row, count in zip(rows, filled, strict=True)), name
    return Result(
        workload=workload.name,
        name=name,
        num_rows=len(rows),
        bound=bound,
        fill=float(np.minimum(filled / TOKEN_BUDGET, 1).mean()),
        balance=balance,
        seconds=seconds,
    )


def _slowest_over_mean(loads: list[list[float]]) -> float:
    """[steps][ranks] -> the time of all steps against perfectly balanced ones."""
    table = np.array(loads)
    return float(table.max(axis=1).sum() / table.mean(axis=1).sum())


def modified_first_fit_decreasing(tokens: IntArray, token_budget: int) -> list[IntArray]:
    """Johnson & Garey 1985, "A 71/60 theorem for bin packing", as NeMo-RL's sequence packing describes it.

    Items above a half of the budget open bins, longest first. The bins with the least room left are then
    offered, shortest first, the two smallest items above a sixth and up to a third if both fit: the smallest
    and the largest that fits beside it. Then each bin takes what still fits, longest first, and the rest is
    packed first fit decreasing.
    """
    order = np.argsort(-tokens, kind="stable").tolist()
    size = tokens.tolist()
    large = [i for i in order if size[i] > token_budget / 2]
    rest = [i for i in order if size[i] <= token_budget / 2]
    bins = [[i] for i in large]
    free = [token_budget - size[i] for i in large]
    medium = [i for i in rest if size[i] > token_budget / 3]
    small = [i for i in rest if token_budget / 6 < size[i] <= token_budget / 3]
    tiny = [i for i in rest if size[i] <= token_budget / 6]
    for b in range(len(bins)):  # largest first: into the least free space
        fitting = next((i for i in medium if size[i] <= free[b]), None)
        if fitting is not None:
            medium.remove(fitting)
            bins[b].append(fitting)
            free[b] -= size[fitting]
    for b in reversed(range(len(bins))):  # the most free space first
        if len(bins[b]) == 1 and len(small) >= 2 and size[small[-1]] + size[small[-2]] <= free[b]:
            smallest = small.pop()
            partner = next(i for i in small if size[i] <= free[b] - size[smallest])
            small.remove(partner)
            bins[b] += [smallest, partner]
            free[b] -= size[smallest] + size[partner]
    _first_fit(sorted(medium + small + tiny, key=lambda i: -size[i]), size, bins, free, token_budget)
    return [np.array(members, dtype=np.int64) for members in bins]


def _first_fit(
    items: list[int], size: list[int], bins: list[list[int]], free: list[int], token_budget: int
) -> None:
    room = np.array(free + [token_budget] * len(items), dtype=np.int64)
    for item in items:
        place = int(np.argmax(room >= size[item]))
        while place >= len(bins):
            bins.append([])
        bins[place].append(item)
        room[place] -= size[item]


def trl_pack_dataset(tokens: IntArray, token_budget: int) -> list[IntArray]:
    """TRL cuts what exceeds the budget, so such pairs are packed beside it, alone, as ours are."""
    from datasets import Dataset
    from trl import pack_dataset

    fitting = np.flatnonzero(tokens <= token_budget)
    rows = Dataset.from_dict({"input_ids": [[int(i)] * int(tokens[i]) for i in fitting]})
    packed = pack_dataset(
        rows, seq_length=token_budget, strategy="bfd", map_kwargs={"batch_size": len(fitting)}
    )
    packed = packed.with_format("numpy")
    inside = [np.unique(row["input_ids"]) for row in packed]
    return inside + [np.array([i]) for i in np.flatnonzero(tokens > token_budget)]


def trl_version() -> str | None:
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


# ---- Workloads


def hh_workload(path: Path, tokenizer: Path) -> Workload:
    """HH-RLHF as a run reads it."""
    from dpo_pack.data.store import pair_lengths
    from dpo_pack.recipe.load import parse_recipe
    from dpo_pack.run.prepare import prepare_data, prepare_tokenizer
    from dpo_pack.system.console import make_console

    with tempfile.TemporaryDirectory() as scratch:
        recipe = parse_recipe(
            {
                "output_dir": f"{scratch}/run",
                "model": {"path": str(tokenizer)},
                "reference": {"cache_dir": f"{scratch}/cache"},
                "data": {
                    "train": {"path": str(path), "format": "transcript"},
                    "max_length": 2048,
                    "on_bad_row": "skip",
                },
            }
        )
        table = prepare_data(recipe, prepare_tokenizer(recipe), make_console(quiet=True)).train
        return _shuffled(path.name, pair_lengths(table))


def log_normal_workload(num_pairs: int) -> Workload:
    """Long-tailed pairs: log-normal tokens a pair, mean 600, cut at 16,384; 40 % prompt."""
    random = np.random.default_rng(0)
    total = np.clip(random.lognormal(np.log(600) - 0.5, 1.0, num_pairs), 8, 16384)
    share = random.uniform(0.3, 0.7, num_pairs)  # part of the completion tokens that are in chosen
    prompt, chosen = np.maximum(0.4 * total, 1), np.maximum(0.6 * share * total, 1)
    return _shuffled("log-normal, mean 600", _lengths(prompt, chosen, np.maximum(0.6 * total - chosen, 1)))


def hh_like_workload(num_pairs: int) -> Workload:
    """HH's medians and tails: prompt 121, completions 30 and 33 tokens."""
    random = np.random.default_rng(0)
    parts = [random.lognormal(*of, num_pairs) for of in ((4.8, 0.75), (3.4, 0.9), (3.5, 0.9))]
    return _shuffled("HH-like", _lengths(*(np.clip(part, 4, 4096) for part in parts)))


def _lengths(prompt: FloatArray, chosen: FloatArray, rejected: FloatArray) -> PairLengths:
    counts = [part.astype(np.int32) for part in (prompt, chosen, rejected)]
    return PairLengths(prompt=counts[0], chosen=counts[1], rejected=counts[2], shared=counts[0])


def _shuffled(name: str, lengths: PairLengths) -> Workload:
    order = epoch_order(len(lengths.prompt), shuffle=True, seed=0, epoch=0)
    return Workload(name=f"{name}, {len(order):,} pairs", lengths=lengths, order=order)


# ---- Timing of dpo-pack


def time_planner(workload: Workload) -> list[str]:
    """Lines of the timing table; CPU seconds of one thread."""
    lines = []
    tokens, costs, num_pairs = workload.tokens, workload.costs, len(workload.order)
    for scope, rows_per_step in (("step, 64 pairs", None), ("epoch, 32 rows", 32)):
        settings = PlanSettings(
            token_budget=TOKEN_BUDGET,
            pairs_per_step=64,
            rows_per_step=rows_per_step,
            algorithm="best_fit_decreasing",
        )
        begun = time.process_time()
        order = epoch_order(num_pairs, shuffle=True, seed=0, epoch=0)
        plan = settings.plan(tokens, order=order, num_ranks=8, row_costs=costs)
        assert plan.pack_step(0)
        first = time.process_time() - begun
        for step in range(1, len(plan)):
            assert plan.pack_step(step)
        total = time.process_time() - begun
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        each = 1e6 * total / len(plan)
        lines.append(
            f"| {workload.name} | {scope} | {first:.2f} | {total:.2f} | {each:.0f} | {memory:,.0f} |"
        )
    return lines


def markdown(results: list[Result], timings: list[str], num_timed: int) -> str:
    """The page."""
    versions = {
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "TRL": trl_version() or "not installed",
    }
    ranks = list(PAIRS_PER_STEP)
    lines = [
        "# Packing: rows, balance, time",
        "",
        "<!-- Written by scripts/benchmark_packing.py. -->",
        "",
        f"`{' '.join(['python', *sys.argv])}`, {datetime.date.today().isoformat()}, one thread of "
        f"{os.cpu_count()} cores ({platform.machine()}); "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + ".",
        "",
        *(__doc__ or "").split("\n\n")[2].splitlines(),
        "",
        f"Token budget {TOKEN_BUDGET:,}; pairs a step by ranks: "
        + ", ".join(f"{number} on {rank}" for rank, number in PAIRS_PER_STEP.items())
        + ". *Bound*: the volume bound on rows, in scope step summed over steps.",
        "",
    ]
    for workload in dict.fromkeys(result.workload for result in results):
        lines += [f"## {workload}", ""]
        columns = " | ".join(f"{number} ranks: slowest / mean" for number in ranks[1:])
        lines += [f"| | rows | bound | fill | {columns} | seconds |", "|---|---|---|---|---|---|---|"]
        for result in results:
            if result.workload == workload:
                cells = " | ".join(f"{result.balance[number]:.3f}" for number in ranks[1:])
                lines.append(
                    f"| {result.name} | {result.num_rows:,} | {result.bound:,} | {result.fill:.1%} | {cells} "
                    f"| {result.seconds:.2f} |"
                )
        lines.append("")
    lines += [
        f"## Planning {num_timed:,} pairs for 8 ranks",
        "",
        "CPU seconds, the shuffle of the epoch included; peak memory is the process's, all workloads so far.",
        "",
        "| lengths | scope | to the first step | all steps | µs a step | peak MiB |",
        "|---|---|---|---|---|---|",
        *timings,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
