"""pairs.parquet: what each pair said each time, whole whatever happens, the same on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from support.reference_pairs import make_table, random_pairs
from support.rows import write_rows
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks
from support.whole_runs import lines, pair_lines, whole_run

from dpo_pack.run.log import PairLog
from dpo_pack.system import ranks
from dpo_pack.trainer import train
from dpo_pack.training.metrics import NAMES

NUM_PAIRS = 6


def new_log(directory: Path, **options: Any) -> PairLog:
    settings: dict[str, Any] = {"beta": 0.5, "has_reference": True} | options
    return PairLog(
        directory=directory / "pairs.parquet",
        table=make_table(random_pairs(NUM_PAIRS)),
        source_names=["hh"],
        **settings,
    )


def add_step(log: PairLog, step: int, pairs: list[int]) -> None:
    """The values of a pair are made of its index and the step, so that a mix-up shows."""
    rows = [[100 * step + 10 * pair + column for column in range(len(NAMES))] for pair in pairs]
    values = torch.tensor(rows, dtype=torch.float64).reshape(len(pairs), len(NAMES))
    scores = np.array([pair / 4 if pair else np.nan for pair in pairs])
    log.add(step, step / 10, np.column_stack((pairs, scores)), values, num_pairs=len(pairs))


def read(log: PairLog) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(log.directory).to_pylist()
    return found


def test_a_line_has_the_pair_s_row_and_its_own_numbers(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    add_step(log, 1, [4, 2])
    log.flush()
    first, second = read(log)
    assert (first["source"], first["row"], second["row"]) == ("hh", 3, 5)  # rows count from 1
    value = {name: 100 + 20 + number for number, name in enumerate(NAMES)}
    logratios = [value[f"policy_{side}"] - value[f"reference_{side}"] for side in ("chosen", "rejected")]
    assert first == {
        "source": "hh",
        "row": 3,
        "step": 1,
        "epoch": 0.1,
        "margin": 0.5 * (logratios[0] - logratios[1]),
        "chosen_logps": value["policy_chosen"],
        "rejected_logps": value["policy_rejected"],
        "reference_chosen_logps": value["reference_chosen"],
        "reference_rejected_logps": value["reference_rejected"],
        "loss": value["loss"],
        "score_margin": 0.5,
    }


def test_without_a_reference_its_columns_are_null_and_the_margin_is_the_policy_s(tmp_path: Path) -> None:
    log = new_log(tmp_path, has_reference=False)
    add_step(log, 1, [0])
    log.flush()
    (line,) = read(log)
    assert line["reference_chosen_logps"] is None and line["reference_rejected_logps"] is None
    assert line["score_margin"] is None
    assert line["margin"] == 0.5 * (line["chosen_logps"] - line["rejected_logps"])


def test_a_resumed_run_cuts_off_later_steps_also_inside_of_a_file(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    for step in (1, 2):
        add_step(log, step, [0, 1])
    log.flush()
    for step in (3, 4, 5):
        add_step(log, step, [2, 3])
    log.flush()
    add_step(log, 6, [4])
    log.flush()
    whole = read(log)
    log.cut_after(4)
    assert read(log) == [line for line in whole if line["step"] <= 4]
    log.cut_after(2)
    assert read(log) == [line for line in whole if line["step"] <= 2]
    log.cut_after(0)
    assert list(log.directory.iterdir()) == []


def write_on_ranks(directory: Path) -> None:
    log = new_log(directory)
    mine = [[0, 3], [1, 5, 2]][ranks.rank()]
    add_step(log, 1, mine)
    add_step(log, 2, mine[::-1] if ranks.is_first() else [])
    log.flush()


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path: Path) -> None:
    alone = new_log(tmp_path / "one")
    add_step(alone, 1, [5, 3, 2, 1, 0])
    add_step(alone, 2, [0, 3])
    alone.flush()
    run_on_ranks(write_on_ranks, tmp_path / "two")
    assert pq.read_table(tmp_path / "two" / "pairs.parquet").to_pylist() == read(alone)


def test_a_run_s_pairs_have_the_averages_of_its_metrics(straight: Path) -> None:
    written = pair_lines(straight)
    for record in lines(straight, "train"):
        step = [line for line in written if line["step"] == record["step"]]
        assert len(step) == record["pairs"] and {line["epoch"] for line in step} == {record["epoch"]}
        for name, metric in (
            ("margin", "rewards/margins"),
            ("loss", "loss"),
            ("chosen_logps", "logps/chosen"),
            ("rejected_logps", "logps/rejected"),
        ):
            assert np.mean([line[name] for line in step]) == pytest.approx(record[metric], rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_pairs_of_a_run_have_the_scores_of_their_rows(tmp_path: Path) -> None:
    own = tiny_run(tmp_path / "own").parent
    for name in ("pairs", "heldout"):
        rows = [json.loads(line) for line in (own / f"{name}.jsonl").read_text().splitlines()]
        write_rows(own / f"{name}.jsonl", [{**row, "m": n / 8 or None} for n, row in enumerate(rows)])
    path, columns = str(own / "{}.jsonl"), {"score_margin": "m"}
    sources = [{"path": path.format(name), "columns": columns} for name in ("pairs", "heldout")]
    overrides = (f"data.train={sources[:1]}", f"data.eval={sources[1:]}", "train.epochs=1")
    train(whole_run(own, run := tmp_path / "run", *overrides), Console(quiet=True))
    for table in (pair_lines(run), pq.read_table(run / "held_out.parquet").to_pylist()):
        scores = {line["row"]: line["score_margin"] for line in table}
        assert scores == {row: (row - 1) / 8 or None for row in range(1, len(scores) + 1)}
    steps = [(line["step"], line["pairs_seen"]) for line in lines(run, "eval")]
    assert steps == [(0, 0), (2, 8), (4, 16)]
