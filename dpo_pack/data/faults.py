"""Common faults of preference data and chat templates, in words and with a remedy.

A rule looks at one pair and returns what it found there, as a sentence; None if the pair is in order. To add
a rule, write a function and a line in RULES, at the end of this file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dpo_pack.data.formats import FORMATS, are_labels
from dpo_pack.data.view import LeftOutReason, Origin, SourceView, ViewedPair

SIDES = ("chosen", "rejected")
_QUOTED_CHARACTERS = 40
_LEAST_PROMPT_CHARACTERS = 8  # a shorter prompt may be in an answer by chance
_DROP = "if so long rows take too much memory, data.truncation: drop leaves these pairs out"
_FEW = 0.1  # of a source's pairs or rows: if fewer have a fault, it may be right


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of some pairs of a source, or of rows that are left out."""

    name: str  # a snake_case word
    origin: Origin
    sentence: str
    remedy: str
    num_rows: int  # that have the fault
    of_rows: int
    unit: Literal["pair", "row"]
    rows: tuple[int, ...]  # numbers of rows that have the fault; of rows that are left out, the first ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a fault is found and described."""

    find: Callable[[ViewedPair], str | None]
    sentence: str
    remedy: Callable[[Sequence[ViewedPair]], str]  # gets the pairs that have the fault
    least_share: float = 0.0  # of the source's pairs; in fewer pairs it is no fault


def find_faults(view: SourceView) -> list[Fault]:
    """Returns the faults of a source: first those that most rows have."""
    faults = []
    for name, rule in RULES.items():
        found = [pair for pair in view.pairs if rule.find(pair)]
        if found and len(found) >= rule.least_share * len(view.pairs):
            faults.append(_fault(view, name, rule.sentence, rule.remedy(found), found))
    many = [reason for reason in view.left_out if reason.num_rows >= _FEW * reason.of_rows]
    faults += [*_labels(view), *map(_left_out, many)]
    return sorted(faults, key=lambda fault: -fault.num_rows)


def notes_of(pair: ViewedPair, faults: Sequence[Fault]) -> dict[str, str]:
    """Returns what the rules found in a pair, by name of the fault; only for faults that its source has."""
    names = {fault.name for fault in faults if fault.origin == pair.origin}
    found = ((name, rule.find(pair)) for name, rule in RULES.items() if name in names)
    return {name: note for name, note in found if note}


def _repeated_prompt(pair: ViewedPair) -> str | None:
    prompt = _text_of(pair.pair.prompt).strip()
    completions = {"chosen": pair.pair.chosen, "rejected": pair.pair.rejected}
    repeating = [side for side, completion in completions.items() if prompt in _text_of(completion)]
    if not repeating or len(prompt) < _LEAST_PROMPT_CHARACTERS:
        return None
    verb = "contains" if len(repeating) == 1 else "contain"
    return f"{' and '.join(repeating)} {verb} the prompt again: {quoted(prompt)}"


def _mend_repeated_prompt(pairs: Sequence[ViewedPair]) -> str:
    key, format = pairs[0].origin.key, FORMATS[pairs[0].format]
    if format.infers_prompts:
        other = f"other columns have the answers alone, name them in {key}.columns"
        if all(
            _text_of(completion).lstrip().startswith(_text_of(one.pair.prompt).strip())
            for one in pairs
            for completion in (one.pair.chosen, one.pair.rejected)
        ):
            return (
                f"chosen and rejected are prompt and answer together: set {key}.columns: {{prompt: null}}; "
                f"but if {other}"
            )
        return f"wrong columns? Chosen and rejected must be answers only. If {other}; if not, mend the rows"
    answers = " and ".join(format.completion_columns)
    return f"remove the prompt from {answers}, or name other columns in {key}.columns"


def _scored_header(pair: ViewedPair) -> str | None:
    header = _header(pair)
    if header is None or pair.opens_turn:
        return None
    return (
        f"the prompt ends before the header of the assistant's turn, so the completions begin with it: "
        f"{quoted(header)}"
    )


