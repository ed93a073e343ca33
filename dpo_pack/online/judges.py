"""Judges that load no model in this process: your own function, a server's model, a weighted sum."""

import json
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from dpo_pack.data.written import CHANGES
from dpo_pack.online.endpoint import Endpoint
from dpo_pack.online.interface import Failure, Judge, Rollout, Scores
from dpo_pack.recipe.online import JudgeRecipe
from dpo_pack.system.errors import RunError, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedJudges:
    """Adds up factor x score of several judges. A prompt has no scores if one of the judges fails on it."""

    judges: tuple[tuple[Judge, float], ...]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        sums: list[Scores | Failure] = [np.zeros(len(rollout.completions)) for rollout in rollouts]
        for judge, factor in self.judges:
            # If a judge fails on a prompt, later judges, which may cost money, do not get this prompt.
            places = [place for place, total in enumerate(sums) if not isinstance(total, Failure)]
            if not places:
                break
            for place, scores in zip(places, judge.score([rollouts[p] for p in places]), strict=True):
                total = sums[place]
                assert not isinstance(total, Failure)
                sums[place] = scores if isinstance(scores, Failure) else total + factor * scores
        return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionJudge:
    """Calls your own function. It returns a number for each completion; a better one has a higher number:

        def score(*, prompts: list[str | list[dict]], completions: list[str]) -> list[float]

    A prompt is text, or a list of messages if the data is conversational. The completions of one prompt
    follow one another. If a number is `None` or not finite, the prompt fails. A call that raises an error is
    repeated up to `retries` times, then each prompt alone."""

    name: str  # module:function
    function: Callable[..., Any]
    retries: int

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        """Raises RunError when the function does not return one number for each completion."""
        batch: dict[str, list[Any]] = {"prompts": [], "completions": []}
        for rollout in rollouts:
            prompt = rollout.draw.prompt
            for completion in rollout.completions:
                batch["prompts"].append(prompt.text if prompt.messages is None else list(prompt.messages))
                batch["completions"].append(completion.text)
        reason = ""
        for _ in range(1 + self.retries):
            try:
                values = self.function(**batch)
                break
            except Exception as error:  # the user's code may raise anything
                reason = f"{self.name}: {one_line(error)}"
        else:
            if len(rollouts) == 1:
                return [Failure(reason=reason)]
            # One bad prompt must not make the other prompts fail.
            return [result for rollout in rollouts for result in self.score([rollout])]
        ends = np.cumsum([len(rollout.completions) for rollout in rollouts])
        try:
            numbers = [math.nan if value is None else float(value) for value in values]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != ends[-1]:
            raise RunError(
                f"online.judges: {self.name} must return a list with one number for each of {ends[-1]} "
                f"completions, not {type(values).__name__} {str(values)[:60]!r}"
            )
        not_finite = Failure(reason=f"{self.name}: a score is not finite")
        by_prompt = np.split(np.array(numbers, dtype=np.float64), ends[:-1])
        return [scores if np.isfinite(scores).all() else not_finite for scores in by_prompt]


INSTRUCTIONS = "The better answer is helpful, honest and to the point."
_SYSTEM = """\
You compare two answers to the same request. {instructions}
Say which answer is better. Reply with one letter and nothing else: A, B, or T for a tie."""
_QUESTION = """\
[Request]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Which answer is better: A, B, or T for a tie?"""
_SHORT = reprlib.Repr()  # of a judge's words, in messages
_SHORT.maxstring = _SHORT.maxother = 120
# Score of the answer that is shown first, by the letter or the group of a statement.
_WINS = {"a": 1.0, "first": 1.0, "b": 0.0, "second": 0.0, "t": 0.5, "tie": 0.5}

