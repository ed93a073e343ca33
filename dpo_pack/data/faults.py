"""Common faults of preference data and chat templates: SENTENCES, at the end, name them. `find_in` finds
those of a tokenised pair, `explain` says more about one for `dpopack show`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpo_pack.data.formats import FORMATS, are_labels
from dpo_pack.data.tokenization import EndTokens, TokenizationSettings, TokenizedPair
from dpo_pack.data.tokenizer import Tokenizer, template_opens_turn
from dpo_pack.data.written import MESSAGE_KEY, THINKING, TOOL_KEY
from dpo_pack.packing.lengths import AnyIntArray, Group

SIDES = ("chosen", "rejected")
Finding = tuple[str, Any]  # the name of a fault, and what `explain` needs beside the pair
_QUOTED_CHARACTERS = 40
_LEAST_PROMPT_CHARACTERS = 8  # a shorter prompt may be in an answer by chance
_EDGE_TOKENS = 4  # BOS and EOS at an edge are among so many tokens: a template may write line breaks there
# Marks of turns in popular chat templates, and what texts with one of them have, which is found faster.
_MARKS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "<|user|>", "<|assistant|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
]
_OF_MARKS = ("<|", "_of_turn>", "INST]")
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
    is_chat: bool  # the rows are conversations
    begins_with_bos: bool  # plain texts do, because the tokenizer adds it
    controls: re.Pattern[str]  # finds special tokens in a text
    controls_begin: frozenset[str]  # with these characters; empty: text never becomes such tokens
    foreign_marks: tuple[str, ...]  # of `_MARKS`, those that are plain text for this tokenizer and template
    num_positions: int | None  # that the model computes exactly; None: not known
    opens_turn: dict[str, bool] = field(default_factory=dict)  # `template_opens_turn`, by role of the end

    @staticmethod
    def of(
        key: str, settings: TokenizationSettings, tokenizer: Tokenizer, *, num_positions: int | None = None
    ) -> "Origin":
        tokens = tokenizer.added_tokens_decoder.values() if not tokenizer.split_special_tokens else ()
        special = [str(token.content) for token in tokens if token.special]
        controls = [token for token in special if token.strip() and not THINKING.fullmatch(token)]
        own = (*map(str, tokenizer.added_tokens_decoder.values()), str(tokenizer.chat_template))
        bos, first = tokenizer.bos_token_id, tokenizer(["a"], verbose=False)["input_ids"][0][:1]
        return Origin(
            key=key,
            settings=settings,
            tokenizer=tokenizer,
            ends=EndTokens.of(tokenizer, settings.format),
            bos=bos,
            eos=tokenizer.eos_token_id,
            is_chat=FORMATS[settings.format].content == "messages",
            begins_with_bos=first == [bos],
            controls=re.compile("|".join(map(re.escape, controls))),
            controls_begin=frozenset(token[0] for token in controls),
            foreign_marks=tuple(mark for mark in _MARKS if not any(mark in text for text in own)),
            num_positions=num_positions,
        )

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


def last_text(content: Any) -> str:
    """Returns the text of a prompt or completion: of messages the last one's, of token ids ""."""
    if isinstance(content, list):
        content = content[-1].get("content") if isinstance(content[-1], dict) else ""
    return content if isinstance(content, str) else ""


_CHANGES = {
    "developer_as_system": "the role developer is written as system, which the chat template knows",
    "parts_joined": "parts of text are joined by a line break, because the chat template takes text",
    "texts_as_parts": "texts are given as parts, because the chat template takes parts",
    "arguments_as_objects": "arguments of tool calls are given as objects, which the chat template takes",
    "arguments_as_text": "arguments of tool calls are given as JSON text, which the chat template takes",
    "texts_changed": "the chat template writes a text in another form, as with other white space or signs",
}


_LABEL = "_is_a_label"


