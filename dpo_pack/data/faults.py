"""Common faults of preference data and chat templates: FAULTS, at the end; and what a user should know of a
source. `find_in` finds the faults of a tokenised pair."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpo_pack.data.columns import are_labels
from dpo_pack.data.formats import FORMATS, SIDES
from dpo_pack.data.tokenization import CHOSEN_KEY, TokenizationSettings, TokenizedPair
from dpo_pack.data.tokenizer import template_opens_turn
from dpo_pack.data.written import MESSAGE_KEY, THINKING
from dpo_pack.packing.lengths import AnyIntArray, Group

FEW = 0.1  # of a source's pairs or rows: what fewer have may be right
_MANY = 20  # of so many pairs, a column that decides should not prefer one side always
_QUOTED_CHARACTERS = 40
_LEAST_PROMPT_CHARACTERS = 8  # a shorter prompt may be in an answer by chance
_EDGE_TOKENS = 4  # BOS and EOS at an edge are among so many tokens: a template may write line breaks there
_LABEL = "_is_a_label"
_MARKS = [  # of turns, in popular chat templates
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "<|user|>", "<|assistant|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("<image>", "<video>", "<audio>"),  # where other tools put one
]


class Origin:
    """The source of pairs, and how they became tokens."""

    def __init__(self, key: str, settings: TokenizationSettings) -> None:
        self.key, self.settings = key, settings  # the key is that of the recipe
        self.tokenizer = tokenizer = settings.tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id  # slow properties
        self.is_chat = settings.content == "messages"
        first = tokenizer(["a"], verbose=False)["input_ids"][0][:1]
        self.begins_with_bos = first == [self.bos]  # plain texts do, because the tokenizer adds it
        added = tokenizer.added_tokens_decoder.values()
        special = [str(token) for token in added if token.special and not tokenizer.split_special_tokens]
        controls = [token for token in special if token.strip() and not THINKING.fullmatch(token)]
        self.controls = re.compile("|".join(map(re.escape, controls)))
        self.controls_begin = {token[0] for token in controls}
        known = (*map(str, added), str(tokenizer.chat_template))
        self.foreign_marks = [mark for mark in _MARKS if not any(mark in text for text in known)]
        self.opens_turn: dict[str, bool] = {}  # `template_opens_turn`, by role of the prompt's last message

    def text(self, ids: AnyIntArray, begin: int = 0) -> str:
        """Returns the text of the tokens from position `begin` on, with special tokens and all spaces."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        before, text = (str(self.tokenizer.decode(some.tolist(), **options)) for some in (ids[:begin], ids))
        return text[len(before) :]


def longest_length(pair: Group) -> int:
    """Returns the number of tokens of the prompt and the longer completion together."""
    return len(pair.context) + max(map(len, pair.completions))


def _last_text(content: Any) -> str:
    """Returns the text of a prompt or completion: of messages the last one's, of token ids ""."""
    if isinstance(content, list):
        content = content[-1].get("content") if isinstance(content[-1], dict) else ""
    return content.strip() if isinstance(content, str) else ""


def faults_of(pairs: Sequence[TokenizedPair], origin: Origin) -> dict[str, list[tuple[TokenizedPair, str]]]:
    """Returns by the name of each fault the pairs that have it, and what shows it in each."""
    found: dict[str, list[tuple[TokenizedPair, str]]] = {name: [] for name in FAULTS}
    for pair in pairs:
        for name, evidence in find_in(pair, origin):
            found[name].append((pair, evidence))
    for part in ("prompt", *SIDES):
        texts = [_last_text(getattr(pair.row.pair, part)) for pair in pairs]
        if all(texts) and are_labels(texts):
            found[f"{part}{_LABEL}"] = [(pair, ", ".join(map(_quoted, texts[:3]))) for pair in pairs]
    return {name: having for name, having in found.items() if having}


