"""The audit of a recipe or a run: each column against plain computation, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from peft import PeftModel
from rich.console import Console
from support.dpopack import Dpopack
from support.oracle import completion_logps_one_by_one
from support.rows import write_rows
from support.tiny_run import tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo_pack
from dpo_pack.audits import audit as module
from dpo_pack.audits.audit import audit_pairs, folds_of
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.setup import prepare
from dpo_pack.trainer import train

LONG = " red green blue one two three"


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def change(recipe: Path, **sections: dict[str, Any]) -> Path:
    tree = yaml.safe_load(recipe.read_text())
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    recipe.write_text(yaml.safe_dump(tree))
    return recipe


def plain_sequences(rows: list[dict[str, str]], directory: Path) -> list[tuple[list[int], list[int]]]:
    """Context and completion, chosen before rejected, of rows whose tokens do not cross the boundary."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    encode = [
        (tokenizer(row["prompt"]).input_ids, tokenizer(row[side] + "</s>").input_ids)
        for row in rows
        for side in ("chosen", "rejected")
    ]
    return encode


def test_columns_that_cost_nothing_are_what_a_plain_computation_gives(recipe: Path) -> None:
    home = recipe.parent
    rows = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()][:5]
    rows.append({**rows[1], "chosen": rows[1]["rejected"], "rejected": rows[1]["chosen"]})  # row 6
    rows.append(dict(rows[2]))  # row 7
    write_rows(home / "pairs.jsonl", rows)
    path = dpo_pack.audit(recipe, quiet=True)
    assert path == home / "run" / "audit" / "audit.parquet" and not (home / "run" / "run.json").exists()
    audited = rows_of(path)
    assert [row["row"] for row in audited] == list(range(1, 8))
    assert {row["source"] for row in audited} == {"pairs"}
    sequences = plain_sequences(rows, home / "model")
    with torch.no_grad():
        sums = completion_logps_one_by_one(AutoModelForCausalLM.from_pretrained(home / "model"), sequences)
    for number, (row, found) in enumerate(zip(rows, audited, strict=True)):
        written = json.dumps([row["prompt"], row["chosen"], row["rejected"], None])
        assert found["pair"] == hashlib.blake2b(written.encode(), digest_size=16).hexdigest()
        chosen, rejected = (len(completion) for _, completion in sequences[2 * number :][:2])
        assert (found["chosen_tokens"], found["rejected_tokens"]) == (chosen, rejected)
        assert found["length_gap"] == chosen - rejected
        margin = float(sums[2 * number] / chosen - sums[2 * number + 1] / rejected)
        assert found["reference_margin"] == pytest.approx(margin, abs=1e-5)
    assert [row["duplicate_of"] for row in audited] == [None] * 6 + ["pairs row 3"]
    contradicted = {row["row"]: row["contradicted_by"] for row in audited if row["contradicted_by"]}
    assert contradicted == {2: "pairs row 6", 6: "pairs row 2"}
    assert not any(row["equal_after_truncation"] for row in audited)
    page = path.with_suffix(".html").read_text()
    assert "contradicted by pairs row 6" in page and rows[1]["chosen"].strip() in page
    assert "never_learned" not in audited[0] and "p_wrong" not in audited[0]  # nothing was trained


def test_copies_are_found_after_the_cut_and_pairs_of_equal_answers_are_counted(
    recipe: Path, console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"prompt": "ask", "chosen": LONG * 9 + " yes", "rejected": " no"}
    other = {**one, "chosen": LONG * 9 + " no"}
    equal = {"prompt": "ask", "chosen": LONG * 9 + " yes", "rejected": LONG * 9 + " no"}  # no pair remains
    write_rows(recipe.parent / "pairs.jsonl", [one, other, one, equal])
    path = dpo_pack.audit(recipe, **{"data.truncation": "completion_right", "data.on_bad_row": "skip"})
    found = rows_of(path)
    assert [row["duplicate_of"] for row in found] == [None, "pairs row 1", "pairs row 1"]
    assert not any(row["equal_after_truncation"] for row in found)  # such rows are left out
    assert found[0]["pair"] == found[2]["pair"] != found[1]["pair"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "both answers" in line]
    assert line.split()[-1] == "1"


