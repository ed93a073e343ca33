"""The page of a run and of several: what it says, its size, and that it is drawn where there is a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.browser import run_browser
from support.outline import Outline
from support.rows import write_rows
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.data.store import join_pairs, write_store
from dpo_pack.packing.lengths import Group
from dpo_pack.reports.pages import run_page
from dpo_pack.reports.run_files import lowest_margins, read_metrics, read_runs
from dpo_pack.system.errors import RunError

WARNING = "both rewards are falling. Lower optim.lr"
METRICS = (
    "loss", "rewards/margins", "rewards/margins_p10", "rewards/margins_p90", "rewards/accuracies",
    "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "grad_norm", "learning_rate",
    "entropy", "tokens", "seconds/data", "seconds/forward", "seconds/backward", "seconds/optimizer",
    "seconds", "pairs_per_second", "tokens_per_second", "logits/chosen", "logits/rejected", "mfu",
)  # fmt: skip
Row = dict[str, Any]


def evaluation(step: int, accuracy: float) -> Row:
    numbers = {"loss": 0.6, "rewards/accuracies": accuracy, "rewards/margins": 0.25}
    part = {**numbers, "pairs": 7, "intervals": {name: [value, value] for name, value in numbers.items()}}
    return {
        "split": "eval", "source": "held<out>", "step": step, **part,
        "by_source": {"books": part, "<i>web": part}, "by_length": {"chosen_under_half": part},
    }  # fmt: skip


def write_run(root: Path, *, num_steps: int = 30, loss: str = "sigmoid", lr: float = 1e-6) -> Path:
    """Writes the files of a run that has not finished: no model, no reports."""
    root.mkdir(parents=True)
    lines = [evaluation(0, 0.5)]
    for step in range(1, num_steps + 1):
        values = {name: math.sin(step * (1 + i)) + 1.234567891 for i, name in enumerate(METRICS)}
        warnings = {"warnings": [WARNING]} if step == 20 else {}
        lines.append({"split": "train", "step": step, "epoch": step / num_steps, **values, **warnings})
    lines.append(evaluation(num_steps, 0.75))
    write_rows(root / "metrics.jsonl", lines)
    recipe = {"output_dir": str(root), "model": {"path": "m"}, "loss": {"type": loss, "beta": 0.1}}
    (root / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "optim": {"lr": lr}}), encoding="utf-8")
    info = {"status": "interrupted", "versions": {"torch": "9.9"}, "totals": {"steps": num_steps}}
    (root / "run.json").write_text(json.dumps(info), encoding="utf-8")
    return root


def write_pairs(root: Path, *margins: list[float]) -> None:
    """`margins`: of all pairs in an epoch, which has one step and one file."""
    (root / "pairs.parquet").mkdir()
    for step, numbers in enumerate(margins, start=1):
        table = pa.table(
            {
                "source": pa.array(["pairs"] * len(numbers)).dictionary_encode(),
                "row": [*range(1, len(numbers) + 1)],
                "step": [step] * len(numbers),
                "epoch": [float(step)] * len(numbers),
                "margin": pa.array(numbers, pa.float32()),
            }
        )
        pq.write_table(table, root / "pairs.parquet" / f"part-{step:06d}-{step:06d}.parquet")


def said(page: str) -> str:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(outline.tags)
    assert not {"src", "href", "srcset", "onload", "onclick"} & {name for name, _ in outline.attributes}
    return " ".join(" ".join(outline.text).split())


def drawn(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def curves(page: str, title: str) -> list[Row]:
    (chart,) = (chart for chart in drawn(page)["charts"] if chart["title"] == title)
    found: list[Row] = chart["curves"]
    return found


def test_the_page_has_curves_evaluations_warnings_and_files(run: Path) -> None:
    page = run_page([run])
    text = said(page)
    for part in (
        "Gradient norm", "Learning rate", "Seconds by phase", "held<out>", "7 pairs", "after step 30",
        "<i>web", "under half", f"Step 20: {WARNING}.", "lr: 1.0e-06", '"torch": "9.9"', "interrupted",
        "reward accuracy 0.500 (0.500 to 0.500) 0.750 (0.750 to 0.750)",
    ):  # fmt: skip
        assert part in text, part
    data = drawn(page)
    loss, held_out = curves(page, "Loss")
    assert [loss["label"], held_out["label"]] == ["training", "held<out>"]
    assert data["steps"][loss["steps"]] == list(range(1, 31))
    assert loss["values"][0][0] == float(f"{math.sin(1) + 1.234567891:.5g}")
    _, accuracy = curves(page, "Reward accuracy")
    assert accuracy["label"] == "held<out>" and accuracy["values"] == [[0.5, 0.75]] * 3
    assert data["steps"][accuracy["steps"]] == [0, 30]
    assert [curve["label"] for curve in curves(page, "Rewards")] == ["chosen", "rejected"]
    assert [chart["title"] for chart in data["charts"] if chart["is_log"]] == [
        "Gradient norm before clipping"
    ]
    assert page.count('class="chart"') == len(data["charts"])


def test_a_page_of_one_run_says_which_run_it_is_and_has_no_table_that_says_nothing(run: Path) -> None:
    outline = Outline()
    assert " m loss sigmoid, beta 0.1, rate 1e-06 " in said(run_page([run]))  # of an earlier release
    info = json.loads((run / "run.json").read_text()) | {"begun": "2026-11-29T05:27:57+00:00"}
    (run / "run.json").write_text(json.dumps(info))
    outline.feed(run_page([run]))
    assert " m 2026-11-29 05:27 UTC, loss sigmoid, beta 0.1, rate 1e-06 " in said(run_page([run]))
    assert outline.tags.count("table") == 2  # the evaluation, and its three groups of seven pairs
    recipe = yaml.safe_load((run / "recipe.yaml").read_text()) | {"packing": {"pairs_per_step": 1}}
    recipe["loss"]["type"] = [{"type": "sigmoid", "weight": 1.0}, {"type": "sft", "weight": 0.5}]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    few, enough = evaluation(31, 0.5), evaluation(31, 0.5)
    for name in ("books", "<i>web"):
        few["by_source"][name] = {**few["by_source"][name], "pairs": 4}
    write_rows(run / "metrics.jsonl", [enough, few])
    page = run_page([run])
    outline = Outline()
    outline.feed(page)
    assert "loss sigmoid + 0.5 sft, beta 0.1, rate 1e-06, 1 pair a step" in said(page)
    assert outline.tags.count("table") == 1


def test_more_than_2000_lines_become_means_of_successive_lines_and_the_page_says_so(tmp_path: Path) -> None:
    long = write_run(tmp_path / "run", num_steps=4100)
    assert "Each point is the mean of" in said(run_page([write_run(tmp_path / "short"), long]))
    page = run_page([long])
    assert len(drawn(page)["steps"][0]) == 1368
    assert "Each point is the mean of 3 logged steps" in said(page)
    lines = [{"split": "train", "step": n, "loss": v} for n, v in enumerate((1.0, None, 2.0, 4.0, 5.5), 1)]
    write_rows(tmp_path / "metrics.jsonl", [*lines[:2], {**lines[2], "entropy": 1.0}, *lines[3:]])
    found = read_metrics(tmp_path / "metrics.jsonl", 3)
    assert found["steps"] == [1, 3, 5] and found["lines_per_point"] == 2
    assert found["curves"] == {"loss": [1, 2, 4.75], "entropy": [None, 1, None]}  # the first is step 1's


@pytest.mark.slow
def test_the_page_of_a_run_ten_times_as_long_is_as_large_and_needs_as_much_memory(tmp_path: Path) -> None:
    sizes, peaks = [], []
    for num_steps in (4_000, 40_000):
        run = write_run(tmp_path / str(num_steps), num_steps=num_steps)
        (run / "console.log").write_text("step 1\n" * num_steps)
        write_rows(
            run / "samples.jsonl",
            [{"step": s, "source": "h", "prompt": "why?", "completion": "so", "model": "policy"}
             for s in range(num_steps)],
        )  # fmt: skip
        tracemalloc.start()
        sizes.append(len(run_page([run])))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(sizes) < 500_000 and sizes[1] < 1.2 * sizes[0] and peaks[1] < 1.3 * peaks[0]


def test_nothing_from_a_run_can_end_the_script_or_become_markup(run: Path) -> None:
    evil = "</script><script>alert(1)</script><b>"
    lines = [{**evaluation(30, 0.5), "source": evil}]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(lines[0]) + "\n")
    sample = {"step": 0, "source": evil, "prompt": evil, "completion": evil, "model": "start"}
    write_rows(run / "samples.jsonl", [sample])
    (run / "console.log").write_text(f"  Warning: {evil}\n", encoding="utf-8")
    (run / "recipe.yaml").write_text(yaml.safe_dump({"model": {"path": evil}}), encoding="utf-8")
    page = run_page([run])
    assert "<script>alert" not in page and "<b></" not in page
    assert page.count("</script>") == 2
    assert curves(page, "Loss")[-1]["label"] == evil and said(page).count(evil) >= 5


def test_samples_stand_side_by_side_and_the_last_of_the_policy_counts(run: Path) -> None:
    steps = (("start", 0, "moo"), ("policy", 15, "maybe"), ("policy", 30, "indeed"))
    write_rows(
        run / "samples.jsonl",
        [{"step": s, "source": "h", "prompt": "why?", "completion": c, "model": m} for m, s, c in steps],
    )
    text = said(run_page([run]))
    assert "prompt why? before training moo after training indeed" in text and "maybe" not in text
    other = write_run(run.parent / "other")
    shutil.copy(run / "samples.jsonl", other)
    assert "prompt why? run indeed other indeed" in said(run_page([run, other]))


# ---- Pairs


def keep_tokens(run: Path, prompts: list[str]) -> None:
    """Writes tokenizer, token store and data report of pairs whose completions are "yes" and "no"."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(run / "model")

    def ids(text: str) -> Any:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype="<i4")

    pairs = [Group(context=ids(p), completions=(ids(p), ids(p[:1500]))) for p in prompts]
    rows = list(range(1, len(pairs) + 1))
    write_store(run / "tokens", [join_pairs(pairs, [1.0] * len(pairs), rows)], dict)
    source = {"name": "pairs", "rows_read": 3, "pairs_kept": 3, "token_store": str(run / "tokens")}
    (run / "data_report.json").write_text(json.dumps({"train": {"sources": [source]}}), encoding="utf-8")