def find_in(pair: TokenizedPair, origin: Origin) -> Iterator[tuple[str, str]]:
    """Yields the name of each fault of a pair, and what shows it: of texts first, then of tokens."""
    read, row, whole, fitted = pair.row, pair.row.pair, pair.whole, pair.fitted
    prompt, *answers = map(_last_text, (row.prompt, row.chosen, row.rejected))
    repeating = [side for side, text in zip(SIDES, answers, strict=True) if prompt in text]
    # An answer may well quote a tool's result.
    may_quote = origin.is_chat and row.prompt[-1].get("role") != "user"  # type: ignore[union-attr]
    if repeating and not may_quote and len(prompt) >= _LEAST_PROMPT_CHARACTERS:
        yield "prompt_in_completion", f"{' and '.join(repeating)}: {_quoted(prompt)}"
    for part, text in zip(("prompt", *SIDES), map("\n".join, read.contents), strict=False):
        # First characters are found much faster.
        if any([begin in text for begin in origin.controls_begin]) and (hit := origin.controls.search(text)):
            yield "control_tokens_in_text", f"{part}: {_quoted(hit[0])}"
            break
    asked = "\n".join(read.contents[0]) if read.contents else prompt
    if foreign := [mark for mark in origin.foreign_marks if mark in asked]:
        yield "foreign_marks", _quoted(foreign[0])
    if "tools_not_written" in read.counts:
        yield "tools_not_written", ""
    answer = answers[0][:_QUOTED_CHARACTERS]
    if origin.is_chat and answer and (header := _scored_header(pair, answer, origin)):
        yield "no_generation_prompt", _quoted(header)
    begin, moved = whole.context[:_EDGE_TOKENS].tolist(), pair.alone[len(whole.context) :].tolist()
    if moved and moved != [origin.eos]:  # some tokenizers add EOS to every text
        yield "prompt_boundary_moved", ""
    sides = list(zip(SIDES, whole.completions, fitted.completions, whole.scored or (None, None), strict=True))
    if endless := [side for side, ids, *_ in sides if not origin.settings.ends_of(ids)]:
        yield "no_eos", " and ".join(endless)
    if begin[0] == origin.bos and begin.count(origin.bos) > 1:
        yield "bos_twice", ""
    if origin.begins_with_bos and begin[0] != origin.bos:
        yield "bos_missing", ""
    has_inner_ends = origin.eos is None or (origin.is_chat and read.has_other_turns)  # one for each turn
    for side, ids, _, scored in () if has_inner_ends else sides:
        at = np.flatnonzero(ids == origin.eos)
        at = at[:-1] if len(at) and at[-1] >= len(ids) - _EDGE_TOKENS else at
        # After the EOS of an earlier turn come tokens that are not scored.
        if len(at if scored is None else at[scored[at + 1]]):
            yield "eos_inside", side
            break
    if cut := len(whole.context) - len(fitted.context):
        yield "prompt_cut", f"{cut:,} of the prompt's {len(whole.context):,}"
    if cuts := [f"{len(a) - len(b):,} of {side}'s" for side, a, b, _ in sides if len(a) > len(b)]:
        yield "completion_cut", " and ".join(cuts)


def _scored_header(pair: TokenizedPair, answer: str, origin: Origin) -> str:
    """Returns what the template writes before an answer, but not after a prompt alone; "": nothing."""
    read, (before, whole) = pair.row, pair.row.texts[:2]
    header, *after = whole[len(before) :].split(answer, 1)
    if not (after and header.strip() and whole.startswith(before)):
        return ""
    role = str(read.written.prompt[-1]["role"])  # type: ignore[index]
    if role not in origin.opens_turn:
        origin.opens_turn[role] = template_opens_turn(read.written, origin.tokenizer)
    return "" if origin.opens_turn[role] else header


