"""The `data` and `packing` sections of a recipe: the pairs, and which pairs share a row (a forward pass)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Strict, Tag, create_model

from dpo_pack.recipe import types

# The suffixes that data/readers.py reads.
DATA_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow", ".csv", ".csv.gz")
IMAGE_FIELDS = ("images", "image")  # a list, or one; read with model.images
# Both scores, or the difference of chosen and rejected; read only if `columns` names them.
SCORE_FIELDS = ("chosen_score", "rejected_score", "score_margin")
_MESSAGE_FIELDS = ("system", "weight", "tools", "chat_template_kwargs", *IMAGE_FIELDS)
# The formats of data files, and the fields that data/formats.py reads. `columns` can name these fields.
_FIELDS: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected", "weight"),
    "conversational": ("prompt", "chosen", "rejected", *_MESSAGE_FIELDS),
    "openai": ("input", "preferred_output", "non_preferred_output", *_MESSAGE_FIELDS),
    "swift": ("messages", "rejected_response", "rejected_messages", *_MESSAGE_FIELDS),
    "transcript": ("chosen", "rejected", "weight", *IMAGE_FIELDS),
    "tokenized": ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_weights", "rejected_weights", "weight"),
    "messages": ("messages", "chosen", "rejected", *_MESSAGE_FIELDS),
    "sharegpt": ("conversations", "chosen", "rejected", *_MESSAGE_FIELDS),
    "alpaca": ("instruction", "input", "history", "chosen", "rejected", *_MESSAGE_FIELDS),
    "compared": ("prompt", "first", "second", "preference", "better", *_MESSAGE_FIELDS),
    "ranked": ("prompt", "answers", *_MESSAGE_FIELDS),
    "pictured": ("prompt", "chosen", "rejected", *_MESSAGE_FIELDS),
}  # fmt: skip
_SCORES = {"compared": SCORE_FIELDS[2:], "ranked": ()}  # the answers of ranked bring theirs
FIELDS_OF_FORMAT = {name: (*own, *_SCORES.get(name, SCORE_FIELDS)) for name, own in _FIELDS.items()}
if TYPE_CHECKING:
    RowField: TypeAlias = str
    FormatName: TypeAlias = str
else:
    RowField = Literal[tuple({field: 1 for fields in FIELDS_OF_FORMAT.values() for field in fields})]
    FormatName = Literal["auto", *FIELDS_OF_FORMAT]


# Arguments of the chat template that dpo-pack itself sets, or takes from a row.
_NO_OPTIONS = {
    *("conversation", "messages", "tools", "documents", "tokenize", "tokenizer_kwargs", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}


def _template_options(options: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(_NO_OPTIONS.intersection(options)):
        raise ValueError(f"dpo-pack sets {', '.join(taken)}; only variables of the template are options")
    return options


TemplateOptions = Annotated[
    dict[str, Any], AfterValidator(_template_options), "a mapping from names to values"
]


if TYPE_CHECKING:
    _FromFile = types.Section
else:  # no class can write the name of this field
    _path = Field(description="A Parquet file whose column pair has names of pairs, as dpopack audit has.")
    _FromFile = create_model("_FromFile", __base__=types.Section, **{"from": (types.LocalPath, _path)})


class KeepRecipe(_FromFile):
    """Which pairs of a source are trained on: those that a file names, or some of these."""

    by: types.Name | None = None
    """Column of numbers in the file, by which part, above and below choose; null: take all named pairs."""
    part: types.Fraction | None = None
    """Take this part of the named pairs, in the order of `order`."""
    order: Literal["largest", "smallest", "random"] | None = None
    """The pairs to take with part: those with the largest or smallest numbers, or any; the seed decides."""
    above: float | None = None
    """Take pairs with a number above this."""
    below: float | None = None
    """Take pairs with a number below this."""

    @property
    def file(self) -> str:
        return str(self.__dict__["from"])

    def broken_rules(self) -> Iterator[types.Problem]:
        bounds = [key for key in ("above", "below") if getattr(self, key) is not None]
        if self.part is not None and self.order is None:
            yield "part", "needs order: largest, smallest or random"
        if self.order is not None and self.part is None:
            yield "order", "needs part, the part to take, e.g. 0.5"
        if bounds and (self.part is not None or self.order is not None):
            yield bounds[0], "goes without part and order; choose by numbers, or take a part"
        if self.by is None and (bounds or self.order in ("largest", "smallest")):
            yield (bounds or ["order"])[0], "needs by, the column of numbers to compare"
        if self.by is not None and not bounds and self.part is None and self.order is None:
            yield "by", "needs above or below, or part and order"


# The keys that choose the pairs to train on, after those that are held out; in this order.
SELECTING_KEYS = ("max_length_gap", "min_margin", "keep")


class SourceRecipe(types.Section):
    """One source of pairs, in data.train or data.eval; a path alone stands for a source with that path."""

    path: types.PathText = Field(examples=["pairs.jsonl"])
    """A file (.jsonl .json .csv, also .gz; .parquet .arrow), a directory of such or of datasets, a hub id."""
    name: types.Name | None = None
    """The source's name in reports and metrics; null: derived from the path."""
    split: types.Name = "train"
    """Split of a hub id or datasets directory."""
    config: types.Name | None = None
    """Configuration (subset) of a hub id; null: its default. Local sources have none."""
    data_dir: types.Name | None = None
    """Folder of a hub id whose files are read, e.g. harmless-base of Anthropic/hh-rlhf; null: all."""
    revision: types.Name | None = None
    """Branch, tag or commit of a hub id; null: its main branch."""
    format: FormatName = "auto"
    """What a row looks like; auto: the columns of the first row decide."""
    turns: Literal["text", "messages"] = "text"
    """Of format transcript; messages: the turns are messages, a text before the first one the system's."""
    columns: Annotated[
        dict[RowField, types.Name | None],
        f"a mapping from {', '.join(get_args(RowField))} to column names",
    ] = Field(default_factory=dict)
    """Columns with other names, e.g. {prompt: question}; {prompt: null}: none is. See docs/data.md."""
    image_folder: types.LocalPath | None = None
    """Folder of the paths of images; null: that of the data file. Paths outside of it are bad rows."""
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    """Options of the chat template for this source, beside those of data.chat_template_kwargs."""
    max_pairs: types.Count | None = None
    """Use at most this many pairs; null: all."""
    weight: types.PositiveNumber = 1.0
    """How often an epoch has each pair, at random for a fraction: 2.5 is twice or three times."""
    share: types.PositiveNumber | None = None
    """Its part of the mixture, beside the other sources' shares: so many first pairs; null: all pairs."""
    keep: KeepRecipe | None = None
    """Train only on pairs that a file names, e.g. {from: audit.parquet, by: p_wrong, below: 0.9}."""
    max_length_gap: types.CountOrZero | None = None
    """Train only on pairs whose completions differ by at most so many tokens; null: on all."""
    min_margin: float | None = None
    """Train only on pairs whose score margin is at least this; null: on all. Needs scores."""

    @property
    def selecting_keys(self) -> tuple[str, ...]:
        """The keys that this source has of SELECTING_KEYS."""
        return tuple(key for key in SELECTING_KEYS if self.is_changed(key))

    def broken_rules(self) -> Iterator[types.Problem]:
        if self.turns == "messages" and self.format != "transcript":
            yield "turns", "only dialogues as text have turns; set format: transcript, or leave it out"
        columns = list(self.columns.values())
        known = FIELDS_OF_FORMAT.get(self.format, get_args(RowField))
        for field, column in self.columns.items():
            if column is None and field not in ("prompt", "chat_template_kwargs"):
                yield f"columns.{field}", "must be a column; only prompt and chat_template_kwargs can be null"
            elif columns.count(column) > 1:
                yield "columns", f"column '{column}' is given for several fields"
            elif field not in known:
                yield f"columns.{field}", f"rows of format {self.format} have {', '.join(known)}"
            elif field in IMAGE_FIELDS and (self.format, self.turns) == ("transcript", "text"):
                yield f"columns.{field}", "dialogues as text have no images; set turns: messages"
        if ("score_margin" in (scores := self.columns.keys() & {*SCORE_FIELDS})) != (len(scores) == 1):
            yield f"columns.{min(scores)}", "give chosen_score and rejected_score, or score_margin alone"


