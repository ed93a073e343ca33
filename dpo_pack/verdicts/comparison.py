"""One verdict, top to bottom: is a model better than the one it began with?

Both models answer prompts, which judges compare; lm-eval and a command measure both. `conclude` says what it
shows; run.json, the run's page and the model card get it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dpo_pack.model.lora import read_adapter
from dpo_pack.online.interface import SamplingSettings
from dpo_pack.recipe import load
from dpo_pack.recipe.load import INFO_FILE, Recipe
from dpo_pack.recipe.verdict import NO_EVIDENCE, VerdictRecipe
from dpo_pack.reports.pages import write_run_page
from dpo_pack.reports.tables import VERDICT_NOTE, render_completions, terminal_table, verdict_cells
from dpo_pack.run.checkpoint import model_of
from dpo_pack.run.export import add_to_card, card_name
from dpo_pack.run.run_dir import ITS_START, LOOKS_FILE, RunDir, input_fingerprints, only_run
from dpo_pack.system.console import keep_log
from dpo_pack.system.errors import RecipeError, RunError
from dpo_pack.system.files import Json, parse_json, read_json, text_of, write_text_atomically
from dpo_pack.system.process import counted, placement
from dpo_pack.verdicts.answers import Contest, answer_prompts, choose_prompts, prepare_contest
from dpo_pack.verdicts.benchmarks import run_benchmarks
from dpo_pack.verdicts.conclusion import Evidence, conclude
from dpo_pack.verdicts.judging import judge_answers

_NUM_CHANGED = 10  # items in each direction that are shown
_LONG = re.compile(r"(.{600}).+", re.DOTALL)  # a text of which the beginning is shown


def give_verdict(
    name: str,
    overrides: Sequence[str],
    console: Console,
    *,
    against: str | None = None,
    output: Path | None = None,
    trusts_recipe: bool = False,
) -> Json:
    """Prints and returns what `conclude` returns. name: a finished run, or a model or an adapter, whose files
    go to `output`. against: a model or a run; None: the run's start, or the adapter's base. trusts_recipe:
    whether code that the run's recipe names may run. Raises DpoPackError."""
    if (place := placement(os.environ)) is not None and place.num_ranks > 1:
        raise RecipeError("verdict: it is one process; start it alone, not by torchrun, accelerate or srun")
    run = RunDir(
        root=Path(name), checkpoint=None, is_finished=True, info=read_json(Path(name, INFO_FILE)) or {}
    )
    if bool(run.info) == (output is not None):
        told = f"is a run, whose verdict is in {run.verdict}; leave it out" if run.info else "is no run"
        raise RecipeError(f"--output: {name} {told}" + "; name a directory for its verdict" * (not run.info))
    directory = output or run.verdict
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_run(run.root if run.info else directory, f"{name}: its verdict"))
        start = None if against is None else stack.enter_context(model_of(against, console))
        if run.info:
            recipe = recipe_of_run(run, overrides, trusts_recipe)
            keep_log(console, run.console_log)
        else:
            recipe, start = recipe_of_model(name, start, directory, overrides), None
        if (verdict := recipe.verdict) is None:
            raise RecipeError(f"verdict: {NO_EVIDENCE}")
        load.check_environment(recipe, only="verdict")
        new = stack.enter_context(model_of(name, console))
        contest = prepare_contest(recipe, new, console, against=start)
        then = run.info.get("inputs", {}).get("model.path")
        if then and against is None and then not in input_fingerprints(recipe, ["model.path"]).values():
            what = f"{recipe.model.path} is no longer the model with which this run began"
            raise RunError(f"model.path: {what}; put that back, or name a model with --against")
        evidence = gather_evidence(contest, verdict, directory)
        result, looks = conclude_anew(contest, evidence, verdict, directory / LOOKS_FILE)
        other = card_name(against or recipe.model.path)
        told = f"{ITS_START}, {other}" if against is None else other
        result["sentence"] = f"{card_name(name)} compared with {told}: {result['sentence']}"
        show(result, evidence, console)
        if run.info:
            publish(run, result, ITS_START if against is None else other)
        # Last, so that a verdict that is stopped before is not counted.
        write_text_atomically(directory / LOOKS_FILE, looks)
    return result


def recipe_of_run(run: RunDir, overrides: Sequence[str], is_trusted: bool) -> Recipe:
    """Returns the run's recipe with `overrides`. Raises RecipeError if it is not trusted, but names code, or
    servers, to which held-out prompts and the value of a variable would be sent."""
    if (status := run.info.get("status")) != "finished":
        told = f"this run is not finished ({status}); 'dpopack train {run.root}' goes on with it"
        raise RunError(f"{run.root}: {told}")
    recipe = load.load_recipe(run.root, overrides, lenient=True)
    if (verdict := recipe.verdict) is None or is_trusted:
        return recipe
    # lm-eval runs functions that a file names, and reads the files of a directory.
    tasks = [task for task in verdict.tasks if task.endswith(".yaml") or os.path.exists(task)]
    judges = [one.function or (one.endpoint.url if one.endpoint else None) for one in verdict.judges]
    named = {
        "verdict.judges": ", ".join(filter(None, judges)),
        "verdict.tasks": ", ".join(tasks),
        "verdict.command": verdict.command,
        "verdict.lm_eval": verdict.lm_eval,
        "model.trust_remote_code": recipe.model.trust_remote_code,
    }
    given = {override.partition("=")[0].strip() for override in overrides}
    theirs = [
        f"{key} ({what})" for key, what in named.items() if what and not given & {key, key.partition(".")[0]}
    ]
    if theirs:
        ways = "give --trust-recipe, or values of yours (--judge, --tasks, --command, KEY=VALUE)"
        raise RecipeError(f"{run.root}: its recipe runs code or asks servers: {', '.join(theirs)}; {ways}")
    return recipe


