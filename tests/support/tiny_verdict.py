"""Two tiny models for a verdict: the start of a `tiny_run`, and one that has learned something else."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dpo_pack.data.tokenization import Prompt
from dpo_pack.online.interface import Completion, Draw, Rollout
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run.run_dir import input_fingerprints
from dpo_pack.run.setup import prepare_data, prepare_tokenizer
from dpo_pack.system.files import write_json_atomically
from dpo_pack.verdicts.answers import Contest, prepare_contest
from support.tiny_run import tiny_checkpoint, tiny_run
from support.tiny_tokenizer import tiny_tokenizer


def contest_in(directory: Path, *overrides: str, new: str | None = None) -> Contest:
    """`directory` holds a `tiny_run` and, in other/, another model; both are made if they are not there."""
    if not (directory / "recipe.yaml").exists():
        tiny_run(directory)
        tiny_checkpoint(directory / "other", seed=1)
    recipe = load_recipe(directory / "recipe.yaml", overrides)
    console = Console(file=io.StringIO(), width=300, highlight=False, soft_wrap=True, markup=False)
    return prepare_contest(recipe, new or str(directory / "other"), console)


def finish(recipe: Recipe) -> None:
    """Writes what run.json has about data."""
    data = prepare_data(recipe, prepare_tokenizer(recipe), Console(quiet=True), takes_prompts=True)
    recipe.output_dir.mkdir(parents=True, exist_ok=True)
    info = {"inputs": input_fingerprints(recipe), "fingerprints": {"data": data.fingerprint}}
    write_json_atomically(recipe.output_dir / "run.json", info)


def answered(prompt: str, start: str, new: str, number: int = 0, **more: Any) -> Rollout:
    """A prompt with the answers of both models. more: its messages and tools."""

    def ids(text: str) -> Any:
        return np.array(tiny_tokenizer()(text)["input_ids"], dtype=np.int32)

    asked = Prompt(ids=ids(prompt), text=prompt, row_number=number + 1, **{"messages": None, **more})
    answers = [Completion(ids=ids(text), text=text, is_finished=True) for text in (start, new)]
    draw = Draw(number=number, prompt_index=number, prompt=asked)
    return Rollout(draw=draw, completions=tuple(answers))