class EvalFraction(types.Section):
    """Holds out a part of the training pairs."""

    fraction: types.Fraction
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
    is_other = isinstance(value, dict) and value.keys().isdisjoint(SourceRecipe.model_fields)
    return value if is_other else as_sources(value)


_Sources = str | SourceRecipe | list[str | SourceRecipe]


class DataRecipe(types.Section):
    """Which pairs are trained on and how they become tokens."""

    train: Annotated[
        tuple[SourceRecipe, ...],
        Strict(False),
        MinLen(1),
        BeforeValidator(as_sources, json_schema_input_type=_Sources),
        "a path, a source (a mapping with a path) or a list of these",
    ]
    """Where the training pairs come from."""
    eval: Annotated[
        Annotated[tuple[SourceRecipe, ...], Strict(False), Tag("(sources)")]
        | Annotated[EvalFraction, Tag("(fraction)")],
        Discriminator(lambda value: "(fraction)" if isinstance(value, (dict, EvalFraction)) else "(sources)"),
        BeforeValidator(as_eval, json_schema_input_type=_Sources | EvalFraction),
        "a path, a source (a mapping with a path), a list of these, or {fraction: 0.02}",
    ] = ()
    """Held-out pairs: sources, or a fraction of the training pairs."""
    max_length: Annotated[int, Ge(2), Le(types.MAX_ROW_TOKENS)] = 2048
    """Most tokens of prompt and one completion together."""
    max_prompt_length: types.TokenCount | None = None
    """Most tokens of a prompt, below max_length; null: only max_length limits it."""
    truncation: Literal["drop", "prompt_left", "completion_right", "error"] = "drop"
    """Of too long pairs, cut the prompt's beginning (prompt_left) or the completion's end, or stop."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Rows that are not valid pairs: stop the run (error), or leave them out, count and list them (skip)."""
    max_pixels: types.Count | None = None
    """Scale larger images (width x height) down, e.g. 786432; null: only the model's processor does."""
    system_prompt: str | None = None
    """System message for conversations that have none."""
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    """Options of the chat template, e.g. {enable_thinking: false}. Those of sources and of rows win."""
    continue_final_message: bool = False
    """true: completions go on with a prompt's last message if it is the assistant's. false: a bad row."""
    scored_turns: Literal["assistant", "all"] = "assistant"
    """all: score every token after the prompt, as TRL does; assistant: only what the assistant says."""
    shuffle: bool = True
    """Train on the pairs in a new random order each epoch; the seed decides it. false: in file order."""
    num_workers: Literal["auto"] | types.CountOrZero = "auto"
    """Processes that tokenise; 0 and auto: the main process, with the threads of the tokenizer."""

    @property
    def eval_sources(self) -> tuple[SourceRecipe, ...]:
        """The sources of held-out pairs; none if `eval` is a fraction."""
        return () if isinstance(self.eval, EvalFraction) else self.eval

    def broken_rules(self) -> Iterator[types.Problem]:
        if self.max_prompt_length and self.max_prompt_length >= self.max_length:
            yield "max_prompt_length", f"must be below data.max_length ({self.max_length}), for a completion"
        formats = ("" if source.turns == "messages" else source.format for source in self.train)
        talks = any("system" in FIELDS_OF_FORMAT.get(format, ("system",)) for format in formats)
        if self.continue_final_message and not talks:
            yield "continue_final_message", "no source of data.train has conversations; leave it out"
        for part, sources in (("train", self.train), ("eval", self.eval_sources)):
            names = [source.name for source in sources]
            for index, name in enumerate(names):
                if name and name in names[:index]:
                    yield f"{part}.{index}.name", f"another source of data.{part} has the name '{name}', too"
        for index, source in enumerate(self.eval_sources):
            for key in ("weight", "share", *SELECTING_KEYS):
                if source.is_changed(key):
                    yield f"eval.{index}.{key}", f"only training sources have {key}; leave it out"
        without = [index for index, source in enumerate(self.train) if source.share is None]
        for index, key in ((n, key) for n, one in enumerate(self.train) for key in one.selecting_keys):
            if not without:
                yield f"train.{index}.{key}", "a share is of a whole source; leave share out, or this key"
        if 0 < len(without) < len(self.train):
            yield f"train.{without[0]}.share", "other sources have one; give each source a share, or none"