def test_the_pairs_with_the_lowest_mean_margins_come_first_with_their_text(run: Path) -> None:
    nan = float("nan")
    write_pairs(run, [1.0, -7.0, nan, -5.0], [-3.0, 1.0, nan, nan])
    keep_tokens(run, ["red moon" * 400, "blue sun", "one", "two <b>"])
    found = lowest_margins(read_runs([run])[0])
    assert [[pair[key] for key in ("row", "margin", "num_times", "last_step")] for pair in found] == [
        [4, -5, 1, 1], [2, -3, 2, 2], [1, -1, 2, 2]
    ]  # fmt: skip
    assert found[1]["texts"]["prompt"].strip() == "blue sun"
    assert re.search(r"moon\n\[... [0-9,]+ characters ...\]\n", found[2]["texts"]["prompt"])
    text = said(run_page([run]))
    assert "pairs row 4: margin -5, times trained: 1, last at step 1" in text and "two <b>" in text


# ---- Several runs


def test_several_runs_lie_over_each_other_with_the_keys_in_which_they_differ(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, lr=lr) for name, lr in (("a", 1e-6), ("b", 2e-6), ("c", 1e-6))]
    with (runs[1] / "recipe.yaml").open("a", encoding="utf-8") as recipe:
        recipe.write("data: {train: [größe.jsonl]}\nonline: null\n")
    info = json.loads((runs[2] / "run.json").read_text())
    (runs[2] / "run.json").write_text(json.dumps({**info, "versions": {"torch": "10"}}))
    page = run_page(runs)
    text = said(page)
    assert 'key a b c optim.lr 1e-06 2e-06 1e-06 versions.torch 9.9 9.9 10 data.train ["größe.jsonl"]' in text
    assert (
        "a, step 30 b, step 30 c, step 30 measured on 7 pairs 7 pairs 7 pairs reward accuracy 0.750" in text
    )
    assert "output_dir" not in text.split("recipe.yaml of")[0]
    labels = [f"{run}{held_out}" for run in "abc" for held_out in ("", " held<out>")]
    assert [curve["label"] for curve in curves(page, "Loss")] == labels
    assert [(curve["run"], curve["label"]) for curve in curves(page, "Rewards")][:3] == [
        (0, "a chosen"), (0, "a rejected"), (1, "b chosen")
    ]  # fmt: skip


