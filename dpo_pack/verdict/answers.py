"""Two models answer the same prompts, with the same random numbers, one model after the other.

The prompts are rows as they were written, and none that was trained on. Answers are kept as JSON lines, so a
verdict that is stopped goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dpo_pack.data.tokenization import Prompt
from dpo_pack.model.facts import ModelFacts
from dpo_pack.online.interface import Rollout, SamplingSettings
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.schema import SourceRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Two models that answer the same prompts, and what they share: dtype, tokenizer, chat template."""

    recipe: Recipe  # of the run; without a run, one whose model.path is the start
    start: ModelFacts
    new: ModelFacts
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    console: Console


def prepare_contest(recipe: Recipe, new: str, console: Console, *, against: str | None = None) -> Contest:
    """new: a directory or hub id of a model or an adapter. against: another one in place of the recipe's
    start. Loads no weights. Raises RecipeError, ModelError."""
    raise NotImplementedError


def choose_prompts(
    contest: Contest, source: SourceRecipe | None, *, num: int, max_new_tokens: int
) -> list[Prompt]:
    """Returns at most `num` distinct prompts, the same ones every time: of `source` (`verdict.prompts`), or
    else held-out ones of the run in `recipe.output_dir`. Prints how many there are, and what is left out.
    Raises DataError, RecipeError, and RunError if data files have changed since the run."""
    raise NotImplementedError


def answer_prompts(
    contest: Contest, prompts: Sequence[Prompt], sampling: SamplingSettings, directory: Path
) -> list[Rollout]:
    """Returns each prompt with two completions, the start's and the new model's, whose texts have no
    reasoning. `directory` (output_dir/verdict) keeps them in answers.jsonl; what it has is not written again.
    Prints lengths, and the parts that are cut off and identical. Raises ModelError, CacheError."""
    raise NotImplementedError
