"""Messages and rows of pairs, files of rows, and the splits that they become."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpo_pack.data.sources import Data, load_data
from dpo_pack.data.tokenization import TokenizationSettings
from dpo_pack.recipe.schema import DataRecipe, SourceRecipe
from support.tiny_tokenizer import tiny_tokenizer


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(content: Any) -> dict[str, Any]:
    return said("user", content)


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return said("assistant", content, **more)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """JSON lines; returns the path as recipes have it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load_splits(
    directory: Path,
    train: Any,
    tokenizer: Any = None,
    *,
    seed: int = 0,
    images: Any = None,
    max_new_tokens: int | None = None,
    **data: Any,
) -> Data:
    """`data`: keys of the recipe's section beside `train`. The cache is in `directory`."""
    return load_data(
        DataRecipe.model_validate({"train": train, **data}),
        tokenizer=tokenizer or tiny_tokenizer(),
        seed=seed,
        cache_dir=directory / "cache",
        images=images,
        max_new_tokens=max_new_tokens,
    )


def tokenization_settings(
    format: str, tokenizer: Any = None, *, completion_tokens: int | None = None, **data: Any
) -> TokenizationSettings:
    """`data`: keys of the recipe's section, with any values."""
    section = DataRecipe.model_validate({"train": "pairs.jsonl"})
    return TokenizationSettings(
        format=format,
        data=section.model_copy(update={"max_length": 10_000, **data}),
        source=SourceRecipe(path="pairs.jsonl"),
        tokenizer=tokenizer or tiny_tokenizer(),
        completion_tokens=completion_tokens,
    )