def faults_of(pairs: Sequence[TokenizedPair], origin: Origin) -> dict[str, list[tuple[TokenizedPair, Any]]]:
    """Returns by the name of each fault the pairs that have it, and what `explain` needs of each."""
    found: dict[str, list[tuple[TokenizedPair, Any]]] = {name: [] for name in SENTENCES}
    for pair in pairs:
        for name, evidence in find_in(pair, origin):
            found[name].append((pair, evidence))
    for part in ("prompt", *SIDES):
        texts = [last_text(getattr(pair.row.pair, part)).strip() for pair in pairs]
        if all(texts) and are_labels(texts):
            found[f"{part}{_LABEL}"] = [(pair, texts[:3]) for pair in pairs]
    return {name: having for name, having in found.items() if having}


def find_in(pair: TokenizedPair, origin: Origin) -> Iterator[Finding]:
    """Yields the faults of a pair."""
    row = pair.row.pair
    prompt, answers = last_text(row.prompt).strip(), (last_text(row.chosen), last_text(row.rejected))
    begin = prompt[:_QUOTED_CHARACTERS]  # is found faster
    repeating = [side for side, text in zip(SIDES, answers, strict=True) if begin in text and prompt in text]
    # An answer may well quote a tool's result.
    may_quote = origin.is_chat and row.prompt[-1].get("role") != "user"  # type: ignore[union-attr]
    if repeating and not may_quote and len(prompt) >= _LEAST_PROMPT_CHARACTERS:
        yield "prompt_in_completion", repeating
    parts = ["\n".join(texts) for texts in pair.row.contents]
    if any([begin in text for begin in origin.controls_begin for text in parts]):  # faster than to search
        hits = zip(("prompt", *SIDES), map(origin.controls.search, parts), strict=True)
        if found := [(part, hit[0]) for part, hit in hits if hit is not None]:
            yield "control_tokens_in_text", found[0]
    if any([sign in prompt for sign in _OF_MARKS]):
        yield from [("foreign_marks", mark) for mark in origin.foreign_marks if mark in prompt][:1]
    if "tools_not_written" in pair.row.counts:
        yield "tools_not_written", None
    if origin.is_chat and (answer := answers[0].strip()[:_QUOTED_CHARACTERS]):
        before, whole = pair.row.texts[:2]
        at = whole.find(answer, len(before))
        header = whole[len(before) : at]
        if at >= 0 and header.strip() and whole.startswith(before):
            role = str(pair.row.written.prompt[-1]["role"])  # type: ignore[index]
            if role not in origin.opens_turn:
                origin.opens_turn[role] = template_opens_turn(pair.row.written, origin.tokenizer)
            if not origin.opens_turn[role]:
                yield "no_generation_prompt", header
    yield from _find_in_tokens(pair, origin)


def _find_in_tokens(pair: TokenizedPair, origin: Origin) -> Iterator[Finding]:
    whole, fitted = pair.whole, pair.fitted
    begin, moved = whole.context[:_EDGE_TOKENS].tolist(), pair.alone[len(whole.context) :].tolist()
    if moved and moved != [origin.eos]:  # some tokenizers add EOS to every text
        yield "prompt_boundary_moved", None
    both = zip(SIDES, whole.completions, strict=True)
    if endless := [side for side, ids in both if not origin.ends.found_in(ids)]:
        yield "no_eos", endless
    if begin[0] == origin.bos and begin.count(origin.bos) > 1:
        yield "bos_twice", None
    if origin.begins_with_bos and begin[0] != origin.bos:
        yield "bos_missing", None
    has_inner_ends = origin.eos is None or (origin.is_chat and pair.row.has_other_turns)  # one for each turn
    weights = whole.weights or (None, None)
    for side, ids, of_side in () if has_inner_ends else zip(SIDES, whole.completions, weights, strict=True):
        at = np.flatnonzero(ids == origin.eos)
        at = at[:-1] if len(at) and at[-1] >= len(ids) - _EDGE_TOKENS else at
        # After the EOS of an earlier turn come tokens that are not scored.
        at = at if of_side is None else at[of_side[at + 1] > 0]
        if len(at):
            yield "eos_inside", (side, int(at[0]))
            break
    if origin.num_positions is not None and longest_length(fitted) > origin.num_positions:
        yield "too_many_positions", None
    if len(fitted.context) < len(whole.context):
        yield "prompt_cut", None
    if any(len(a) < len(b) for a, b in zip(fitted.completions, whole.completions, strict=True)):
        yield "completion_cut", None


