"""Runs benchmarks on both models: tasks of lm-eval and a command of the user's, each a source of evidence.

A benchmark gives a line for each item: `item` (what pairs the two models' lines), `task`, `scores` (finite
numbers by metric, higher is better), `prompt` and `answer` (texts).
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from rich.console import Console

from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fingerprint import stored_dtype, weight_files
from dpo_pack.recipe.text import show
from dpo_pack.recipe.verdict import VerdictRecipe
from dpo_pack.system.console import shown
from dpo_pack.system.errors import RunError
from dpo_pack.system.files import Json, parse_json, read_json, text_of
from dpo_pack.system.machine import release_memory
from dpo_pack.verdicts.answers import Contest
from dpo_pack.verdicts.conclusion import Evidence, Source

_BATCH_SIZE = "8"  # of lm-eval; the same for both models, since rounding depends on it
_MOST_OUTPUT = 4000  # characters of lm-eval's that are printed if it fails


def run_benchmarks(contest: Contest, verdict: VerdictRecipe) -> Evidence:
    """Returns a source for each task and the command, with a line for each item: prompt, start and new (the
    answers), value (new minus start), item, metric. Raises RunError if the command or its lines are wrong."""
    release_memory()
    evidence, models = Evidence(), (contest.start, contest.new)
    for name, task in zip(verdict.task_names, verdict.tasks, strict=True):
        try:
            lines = [_run_lm_eval(contest, task, verdict.lm_eval, facts) for facts in models]
            evidence.append(pair_items(name, "task", *lines))
        except RunError as error:
            contest.console.print(f"Warning: {name}: {error}")
            evidence.append((Source(name=name, kind="task", values=np.zeros(0)), []))
    if verdict.command is not None:
        lines = [_run_command(verdict.command, facts, contest.console) for facts in models]
        evidence.append(pair_items("command", "command", *lines))
    return evidence


def pair_items(
    name: str, kind: Literal["task", "command"], start: Sequence[Json], new: Sequence[Json]
) -> tuple[Source, list[Json]]:
    """Pairs the lines of both models by item. The metric of a task is its first one that each item has; the
    items of a group's tasks are pooled. Raises RunError without a metric, or if an item has no partner."""
    olds, news = ({line["item"]: line for line in lines} for lines in (start, new))
    if lone := sorted(olds.keys() ^ news.keys()):
        what = f"{lone[0]!r} of the {'start' if lone[0] in olds else 'new model'} ({len(lone):,} such items)"
        raise RunError(
            f"{name}: the other model has no score of the item {what}; score the same items of both"
        )
    items: list[Json] = []
    for task in dict.fromkeys(line["task"] for line in start):
        keys = [line["item"] for line in start if line["task"] == task]
        every = [side[key]["scores"] for key in keys for side in (olds, news)]
        metric = next((metric for metric in every[0] if all(metric in scores for scores in every)), None)
        if metric is None:
            raise RunError(f"{name}: {task} has no metric with one finite number an item")
        for key in keys:
            old, other = (side[key]["scores"][metric] for side in (olds, news))
            item = {"prompt": olds[key]["prompt"], "value": other - old, "item": key, "metric": metric}
            item["start"] = olds[key]["answer"] or f"score {old:g}"
            items.append(item | {"new": news[key]["answer"] or f"score {other:g}"})
    return Source(name=name, kind=kind, values=np.array([item["value"] for item in items], float)), items


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max / 2  # so is a difference


# ------------------------------------------------------------------------------------------------ lm-eval


