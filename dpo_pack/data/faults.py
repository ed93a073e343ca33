"""Common faults of preference data and chat templates: RULES, at the end, each look at one tokenised pair."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpo_pack.data.formats import FORMATS, are_labels
from dpo_pack.data.tokenization import EndTokens, LengthLimits, TokenizationSettings, TokenizedPair
from dpo_pack.data.tokenizer import Tokenizer, has_other_turns, template_opens_turn
from dpo_pack.data.written import THINKING, texts_of
from dpo_pack.packing.lengths import AnyIntArray, Group

SIDES = ("chosen", "rejected")
Finding = tuple[str, str]  # what is wrong with a pair, and a remedy
_QUOTED_CHARACTERS = 40
_LEAST_PROMPT_CHARACTERS = 8  # a shorter prompt may be in an answer by chance
_EDGE_TOKENS = 4  # BOS and EOS at an edge are among so many tokens: a template may write line breaks there
FEW = 0.1  # of a source's pairs or rows: what fewer have may be right


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of pairs, and how they became tokens."""

    key: str  # "data.train.0"
    settings: TokenizationSettings
    tokenizer: Tokenizer
    ends: EndTokens
    bos: int | None  # ids: the properties of a tokenizer are slow
    eos: int | None
    begins_with_bos: bool  # plain texts do, because the tokenizer adds it
    controls: re.Pattern[str] | None  # finds special tokens in a text; None: text never becomes such tokens
    controls_begin: frozenset[str]  # with these characters
    num_positions: int | None = None  # that the model computes exactly; None: not known
    describes: bool = True  # False: findings are counted only, so no text is decoded
    opens_turn: dict[str, bool] = field(default_factory=dict)  # `template_opens_turn`, by role of the end

    @staticmethod
    def of(key: str, settings: TokenizationSettings, tokenizer: Tokenizer, **more: Any) -> "Origin":
        tokens = tokenizer.added_tokens_decoder.values() if not tokenizer.split_special_tokens else ()
        special = [str(token.content) for token in tokens if token.special]
        controls = [token for token in special if token.strip() and not THINKING.fullmatch(token)]
        bos, first = tokenizer.bos_token_id, tokenizer(["a"], verbose=False)["input_ids"][0][:1]
        return Origin(
            key=key,
            settings=settings,
            tokenizer=tokenizer,
            ends=EndTokens.of(tokenizer, settings.format),
            bos=bos,
            eos=tokenizer.eos_token_id,
            begins_with_bos=first == [bos],
            controls=re.compile("|".join(map(re.escape, controls))) if controls else None,
            controls_begin=frozenset(token[0] for token in controls),
            **more,
        )

    @property
    def is_chat(self) -> bool:
        return FORMATS[self.settings.format].content == "messages"

    def text(self, ids: AnyIntArray, begin: int = 0) -> str:
        """Returns the text of the tokens from position `begin` on, with special tokens and all spaces."""
        if not self.describes:
            return ""
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


def count_faults(pairs: Sequence[TokenizedPair], origin: Origin) -> Iterator[tuple[str, int, int]]:
    """Yields the name of each fault, how many of the pairs have it, and the number of the first one's row."""
    found: dict[str, list[int]] = {}
    for pair in pairs:
        for name, rule in RULES.items():
            if rule.find(pair, origin) is not None:
                found.setdefault(name, []).append(pair.row_number)
    for part in ("prompt", *SIDES):
        if is_label(pairs, part):
            found[f"{part}{_LABEL}"] = [pair.row_number for pair in pairs]
    for name, rows in found.items():
        yield name, len(rows), rows[0]


def is_label(pairs: Sequence[TokenizedPair], part: str) -> bool:
    """Returns True if this part of the pairs is an id or a category."""
    texts = [text_of(pair, part).strip() for pair in pairs]
    return all(texts) and are_labels(texts)


_LABEL = "_is_a_label"
_CHANGES = {
    "developer_as_system": "the role developer is written as system, which the chat template knows",
    "parts_joined": "parts of text are joined by a line break, because the chat template takes text",
    "texts_as_parts": "texts are given as parts, because the chat template takes parts",
    "arguments_as_objects": "arguments of tool calls are given as objects, which the chat template takes",
    "arguments_as_text": "arguments of tool calls are given as JSON text, which the chat template takes",
}


