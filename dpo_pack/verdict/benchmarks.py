"""Runs benchmarks on both models: tasks of lm-eval and a command of the user's, each a source of evidence.

A benchmark gives a line for each item: `item` (what pairs the two models' lines), `task`, `scores` (finite
numbers by metric, higher is better), `prompt` and `answer` (texts). The lines are kept by what was run on
which weights, so a verdict that is stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fingerprint import stored_dtype, weight_files
from dpo_pack.recipe.verdict import VerdictRecipe
from dpo_pack.system.console import shown
from dpo_pack.system.errors import RunError
from dpo_pack.system.files import Json, parse_json, read_json, text_of, write_text_atomically
from dpo_pack.system.machine import release_memory
from dpo_pack.verdict.answers import Contest
from dpo_pack.verdict.conclusion import Source

_BATCH_SIZE = "8"  # of lm-eval; the same for both models, since rounding depends on it


def run_benchmarks(
    contest: Contest, verdict: VerdictRecipe, directory: Path
) -> list[tuple[Source, list[Json]]]:
    """Returns each task's and the command's source, and a line for each item: prompt, start, new (answers),
    value (new minus start), item, metric. A task without a result is a source with a failure. Raises RunError
    if the command's lines are wrong."""
    found = []
    for name, task in zip(verdict.task_names, verdict.tasks, strict=True):
        words = text_of(Path(task)) if task.endswith(".yaml") else task
        run = partial(_run_lm_eval, contest, task, verdict.lm_eval, directory / f"{name}.log")
        try:
            found.append(pair_items(name, "task", *_of_both(contest, directory, name, words, run)))
        except RunError as error:
            found.append(_without_result(name, str(error)))
    if verdict.command is not None:
        run_command = partial(_run_command, verdict.command)
        lines = _of_both(contest, directory, "command", verdict.command, run_command)
        found.append(pair_items("command", "command", *lines))
    return found