def test_evaluations_are_drawn_over_the_pairs_seen_so_that_other_steps_can_be_compared(
    tmp_path: Path, run: Path
) -> None:
    assert "pairs seen" not in run_page([run])  # an earlier release has written it
    runs = [write_run(tmp_path / name) for name in ("small", "large")]
    for path, pairs in zip(runs, (4, 64), strict=True):
        lines = [{**evaluation(step, 0.5), "pairs_seen": step * pairs} for step in (0, 30)]
        lines[1]["intervals"]["rewards/accuracies"] = [0.25, 0.75]
        with (path / "metrics.jsonl").open() as file:
            steps = [line for line in map(json.loads, file) if line["split"] == "train"]
        write_rows(path / "metrics.jsonl", [lines[0], *steps, lines[1]])
    page = run_page(runs)
    small, large = curves(page, "Reward accuracy by pairs seen, held out")
    assert [small["label"], large["label"]] == ["small held<out>", "large held<out>"]
    assert [drawn(page)["steps"][one["steps"]] for one in (small, large)] == [[0, 120], [0, 1920]]
    assert small["values"] == [[0.5, 0.5], [0.5, 0.25], [0.5, 0.75]]
    axes = {chart["title"]: chart["axis"] for chart in drawn(page)["charts"]}
    assert [title for title, axis in axes.items() if axis == "pairs"] == [
        f"{what} by pairs seen, held out" for what in ("Loss", "Reward accuracy", "Reward margin")
    ]
    assert axes["Reward accuracy"] == "step"