def source_notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a user should know of a source: `summary` is that of its store."""
    kept = summary.get("pairs_kept", summary.get("prompts_kept", 0))
    what = "pairs" if "pairs_kept" in summary else "prompts"
    share = summary.get("characters_in_tokens")
    if share is not None:
        counts = {"of earlier reasoning": "characters_of_earlier_reasoning", "cut off": "characters_cut"}
        missing = ", ".join(f"{summary[key]:,} {name}" for name, key in counts.items() if summary.get(key))
        missing = missing and f"; not: {missing}"
        yield f"{int(share * 10_000) / 100:g} % of all characters are in the tokens{missing}"
    for name, sentence in _CHANGES.items():
        if summary.get(name):
            yield f"in {summary[name]:,} of {kept:,} {what} {sentence}"
    for name, found in summary.get("faults", {}).items():
        if found["pairs"] >= FEW * kept:
            part = name.removesuffix(_LABEL)
            sentence = RULES[name].sentence if name in RULES else f"{part} is an id or a category, no text"
            yield (
                f"Warning: {name} in {found['pairs']:,} of {kept:,} {what}: {sentence}; "
                f"dpopack show RECIPE --pair {found['first_row']} shows one"
            )


def _repeated_prompt(pair: TokenizedPair, origin: Origin) -> Finding | None:
    last: Any = pair.pair.prompt[-1]
    if origin.is_chat and last.get("role") != "user":
        return None  # an answer may well quote a tool's result
    prompt, format = text_of(pair, "prompt").strip(), FORMATS[origin.settings.format]
    begin = prompt[:_QUOTED_CHARACTERS]  # is found faster
    repeating = [s for s in SIDES if begin in (text := text_of(pair, s)) and prompt in text]
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
    before, whole = pair.row.texts[:2]
    at = whole.find(answer, len(before))
    header = whole[len(before) : at]
    if at < 0 or not header.strip() or not whole.startswith(before):
        return None
    written = pair.row.written
    role = str(written.prompt[-1]["role"])  # type: ignore[index]
    if role not in origin.opens_turn:
        origin.opens_turn[role] = template_opens_turn(written, origin.tokenizer)
    if origin.opens_turn[role]:
        return None
    return (
        f"the header of the assistant's turn is not in the prompt, but in the completions: {quoted(header)}",
        f"the template must write {quoted(header)} after the messages if add_generation_prompt is true; mend "
        "it and name the file in tokenizer.chat_template",
    )


def _moved_boundary(pair: TokenizedPair, origin: Origin) -> Finding | None:
    added = pair.alone[len(pair.whole.context) :].tolist()
    if not added or added == [origin.eos]:  # some tokenizers add EOS to every text
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


def _bos_twice(pair: TokenizedPair, origin: Origin) -> Finding | None:
    begin = pair.whole.context[:_EDGE_TOKENS]
    if origin.bos is None or begin[0] != origin.bos or begin.tolist().count(origin.bos) < 2:
        return None
    token = quoted(origin.text(pair.whole.context[:1]))
    remedy = f"remove {token} from the beginning of the rows: this tokenizer adds it to every text"
    if not (origin.begins_with_bos and FORMATS[origin.settings.format].content == "text"):
        remedy = f"write {token} once, either in the rows or in the chat template (tokenizer.chat_template)"
    return f"BOS is there twice: {quoted(origin.text(begin))}", remedy


def _bos_missing(pair: TokenizedPair, origin: Origin) -> Finding | None:
    if not origin.begins_with_bos or pair.whole.context[0] == origin.bos:
        return None
    begin = f"BOS is missing: the prompt begins with {quoted(origin.text(pair.whole.context[:_EDGE_TOKENS]))}"
    remedy = "write its id at the beginning of prompt_ids"
    if origin.is_chat:
        remedy = "write {{ bos_token }} at the beginning of the template (tokenizer.chat_template)"
    return begin, f"if the model was trained with BOS, {remedy}"


def _odd_eos(pair: TokenizedPair, origin: Origin) -> Finding | None:
    if origin.eos is None or (origin.is_chat and has_other_turns(pair.pair)):  # each turn ends with EOS
        return None
    weights = pair.whole.weights or (None, None)
    for side, ids, of_side in zip(SIDES, pair.whole.completions, weights, strict=True):
        is_eos = ids == origin.eos
        if np.count_nonzero(is_eos) == np.count_nonzero(is_eos[-_EDGE_TOKENS:]) < 2:
            continue
        at = np.flatnonzero(is_eos)
        # After the EOS of an earlier turn come tokens that are not scored.
        at = at[:-1] if at[-1] >= len(ids) - _EDGE_TOKENS else at
        at = at if of_side is None else at[of_side[at + 1] > 0]
        if len(at):
            text = quoted(origin.text(sequence(pair, side), len(pair.whole.context) + int(at[0])))
            return (
                f"EOS is in {side} before its end, and then follows: {text}",
                "leave EOS out of the rows: it is written once, at the end of each answer",
            )
    return None


def _control_tokens(pair: TokenizedPair, origin: Origin) -> Finding | None:
    if not origin.is_chat or origin.controls is None:
        return None
    messages: Any = (pair.pair.prompt, pair.pair.chosen, pair.pair.rejected)
    for part, of_part in zip(("prompt", *SIDES), messages, strict=True):
        for text in texts_of(of_part):
            may_be = any(character in text for character in origin.controls_begin)
            if may_be and (found := origin.controls.search(text)):
                return (
                    f"a text of {part} has the special token {quoted(found[0])}",
                    "remove it from the texts: the chat template writes the special tokens",
                )
    return None


def _tools_not_written(pair: TokenizedPair, origin: Origin) -> Finding | None:
    if "tools_not_written" not in pair.row.counts:
        return None
    return (
        "the chat template leaves out names or descriptions of the row's tools",
        "name a template that writes tools in tokenizer.chat_template, or remove the column tools",
    )


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
    "bos_twice": Rule(
        find=_bos_twice,
        sentence="the sequence begins with BOS twice, which the model has never seen",
    ),
    "bos_missing": Rule(
        find=_bos_missing,
        sentence="the sequence begins without BOS, although this tokenizer begins texts with it",
    ),
    "eos_inside": Rule(
        find=_odd_eos,
        sentence="EOS is twice in an answer or before its end, so what follows it is scored in vain",
    ),
    "control_tokens_in_text": Rule(
        find=_control_tokens,
        sentence="what somebody wrote has special tokens, which the model reads as the marks of turns",
    ),
    "tools_not_written": Rule(
        find=_tools_not_written,
        sentence="the chat template does not write the tools, so the model does not know them",
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