class PackingRecipe(types.Section):
    """How many pairs make a step, and how they are laid out in rows."""

    mode: Literal["packed", "padded"] = "packed"
    """padded: right-padded batches without shared prompts, for models that cannot be packed."""
    token_budget: Literal["auto"] | types.TokenCount = "auto"
    """Most tokens of a row, that is, of a forward pass. auto: 8192 on CUDA, on CPU at least 2048."""
    pairs_per_step: types.Count = 64
    """Pairs in an optimizer step, of all processes together."""
    share_prompt: bool = True
    """Compute only once what sequences of a pair, or pairs of a row, begin with; the results are the same."""


def source_names(sources: Sequence[SourceRecipe]) -> tuple[str, ...]:
    """Returns the sources' different names in reports and metrics: `name`, else a name made from `path`."""
    names: list[str] = []
    taken = {source.name for source in sources}
    for source in sources:
        short = source.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gz")
        for suffix in DATA_FILE_SUFFIXES:
            short = short.removesuffix(suffix)
        parts = (source.config, source.data_dir, None if source.split == "train" else source.split)
        # "/" and ".jsonl" have nothing but the path.
        derived = "-".join([short or source.path, *(part.replace("/", "-") for part in parts if part)])
        numbered = (f"{source.path}-{number}" for number in range(2, len(sources) + 2))
        names.append(source.name or next(n for n in (derived, source.path, *numbered) if n not in taken))
        taken.add(names[-1])
    return tuple(names)