def test_score_margins_are_those_of_the_data(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (recipe.parent / "pairs.jsonl").read_text().splitlines()]
    write_rows(recipe.parent / "pairs.jsonl", [{**row, "m": n / 2 - 1} for n, row in enumerate(rows)])
    source = {"path": str(recipe.parent / "pairs.jsonl"), "columns": {"score_margin": "m"}}
    audited = rows_of(dpo_pack.audit(recipe, **{"data.train": [source]}))
    assert [row["score_margin"] for row in audited] == [n / 2 - 1 for n in range(len(rows))]
    told = capsys.readouterr().out
    assert re.search(r"The rejected answer has the higher score +2\b", told)
    assert {row["score_margin"] for row in rows_of(dpo_pack.audit(recipe))} == {None}


@pytest.mark.slow
def test_what_a_finished_run_logged_is_joined_by_source_and_row(recipe: Path) -> None:
    rows = [json.loads(line) for line in (recipe.parent / "pairs.jsonl").read_text().splitlines()]
    rows += [rows[0]] * 3 + [{**rows[0], "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}]
    write_rows(recipe.parent / "pairs.jsonl", rows)
    run = dpo_pack.train(recipe, quiet=True, **{"train.epochs": 2})
    lines = rows_of(run.path / "pairs.parquet")
    audited = rows_of(dpo_pack.audit(run, quiet=True))
    for row in audited:
        looks = [line for line in lines if (line["source"], line["row"]) == (row["source"], row["row"])]
        looks.sort(key=lambda line: line["step"])
        assert len(looks) == 2
        assert row["margin"] == [line["margin"] for line in looks]
        assert row["loss"] == [line["loss"] for line in looks]
        assert row["never_learned"] == (max(row["margin"]) <= 0)
    assert [row["never_learned"] for row in audited[-2:]] == [False, True]  # the last one contradicts four


@pytest.mark.slow
def test_a_run_with_one_look_or_other_pairs_does_not_say_what_was_never_learned(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dpo_pack.audit(recipe)
    assert "No margins of a run: " in capsys.readouterr().out
    run = dpo_pack.train(recipe, quiet=True)
    audited = rows_of(dpo_pack.audit(run))
    assert {row["never_learned"] for row in audited} == {None} and len(audited[0]["margin"]) == 1
    assert "never_learned is empty: the run trained on no pair twice." in capsys.readouterr().out
    found = rows_of(dpo_pack.audit(run, **{"data.train.0.max_pairs": 9}))
    assert "changed since: the tokenizer, its template, or keys of data" in capsys.readouterr().out
    assert len(found) == 9 and "margin" not in found[0]
    lines = (recipe.parent / "pairs.jsonl").read_text().splitlines()
    (recipe.parent / "pairs.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    found = rows_of(dpo_pack.audit(run))
    assert "changed since: data.train.0.path (" in capsys.readouterr().out and "margin" not in found[0]


def test_folds_of_few_pairs_are_refused_before_anything_is_computed(recipe: Path, dpopack: Dpopack) -> None:
    rows = [{"prompt": f"ask {n}", "chosen": " yes", "rejected": " no"} for n in range(200)]
    write_rows(recipe.parent / "pairs.jsonl", rows)
    done = dpopack("audit", recipe, "--folds", "2")
    assert (done.status, len(done.err.splitlines())) == (2, 1) and not (recipe.parent / "run").exists()
    assert "--folds: 200 pairs are too few" in done.err and "Reference" not in done.out
    assert dpopack("audit", recipe, "--output", recipe.parent / "some.parquet").status == 0
    assert len(rows_of(recipe.parent / "some.parquet")) == 200 and (recipe.parent / "some.html").is_file()


def test_pairs_of_one_prompt_are_never_separated(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"ask {n % 150}", "chosen": f" yes {n % 299}", "rejected": " no"} for n in range(600)]
    write_rows(recipe.parent / "pairs.jsonl", rows)
    folds = folds_of(prepare(load_recipe(recipe), Console(quiet=True)).data, 3, seed=1)
    for prompt in {row["prompt"] for row in rows}:
        assert len({fold for fold, row in zip(folds, rows, strict=True) if row["prompt"] == prompt}) == 1
    assert np.bincount(folds).tolist() == [200, 200, 200]
    same = [{**row, "prompt": "ask"} for row in rows]
    write_rows(recipe.parent / "pairs.jsonl", same)
    data = prepare(load_recipe(recipe), Console(quiet=True)).data
    with pytest.raises(dpo_pack.DpoPackError, match=r"^--folds 2: 600 of 600 pairs stay together"):
        folds_of(data, 2, seed=1)


def test_pairs_of_inferred_prompts_that_begin_alike_are_never_separated(recipe: Path) -> None:
    rows = [
        {side: f"{n % 150} ask:{answer} {n}" for side, answer in (("chosen", " yes"), ("rejected", " no"))}
        for n in range(600)
    ]
    write_rows(recipe.parent / "pairs.jsonl", rows)
    data = prepare(load_recipe(recipe), Console(quiet=True)).data
    assert data.report["train"]["sources"][0]["prompts_inferred"] == 600
    folds = folds_of(data, 2, seed=1)
    for prompt in range(150):
        assert len({int(fold) for n, fold in enumerate(folds) if n % 150 == prompt}) == 1


def test_what_belongs_to_folds_is_refused_without_them_or_if_it_cannot_be(recipe: Path) -> None:
    for options, told in (
        ({"lr": 1e-4}, "give --folds, too"),
        ({"train_pairs": 500}, "give --folds, too"),
        ({"folds": 1}, "at least 2"),
        ({"folds": 2, "lr": 0.0}, "above 0"),
        ({"folds": 2, "lr": math.nan}, "above 0"),
        ({"folds": 2, "train_pairs": 1}, "at least 200"),
    ):
        with pytest.raises(dpo_pack.DpoPackError, match=told):
            dpo_pack.audit(recipe, quiet=True, **options)


def test_an_output_that_cannot_be_written_or_would_replace_an_input_is_refused_first(recipe: Path) -> None:
    home = recipe.parent
    (home / "there.parquet").mkdir()
    (home / "file").touch()
    path = dpo_pack.audit(recipe, quiet=True)
    before = path.read_bytes()
    for output, told, overrides in (
        (home / "a.html", "name a file .parquet", {}),
        (home / "there.parquet", "is a directory", {}),
        (home / "file" / "a.parquet", "cannot write", {}),
        (
            None,
            "it would replace what data.train.0.keep.from names",
            {"data.train.0.keep": {"from": str(path)}},
        ),
    ):
        with pytest.raises(dpo_pack.DpoPackError, match=told):
            dpo_pack.audit(recipe, output=output, quiet=True, **overrides)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_run_is_joined_although_its_source_has_another_name_now(recipe: Path) -> None:
    run = dpo_pack.train(recipe, quiet=True)
    audited = rows_of(dpo_pack.audit(run, quiet=True, **{"data.train.0.name": "renamed"}))
    assert {row["source"] for row in audited} == {"renamed"} and all(row["margin"] for row in audited)


def train_once(recipe: Path, directory: Path) -> Path:
    path: Path = dpo_pack.train(recipe, quiet=True, output_dir=str(directory)).path
    return path


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.slow
def test_what_unseen_models_say_is_what_their_adapters_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    """Also: an adapter trains on pairs of the other fold only, and no more than it may."""
    recipe, home = tiny_run(tmp_path / "job"), tmp_path / "job"
    monkeypatch.setattr(module, "FEWEST_PAIRS", 16)
    monkeypatch.setattr(module, "FEWEST_TRAINED", 7)
    rows = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
    copies = rows[:2] + rows[8:10]
    write_rows(home / "copies.jsonl", copies)
    change(recipe, data={"train": [{"path": str(home / f"{name}.jsonl")} for name in ("pairs", "copies")]})
    # Nothing is held out of a fold's training, so a verdict would have no prompts.
    change(recipe, optim={"warmup_steps": 100}, data={"eval": str(home / "copies.jsonl")})
    change(recipe, verdict={"judges": [{"type": "reward_model", "path": str(home / "model")}]})
    sources = yaml.safe_load(recipe.read_text())["data"]["train"]
    change(recipe, data={"train": [{**sources[0], "weight": 3.0}, sources[1]]})
    runs: dict[int, Path] = {}

    def keep_run(own: Any, quiet: Console) -> None:
        train(own, quiet)
        runs[int(own.output_dir.name)] = Path(shutil.copytree(own.output_dir, tmp_path / own.output_dir.name))

    setup = prepare(load_recipe(recipe), console)
    stale, unrelated = tmp_path / "out" / ".audit.parquet.folds" / "0", tmp_path / "out" / ".folds"
    shutil.copytree(train_once(recipe, tmp_path / "once"), stale)  # of an audit that was stopped
    unrelated.mkdir()
    options = module.FoldOptions(num_folds=2, train_pairs=7, lr=1e-2)
    audit_pairs(setup, tmp_path / "out" / "audit.parquet", keep_run, options)
    assert unrelated.is_dir() and not stale.exists()
    unrelated.rmdir()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 folds: an adapter ({r: 16, alpha: 32}, optim.lr 0.01) trains on " in text
    assert text.index("in all") < text.index("Fold 1: training") and "lower bounds" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.html", "audit.parquet"]
    found = rows_of(tmp_path / "out" / "audit.parquet")
    rows += copies
    sequences = plain_sequences(rows, home / "model")
    reference = AutoModelForCausalLM.from_pretrained(home / "model")
    with torch.no_grad():
        before = completion_logps_one_by_one(reference, sequences).view(-1, 2)
        for fold, run in runs.items():
            report = json.loads((run / "data_report.json").read_text())
            assert 5 < report["train"]["pairs"] <= 7
            trained = yaml.safe_load((run / "recipe.yaml").read_text())
            assert all(source.get("weight", 1.0) == 1.0 for source in trained["data"]["train"])
            assert (
                not trained["optim"].get("warmup_steps")
                and trained["optim"]["lr"] == 1e-2
                and trained["data"]["eval"] == []
            )
            base: Any = AutoModelForCausalLM.from_pretrained(home / "model")
            adapted: Any = PeftModel.from_pretrained(base, run / "model")
            after = completion_logps_one_by_one(adapted, sequences)
            ratios = after.view(-1, 2) - before
            for row, ratio in zip(found, ratios.tolist(), strict=True):
                if row["fold"] == fold:
                    assert row["unseen_margin"] == pytest.approx(ratio[0] - ratio[1], abs=1e-3)
    margins, folds = (np.array([row[name] for row in found]) for name in ("unseen_margin", "fold"))
    assert margins.std() > 0.01
    probabilities: dict[str, list[float]] = {}
    for name, values in (("p_wrong", margins), ("length", np.array([row["length_gap"] for row in found]))):
        scaled = [value / values[folds == fold].std() for value, fold in zip(values, folds, strict=True)]
        probabilities[name] = []
        for value, own in zip(scaled, folds, strict=True):
            others = [x for x, fold in zip(scaled, folds, strict=True) if fold != own]
            a = min(np.arange(0, 100, 0.01), key=lambda a: sum(np.logaddexp(0, -a * x) for x in others))
            probabilities[name].append(sigmoid(-a * value))
    for row, p_wrong, of_length in zip(found, *probabilities.values(), strict=True):
        assert row["p_wrong"] == pytest.approx(p_wrong, abs=0.02)
        assert row["longer_explains"] == (of_length < 0.3 and p_wrong > 0.5)