def sentence_of(name: str) -> str:
    return SENTENCES.get(name) or f"{name.removesuffix(_LABEL)} is an id or a category, no text"


def source_notes(summary: Mapping[str, Any], *, names_left_out: bool = True) -> Iterator[str]:
    """Yields what a user should know of a source: `summary` is that of its store."""
    kept = summary.get("pairs_kept", summary.get("prompts_kept", 0))
    what = "pairs" if "pairs_kept" in summary else "prompts"
    if names_left_out and (dropped := summary["rows_read"] - kept) > 0:
        reasons = ", ".join(f"{entry['rows']:,} {reason}" for reason, entry in summary["dropped"].items())
        warning = "Warning: " if dropped >= FEW * summary["rows_read"] else ""
        yield f"{warning}{dropped:,} of {summary['rows_read']:,} rows are left out: {reasons}"
    share = summary.get("characters_in_tokens")
    if share is not None:
        counts = {"of earlier reasoning": "characters_of_earlier_reasoning", "cut off": "characters_cut"}
        missing = ", ".join(f"{summary[key]:,} {name}" for name, key in counts.items() if summary.get(key))
        missing = missing and f"; not: {missing}"
        if missing or share < 1:
            yield f"{int(share * 10_000) / 100:g} % of all characters are in the tokens{missing}"
    for name, sentence in _CHANGES.items():
        if summary.get(name):
            yield f"in {summary[name]:,} of {kept:,} {what} {sentence}"
    for part, begin in (("tools", TOOL_KEY), ("messages", MESSAGE_KEY)):
        if keys := [key.removeprefix(begin) for key in summary if key.startswith(begin)]:
            yield f"of the {part} the chat template leaves out the keys {', '.join(sorted(keys))}"
    if texts := summary.get("prompts_without_template"):
        is_rendered = summary.get("faults", {}).get("foreign_marks", {}).get("pairs", 0) >= FEW * kept
        how = "for a chat model, columns: {instruction: prompt} makes messages of them"
        how = "they have those of another template" if is_rendered else how
        yield f"{texts:,} of {kept:,} {what} are texts without the marks of the chat template; {how}"
    if unknown := summary.get("unknown_tokens"):
        yield f"Warning: {unknown:,} tokens stand for texts that this tokenizer does not know, and are lost"
    if files := summary.get("files_not_read"):
        yield f"files of the directory that are not read ({len(files):,}): {', '.join(files[:9])}"
    if "images" in summary:
        yield from _image_notes(summary)
    for name, found in summary.get("faults", {}).items():
        if found["pairs"] >= FEW * kept:
            yield (
                f"Warning: {name} in {found['pairs']:,} of {kept:,} {what}: {sentence_of(name)}; "
                f"dpopack show RECIPE --pair {found['first_row']} shows one"
            )


def _image_notes(summary: Mapping[str, Any]) -> Iterator[str]:
    if scaled := summary["images_scaled"]:
        yield f"{scaled:,} of {summary['images']:,} images are scaled down to data.max_pixels"
    dropped = [summary["dropped"].get(reason, {}) for reason in ("too_long", "prompt_too_long")]
    if num_rows := sum(entry.get("rows", 0) for entry in dropped):
        remedy = "an image is often hundreds of tokens: raise data.max_length, or set data.max_pixels"
        yield f"{num_rows:,} rows are too long; {remedy}"


