"""Common faults of preference data and chat templates: RULES, at the end, each look at one tokenised pair."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpo_pack.data.formats import FORMATS
from dpo_pack.data.tokenization import EndTokens, LengthLimits, TokenizationSettings, TokenizedPair
from dpo_pack.data.tokenizer import Tokenizer, template_opens_turn
from dpo_pack.packing.lengths import AnyIntArray, Group

SIDES = ("chosen", "rejected")
Finding = tuple[str, str]  # what is wrong with a pair, and a remedy
_QUOTED_CHARACTERS = 40
_LEAST_PROMPT_CHARACTERS = 8  # a shorter prompt may be in an answer by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of pairs, and how they became tokens."""

    key: str  # "data.train.0"
    settings: TokenizationSettings
    tokenizer: Tokenizer
    ends: EndTokens
    num_positions: int | None  # that the model computes exactly; None: not known

    @property
    def is_chat(self) -> bool:
        return FORMATS[self.settings.format].content == "messages"

    def text(self, ids: AnyIntArray, begin: int = 0) -> str:
        """Returns the text of the tokens from position `begin` on, with special tokens and all spaces."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        before, text = (str(self.tokenizer.decode(some.tolist(), **options)) for some in (ids[:begin], ids))
        return text[len(before) :]


def sequence(pair: TokenizedPair, side: str) -> AnyIntArray:
    """Returns the prompt and the completion of a side, which is "chosen" or "rejected", before truncation."""
    return np.concatenate([pair.whole.context, pair.whole.completions[SIDES.index(side)]])


def longest_length(pair: Group) -> int:
    """Returns the number of tokens of the prompt and the longer completion together."""
    return len(pair.context) + max(map(len, pair.completions))


def text_of(pair: TokenizedPair, part: str) -> str:
    """Returns the text of "prompt", "chosen" or "rejected": of messages the last one's, of token ids ""."""
    parts = {"prompt": pair.pair.prompt, "chosen": pair.pair.chosen, "rejected": pair.pair.rejected}
    content: Any = parts[part]
    if isinstance(content, list):
        content = content[-1].get("content") if isinstance(content[-1], dict) else ""
    return content if isinstance(content, str) else ""


def quoted(text: str) -> str:
    """Returns the text in quotation marks, with escapes for line breaks, and without its middle if long."""
    if len(text) > _QUOTED_CHARACTERS:
        half = _QUOTED_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return '"' + text.replace("\n", "\\n") + '"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a fault is found and described; `find` returns None if the pair is in order."""

    find: Callable[[TokenizedPair, Origin], Finding | None]
    sentence: str
    least_share: float = 0.0  # of the source's pairs; in fewer pairs it is no fault


def find_in(pair: TokenizedPair, origin: Origin) -> dict[str, Finding]:
    """Returns what the rules find in a pair, by name of the fault."""
    found = ((name, rule.find(pair, origin)) for name, rule in RULES.items())
    return {name: finding for name, finding in found if finding is not None}


def _repeated_prompt(pair: TokenizedPair, origin: Origin) -> Finding | None:
    prompt, format = text_of(pair, "prompt").strip(), FORMATS[origin.settings.format]
    repeating = [side for side in SIDES if prompt in text_of(pair, side)]
    if not repeating or len(prompt) < _LEAST_PROMPT_CHARACTERS:
        return None
    columns, answers = f"{origin.key}.columns", " and ".join(format.completion_columns)
    remedy = f"remove the prompt from {answers}, or name other columns in {columns}"
    if format.infers_prompts:
        remedy = (
            f"if {answers} are prompt and answer together, set {columns}: {{prompt: null}}; if other columns "
            f"have the answers alone, name them in {columns}"
        )
    return f"the prompt is again in {' and '.join(repeating)}: {quoted(prompt)}", remedy


def _scored_header(pair: TokenizedPair, origin: Origin) -> Finding | None:
    answer = text_of(pair, "chosen").strip()[:_QUOTED_CHARACTERS]
    if not origin.is_chat or not answer:
        return None
    completion = origin.text(sequence(pair, "chosen"), len(pair.whole.context))
    header, found, _ = completion.partition(answer)
    if not found or not header.strip() or template_opens_turn(pair.pair, origin.tokenizer):
        return None
    return (
        f"the header of the assistant's turn is not in the prompt, but in the completions: {quoted(header)}",
        f"the template must write {quoted(header)} after the messages if add_generation_prompt is true; mend "
        "it and name the file in tokenizer.chat_template",
    )