def test_runs_that_differ_in_one_key_or_none_have_a_sentence_and_no_table(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, lr=lr) for name, lr in (("a", 1e-6), ("b", 2e-6), ("c", 1e-6))]
    one, none = said(run_page(runs[:2])), said(run_page(runs[::2]))
    assert "Only optim.lr differs: a 1e-06, b 2e-06. Losses" in one and "differ in no key" in none
    assert "Keys and versions" not in one + none


def test_the_page_of_an_online_run_has_win_rates_and_scores_and_nothing_empty(run: Path) -> None:
    online = {"online/win_rate": 0.6, "online/scores": 0.25, "online/score_gain": 0.125}
    intervals = {name: [value, value] for name, value in online.items()}
    ask = {"split": "eval", "source": "ask", "prompts": 7, **online, "intervals": intervals}
    step = {"split": "train", "online/scores": 0.1, "online/total_ties": 3.0, "loss": 0.5}
    write_rows(run / "metrics.jsonl", [{**line, "step": n} for n in (1, 2) for line in (step, ask)])
    page = run_page([run])
    shown = said(page).split(" Files recipe.yaml")[0]
    for part in (
        "wins against the start 0.600 (0.600 to 0.600)", "7 prompts", "score above the start's",
        "Scores of completions", "left out so far",
    ):  # fmt: skip
        assert part in shown, part
    for part in ("reward accuracy", "online/", "Prompts so far", "lowest margins"):
        assert part not in shown, part
    assert curves(page, "Wins against the start, held out")[0]["values"] == [[0.6] * 2] * 3


# ---- What is not there


@pytest.mark.parametrize("name", ["data_report.json", "packing_report.json", "metrics.jsonl", "recipe.yaml"])
def test_a_page_without_some_file_is_still_a_page(name: str, run: Path) -> None:
    (run / name).unlink(missing_ok=True)
    assert "Files" in said(run_page([run]))


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_directory_that_holds_no_run_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=f"^{re.escape(str(tmp_path))}: no run"):
        run_page([tmp_path])


@pytest.mark.slow
def test_the_page_is_written_without_importing_torch_or_transformers(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dpo_pack.reports.pages import run_page;"
        f"run_page([Path({str(run)!r})]); print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# ---- In a browser


@pytest.mark.parametrize("num_runs", [1, 4])
def test_a_browser_draws_every_chart_on_a_narrow_screen(num_runs: int, tmp_path: Path) -> None:
    """A script that only the test adds writes into the title how many charts were drawn, and how wide."""
    runs = [write_run(tmp_path / f"r{number}", lr=number) for number in range(1, num_runs + 1)]
    page = tmp_path / "page.html"
    probe = (
        "<script>document.title = [document.querySelectorAll('.chart').length,"
        "document.querySelectorAll('.chart canvas').length,"
        "document.documentElement.scrollWidth, innerWidth, [...document.querySelectorAll('.scroll')]"
        ".filter(box => box.scrollWidth > box.clientWidth).length].join(' ')</script>"
    )
    page.write_text(run_page(runs).replace("</body>", f"{probe}</body>"), encoding="utf-8")
    title = re.search(
        r"<title>(\d+) (\d+) (\d+) (\d+) (\d+)</title>",
        run_browser("--dump-dom", "--window-size=500,900", page=page),
    )
    assert title is not None
    charts, canvases, width, screen, cut_tables = map(int, title.groups())
    assert charts == canvases == 12 and width <= screen
    assert cut_tables == 0, "a table shows all its columns"


def test_the_page_has_of_a_server_only_the_name_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "finished"}')
    endpoint = {"url": "http://zebra/v1", "model": "served", "extra_body": {"zebra": 1}}
    recipe = {"model": {"path": "m"}, "online": {"judges": [{"endpoint": endpoint}]}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    page = run_page([tmp_path])
    assert "zebra" not in page and "model: served" in page
