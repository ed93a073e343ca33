"""One verdict, top to bottom: is a model better than the one it began with?

give_verdict -> recipe_of_run      what is compared, and by which sources of evidence
             -> prepare_contest    the two models and their tokenizer (answers.py)
             -> gather_evidence    both answer the same prompts and judges compare (answers.py, judging.py);
                                   tasks of lm-eval and a command (benchmarks.py)
             -> conclude_anew      better, worse, mixed, or one cannot tell (conclusion.py)
             -> show, publish      sentence, table and changed items; run.json, page and model card
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from dpo_pack.run.export import add_to_card
from dpo_pack.run.run_dir import RunDir, only_run
from dpo_pack.system.console import keep_log
from dpo_pack.system.errors import RecipeError, RunError
from dpo_pack.system.files import Json, parse_json, read_json, text_of, write_text_atomically
from dpo_pack.system.hub import name_for_others
from dpo_pack.verdict.answers import Contest, answer_prompts, choose_prompts, prepare_contest
from dpo_pack.verdict.benchmarks import run_benchmarks
from dpo_pack.verdict.conclusion import Source, conclude
from dpo_pack.verdict.judging import judge_answers

Evidence = list[tuple[Source, list[Json]]]  # each source, and a line for each of its items
_NUM_CHANGED, _MOST_CHARACTERS = 10, 600  # items that are shown, and of each of their texts


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
    run = RunDir(root=Path(name), checkpoint=None, is_finished=True)
    is_run = (run.root / INFO_FILE).is_file()
    if is_run == (output is not None):
        told = f"{name} is a run, whose verdict is in {run.verdict}" if is_run else f"{name} is no run"
        raise RecipeError(
            f"--output: {told}; {'leave it out' if is_run else 'name a directory for its verdict'}"
        )
    directory = output or run.verdict
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_run(run.root if is_run else directory, f"{name}: its verdict"))
        start = None if against is None else stack.enter_context(model_of(against, console))
        if is_run:
            recipe = recipe_of_run(run.root, overrides, trusts_recipe)
            keep_log(console, run.console_log)
        else:
            recipe, start = recipe_of_model(name, start, directory, overrides), None
        if (verdict := recipe.verdict) is None:
            raise RecipeError(f"verdict: {NO_EVIDENCE}")
        if problems := list(load.verdict_problems(verdict)):
            load.refuse(problems)
        new = stack.enter_context(model_of(name, console))
        contest = prepare_contest(recipe, new, console, against=start)
        evidence = gather_evidence(contest, verdict, directory)
        result, looks = conclude_anew(contest, evidence, verdict, directory / "history.jsonl")
        show(result, evidence, console)
        if is_run:
            publish(run, {"against": name_for_others(start or recipe.model.path), **result})
        # Last, so that a verdict that is stopped before is not counted.
        write_text_atomically(directory / "history.jsonl", looks)
    return result


def recipe_of_run(run: Path, overrides: Sequence[str], is_trusted: bool) -> Recipe:
    """Returns the run's recipe with `overrides`. Raises RecipeError if it names code that is not trusted."""
    if (status := (read_json(run / INFO_FILE) or {}).get("status")) != "finished":
        raise RunError(f"{run}: this run is not finished ({status}); 'dpopack train {run}' goes on with it")
    recipe = load.load_recipe(run, overrides, lenient=True)
    if (verdict := recipe.verdict) is None or is_trusted:
        return recipe
    code = {
        "judges": ", ".join(judge.function for judge in verdict.judges if judge.function),
        "tasks": ", ".join(task for task in verdict.tasks if task.endswith(".yaml")),  # may name functions
        "command": verdict.command,
        "lm_eval": verdict.lm_eval,
    }
    given = {override.partition("=")[0].strip() for override in overrides}
    named = [
        f"verdict.{key} ({what})" for key, what in code.items() if what and f"verdict.{key}" not in given
    ]
    if named and "verdict" not in given:
        ways = "give --trust-recipe, or your own --judge, --tasks, --command, verdict.lm_eval=PATH"
        raise RecipeError(f"{run}: its recipe would run {', '.join(named)}; {ways}")
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
    evidence += run_benchmarks(contest, verdict, directory)
    lines = ({"source": source.name, **item} for source, items in evidence for item in items)
    write_text_atomically(directory / "items.jsonl", "".join(map(_line, lines)))
    return evidence


def conclude_anew(
    contest: Contest, evidence: Evidence, verdict: VerdictRecipe, history: Path
) -> tuple[Json, str]:
    """Returns the conclusion, and the text of `history` with this look in it. Whoever looks often finds
    something by chance: every source that was ever compared with this start counts, once for its values."""
    start, sources = contest.start.read_fingerprints(), [source for source, _ in evidence]
    every = [line for text in text_of(history).encode().splitlines() if (line := parse_json(text))]
    looks = [look for look in every if look["start"] == start]
    now = {(source.name, hashlib.sha256(source.values.tobytes()).hexdigest()) for source in sources}
    before = {(one["name"], one["values"]): one["p"] for look in looks for one in look["sources"]}
    earlier = [p for key, p in before.items() if p is not None and key not in now]
    number, seed = len(looks) + 1, contest.recipe.seed
    result = conclude(sources, earlier=earlier, number=number, primary=verdict.primary, seed=seed)
    p_of = {one["name"]: one["p"] for one in result["sources"]}
    look: Json = {"start": start, "new": contest.new.read_fingerprints(), "conclusion": result["conclusion"]}
    look["sources"] = [{"name": name, "values": values, "p": p_of[name]} for name, values in sorted(now)]
    return result, "".join(map(_line, [*every, look]))


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def show(result: Json, evidence: Evidence, console: Console) -> None:
    """Prints the items that changed most in either direction, then the table and the sentence."""
    changes: list[tuple[float, str, Json]] = []  # of each item: its part of its source's largest change
    for source, items in evidence:
        tie = 0.5 if source.kind in ("function", "reward_model", "llm") else 0.0
        largest = max(abs(source.values - tie), default=0.0) or 1.0
        known = (item for item in items if item["value"] is not None)
        changes += [((item["value"] - tie) / largest, source.name, item) for item in known]
    changes.sort(key=lambda one: one[0])
    worst, best = changes[:_NUM_CHANGED], changes[: -_NUM_CHANGED - 1 : -1]
    for change, name, item in [one for one in worst if one[0] < 0] + [one for one in best if one[0] > 0]:
        texts = {"start": [item["start"][:_MOST_CHARACTERS]], "new model": [item["new"][:_MOST_CHARACTERS]]}
        title = f"{'better' if change > 0 else 'worse'} by {name}"
        render_completions([(title, item["prompt"])], texts, console)
    console.print(terminal_table("Is the new model better?", verdict_cells(result), no_wrap=True))
    console.print(f"{VERDICT_NOTE}.")
    console.print(result["sentence"])


def publish(run: RunDir, result: Json) -> None:
    """Writes the result into run.json, the run's page and the model card."""
    run.info = read_json(run.root / INFO_FILE) or {}
    run.update(verdict=result)
    write_run_page([run.root], run.page)
    columns, rows, _ = verdict_cells(result)
    add_to_card(run.model / "README.md", f"{result['sentence']} {VERDICT_NOTE}.", [columns, *rows])