# What models write before their verdict, and the forms of verdicts. A word that is not listed, as "worse" or
# "not", makes a statement unreadable, so no verdict is ever read the wrong way round.
_NAME = "(?:answer|response|assistant|model|output|option|completion|candidate)"
_LABEL = (
    r"(?:(?:my|the|an?|final|overall|better|best|preferred|winning)\s+)*"
    rf"(?:{_NAME}|verdict|winner|choice|decision|judge?ment|preference|result|conclusion"
    r"|better|best|preferred)"
)
_BETTER = (
    r"\s+(?:wins|is\s+(?:(?:clearly|slightly|significantly|much|overall|the)\s+)*"
    rf"(?:better|best|stronger|superior|preferred|preferable|winner)(?:\s+(?:{_NAME}|one|choice))?"
    rf"(?:\s+(?:than|to)\s+(?:{_NAME}\s+)?[AB])?)"
)
_LETTER = r"(?-i:[AB]\b|(?<=\()[ab](?=\)))"  # lower case may be an article
_TIE = (
    r"(?:(?:it|this)(?:['\u2019]s|\s+is)\s+)?(?:an?\s+)?(?:(?-i:T)|tied?|draw|equal|both)\b"
    rf"|(?:both\s+|they\s+|the\s+(?:two\s+)?)?(?:{_NAME}s?\s+)?(?:A\s+and\s+B\s+)?are\s+"
    r"(?:about\s+|roughly\s+)?(?:equal(?:ly\s+\w+)?|tied|the\s+same)"
    rf"|neither(?:\s+(?:{_NAME}\s+)?is\s+better)?|no\s+(?:clear\s+)?winner"
)
_STATEMENT = re.compile(
    r"[^\w?]*(?:(?:so|thus|hence|therefore|overall|finally|in\s+conclusion)\W+)?"
    rf"(?:{_LABEL}(?:\s+(?:is|goes\s+to))?(?:\s+that)?[^\w?]*|I\s+(?:prefer|choose|pick)\s+)?(?:the\s+)?"
    r"(?:(?P<first>A\s*>+\s*B|B\s*<+\s*A)|(?P<second>B\s*>+\s*A|A\s*<+\s*B)"
    rf"|(?P<tie>A\s*=+\s*B|B\s*=+\s*A|{_TIE})"
    rf"|(?:{_NAME}[^\w?]*)?(?P<letter>{_LETTER})\+*(?:[)\]\"']*{_BETTER})?)[^\w:?]*",
    re.IGNORECASE,
)
_ALONE = re.compile(r"[^\w:?]*(?P<letter>[abt])[^\w:?]*", re.IGNORECASE)
_MARKED = re.compile(
    r"\[\[(.+?)\]\]|\\boxed\{(?:\\\w+\{)?([^{}]+)|\[result\](.+)"
    rf"|[\"']{_LABEL}[\"']\s*:\s*[\"'](.*?)[\"']|<{_LABEL}>(.*?)</{_LABEL}>",
    re.IGNORECASE,
)
_HEADING = re.compile(rf"\s*#|\W*{_NAME}\W+\w\W*$", re.IGNORECASE)  # or an item of a list
_REASONING = re.compile(
    r"^.*(?:</(?:\w+:)?th(?:ink|inking|ought)>|\[/THINK\]|<\|channel\|>final<\|message\|>)", re.DOTALL
)
_UNFINISHED = re.compile(r"\s*(?:<(?:\w+:)?th(?:ink|inking|ought)>|\[THINK\]|<\|channel\|>)")
_OPENED = re.compile(rf"{_UNFINISHED.pattern}\s*\Z")


def without_reasoning(text: str, *, prompt: str | None = None) -> str:
    """Returns what a model says after its reasoning; "" if the reasoning has no end. `prompt`: what the model
    goes on with, if that is known. Then reasoning begins at its end, or with the text."""
    is_opened = prompt is not None and _OPENED.search(prompt)
    if prompt is not None and not is_opened and not _UNFINISHED.match(text):
        return text
    said, num_cut = _REASONING.subn("", text)
    return "" if _UNFINISHED.match(said) or (is_opened and not num_cut) else said


def read_verdict(text: str, pattern: re.Pattern[str] | None = None) -> float | None:
    """Returns the score of the answer that is shown first: 1, 0, or 0.5 for a tie; None: no clear verdict.
    text: a model's words after its reasoning. pattern: the group of its last match is the verdict, or 1 and 2
    for A and B."""
    if pattern is not None:
        verdict = (pattern.findall(text) or [""])[-1].strip()
        return _read_statement({"1": "A", "2": "B"}.get(verdict, verdict))
    text = re.sub(r"[*_`]", " ", text)  # Markdown and fences of code
    marked = [  # [[C]] is a tie in MT-Bench
        _read_statement("tie" if match.group(1) == "C" else next(filter(None, match.groups()), ""))
        for match in _MARKED.finditer(text)
    ]
    if verdicts := {verdict for verdict in marked if verdict is not None}:
        return verdicts.pop() if len(verdicts) == 1 else None
    statements = [part for part in re.split(r"\n+|(?<=[.!])\s+", text.strip()) if part.strip()]
    read = [_read_statement(part) for part in statements]
    if not (found := set(read) - {None}):
        return None
    if len(found) > 1:  # headings and lists name both answers, so only a sentence decides
        return None if _HEADING.match(statements[-1]) or len(statements[-1].split()) < 2 else read[-1]
    return read[-1] if read[-1] is not None or _HEADING.match(statements[0]) else read[0]