def quoted(text: str) -> str:
    """Returns the text in quotation marks, with escapes for line breaks, and without its middle if long."""
    if len(text) > _QUOTED_CHARACTERS:
        half = _QUOTED_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return '"' + text.replace("\n", "\\n") + '"'


def explain(name: str, evidence: Any, pair: TokenizedPair, origin: Origin) -> tuple[str, str]:
    """Returns what is wrong with a pair that has the fault `name`, and a remedy."""
    format, columns = FORMATS[origin.settings.format], f"{origin.key}.columns"
    if name.endswith(_LABEL):
        part, wanted = name.removesuffix(_LABEL), format.completion_columns
        # Of answers under other names, a row's preference may decide which one is chosen.
        wanted = (
            (format.prompt_column or part,) if part == "prompt" else (part,) if part in wanted else wanted
        )
        keys = " or ".join(f"{columns}.{column}" for column in wanted)
        examples = ", ".join(map(quoted, evidence))
        return f"{examples}, and others", f"wrong column? Name the column of the texts in {keys}"
    if name == "prompt_in_completion":
        theirs = " and ".join(format.completion_columns)
        remedy = f"remove the prompt from {theirs}, or name other columns in {columns}"
        if format.infers_prompts:
            remedy = (
                f"if {theirs} are prompt and answer together, set {columns}: {{prompt: null}}; if other "
                f"columns have the answers alone, name them in {columns}"
            )
        prompt = last_text(pair.row.pair.prompt).strip()
        return f"the prompt is again in {' and '.join(evidence)}: {quoted(prompt)}", remedy
    if name == "control_tokens_in_text":
        note = f"a text of {evidence[0]} has the special token {quoted(evidence[1])}"
        return note, "remove it from the texts: the chat template writes the special tokens"
    if name == "foreign_marks":
        note = f"the prompt has {quoted(evidence)}, which this tokenizer reads as plain text"
        return note, (
            "give messages in place of texts with marks, which get the model's own template; or take the "
            "model that the texts were written for"
        )
    if name == "tools_not_written":
        note = "the chat template leaves out names or descriptions of the row's tools"
        return (
            note,
            "name a template that writes tools in tokenizer.chat_template, or remove the column tools",
        )
    if name == "no_generation_prompt":
        note = "the header of the assistant's turn is not in the prompt, but in the completions: "
        return note + quoted(evidence), (
            f"the template must write {quoted(evidence)} after the messages if add_generation_prompt "
            "is true; mend it and name the file in tokenizer.chat_template"
        )
    if name in ("too_many_positions", "prompt_cut", "completion_cut"):
        return _explain_length(name, pair, origin)
    return _explain_tokens(name, evidence, pair, origin)


def _explain_tokens(name: str, evidence: Any, pair: TokenizedPair, origin: Origin) -> tuple[str, str]:
    context, is_chat = pair.whole.context, origin.is_chat
    begin = quoted(origin.text(context[:_EDGE_TOKENS]))
    if name == "prompt_boundary_moved":
        end = quoted(origin.text(pair.alone, len(context)))
        if not is_chat:
            note = f"the end of the prompt, {end}, and the beginning of a completion become one token"
            return note, "if the prompts end with a space, move it to the beginning of the completions"
        return f"the prompt alone ends with {end}, which does not come before the completions", (
            "if the template has an option for this, set it in data.chat_template_kwargs; if not, name a "
            "template that writes the same before an answer as for a generation prompt "
            "(tokenizer.chat_template)"
        )
    if name == "no_eos":
        ends = (f"{side} ends with {quoted(origin.text(sequence(pair, side), -3))}" for side in evidence)
        eos = f"{origin.tokenizer.eos_token} (id {origin.eos})"
        remedy = f"write EOS, {eos}, at the end of chosen_ids and rejected_ids"
        if is_chat:
            remedy = (
                f"the chat template must end each answer with EOS, {eos}, or another special token of this "
                "tokenizer: mend it and name the file in tokenizer.chat_template"
            )
        return f"EOS is missing: {'; '.join(ends)}", remedy
    if name == "bos_twice":
        token = quoted(origin.text(context[:1]))
        remedy = f"write {token} once, either in the rows or in the chat template (tokenizer.chat_template)"
        if origin.begins_with_bos and FORMATS[origin.settings.format].content == "text":
            remedy = f"remove {token} from the beginning of the rows: this tokenizer adds it to every text"
        return f"BOS is there twice: {begin}", remedy
    if name == "bos_missing":
        remedy = "write its id at the beginning of prompt_ids"
        if is_chat:
            remedy = "write {{ bos_token }} at the beginning of the template (tokenizer.chat_template)"
        note = f"BOS is missing: the prompt begins with {begin}"
        return note, f"if the model was trained with BOS, {remedy}"
    side, at = evidence  # eos_inside
    text = quoted(origin.text(sequence(pair, side), len(context) + at))
    note = f"EOS is in {side} before its end, and then follows: {text}"
    return note, "leave EOS out of the rows: it is written once, at each answer's end"