def _of_both(
    contest: Contest, directory: Path, name: str, words: str, run: Callable[[ModelFacts], list[Json]]
) -> list[list[Json]]:
    """Returns the lines of the start and of the new model, kept or made by `run`."""
    found = []
    for side, facts in (("start", contest.start), ("new model", contest.new)):
        settings = [words, facts.read_fingerprints(), contest.recipe.seed, contest.tokenizer.chat_template]
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
        stem = re.sub(r"[^\w.-]", "_", f"{name}-{side}")
        path = directory / "items" / f"{stem}-{digest}.jsonl"
        if path.is_file():
            contest.console.print(f"{name} of the {side}: kept in {path}")
            found.append([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
            continue
        release_memory()
        with shown(contest.console, f"{name} of the {side}"):
            found.append(run(facts))
        lines = (json.dumps(line) + "\n" for line in found[-1])
        write_text_atomically(path, "".join(lines))
    return found


def pair_items(name: str, kind: Any, start: Sequence[Json], new: Sequence[Json]) -> tuple[Source, list[Json]]:
    """Pairs the lines of both models by item. The metric of a task is its first one that each item has; the
    items of a group's tasks are pooled. Raises RunError if an item has no partner."""
    olds, news = ({line["item"]: line for line in lines} for lines in (start, new))
    if lone := sorted(olds.keys() ^ news.keys()):
        raise RunError(
            f"{name}: item {lone[0]!r} has a score of one model only, as {len(lone):,} in all have"
        )
    items = []
    for task in dict.fromkeys(line["task"] for line in start):
        keys = [line["item"] for line in start if line["task"] == task]
        scores = [side[key]["scores"] for key in keys for side in (olds, news)]
        metric = next((name for name in scores[0] if all(name in one for one in scores)), None)
        if metric is None:
            return _without_result(name, f"{task} has no metric with one finite number an item")
        for key in keys:
            old, other = olds[key], news[key]
            texts = {"prompt": old["prompt"], "start": old["answer"], "new": other["answer"]}
            value = other["scores"][metric] - old["scores"][metric]
            items.append({**texts, "value": value, "item": key, "metric": metric})
    return Source(name=name, kind=kind, values=np.array([item["value"] for item in items])), items


def _without_result(name: str, why: str) -> tuple[Source, list[Json]]:
    return Source(name=name, kind="task", values=np.zeros(0), failure=why), []


# ------------------------------------------------------------------------------------------------ lm-eval


def _run_lm_eval(
    contest: Contest, task: str, lm_eval: Path | None, log: Path, facts: ModelFacts
) -> list[Json]:
    """Runs one task or group on one model. Raises RunError if lm-eval fails; `log` then has its words."""
    path, revision = facts.settings.path, facts.settings.revision
    with TemporaryDirectory() as name:
        tokenizer, results = Path(name, "tokenizer"), Path(name, "results")
        contest.tokenizer.save_pretrained(tokenizer)  # the same template for both models
        dtype = stored_dtype(contest.start.settings.path, contest.start.settings.revision)
        arguments: Json = {"pretrained": path, "tokenizer": str(tokenizer)}
        arguments |= {
            "dtype": str(dtype).removeprefix("torch."),
            "trust_remote_code": facts.settings.trust_remote_code,
        }
        arguments |= {"revision": revision} if revision is not None else {}
        arguments |= {"peft": str(facts.adapter)} if facts.adapter is not None else {}
        command = [sys.executable, "-m", "lm_eval"] if lm_eval is None else [str(lm_eval)]
        command += ["run", "--model", "hf", "--model_args", json.dumps(arguments), "--tasks", task]
        command += ["--include_path", str(Path(task).parent.absolute())] if task.endswith(".yaml") else []
        command += ["--batch_size", _BATCH_SIZE, "--seed", str(contest.recipe.seed), "--log_samples"]
        command += ["--output_path", str(results)]
        command += ["--apply_chat_template"] if contest.tokenizer.chat_template is not None else []
        ended = run_alone(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, where="verdict.lm_eval")
        if lines := read_samples(results) if ended.returncode == 0 else []:
            return lines
        write_text_atomically(log, ended.stdout)
        last = (ended.stdout.strip().splitlines() or ["it printed nothing"])[-1]
        raise RunError(f"lm-eval has no result ({last}); {log} has its words")


def read_samples(directory: Path) -> list[Json]:
    """Returns the lines of the samples_*.jsonl that lm-eval has written: of each task those of its first
    filter. Of a metric whose lower values are better, the score is the value with the other sign."""
    lines: list[Json] = []
    results = read_json(next(directory.rglob("results_*.json"), directory)) or {}
    for file in sorted(directory.rglob("samples_*.jsonl")):
        task = re.sub(r"samples_(.*)_\d{4}-\d\d-\d\dT.*", r"\1", file.name)
        is_higher_better = results.get("higher_is_better", {}).get(task, {})
        samples = [json.loads(line) for line in file.open(encoding="utf-8")]
        for sample in (one for one in samples if one["filter"] == samples[0]["filter"]):
            scores = {
                # lm-eval's items of `perplexity` are log-likelihoods.
                metric: -value if is_higher_better.get(metric) is False and metric != "perplexity" else value
                for metric in sample["metrics"]
                if isinstance(value := sample[metric], int | float) and math.isfinite(value)
            }
            asked, answers = list(sample["arguments"].values()), [one[0] for one in sample["resps"]]
            answer = str(answers[0])
            if isinstance(answers[0], list):  # log-likelihoods of choices, and whether each is the likeliest text
                likeliest = max(range(len(answers)), key=lambda number: float(answers[number][0]))
                answer = str(asked[likeliest]["arg_1"])
            item = f"{task} {sample['filter']} {sample['doc_hash']} {sample['doc_id']}"
            texts = {"prompt": str(asked[0]["arg_0"]), "answer": answer}
            lines.append({"item": item, "task": task, "scores": scores, **texts})
    return lines


# -------------------------------------------------------------------------------------- the user's command


def _run_command(command: str, facts: ModelFacts) -> list[Json]:
    """Runs the command on one model and reads its standard output: JSON lines with id, score and, if there
    are any, the texts prompt and answer."""
    path = str(facts.adapter or facts.settings.path)
    if facts.adapter is None and facts.settings.revision is not None:
        path = str(weight_files(path, facts.settings.revision)[0].parent)
    words = [word.replace("{model}", path) for word in shlex.split(command)]
    ended = run_alone(words, stdout=subprocess.PIPE, where="verdict.command")
    where = f"verdict.command: {words[0]}, run on {path},"
    if ended.returncode != 0:
        raise RunError(f"{where} ended with status {ended.returncode}; its words are above")
    lines: dict[str, Json] = {}
    for number, text in enumerate(ended.stdout.splitlines(), start=1):
        line = parse_json(text.encode()) or {}
        item, score = line.get("id"), line.get("score")
        if not isinstance(item, str | int) or not isinstance(score, int | float) or not math.isfinite(score):
            what = f'wrote no {{"id": text, "score": finite number}} in line {number}: {text[:80]!r}'
            raise RunError(f"{where} {what}; write other things to standard error")
        if str(item) in lines:
            raise RunError(f"{where} wrote id {item!r} twice, again in line {number}; give each item its own")
        texts = {name: str(line.get(name, "")) for name in ("prompt", "answer")}
        texts["prompt"] = texts["prompt"] or str(item)
        lines[str(item)] = {"item": str(item), "task": "command", "scores": {"score": score}, **texts}
    if not lines:
        raise RunError(f"{where} wrote no line to standard output; write a JSON line for each item")
    return list(lines.values())


def run_alone(words: Sequence[str], *, where: str, **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, text=True, errors="replace", check=False, **options
        )
    except OSError as error:
        raise RunError(f"{where}: cannot start {words[0]}: {error.strerror}") from error
