"""Judges for tests of online runs."""

from __future__ import annotations

from typing import Any

calls: list[list[str]] = []


def count_e(*, prompts: list[Any], completions: list[str]) -> list[float]:
    """The more often the letter e, the better; a bonus for ending early."""
    return [text.count("e") - 0.01 * len(text) for text in completions]


def says_yes(*, prompts: list[Any], completions: list[str]) -> list[float]:
    return [float(text.count("yes") - text.count("no")) for text in completions]


def always_equal(*, prompts: list[Any], completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def dislikes_bread(*, prompts: list[Any], completions: list[str]) -> list[float]:
    """Raises on some prompts, whatever they come with."""
    calls.append(list(prompts))
    if any("bread" in str(prompt) for prompt in prompts):
        raise ValueError("no bread, please\nat all")
    return [float(len(text)) for text in completions]


def one_short(*, prompts: list[Any], completions: list[str]) -> list[float]:
    return [0.0] * (len(completions) - 1)


def words(*, prompts: list[Any], completions: list[str]) -> list[str]:
    return ["good" for _ in completions]


def not_a_number(*, prompts: list[Any], completions: list[str]) -> list[float | None]:
    """Nothing to say of completions of prompts about the moon."""
    return [None if "moon" in str(prompt) else 1.0 for prompt in prompts]


number = 3
