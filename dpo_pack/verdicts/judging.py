"""Judges compare the answers of two models. Each judge is a source of evidence of its own.

A judgement is that of one judge on two answers in one order. Judgements are kept as JSON lines, so a verdict
that is stopped goes on, and failed requests are sent again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpo_pack.data.store import content_key, path_hash
from dpo_pack.model.fingerprint import weights_fingerprint
from dpo_pack.online.interface import Failure, Judge, Rollout, Scores
from dpo_pack.online.judges import LlmJudge
from dpo_pack.online.win_rate import points
from dpo_pack.recipe.online import JudgeRecipe
from dpo_pack.run.rollouts import make_judge
from dpo_pack.system.console import shown
from dpo_pack.system.files import Json
from dpo_pack.system.machine import release_memory
from dpo_pack.system.process import counted
from dpo_pack.verdicts.answers import Contest, keep, read_kept
from dpo_pack.verdicts.conclusion import Evidence, Source

_BATCH_JUDGEMENTS = 64  # are kept together
_OF_SENDING = {"timeout_seconds", "retries", "concurrency", "api_key_env"}
_BESIDE: Any = {"weight": True, "retries": True, "endpoint": _OF_SENDING}  # keys that decide no judgement


def judge_answers(
    contest: Contest, rollouts: Sequence[Rollout], judges: Mapping[str, JudgeRecipe], directory: Path
) -> Evidence:
    """Returns what each judge says of the answers of `answer_prompts`, with a line for each prompt: prompt
    (its text), start and new (the answers), value (None: failed), and of an LLM, orders: the new answer's
    value after the start's answer, and before it. judges: `verdict.judges`, by the names of their sources.
    `directory` keeps judgements.jsonl. Raises RecipeError, ModelError, RunError."""
    judged = Evidence()
    for number, (name, settings) in enumerate(judges.items()):
        release_memory()
        items = _items(contest, rollouts, name, settings, f"verdict.judges.{number}", directory)
        done = [item for item in items if item["value"] is not None]
        longer = [len(item["new"]) - len(item["start"]) for item in done]
        source = Source(
            name=name,
            kind=settings.type,
            values=np.array([item["value"] for item in done], dtype=np.float64),
            more_characters=np.array(longer, dtype=np.float64),
            num_failed=len(items) - len(done),
        )
        judged.append((source, items))
    return judged


def _items(
    contest: Contest, rollouts: Sequence[Rollout], name: str, settings: JudgeRecipe, key: str, directory: Path
) -> list[Json]:
    judge = make_judge(
        settings,
        key,
        model=contest.start,
        token_budget=contest.recipe.token_budgets(contest.device.type)[1],
        device=contest.device,
        console=contest.console,
        is_chat=any(rollout.draw.prompt.messages is not None for rollout in rollouts),
    )
    memo, content = contest.start.cache_dir, ""  # of what decides what the judge says
    if settings.function is not None:
        file = sys.modules[settings.function.partition(":")[0]].__file__
        content = path_hash(Path(file), memo / "file_hashes.json") if file else ""
    elif settings.path is not None:
        content = weights_fingerprint(settings.path, None, memo / "model_hashes.json")
        content += str(contest.start.precision)
    decided: list[object] = [settings.model_dump(mode="json", exclude=_BESIDE), content]
    games = [_games(rollout, judge, decided) for rollout in rollouts]
    every = {key: game for each in games for key, game in each.items()}
    scores, items = _play(contest, name, judge, every, directory / "judgements.jsonl"), list[Json]()
    for rollout, keys in zip(rollouts, games, strict=True):
        start, new = (answer.text for answer in rollout.completions)
        item: Json = {"prompt": rollout.draw.prompt.text, "start": start, "new": new, "value": None}
        if all(one in scores for one in keys):
            orders = [scores[one] if n == 0 else 1 - scores[one] for n, one in enumerate(keys)]
            item["value"] = float(np.mean(orders or [0.5]))
            item |= {"orders": orders} if len(keys) == 2 else {}
        items.append(item)
    return items


def _games(rollout: Rollout, judge: Judge, decided: list[object]) -> dict[str, Rollout]:
    """Returns the two answers by the key of their judgement, the start's first; for an LLM, which may favour
    the first, in the other order, too. Equal answers need no judge."""
    (start, new), prompt = rollout.completions, rollout.draw.prompt
    if start.text == new.text:
        return {}
    if isinstance(judge, LlmJudge):
        orders = [replace(rollout, completions=answers) for answers in ((start, new), (new, start))]
        return {content_key([decided, judge.body(game)]): game for game in orders}
    texts = [(answer.text, answer.is_finished) for answer in rollout.completions]
    return {content_key([decided, str([prompt.text, prompt.messages, prompt.tools, texts])]): rollout}


def _play(
    contest: Contest, name: str, judge: Judge, games: Mapping[str, Rollout], path: Path
) -> dict[str, float]:
    """Returns the scores of the second answers, without those that failed."""
    console, kept, failures = contest.console, read_kept(path), list[Failure]()
    left = [key for key in games if key not in kept]
    if isinstance(judge, LlmJudge) and left:
        texts = [message["content"] for key in left for message in judge.body(games[key])["messages"]]
        num_tokens = sum(map(len, contest.tokenizer(texts, verbose=False)["input_ids"]))
        told = f"{counted(len(left), 'request')} of about {num_tokens:,} tokens together"
        console.print(f"{name}: {told}; {len(games) - len(left):,} judgements are kept")
    with shown(console, f"Judgements of {name}", "judgements", len(left)) as bar:
        for first in range(0, len(left), _BATCH_JUDGEMENTS):
            keys = left[first : first + _BATCH_JUDGEMENTS]
            batch, lines = [games[key] for key in keys], []
            found: Sequence[Scores | Failure | float] = (
                judge.compare(batch) if isinstance(judge, LlmJudge) else judge.score(batch)
            )
            for key, one in zip(keys, found, strict=True):
                if isinstance(one, Failure):
                    failures.append(one)
                else:  # an LLM gives the score of the first answer
                    second = 1 - one if isinstance(one, float) else float(points([one])[0])
                    lines.append({"key": key, "judge": name, "second": second})
            keep(path, kept, lines)
            bar.advance(len(keys))
    if failures:
        told = f"{len(failures):,} of {len(left):,} judgements failed; the first: {failures[0].reason}"
        console.print(f"Warning: {name}: {told}; the next verdict asks again")
    return {key: kept[key]["second"] for key in games if key in kept}
