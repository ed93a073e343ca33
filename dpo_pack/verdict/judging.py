"""Judges compare the answers of two models. Each judge is a source of evidence of its own.

Judgements are kept as JSON lines, so a verdict that is stopped goes on, and failed requests are sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpo_pack.online.interface import Rollout
from dpo_pack.recipe.online import JudgeRecipe
from dpo_pack.system.files import Json
from dpo_pack.verdict.answers import Contest
from dpo_pack.verdict.conclusion import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What one judge says."""

    source: Source
    # A line for each prompt, in their order: prompt (text), start and new (answers), value (None: failed),
    # orders (llm: the new answer's value with the start's answer first, and with its own first; else None).
    items: list[Json]


def judge_answers(
    contest: Contest, rollouts: Sequence[Rollout], judges: Mapping[str, JudgeRecipe], directory: Path
) -> list[Judged]:
    """Returns what each judge says of the answers of `answer_prompts`. judges: in the order of
    `verdict.judges`, by the names that their sources get. `directory` (output_dir/verdict) keeps judgements.jsonl. Prints,
    before a server is asked, how many requests it will get. Raises RecipeError, ModelError, RunError if a
    judge cannot be had or no request can succeed."""
    raise NotImplementedError