def _header(pair: ViewedPair) -> str | None:
    """Returns the text that the template wrote between the prompt and the first words of the answer."""
    if not _is_chat(pair):
        return None
    answer = _text_of(pair.pair.chosen).strip()[:_QUOTED_CHARACTERS]
    text = "".join(token.text for token in pair.tokens("chosen") if token.part == "completion")
    header = text[: max(text.find(answer), 0)]
    return header if answer and header.strip() else None


def _moved_boundary(pair: ViewedPair) -> str | None:
    if len(pair.whole.prompt) == len(pair.alone):
        return None
    end = quoted(pair.text_after_boundary())
    if _is_chat(pair):
        return f"the prompt alone ends with {end}, which does not come before the completions"
    return f"the end of the prompt, {end}, and the beginning of a completion become one token"


def _mend_moved_boundary(pairs: Sequence[ViewedPair]) -> str:
    if _is_chat(pairs[0]):
        return (
            "if the template has an option for this, set it in the column chat_template_kwargs; if not, take "
            "a chat template that writes the same before an answer as it writes for a generation prompt "
            "(tokenizer.chat_template)"
        )
    return (
        "the usual cause is a space at the end of the prompt: remove this space, and begin the completions "
        "with a space"
    )


def _no_end(pair: ViewedPair) -> str | None:
    missing = [side for side in SIDES if not pair.ends.found_in(pair.whole.completion(side))]
    if not missing:
        return None
    last = "; ".join(
        f"{side} ends with {quoted(''.join(token.text for token in pair.tokens(side)[-3:]))}"
        for side in missing
    )
    return f"EOS is missing: {last}"


def _mend_no_end(pairs: Sequence[ViewedPair]) -> str:
    tokenizer = pairs[0].tokenizer
    eos = f"{tokenizer.eos_token} (id {tokenizer.eos_token_id})"
    if _is_chat(pairs[0]):
        return (
            f"the chat template must end each answer with EOS, {eos}, or another special token of this "
            "tokenizer: mend it and name the file in tokenizer.chat_template"
        )
    return f"write EOS, {eos}, at the end of chosen_ids and rejected_ids"


def _cut_prompt(pair: ViewedPair) -> str | None:
    num_cut = len(pair.whole.prompt) - len(pair.fitted.prompt)
    if not num_cut:
        return None
    return f"{num_cut:,} of the prompt's {len(pair.whole.prompt):,} tokens are cut, the oldest ones"


def _mend_cut_prompt(pairs: Sequence[ViewedPair]) -> str:
    limits = pairs[0].limits
    lengths = {
        "data.max_length": (max(pair.whole.longest_length for pair in pairs), limits.max_length),
        "data.max_prompt_length": (max(len(pair.whole.prompt) for pair in pairs), limits.max_prompt_length),
    }
    keys = [f"{key}: {longest}" for key, (longest, limit) in lengths.items() if limit and longest > limit]
    return f"{' with '.join(keys)} keeps these pairs whole; {_DROP}"


def _cut_completion(pair: ViewedPair) -> str | None:
    num_cut = {side: len(pair.whole.completion(side)) - len(pair.fitted.completion(side)) for side in SIDES}
    cut = [f"{number:,} tokens of {side}" for side, number in num_cut.items() if number]
    return f"{' and '.join(cut)} are cut, and EOS with them" if cut else None


def _mend_cut_completion(pairs: Sequence[ViewedPair]) -> str:
    longest = max(pair.whole.longest_length for pair in pairs)
    return f"data.max_length: {longest} keeps these pairs whole; {_DROP}"


def _too_many_positions(pair: ViewedPair) -> str | None:
    length, positions = pair.fitted.longest_length, pair.num_positions
    if positions is None or length <= positions:
        return None
    return f"prompt and completion have {length:,} tokens, and the model is exact for {positions:,} positions"


def _labels(view: SourceView) -> list[Fault]:
    """Returns a fault for each part of the pairs that holds ids or categories instead of texts."""
    faults = []
    format = FORMATS[view.format]
    for part in ("prompt", *SIDES):
        texts = [_text_of(getattr(pair.pair, part)).strip() for pair in view.pairs]
        if all(texts) and are_labels(texts):
            examples = ", ".join(map(quoted, texts[:3]))
            sentence = f"{part} is an id or a category, no text: {examples}, and others"
            if part == "prompt" and format.prompt_column:
                columns: tuple[str, ...] = (format.prompt_column,)
            else:  # the row's preference can decide which column has the chosen answer
                columns = (part,) if part in format.completion_columns else format.completion_columns
            keys = " or ".join(f"{view.origin.key}.columns.{column}" for column in columns)
            remedy = f"wrong column? Name the column of the texts in {keys}"
            faults.append(_fault(view, f"{part}_is_a_label", sentence, remedy, view.pairs))
    return faults