def remedy_of(name: str, evidence: str, pair: TokenizedPair, origin: Origin) -> str:
    """Returns what the user can do about a pair that has the fault `name`."""
    columns, whole, data = f"{origin.key}.columns", pair.whole, origin.settings.data
    part, format = name.removesuffix(_LABEL), FORMATS[origin.settings.format]
    # Of answers under other names, a row's preference may decide which one is chosen.
    wanted = (part,) if part in format.completion_columns else format.completion_columns
    wanted = (format.prompt_column or part,) if part == "prompt" else wanted
    lengths = {
        "data.max_length": (longest_length(whole), data.max_length),
        "data.max_prompt_length": (len(whole.context), data.max_prompt_length),
    }
    keeping = [f"{key}: {length}" for key, (length, limit) in lengths.items() if limit and length > limit]
    return FAULTS[name][1].format(
        evidence=evidence,
        columns=columns,
        of_texts=" or ".join(f"{columns}.{column}" for column in wanted),
        first=_quoted(origin.text(whole.context[:1])),
        eos=f"{origin.tokenizer.eos_token} (id {origin.eos})",
        keeping=" with ".join(keeping),
    )


def _quoted(text: str) -> str:
    if len(text) > _QUOTED_CHARACTERS:
        half = _QUOTED_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return '"' + text.replace("\n", "\\n") + '"'


def source_notes(summary: Mapping[str, Any], *, names_left_out: bool = True) -> Iterator[str]:
    """Yields what a user should know of a source: `summary` is that of its store."""
    what = "pairs" if "pairs_kept" in summary else "prompts"
    kept, faults = summary[f"{what}_kept"], summary.get("faults", {})
    if names_left_out and (dropped := summary["rows_read"] - kept) > 0:
        reasons = ", ".join(f"{entry['rows']:,} {reason}" for reason, entry in summary["dropped"].items())
        warning = "Warning: " if dropped >= FEW * summary["rows_read"] else ""
        yield f"{warning}{dropped:,} of {summary['rows_read']:,} rows are left out: {reasons}"
    if selection := summary.get("selection"):
        out = ", ".join(f"{name} {number:,}" for name, number in selection["left_out"].items() if number)
        chosen = f"{selection['pairs_after']:,} of {selection['pairs_before']:,} pairs"
        yield f"{chosen} are chosen to train on; left out by {out or 'nothing'}"
    if against := summary.get("scores_against_labels"):
        higher = "the rejected answer has the higher score, which changes no label"
        yield f"Warning: in {against:,} of {kept:,} {what} {higher} (min_margin: 0 leaves such pairs out)"
    counts = {"of earlier reasoning": "characters_of_earlier_reasoning", "cut off": "characters_cut"}
    if missing := [f"{summary[key]:,} {name}" for name, key in counts.items() if summary.get(key)]:
        share = int(summary["characters_in_tokens"] * 10_000) / 100
        yield f"{share:g} % of all characters are in the tokens; not: {', '.join(missing)}"
    for name, sentence in _NOTES.items():
        if summary.get(name) and not (name == "prompts_without_template" and "foreign_marks" in faults):
            yield f"in {summary[name]:,} of {kept:,} {what} {sentence}"
    if choices := [key for key in summary if key.startswith(CHOSEN_KEY)]:
        told = ", ".join(f"{key.removeprefix(CHOSEN_KEY)} ({summary[key]:,} of {kept:,})" for key in choices)
        is_always = len(choices) == 1 and kept >= _MANY and " where " in told  # it may mean the other one
        yield f"{'Warning: chosen is always' if is_always else 'chosen is'} {told}"
    if keys := [key.removeprefix(MESSAGE_KEY) for key in summary if key.startswith(MESSAGE_KEY)]:
        yield f"of the messages the chat template leaves out the keys {', '.join(sorted(keys))}"
    if unknown := summary.get("unknown_tokens"):
        yield f"Warning: {unknown:,} tokens stand for texts that this tokenizer does not know, and are lost"
    if files := summary.get("files_not_read"):
        yield f"files of the directory that are not read ({len(files):,}): {', '.join(files[:9])}"
    if scaled := summary.get("images_scaled"):
        yield f"{scaled:,} of {summary['images']:,} images are scaled down to data.max_pixels"
    for name, found in faults.items():
        if found["pairs"] >= FEW * kept:
            yield (
                f"Warning: {name} in {found['pairs']:,} of {kept:,} {what}: {FAULTS[name][0]}; "
                f"dpopack show RECIPE --pair {found['first_row']} shows one"
            )