def recipe_of_model(name: str, start: str | None, directory: Path, overrides: Sequence[str]) -> Recipe:
    """Returns a recipe whose model is the start of `name`: for an adapter, by default its base."""
    model: Json = {"path": start}
    if start is None:
        if not load.is_adapter(name):
            raise RecipeError(f"{name} is no run, so its start is unknown; give it with --against MODEL")
        adapter = read_adapter(Path(name), name)
        model = {"path": adapter.base, "revision": adapter.base_revision}
    tree = {"output_dir": str(directory), "model": model, "data": {"train": "unused"}}
    return load.parse_recipe(tree, ["packing.mode=padded", *overrides])


def gather_evidence(contest: Contest, verdict: VerdictRecipe, directory: Path) -> Evidence:
    """Returns each source with its items, and writes these. What `directory` has is not made again."""
    evidence: Evidence = []
    if verdict.judges:
        length, sampling = verdict.max_new_tokens, verdict.sampling.model_dump()
        prompts = choose_prompts(contest, verdict.prompts, num=verdict.num_prompts, max_new_tokens=length)
        settings = SamplingSettings(completions_per_prompt=1, max_new_tokens=length, **sampling)
        rollouts = answer_prompts(contest, prompts, settings, directory)
        judges = dict(zip(verdict.judge_names, verdict.judges, strict=True))
        evidence += judge_answers(contest, rollouts, judges, directory)
    evidence += run_benchmarks(contest, verdict)
    lines = ({"source": source.name, **item} for source, items in evidence for item in items)
    write_text_atomically(directory / "items.jsonl", "".join(map(_line, lines)))
    return evidence


def conclude_anew(
    contest: Contest, evidence: Evidence, verdict: VerdictRecipe, history: Path
) -> tuple[Json, str]:
    """Returns the conclusion, and the text of `history` with this look in it. Whoever looks often finds
    something by chance: every source that was ever compared with this start counts, once for its values."""
    start, sources = contest.start.read_fingerprints(), [source for source, _ in evidence]
    text = text_of(history)
    every = [parse_json(line) or {} for line in text.encode().splitlines()]
    if damaged := every.count({}):
        contest.console.print(f"Warning: {history}: {counted(damaged, 'line')} cannot be read, and no look")
    looks = [look for look in every if look.get("start") == start]
    now = {(source.name, hashlib.sha256(source.values.tobytes()).hexdigest()) for source in sources}
    before = {(one["name"], one["values"]): one["p"] for look in looks for one in look["sources"]}
    earlier = [p for key, p in before.items() if p is not None and key not in now]
    number, seed = len(looks) + 1, contest.recipe.seed
    result = conclude(sources, earlier=earlier, number=number, primary=verdict.primary, seed=seed)
    p_of = {one["name"]: one["p"] for one in result["sources"]}
    new: Json = {"start": start, "new": contest.new.read_fingerprints(), "conclusion": result["conclusion"]}
    new["sources"] = [{"name": name, "values": values, "p": p_of[name]} for name, values in sorted(now)]
    return result, text + "\n" * (text[-1:] not in ("", "\n")) + _line(new)


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def show(result: Json, evidence: Evidence, console: Console) -> None:
    """Prints the items that changed most in either direction, then the table and the sentence."""
    changes: list[tuple[float, str, Json]] = []  # of each item: its part of its source's largest change
    for source, items in evidence:
        largest = max(abs(source.values - source.middle), default=0.0) or 1.0
        known = (item for item in items if item["value"] is not None)
        changes += [((item["value"] - source.middle) / largest, source.name, item) for item in known]
    changes.sort(key=lambda one: one[0])
    worst, best = changes[:_NUM_CHANGED], changes[: -_NUM_CHANGED - 1 : -1]
    for change, name, item in [one for one in worst if one[0] < 0] + [one for one in best if one[0] > 0]:
        both = {"start": item["start"], "new model": item["new"]}
        texts = {side: [_LONG.sub(r"\1…", text)] for side, text in both.items()}
        title = f"{'better' if change > 0 else 'worse'} by {name}"
        render_completions([(title, item["prompt"])], texts, console)
    console.print(terminal_table("Is the new model better?", verdict_cells(result), no_wrap=True))
    console.print(f"{VERDICT_NOTE}.")
    console.print(result["sentence"])


def publish(run: RunDir, result: Json, against: str) -> None:
    """Writes the result into run.json, the run's page and the model card, in place of an earlier one."""
    run.info = read_json(run.root / INFO_FILE) or run.info  # as it is by now
    run.update(verdict={**run.info.get("verdict", {}), against: result})
    write_run_page([run.root], run.page)
    columns, rows, _ = verdict_cells(result)
    told = f"{result['sentence']} {VERDICT_NOTE}."
    add_to_card(run.model / "README.md", f"Compared with {against}", told, [columns, *rows])