def _fault(view: SourceView, name: str, sentence: str, remedy: str, pairs: Sequence[ViewedPair]) -> Fault:
    return Fault(
        name=name,
        origin=view.origin,
        sentence=sentence,
        remedy=remedy,
        num_rows=len(pairs),
        of_rows=len(view.pairs),
        unit="pair",
        rows=tuple(pair.row_number for pair in pairs),
    )


def _left_out(reason: LeftOutReason) -> Fault:
    first, remedy = reason.rows[0], reason.remedy or "mend the rows"
    if reason.reason in ("empty_completion", "identical_completions"):
        remedy = f"if the columns are wrong, correct {reason.origin.key}.columns; if not, mend the rows"
    consequence = "a run stops there" if reason.stops_run else "left out"
    return Fault(
        name=reason.reason,
        origin=reason.origin,
        sentence=(
            f"no pair ({reason.reason}), {consequence}; {first.origin.row_word} {first.row_number:,}: "
            f"{first.detail}"
        ),
        remedy=remedy,
        num_rows=reason.num_rows,
        of_rows=reason.of_rows,
        unit="row",
        rows=tuple(row.row_number for row in reason.rows),
    )


def _is_chat(pair: ViewedPair) -> bool:
    return isinstance(pair.pair.prompt, list) and isinstance(pair.pair.prompt[0], dict)


def _text_of(content: object) -> str:
    """Returns a text, or what the last message says; "" for token ids and for messages without text."""
    if isinstance(content, list):
        content = content[-1].get("content") if content and isinstance(content[-1], dict) else ""
    return content if isinstance(content, str) else ""


def quoted(text: str) -> str:
    """Returns the text in quotation marks, with escapes for line breaks, and without its middle if long."""
    if len(text) > _QUOTED_CHARACTERS:
        half = _QUOTED_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return '"' + text.replace("\n", "\\n") + '"'


RULES: dict[str, Rule] = {
    "prompt_in_completion": Rule(
        find=_repeated_prompt,
        sentence="the completions contain the prompt again, so the model learns to repeat it",
        remedy=_mend_repeated_prompt,
        least_share=_FEW,
    ),
    "no_generation_prompt": Rule(
        find=_scored_header,
        sentence=(
            "the chat template has no generation prompt: the prompt ends before the header of the "
            "assistant's turn, so this header is scored as a part of each answer"
        ),
        remedy=lambda pairs: (
            f"the template must write {quoted(_header(pairs[0]) or '')} after the messages if "
            "add_generation_prompt is true; mend it and name the file in tokenizer.chat_template"
        ),
    ),
    "prompt_boundary_moved": Rule(
        find=_moved_boundary,
        sentence=(
            "the completions begin before the end of the prompt, because its last tokens change when a "
            "completion follows. A model in use gets other tokens than in training"
        ),
        remedy=_mend_moved_boundary,
    ),
    "no_eos": Rule(
        find=_no_end,
        sentence="a completion has no EOS at its end, so the model does not learn where to stop",
        remedy=_mend_no_end,
    ),
    "prompt_cut": Rule(
        find=_cut_prompt,
        sentence=(
            "the beginning of the prompt is cut off (data.truncation: prompt_left), so the model does not "
            "see what was said first"
        ),
        remedy=_mend_cut_prompt,
    ),
    "completion_cut": Rule(
        find=_cut_completion,
        sentence=(
            "the end of a completion is cut off with its EOS (data.truncation: completion_right), so the "
            "model does not learn where to stop"
        ),
        remedy=_mend_cut_completion,
    ),
    "too_many_positions": Rule(
        find=_too_many_positions,
        sentence="a sequence has more positions than the model computes exactly, so a run stops",
        remedy=lambda pairs: f"set data.max_length: {pairs[0].num_positions}",
    ),
}