_NOTES = {  # by counts of a summary
    "developer_as_system": "the role developer is written as system, which the chat template knows",
    "parts_joined": "parts of text are joined by a line break, because the chat template takes text",
    "texts_as_parts": "texts are given as parts, because the chat template takes parts",
    "arguments_as_objects": "arguments of tool calls are given as objects, which the chat template takes",
    "arguments_as_text": "arguments of tool calls are given as JSON text, which the chat template takes",
    "texts_changed": "the chat template writes a text in another form, as with other white space or signs",
    "prompts_without_template": "texts are without the marks of the chat template; for a chat model, name "
    "the column of the prompt as instruction in columns, which makes messages of them",
    "transcripts_without_template": "dialogues are without the marks of the chat template; for a chat model, "
    "set format: transcript and turns: messages, which make messages of them",
}
_KEEP = "{keeping} keeps these pairs whole; data.truncation: drop leaves them out"
# What each fault means for the model, and its remedy; `remedy_of` fills in the words in braces.
FAULTS: dict[str, tuple[str, str]] = {
    "prompt_in_completion": (
        "the completions contain the prompt again, so the model learns to repeat it",
        "remove the prompt from the answers, or name other columns in {columns}; if texts are prompt and "
        "answer together, set {columns}: {{prompt: null}}",
    ),
    "no_generation_prompt": (
        "the chat template has no generation prompt, so the header of the assistant's turn is scored",
        "it must write {evidence} if add_generation_prompt is true; mend it in tokenizer.chat_template",
    ),
    "prompt_boundary_moved": (
        "the end of the prompt changes when a completion follows, so a model in use gets other tokens",
        "if prompts end with a space, move it to the completions; a template must write the same before an "
        "answer as for a generation prompt: set data.chat_template_kwargs or another tokenizer.chat_template",
    ),
    "no_eos": (
        "a completion has no EOS at its end, so the model does not learn where to stop",
        "end each answer with EOS, {eos}, or another special token: in tokenizer.chat_template, or in "
        "chosen_ids and rejected_ids",
    ),
    "bos_twice": (
        "the sequence begins with BOS twice, which the model has never seen",
        "remove {first} from the rows (the tokenizer adds it to texts) or from tokenizer.chat_template",
    ),
    "bos_missing": (
        "the sequence begins without BOS, although this tokenizer begins texts with it",
        "if the model was trained with BOS, begin tokenizer.chat_template with {{{{ bos_token }}}}, or "
        "prompt_ids with its id",
    ),
    "eos_inside": (
        "EOS is twice in an answer or before its end, so what follows it is scored in vain",
        "leave EOS out of the rows: it is written once, at each answer's end",
    ),
    "control_tokens_in_text": (
        "what somebody wrote has special tokens, which the model reads as the marks of turns",
        "remove it from the texts: the chat template writes the special tokens",
    ),
    "foreign_marks": (
        "prompts have the marks of another model's chat template, or of images, which are text for this one",
        "give messages in place of texts with marks, and images with model.images: true if the model reads "
        "them, or take the model that the texts were written for",
    ),
    "tools_not_written": (
        "the chat template leaves out names or descriptions of tools, so the model does not know them",
        "name a template that writes tools in tokenizer.chat_template, or remove the column tools",
    ),
    "prompt_cut": ("the beginning of the prompt is cut off (data.truncation: prompt_left)", _KEEP),
    "completion_cut": (
        "a completion is cut off with its EOS (data.truncation), so the model does not learn where to stop",
        _KEEP,
    ),
    **{
        f"{part}{_LABEL}": (
            f"{part} is an id or a category, no text",
            "wrong column? Name the column of the texts in {of_texts}",
        )
        for part in ("prompt", *SIDES)
    },
}