def _run_lm_eval(contest: Contest, task: str, lm_eval: Path | None, facts: ModelFacts) -> list[Json]:
    """Runs a task or group on one model. Raises RunError, and prints lm-eval's output, if it fails."""
    start, model, is_file = contest.start.settings, facts.settings, task.endswith(".yaml")
    # lm-eval reads no group from a file that is named: the file is included, and what it defines is named.
    defined = re.search(r"^(?:task|group): *[\"']?([\w.-]+)", text_of(Path(task)) if is_file else "", re.M)
    with TemporaryDirectory() as name:
        tokenizer, results = Path(name, "tokenizer"), Path(name, "results")
        contest.tokenizer.save_pretrained(tokenizer)  # the same template for both models
        arguments: Json = {"pretrained": model.path, "tokenizer": str(tokenizer)}
        arguments["dtype"] = str(stored_dtype(start.path, start.revision)).removeprefix("torch.")
        arguments["trust_remote_code"] = model.trust_remote_code
        arguments |= {"revision": model.revision} if model.revision is not None else {}
        arguments |= {"peft": str(facts.adapter)} if facts.adapter is not None else {}
        command = [sys.executable, "-m", "lm_eval"] if lm_eval is None else [str(lm_eval.absolute())]
        command += ["run", "--model", "hf", "--model_args", json.dumps(arguments)]
        command += ["--tasks", defined[1] if defined else task]
        command += ["--include_path", str(Path(task).absolute().parent)] if is_file else []
        command += ["--batch_size", _BATCH_SIZE, "--seed", str(contest.recipe.seed), "--log_samples"]
        command += ["--output_path", str(results)]
        command += ["--apply_chat_template"] if contest.tokenizer.chat_template is not None else []
        with shown(contest.console, f"{task} of {facts.label}"):
            ended = _run(command, "verdict.lm_eval", stderr=subprocess.STDOUT)
        if ended.returncode == 0 and (lines := read_lm_eval(results)):
            return lines
    contest.console.print(ended.stdout[-_MOST_OUTPUT:])
    raise RunError(f"lm-eval has no result for {facts.label}; see the end of its output above")


def read_lm_eval(directory: Path) -> list[Json]:
    """Returns the lines of the samples_*.jsonl that lm-eval has written: of each task those of its first
    filter. Of a metric whose lower values are better, the score is the value with the other sign."""
    lines: list[Json] = []
    results = read_json(next(directory.rglob("results_*.json"), directory)) or {}
    for file in sorted(directory.rglob("samples_*.jsonl")):
        task = re.sub(r"samples_(.*)_\d{4}-\d\d-\d\dT.*", r"\1", file.name)
        is_higher_better = results.get("higher_is_better", {}).get(task, {})
        samples = [json.loads(line) for line in file.read_bytes().splitlines()]
        for sample in (one for one in samples if one["filter"] == samples[0]["filter"]):
            scores = {
                # lm-eval's items of `perplexity` are log-likelihoods.
                metric: -value if is_higher_better.get(metric) is False and metric != "perplexity" else value
                for metric in sample["metrics"]
                if _is_score(value := sample[metric])
            }
            asked, answers = list(sample["arguments"].values()), [one[0] for one in sample["resps"]]
            answer = str(answers[0])
            if isinstance(answers[0], list):  # log-likelihoods of choices, and if each is the likeliest text
                likeliest = max(range(len(answers)), key=lambda number: float(answers[number][0]))
                answer = str(asked[likeliest]["arg_1"])
            item = f"{task} {sample['filter']} {sample['doc_hash']} {sample['doc_id']}"
            texts = {"prompt": str(asked[0]["arg_0"]), "answer": answer}
            lines.append({"item": item, "task": task, "scores": scores, **texts})
    return lines


# -------------------------------------------------------------------------------------- the user's command


def _run_command(command: str, facts: ModelFacts, console: Console) -> list[Json]:
    """Runs the command on one model and reads the JSON lines of its standard output: id, score and, if there
    are such texts, prompt and answer."""
    path = str(facts.adapter or facts.settings.path)
    if facts.adapter is None and facts.settings.revision is not None:
        path = str(weight_files(path, facts.settings.revision)[0].parent)
    words = [word.replace("{model}", path) for word in shlex.split(command)]
    with shown(console, f"The command on {facts.label}"):
        ended = _run(words, "verdict.command")
    told = f"verdict.command: {words[0]}, run on {path},"
    if ended.returncode != 0:
        raise RunError(f"{told} ended with status {ended.returncode}; see its output above")
    lines: dict[str, Json] = {}
    for number, text in enumerate(ended.stdout.encode().splitlines(), start=1):
        if not text.strip():
            continue
        line = parse_json(text) or {}
        item, score = line.get("id"), line.get("score")
        if not isinstance(item, str | int) or not _is_score(score):
            what = f"wrote a line without id and finite score (line {number}: {show(text.decode())})"
            raise RunError(f'{told} {what}; write {{"id": ..., "score": ...}}, and all else to stderr')
        if str(item) in lines:
            raise RunError(f"{told} wrote the id {item!r} again in line {number}; give each item its own")
        texts = {"prompt": str(line.get("prompt", item)), "answer": str(line.get("answer", ""))}
        lines[str(item)] = {"item": str(item), "task": "command", "scores": {"score": score}, **texts}
    if not lines:
        raise RunError(f"{told} wrote nothing to standard output; write a JSON line for each item")
    return list(lines.values())


def _run(words: Sequence[str], key: str, stderr: Any = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RunError(f"{key}: cannot start {words[0]}: {error.strerror}") from error
