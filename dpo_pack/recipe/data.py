"""The `data` and `packing` sections of a recipe: the pairs, and which pairs share a row (a forward pass)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from annotated_types import Ge, Le, MinLen
from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag

from dpo_pack.recipe.types import (
    MAX_ROW_TOKENS,
    Allowed,
    Count,
    CountOrZero,
    Fraction,
    Name,
    PathText,
    PositiveNumber,
    Problem,
    Section,
    TokenCount,
    is_changed,
)

# The suffixes that data/readers.py reads.
DATA_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow", ".csv", ".csv.gz")
_MESSAGE_FIELDS = ("system", "weight", "tools", "chat_template_kwargs")
# The formats of data files, and the fields that data/formats.py reads. `columns` can name these fields.
FIELDS_OF_FORMAT: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected", "weight"),
    "conversational": ("prompt", "chosen", "rejected", *_MESSAGE_FIELDS),
    "transcript": ("chosen", "rejected", "weight"),
    "tokenized": (
        "prompt_ids",
        "chosen_ids",
        "rejected_ids",
        "chosen_weights",
        "rejected_weights",
        "weight",
    ),
    "messages": ("messages", "chosen", "rejected", *_MESSAGE_FIELDS),
    "sharegpt": ("conversations", "chosen", "rejected", *_MESSAGE_FIELDS),
    "alpaca": ("instruction", "input", "history", "chosen", "rejected", *_MESSAGE_FIELDS),
    "compared": ("prompt", "first", "second", "preference", "better", *_MESSAGE_FIELDS),
    "ranked": ("prompt", "answers", *_MESSAGE_FIELDS),
}
if TYPE_CHECKING:
    RowField: TypeAlias = str
    FormatName: TypeAlias = str
else:
    RowField = Literal[
        tuple(dict.fromkeys(field for fields in FIELDS_OF_FORMAT.values() for field in fields))
    ]
    FormatName = Literal["auto", *FIELDS_OF_FORMAT]


class SourceRecipe(Section):
    """One source of pairs; a path alone stands for a source with that path."""

    path: PathText = Field(examples=["pairs.jsonl"])
    """A file (.jsonl .json .csv, each also .gz; .parquet .arrow), a directory of such files or of the
    datasets library, or a hub id."""
    name: Name | None = None
    """The source's name in reports and metrics; null: derived from the path."""
    split: Name = "train"
    """Split of a hub id or datasets directory."""
    config: Name | None = None
    """Configuration (subset) of a hub id; null: its default. Local sources have none."""
    data_dir: Name | None = None
    """Folder of a hub id whose files are read, e.g. harmless-base of Anthropic/hh-rlhf; null: all."""
    revision: Name | None = None
    """Branch, tag or commit of a hub id; null: its main branch."""
    format: FormatName = "auto"
    """What a row looks like; auto: the columns of the first row decide."""
    columns: Annotated[
        dict[RowField, Name | None],
        Allowed(f"a mapping from {', '.join(get_args(RowField))} to column names"),
    ] = Field(default_factory=dict)
    """Columns that have other names, e.g. {prompt: question, chosen: better}. {prompt: null}: no column is
    the prompt, and the prompt is what chosen and rejected both begin with."""
    max_pairs: Count | None = None
    """Use at most this many pairs; null: all."""
    weight: PositiveNumber = 1.0
    """How often an epoch has the source's pairs (training only): each pair floor(weight) times, and a random
    part of the pairs once more, drawn anew each epoch; 2.5: twice, and half of them a third time."""

    @property
    def names_system(self) -> bool:
        """True if `columns` names a column with system prompts."""
        return "system" in self.columns

    def broken_rules(self) -> Iterator[Problem]:
        columns = list(self.columns.values())
        for field, column in self.columns.items():
            if column is None and field != "prompt":
                yield f"columns.{field}", "must be the name of a column; only the prompt can be null"
            elif columns.count(column) > 1:
                yield "columns", f"column '{column}' is given for several fields"
            if self.format != "auto" and field not in FIELDS_OF_FORMAT[self.format]:
                fields = ", ".join(FIELDS_OF_FORMAT[self.format])
                yield (
                    f"columns.{field}",
                    f"rows of format {self.format} have no such field; their fields are {fields}",
                )