def _moved_boundary(pair: TokenizedPair, origin: Origin) -> Finding | None:
    added = pair.alone[len(pair.whole.context) :].tolist()
    if not added or added == [origin.tokenizer.eos_token_id]:  # some tokenizers add EOS to every text
        return None
    end = quoted(origin.text(pair.alone, len(pair.whole.context)))
    if not origin.is_chat:
        return (
            f"the end of the prompt, {end}, and the beginning of a completion become one token",
            "if the prompts end with a space, move it to the beginning of the completions",
        )
    return (
        f"the prompt alone ends with {end}, which does not come before the completions",
        "if the template has an option for this, set it in data.chat_template_kwargs; if not, name a "
        "template that writes the same before an answer as for a generation prompt (tokenizer.chat_template)",
    )


def _no_end(pair: TokenizedPair, origin: Origin) -> Finding | None:
    both = zip(SIDES, pair.whole.completions, strict=True)
    missing = [side for side, completion in both if not origin.ends.found_in(completion)]
    if not missing:
        return None
    ends = (f"{side} ends with {quoted(origin.text(sequence(pair, side), -3))}" for side in missing)
    eos = f"{origin.tokenizer.eos_token} (id {origin.tokenizer.eos_token_id})"
    remedy = f"write EOS, {eos}, at the end of chosen_ids and rejected_ids"
    if origin.is_chat:
        remedy = (
            f"the chat template must end each answer with EOS, {eos}, or another special token of this "
            "tokenizer: mend it and name the file in tokenizer.chat_template"
        )
    return f"EOS is missing: {'; '.join(ends)}", remedy


def _cut_prompt(pair: TokenizedPair, origin: Origin) -> Finding | None:
    num_tokens, num_kept = len(pair.whole.context), len(pair.fitted.context)
    if num_kept == num_tokens:
        return None
    note = f"{num_tokens - num_kept:,} of the prompt's {num_tokens:,} tokens are cut, the oldest ones"
    return note, _keep_whole(pair, origin.settings.limits)


def _cut_completion(pair: TokenizedPair, origin: Origin) -> Finding | None:
    lengths = (map(len, completions) for completions in (pair.whole.completions, pair.fitted.completions))
    changes = zip(SIDES, *lengths, strict=True)
    cut = [f"{before - after:,} tokens of {side}" for side, before, after in changes if after < before]
    note = f"{' and '.join(cut)} are cut, and EOS with them"
    return (note, _keep_whole(pair, origin.settings.limits)) if cut else None


def _keep_whole(pair: TokenizedPair, limits: LengthLimits) -> str:
    lengths = {
        "data.max_length": (longest_length(pair.whole), limits.max_length),
        "data.max_prompt_length": (len(pair.whole.context), limits.max_prompt_length),
    }
    keys = [f"{key}: {length}" for key, (length, limit) in lengths.items() if limit and length > limit]
    return f"{' with '.join(keys)} keeps these pairs whole; data.truncation: drop leaves them out"


def _too_many_positions(pair: TokenizedPair, origin: Origin) -> Finding | None:
    length, positions = longest_length(pair.fitted), origin.num_positions
    if positions is None or length <= positions:
        return None
    note = f"prompt and completion have {length:,} tokens, and the model is exact for {positions:,} positions"
    return note, f"set data.max_length: {positions}"


RULES = {
    "prompt_in_completion": Rule(
        find=_repeated_prompt,
        sentence="the completions contain the prompt again, so the model learns to repeat it",
        least_share=0.1,
    ),
    "no_generation_prompt": Rule(
        find=_scored_header,
        sentence="the chat template has no generation prompt: the prompt ends before the header of the "
        "assistant's turn, so this header is scored as a part of each answer",
    ),
    "prompt_boundary_moved": Rule(
        find=_moved_boundary,
        sentence="the completions begin before the end of the prompt, because its last tokens change when a "
        "completion follows. A model in use gets other tokens than in training",
    ),
    "no_eos": Rule(
        find=_no_end,
        sentence="a completion has no EOS at its end, so the model does not learn where to stop",
    ),
    "prompt_cut": Rule(
        find=_cut_prompt,
        sentence="the beginning of the prompt is cut off (data.truncation: prompt_left), so the model does "
        "not see what was said first",
    ),
    "completion_cut": Rule(
        find=_cut_completion,
        sentence="the end of a completion is cut off with its EOS (data.truncation: completion_right), so "
        "the model does not learn where to stop",
    ),
    "too_many_positions": Rule(
        find=_too_many_positions,
        sentence="a sequence has more positions than the model computes exactly, so a run stops",
    ),
}
