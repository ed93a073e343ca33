"""Forms of verdicts from published judge prompts: read or refused as a person would."""

from __future__ import annotations

import re

import pytest

from dpo_pack.online.endpoint import Endpoint
from dpo_pack.online.judges import LlmJudge, read_verdict
from dpo_pack.recipe.online import EndpointRecipe, JudgeRecipe

A, B, TIE = 1.0, 0.0, 0.5
REASONS = "Answer A is short and right. Answer B is long; it names Paris, as [Answer A] does.\n\n"
LETTERS = {  # alone, as our own prompt asks for
    A: ("A", "**A**", "[A]", "_A_", '"A"'),
    B: (" b.", "`B`", "(B)", "```\nB\n```"),
    TIE: ("T", "Tie.", "It's a tie.", "Both answers are equally good.", "Neither answer is better."),
}
READ = {
    # MT-Bench, RewardBench, LangChain's pairwise evaluator, Skywork-Critic, Self-Taught Evaluator
    "[[A]]": A,
    f"{REASONS}Therefore, my final verdict is: [[B]]": B,
    f"{REASONS}Both are fine. [[C]]": TIE,
    # Arena-Hard
    f"{REASONS}My final verdict is Assistant A is significantly better: [[A>>B]]": A,
    "My final verdict is tie: [[A=B]].": TIE,
    "**My final verdict is: [[B>A]]**": B,
    "B > A": B,
    # WildBench
    '{"analysis of A": "short", "analysis of B": "long", "reason of A=B": "", "choice": "A++"}': A,
    '```json\n{"reasoning": "A is wordy", "winner": "B"}\n```': B,
    "{'better_answer': 'tie'}": TIE,
    # Prometheus 2
    "Feedback: Response A is brief, and response B rambles. So the former is better [RESULT] A": A,
    # Auto-J, AlpacaEval, JudgeBench, J1, JudgeLRM
    f"{REASONS}So, the final decision is Tie.": TIE,
    f"{REASONS}Therefore, Output (a) is better.": A,
    f"{REASONS}<answer> [[B]] </answer>": B,
    f"{REASONS}$\\boxed{{\\text{{A}}}}$": A,
    # last lines, and first ones
    f"{REASONS}## Verdict\n\n**B**": B,
    f"{REASONS}Final answer: Answer B is better.": B,
    "Tie\n\n### Reason: both name Paris.": TIE,  # PandaLM
    "A\n\nAnswer A is more detailed, as it names Paris.": A,
    "Answer B is better than Answer A. It names Paris.": B,
}
REFUSED = [
    *("", "C", "M", "A or B?", "Not A.", "A>A", "I would rather not say", "B is worse than A"),
    *("A, B, or T for a tie?", "The worse answer: A", "The answer is a", "The answer is Paris."),
    "A good answer names the city, and only one does.",
    "A tie would be unfair to the second answer",
    "Tie-break: the longer one",
    "8 9",  # JudgeLM: scores
    *("1", "Response 1"),  # PandaLM, TRL's pairwise judges: numbers that our prompt does not give
    *("[[D]]", "Rating: [[8]]", "[[A]] or [[B]]"),  # RewardBench with four answers
    *('{"winner": "A", "verdict": "B"}', '{"A": 8, "B": 5}', '{"worse_answer": "A"}'),
    "**Answer A**\nshort and right\n\n**Answer B**\nlong and wrong",
    "The ranking is:\n1. Answer A\n2. Answer B",
    "### A\nshort and right\n### B: long",
    "I do not think that A is better",
]
ALONE = [(text, verdict) for verdict, texts in LETTERS.items() for text in texts]


@pytest.mark.parametrize(("text", "verdict"), [*ALONE, *READ.items(), *((text, None) for text in REFUSED)])
def test_a_verdict_is_read_as_a_person_reads_it_or_not_at_all(text: str, verdict: float | None) -> None:
    assert read_verdict(text) == verdict


@pytest.mark.parametrize(
    ("pattern", "text", "verdict"),
    [
        (r"Response (\d)", "Response 1 is short. The final decision is Response 2", B),  # Auto-J
        (r"^\s*(1|2|Tie)", "Tie\n\n### Reason: none", TIE),  # PandaLM
        (r"score: (\S+)", "no such words", None),
        (r"is (\w+)$", "The best is Paris", None),
    ],
)
def test_a_regular_expression_reads_other_forms(pattern: str, text: str, verdict: float | None) -> None:
    assert read_verdict(text, re.compile(pattern)) == verdict


THINKING = "<think>\nBoth are polite. Winner: A\n</think>\n\n"


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ({"content": f"{THINKING}B"}, B),
        ({"content": "Both are polite. [[A]]</think>B"}, B),  # the template has written <think>
        ({"content": "[THINK]Is it [[A]]?[/THINK]B"}, B),
        ({"content": "<|channel|>analysis<|message|>A?<|end|><|channel|>final<|message|>B"}, B),
        ({"content": "B", "reasoning_content": "[[A]]"}, B),
        ({"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "B"}]}, B),
        ({"content": None, "reasoning_content": "A is"}, "its reasoning but no answer .*max_new_tokens"),
        ({"content": "", "reasoning": "A is"}, "its reasoning but no answer"),
        ({"content": "<think>\nBoth are polite.\n\nA"}, "its reasoning but no answer"),
        ({"content": None}, "neither A, B nor T: None"),
        ({"content": "B is worse than A"}, r"'B is worse than A'; .*online\.judges\.0\.verdict"),
        ({}, "neither"),
    ],
)
def test_reasoning_is_no_verdict(message: dict[str, object], verdict: float | str) -> None:
    server = EndpointRecipe(url="http://x", model="m", retries=0)
    endpoint = Endpoint(settings=server, api_key=None, recipe_key="k")
    settings = JudgeRecipe(type="llm", endpoint=server)
    judge = LlmJudge(endpoint=endpoint, settings=settings, recipe_key="online.judges.0")
    answer = {"choices": [{"message": message, "finish_reason": "length"}]}
    if isinstance(verdict, float):
        assert judge._read(answer) == verdict
    else:
        with pytest.raises(ValueError, match=verdict):
            judge._read(answer)