class EvalFraction(Section):
    """Holds out a part of the training pairs."""

    fraction: Fraction
    """Part of the training pairs to hold out, e.g. 0.02."""


def as_sources(value: object) -> object:
    """Turns a path, a source or a list of both into a list of sources; returns other values unchanged."""
    if isinstance(value, (str, dict, SourceRecipe)):
        value = [value]
    if isinstance(value, (list, tuple)):
        return [{"path": source} if isinstance(source, str) else source for source in value]
    return value


def as_eval(value: object) -> object:
    """Returns `as_sources(value)`, but a mapping without a source's keys as it is: {fraction: 0.02}."""
    if isinstance(value, dict) and value.keys().isdisjoint(SourceRecipe.model_fields):
        return value
    return as_sources(value)


def _eval_kind(value: object) -> str:
    return "(fraction)" if isinstance(value, (dict, EvalFraction)) else "(sources)"


class DataRecipe(Section):
    """Which pairs are trained on and how they become tokens."""

    train: Annotated[
        tuple[SourceRecipe, ...],
        Strict(False),
        MinLen(1),
        BeforeValidator(as_sources, json_schema_input_type=str | SourceRecipe | list[str | SourceRecipe]),
        Allowed("a path, a source (a mapping with a path) or a list of these"),
    ]
    """Where the training pairs come from."""
    eval: Annotated[
        Annotated[tuple[SourceRecipe, ...], Strict(False), Tag("(sources)")]
        | Annotated[EvalFraction, Tag("(fraction)")],
        Discriminator(_eval_kind),
        BeforeValidator(
            as_eval, json_schema_input_type=str | SourceRecipe | list[str | SourceRecipe] | EvalFraction
        ),
        Allowed("a path, a source (a mapping with a path), a list of these, or {fraction: 0.02}"),
    ] = ()
    """Held-out pairs: sources, or a fraction of the training pairs."""
    max_length: Annotated[int, Ge(2), Le(MAX_ROW_TOKENS)] = 2048
    """Most tokens of prompt and one completion together."""
    max_prompt_length: TokenCount | None = None
    """Most tokens of a prompt, below max_length; null: only max_length limits it."""
    truncation: Literal["drop", "prompt_left", "completion_right", "error"] = "drop"
    """Pairs that are too long: drop them, cut the first prompt tokens (prompt_left), cut the end of a
    completion and so its EOS (completion_right), or stop the run (error). Such pairs are counted."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Rows that are not valid pairs: stop the run (error), or leave them out, count and list them (skip)."""
    system_prompt: str | None = None
    """System message for conversations that have none."""
    scored_turns: Literal["assistant", "all"] = "assistant"
    """assistant: of a completion of several messages only what the assistant says is scored; tool results and
    turns of the user are not. all: every token after the prompt is scored, as TRL does."""
    shuffle: bool = True
    """Train on the pairs in a new random order each epoch; the seed decides it. false: in file order."""
    num_workers: Literal["auto"] | CountOrZero = "auto"
    """Processes that tokenise; 0 and auto: the main process, with the threads of the tokenizer."""

    @property
    def eval_sources(self) -> tuple[SourceRecipe, ...]:
        """The sources of held-out pairs; none if `eval` is a fraction."""
        return () if isinstance(self.eval, EvalFraction) else self.eval

    def broken_rules(self) -> Iterator[Problem]:
        if self.max_prompt_length and self.max_prompt_length >= self.max_length:
            limit = f"data.max_length ({self.max_length}), to leave room for a completion"
            yield "max_prompt_length", f"must be below {limit}, not {self.max_prompt_length}"
        if self.system_prompt is not None and all(
            source.format != "auto" and "system" not in FIELDS_OF_FORMAT[source.format]
            for source in self.train
        ):
            yield (
                "system_prompt",
                "only conversations have one, and no source of data.train has conversations; leave it out",
            )
        for part, sources in (("train", self.train), ("eval", self.eval_sources)):
            names = [source.name for source in sources]
            for index, name in enumerate(names):
                if name and name in names[:index]:
                    other = f"data.{part}.{names.index(name)}"
                    yield f"{part}.{index}.name", f"'{name}' is already the name of {other}"
        for index, source in enumerate(self.eval_sources):
            if source.weight != 1.0:
                yield f"eval.{index}.weight", "only training sources are mixed by weight; leave it out"