def _read_statement(text: str) -> float | None:
    found = _ALONE.fullmatch(text) or _STATEMENT.fullmatch(text)
    return None if found is None else _WINS[(found["letter"] or str(found.lastgroup)).lower()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmJudge:
    """Asks a server's model which of two completions is better. A score is the fraction of comparisons won.

    Models favour the answer that is shown first (Zheng et al. 2023, arXiv 2306.05685), so each pair of
    completions is compared in both orders."""

    endpoint: Endpoint
    settings: JudgeRecipe
    recipe_key: str  # error messages name this key of the recipe

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        comparisons = [
            (place, first, second)
            for place, rollout in enumerate(rollouts)
            for one, other in combinations(range(len(rollout.completions)), 2)
            # Equal texts are a tie and need no request.
            if rollout.completions[one].text != rollout.completions[other].text
            for first, second in ((one, other), (other, one))
        ]
        answers = [rollout.completions for rollout in rollouts]
        verdicts = self.compare(
            [replace(rollouts[n], completions=(answers[n][i], answers[n][j])) for n, i, j in comparisons]
        )
        wins = [np.full((len(r.completions), len(r.completions)), 0.5) for r in rollouts]  # of i against j
        failures: dict[int, Failure] = {}
        for (place, first, second), verdict in zip(comparisons, verdicts, strict=True):
            if isinstance(verdict, Failure):
                failures.setdefault(place, verdict)
                continue
            # This verdict counts one half; the verdict on the other order counts the other half.
            wins[place][first, second] += (verdict - 0.5) / 2
            wins[place][second, first] -= (verdict - 0.5) / 2
        # Without the diagonal: no completion is compared with itself.
        means = [np.array([np.delete(line, i).mean() for i, line in enumerate(table)]) for table in wins]
        return [failures.get(place) or scores for place, scores in enumerate(means)]

    def compare(self, pairs: Sequence[Rollout]) -> list[float | Failure]:
        """Returns the score, 0, 0.5 or 1, of the first of each rollout's two completions, shown in order."""
        optional = {"max_tokens": "max_completion_tokens"} | (
            {} if self.settings.temperature else {"temperature": None}
        )
        bodies = list(map(self.body, pairs))
        verdicts = self.endpoint.ask_all("/chat/completions", bodies, self._read, optional=optional)
        if unusable := [verdict for verdict in verdicts if isinstance(verdict, Failure)]:
            self.endpoint.console.print(
                f"  Warning: {self.recipe_key}: {len(unusable):,} of {len(verdicts):,} comparisons gave no "
                f"verdict; the first: {unusable[0].reason}",
                markup=False,
            )
        return verdicts

    def body(self, pair: Rollout) -> dict[str, Any]:
        """Returns the request that compares a rollout's two completions."""
        prompt, (first, second) = pair.draw.prompt, pair.completions
        text = prompt.text
        if prompt.messages is not None:
            turns = [f"tools: {json.dumps(prompt.tools, ensure_ascii=False)}"] if prompt.tools else []
            for message in map(CHANGES["parts_joined"], prompt.messages):
                said = filter(None, (message["content"], message.get("tool_calls")))
                texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in said)
                turns.append(f"{message['role']}: " + "\n".join(texts))
            text = "\n\n".join(turns)
        question = _QUESTION.format(prompt=text, first=first.text, second=second.text)
        limits = {"temperature": self.settings.temperature, "max_tokens": self.settings.max_new_tokens}
        return {
            "messages": [
                {
                    "role": "system",
                    "content": _SYSTEM.format(instructions=self.settings.instructions or INSTRUCTIONS),
                },
                {"role": "user", "content": question},
            ],
            **{name: value for name, value in limits.items() if value is not None},
        }

    def _read(self, answer: Any) -> float:
        """Returns the verdict. Raises ValueError, which quotes an answer that has none."""
        try:
            choice = answer["choices"][0]
            content, reason = choice["message"].get("content"), choice.get("finish_reason")
            reasoning = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
            if isinstance(content, list):  # of parts; those with reasoning have another type
                content = "".join(str(part.get("text")) for part in content if part.get("type") == "text")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError("the answer has no message") from None
        said = content if isinstance(content, str) else ""
        text = without_reasoning(said)
        if (reasoning or said.strip()) and not text.strip():
            raise ValueError(
                f"the model gave its reasoning but no answer (finish_reason: {reason}); raise or "
                f"leave out {self.recipe_key}.max_new_tokens, or use endpoint.extra_body to think less"
            )
        verdict = read_verdict(text, self.settings.verdict)
        if verdict is None:
            raise ValueError(
                f"the answer is neither A, B nor T: {_SHORT.repr(text or content)}; finish_reason {reason}; "
                f"{self.recipe_key}.verdict can read other forms"
            )
        return verdict
