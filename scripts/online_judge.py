"""The judge of configs/online_function.yaml: it likes courteous words, and answers that come to an end."""

import re
from typing import Any

COURTEOUS = frozenset({"course", "gladly", "good", "happy", "help", "thank", "thanks", "time", "wish", "you"})


def courtesy(*, prompts: list[Any], completions: list[str]) -> list[float]:
    """One point for each courteous word of a completion."""
    return [float(sum(word in COURTEOUS for word in words_of(text))) for text in completions]


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())