def _explain_length(name: str, pair: TokenizedPair, origin: Origin) -> tuple[str, str]:
    whole, fitted, limits = pair.whole, pair.fitted, origin.settings
    if name == "too_many_positions":
        positions, length = origin.num_positions, longest_length(fitted)
        note = f"prompt and completion have {length:,} tokens, and the model is exact for {positions:,}"
        return f"{note} positions", f"set data.max_length: {positions}"
    lengths = {
        "data.max_length": (longest_length(whole), limits.max_length),
        "data.max_prompt_length": (len(whole.context), limits.max_prompt_length),
    }
    keys = [f"{key}: {length}" for key, (length, limit) in lengths.items() if limit and length > limit]
    remedy = f"{' with '.join(keys)} keeps these pairs whole; data.truncation: drop leaves them out"
    if name == "prompt_cut":
        num_tokens = len(whole.context)
        note = f"{num_tokens - len(fitted.context):,} of the prompt's {num_tokens:,} tokens are cut"
        return f"{note}, the oldest ones", remedy
    cuts = [len(b) - len(a) for b, a in zip(whole.completions, fitted.completions, strict=True)]
    parts = [f"{cut:,} tokens of {side}" for side, cut in zip(SIDES, cuts, strict=True) if cut]
    return f"{' and '.join(parts)} are cut, and EOS with them", remedy


# What each fault means for the model, by its name.
SENTENCES = {
    "prompt_in_completion": "the completions contain the prompt again, so the model learns to repeat it",
    "no_generation_prompt": "the chat template has no generation prompt: the prompt ends before the header "
    "of the assistant's turn, so this header is scored as a part of each answer",
    "prompt_boundary_moved": "the completions begin before the end of the prompt, because its last tokens "
    "change when a completion follows. A model in use gets other tokens than in training",
    "no_eos": "a completion has no EOS at its end, so the model does not learn where to stop",
    "bos_twice": "the sequence begins with BOS twice, which the model has never seen",
    "bos_missing": "the sequence begins without BOS, although this tokenizer begins texts with it",
    "eos_inside": "EOS is twice in an answer or before its end, so what follows it is scored in vain",
    "control_tokens_in_text": "what somebody wrote has special tokens, which the model reads as the marks of "
    "turns",
    "foreign_marks": "prompts have the marks of another model's chat template, which are plain text for this "
    "one",
    "tools_not_written": "the chat template does not write the tools, so the model does not know them",
    "prompt_cut": "the beginning of the prompt is cut off (data.truncation: prompt_left), so the model does "
    "not see what was said first",
    "completion_cut": "the end of a completion is cut off with its EOS (data.truncation: completion_right), "
    "so the model does not learn where to stop",
    "too_many_positions": "a sequence has more positions than the model computes exactly, so a run stops",
}