class PackingRecipe(Section):
    """How many pairs make a step, and how they are laid out in rows."""

    mode: Literal["packed", "padded"] = "packed"
    """padded: right-padded batches without shared prompts, for models that cannot be packed."""
    token_budget: TokenCount = 8192
    """Most tokens of one row, that is, of one forward pass. A longer pair gets a row of its own."""
    pairs_per_step: Count = 64
    """Pairs in an optimizer step, of all processes together."""
    scope: Literal["step", "epoch"] = "step"
    """step: fill rows with the pairs of each step; epoch: fill rows with pairs of the whole shuffled epoch,
    which gives fuller rows."""
    rows_per_step: Count | None = None
    """Scope epoch: rows in an optimizer step, of all processes together."""
    window_pairs: Count = 16384
    """Scope epoch: so many shuffled pairs at a time are packed into rows."""
    algorithm: Literal["best_fit_decreasing", "first_fit_decreasing", "next_fit"] = "best_fit_decreasing"
    """How pairs are distributed over rows; next_fit keeps their order."""
    share_prompt: bool = True
    """Compute only once what chosen and rejected both begin with; the results are the same."""
    merge_prompts: bool = False
    """If pairs of one row have the same prompt, compute this prompt, and equal completions, only once."""

    def broken_rules(self) -> Iterator[Problem]:
        if self.merge_prompts and self.mode == "padded":
            yield "merge_prompts", "needs packing.mode: packed"
        if self.merge_prompts and not self.share_prompt:
            yield "merge_prompts", "needs packing.share_prompt: true"
        if self.scope == "step":
            if self.rows_per_step is not None:
                reason = "in scope step, pairs_per_step sets the size of a step"
                yield "rows_per_step", f"needs packing.scope: epoch; {reason}"
            if is_changed(self, "window_pairs"):
                yield "window_pairs", "needs packing.scope: epoch"
            return
        if self.rows_per_step is None:
            yield "rows_per_step", "packing.scope epoch needs it: the number of rows in a step"
        if is_changed(self, "pairs_per_step"):
            reason = "in scope epoch, rows_per_step sets the size of a step"
            yield "pairs_per_step", f"needs packing.scope: step; {reason}"
        if self.mode == "padded":
            yield "scope", "epoch needs packing.mode: packed"


def source_names(sources: Sequence[SourceRecipe]) -> tuple[str, ...]:
    """Returns the sources' different names in reports and metrics: `name`, else a name made from `path`."""
    names: list[str] = []
    for source in sources:
        short = source.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gz")
        for suffix in DATA_FILE_SUFFIXES:
            short = short.removesuffix(suffix)
        short = short or source.path  # "/" and ".jsonl" have nothing else
        parts = (source.config, source.data_dir, None if source.split == "train" else source.split)
        derived = "-".join([short, *(part.replace("/", "-") for part in parts if part)])
        taken = {*names, *(other.name for other in sources if other.name)}
        numbered = (f"{source.path}-{number}" for number in range(2, len(sources) + 2))
        choices = (derived, source.path, *numbered)
        names.append(source.name or next(choice for choice in choices if choice not in taken))
    return tuple(names)
