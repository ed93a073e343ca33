"""What `dpopack show` shows: the pairs of a recipe as tokens, their faults, and the rows that are left out.
Loads no weights and writes no files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from dpo_pack.data.beginnings import table_of
from dpo_pack.data.faults import (
    FAULTS,
    FEW,
    Origin,
    faults_of,
    find_in,
    longest_length,
    remedy_of,
    source_notes,
)
from dpo_pack.data.formats import SIDES
from dpo_pack.data.images import ImageProcessor, ReadImage, image_label
from dpo_pack.data.ingest import Ingestion, columns_sentence
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.sources import locate_source
from dpo_pack.data.store import join_pairs, pair_lengths
from dpo_pack.data.tokenization import TokenizedPair, tokenize_rows
from dpo_pack.data.values import BadRow
from dpo_pack.packing.lengths import AnyIntArray, common_prefix_length, pair_sizes
from dpo_pack.packing.plan import plan_epoch
from dpo_pack.recipe.data import source_names
from dpo_pack.recipe.load import Recipe
from dpo_pack.run.models import CPU, resolve_model
from dpo_pack.run.setup import NO_PAIRS, prepare_tokenizer
from dpo_pack.system import ranks
from dpo_pack.system.console import shown
from dpo_pack.system.errors import DataError, RecipeError
from dpo_pack.system.files import Json
from dpo_pack.system.process import counted, printable

FIRST_ROWS = 200  # of each source that are read, besides the rows that the user asks for
# Tokens decode to this if their last bytes begin a character, whose other bytes are in the next tokens.
_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class _Values(Json):
    """A dict whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"there are {', '.join(self)}, no {name}")
        return self[name]

    @classmethod
    def of(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [cls.of(one) for one in value]
        return cls((key, cls.of(one)) for key, one in value.items()) if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecipe:
    """All that `dpopack show` shows."""

    # What `--json` writes. Tokens have `is_cut` besides: truncation removes them.
    report: Json
    images: list[ReadImage]  # of the pairs that are shown, as in the report

    @property
    def sources(self) -> list[Any]:
        """The report of each source with its own warnings, left_out, dropped and pairs, e.g.
        `sources[0].pairs_kept`: the values of the report's dicts are attributes, too."""
        of_all = {name: self.report[name] for name in ("warnings", "left_out", "dropped", "pairs")}
        return [
            _Values.of(
                source
                | {name: [v for v in all_ if v["source"] == source["name"]] for name, all_ in of_all.items()}
            )
            for source in self.report["sources"]
        ]

    @property
    def packed_row(self) -> Any:
        """`tokens`, `token_budget`, and `pairs`: by place, the tokens of prompt, chosen and rejected. None
        without a pair."""
        return _Values.of(self.report["packed_row"])

    @property
    def rows(self) -> list[Json]:
        """A dict for each pair: source, row, warnings, and as texts prompt, chosen and rejected."""

        def text(pair: Json, side: str, part: str) -> str:
            return "".join(token["text"] for token in pair[side] if token["part"] == part)

        return [
            {name: pair[name] for name in ("source", "row", "warnings")}
            | {"prompt": text(pair, "chosen", "prompt")}
            | {side: text(pair, side, "completion") for side in SIDES}
            for pair in self.report["pairs"]
        ]

    def __repr__(self) -> str:
        names = ", ".join(source["name"] for source in self.report["sources"])
        pairs, warnings = (len(self.report[key]) for key in ("pairs", "warnings"))
        return f"ShownRecipe({names}: {counted(pairs, 'pair')}, {counted(warnings, 'warning')})"


def show_recipe(
    recipe: Recipe, console: Console, *, asked_rows: Collection[int] = (), reads_all: bool = False
) -> ShownRecipe:
    """Reads the first rows of each source and the rows `asked_rows`, or all rows; leaves out bad rows. Raises
    RecipeError for an online recipe, or if no source has one of the rows; DataError if a source cannot be
    read or has no rows; ModelError if the tokenizer lacks a feature."""
    if recipe.online is not None:
        raise RecipeError(NO_PAIRS)
    data = recipe.data
    images = resolve_model(recipe, CPU).processor if recipe.model.images else None  # on any device
    tokenizer = prepare_tokenizer(recipe, images)
    owner = "processor" if images is not None and images.gives_template(tokenizer) else "tokenizer"
    settings = [
        f"Model {recipe.model.path}, tokenizer {recipe.tokenizer.path or 'of the model'}, "
        f'{len(tokenizer):,} tokens, EOS "{tokenizer.eos_token}"; chat template (of conversations only): '
        f"{recipe.tokenizer.chat_template or (f'of the {owner}' if tokenizer.chat_template else 'none')}",
        f"data.max_length: {data.max_length:,} tokens of prompt and one completion; data.truncation: "
        f"{data.truncation}",
    ]
    report: Json = {"model": recipe.model.path, "asked": bool(asked_rows), "settings": settings}
    report |= {name: [] for name in ("sources", "warnings", "pairs", "left_out", "dropped")}
    read: dict[str, dict[str, TokenizedPair]] = {"train": {}, "eval": {}}  # the pairs by their places
    for part, sources in (("train", data.train), ("eval", data.eval_sources)):
        for number, (source, name) in enumerate(zip(sources, source_names(sources), strict=True)):
            located = locate_source(source, f"data.{part}.{number}", None, reads_images=images is not None)
            ingestion = Ingestion(
                located=located, source=source, data=data, tokenizer=tokenizer, images=images
            )
            name = name if part == "train" else f"{name} (held out)"
            rows = _read_rows(report, ingestion, name, console, asked_rows, reads_all=reads_all)
            read[part] |= _report_source(report, ingestion, name, rows, asked_rows)
    there = {row["row"] for row in (*report["pairs"], *report["dropped"])}
    if missing := sorted(set(asked_rows) - there):
        names = ", ".join(source["name"] for source in report["sources"])
        raise RecipeError(f"--pair {missing[0]}: no such {ingestion.opened.row_word} was read of {names}")
    shown = _add_images(report, read["train"] | read["eval"], images)
    report["packed_row"] = _packed_row(read["train"], recipe, -1 if images is None else images.token_id)
    return ShownRecipe(report=report, images=shown)


def _read_rows(
    report: Json,
    ingestion: Ingestion,
    name: str,
    console: Console,
    asked_rows: Collection[int],
    *,
    reads_all: bool,
) -> dict[int, tuple[TokenizedPair, Any]]:
    """Adds the rows that are left out to the report: the first ones of each reason, or those asked for.
    Returns by their numbers the first pairs and those asked for, with what the format reads of their rows."""
    kept: dict[int, tuple[TokenizedPair, Any]] = {}
    taken: dict[int, Any] = {}  # the rows that are being tokenised

    def selected() -> Iterator[NumberedRow]:
        for position, (number, row) in enumerate(rows, 1):
            if position <= FIRST_ROWS or reads_all or number in asked_rows:
                taken[number] = row
                yield number, row
            if position >= FIRST_ROWS and number >= max(asked_rows, default=0) and not reads_all:
                return

    most, work = ingestion.source.max_pairs, f"Reading {printable(name)}"
    with (
        ingestion.start() as rows,
        shown(console, work, "" if reads_all or asked_rows else "rows") as tell,
        closing(tokenize_rows(selected(), ingestion.submit, num_workers=0, max_pairs=most)) as batches,
    ):
        for batch in batches:
            ingestion.count(batch)
            tell(work, ingestion.num_rows, None, [counted(ingestion.num_rows, "row")])
            for number, bad in batch.dropped:
                if number in (asked_rows or ingestion.dropped_rows[bad.reason]):
                    about = {"source": name, "row": number, "reason": bad.reason, "detail": bad.detail}
                    report["dropped"].append({**about, "content": _content(taken[number], ingestion)})
            for pair in batch.kept:
                if len(kept) < FIRST_ROWS or pair.row.number in asked_rows:
                    kept[pair.row.number] = pair, _content(taken[pair.row.number], ingestion)
            taken.clear()
        is_at_end = next(rows, None) is None and (reads_all or ingestion.num_rows <= FIRST_ROWS)
    if ingestion.num_rows == 0:
        raise DataError(f"{ingestion.located.label} has no rows; correct or remove {ingestion.located.key}")
    report["sources"].append({"rows": ingestion.num_rows if is_at_end else ingestion.opened.num_rows})
    return kept


def _report_source(
    report: Json,
    ingestion: Ingestion,
    name: str,
    kept: Mapping[int, tuple[TokenizedPair, Any]],
    asked_rows: Collection[int],
) -> dict[str, TokenizedPair]:
    """Adds a source to the report, and returns its pairs by their places."""
    origin = Origin(ingestion.located.key, ingestion.settings)
    pairs, summary, word = [pair for pair, _ in kept.values()], ingestion.summary(), ingestion.opened.row_word
    left_out = [_reason(reason, ingestion) for reason in ingestion.first_dropped]
    faults = [*_find_faults(pairs, origin), *(one for one in left_out if one["count"] >= FEW * one["of"])]
    faults.sort(key=lambda fault: -fault["count"])
    first = [*kept][: 2 if origin.key.startswith("data.train.") else 1]
    wanted = asked_rows or {*first, *(fault["rows"][0] for fault in faults)}
    known = {fault["name"] for fault in faults}
    places = {number: f"{name} {word} {number:,}" for number in kept}
    report["warnings"] += ({"source": name, **fault} for fault in faults)
    report["left_out"] += ({"source": name, **reason} for reason in left_out)
    report["pairs"] += (
        {"source": name, "place": places[number], "content": content, **_shown_pair(pair, origin, known)}
        for number, (pair, content) in kept.items()
        if number in wanted
    )
    source, num_read, num_kept = report["sources"][-1], ingestion.num_rows, ingestion.num_kept
    source |= {
        "name": name,
        "row_word": word,
        "format": ingestion.format,
        "columns": ingestion.columns_read,
        "columns_not_read": summary["columns_not_read"],
        "rows_read": num_read,
        "pairs_kept": num_kept,
    }
    source_keys = ingestion.source.selecting_keys
    of_all = "only " if source["rows"] is None else f"{num_read:,} of "
    of_all += counted(source["rows"] or num_read, "row")
    report["settings"] += [
        f"{name}, format {ingestion.format}: {of_all} tokenised, "
        f"{num_kept:,} kept, {num_read - num_kept:,} left out",
        f"{name}: {columns_sentence(ingestion.columns_read, summary['columns_not_read'])}",
        *(f"{name}: {note}" for note in source_notes(summary, names_left_out=False)),
        *(f"{name}: a run trains on fewer of these pairs: {key} chooses" for key in source_keys),
    ]
    return {places[pair.row.number]: pair for pair in pairs}


def _reason(name: str, ingestion: Ingestion) -> Json:
    number, bad = ingestion.first_dropped[name]
    remedy = ingestion.advice(bad)
    if name in ("empty_completion", "identical_completions"):
        remedy = f"correct {ingestion.located.key}.columns if they are wrong, or {remedy or 'mend the rows'}"
    outcome = "a run stops there" if ingestion.stops_run(name) else "left out"
    first = f"{ingestion.opened.row_word} {number:,}: " if ingestion.dropped_counts[name] > 1 else ""
    return {
        "name": name,
        "sentence": f"no pair ({name}), {outcome}; {first}{bad.detail}",
        "remedy": remedy,
        "rows": ingestion.dropped_rows[name],
        "count": ingestion.dropped_counts[name],
        "of": ingestion.num_rows,
        "unit": "row",
    }


def _find_faults(pairs: Sequence[TokenizedPair], origin: Origin) -> Iterator[Json]:
    for name, found in faults_of(pairs, origin).items():
        if name == "prompt_in_completion" and len(found) < FEW * len(pairs):
            continue  # a few answers may well repeat it
        pair, evidence = max(found, key=lambda one: longest_length(one[0].whole))
        yield {
            "name": name,
            "sentence": FAULTS[name][0] + (f": {evidence}, and others" if "label" in name else ""),
            "remedy": remedy_of(name, evidence, pair, origin),
            "rows": [pair.row.number for pair, _ in found],
            "count": len(found),
            "of": len(pairs),
            "unit": "pair",
        }


def _content(row: Any, ingestion: Ingestion) -> Any:
    """Returns what the format reads of a row, with the beginnings of images, which can be megabytes."""

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shortened(one) for key, one in value.items()}
        if isinstance(value, list):
            return [shortened(one) for one in value]
        is_image = isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:image"))
        return f"{value[:40]!r}..." if is_image else value

    if isinstance(row, BadRow):
        return shortened(row.content)
    return shortened({field: row[field] for field in ingestion.columns_read if field in row} or row)


def _shown_pair(pair: TokenizedPair, origin: Origin, known: Collection[str]) -> Json:
    """Returns a pair as the model gets it; `known` are the faults of its source."""
    whole, fitted, num_prompt = pair.whole, pair.fitted, len(pair.whole.context)
    # `prompt_left` cuts the tokens before `end`; BOS stays if there is room for it.
    begin = int(len(fitted.context) > 1 and whole.context[0] == origin.bos)
    end = begin + num_prompt - len(fitted.context)
    shown: Json = {"row": pair.row.number}
    scored = whole.scored or [np.ones(len(ids), dtype=np.bool_) for ids in whole.completions]
    for number, side in enumerate(SIDES):
        ids = np.concatenate([whole.context, whole.completions[number]])
        num_kept = num_prompt + len(fitted.completions[number])
        shown[side] = [
            {
                "id": int(ids[at]),
                "text": text,
                "part": "prompt" if at < num_prompt else "completion",
                "scored": num_prompt <= at < num_kept and bool(scored[number][at - num_prompt]),
                "is_cut": begin <= at < end or at >= num_kept,
            }
            for at, text in enumerate(_token_texts(ids, pair, origin))
        ]
    ends = [origin.settings.ends_of(completion)[-1:] for completion in fitted.completions]
    return shown | {
        "shared_tokens": len(fitted.context) + common_prefix_length(fitted.completions),
        "ends_with": {side: origin.text(np.array(ids)) for side, ids in zip(SIDES, ends, strict=True)},
        "warnings": [f"{name} {shows}".rstrip() for name, shows in find_in(pair, origin) if name in known],
    }


def _token_texts(ids: AnyIntArray, pair: TokenizedPair, origin: Origin) -> list[str]:
    """Returns the texts of tokens, which joined are that of the sequence. The last token of a character has
    the character, the first one of an image describes the image."""
    texts: list[str] = []
    begin = known = 0  # `ids[begin:known]` gave the last text that is not empty
    for end in range(1, len(ids) + 1):
        text = origin.text(ids[begin:end], known - begin)
        is_part = text.endswith(_PART_OF_A_CHARACTER) and end < len(ids)
        texts.append("" if is_part else text)
        if not is_part:
            begin, known = known, end
    if origin.settings.images is not None and pair.row.images:
        processor = origin.settings.images.processor
        places = iter(np.flatnonzero(ids == processor.token_id).tolist())
        for image in pair.row.images:
            label = image_label(image, processor)
            for _ in range(processor.num_tokens((image.width, image.height))):
                texts[next(places)], label = label, ""
    return texts


def _add_images(
    report: Json, pairs: Mapping[str, TokenizedPair], processor: ImageProcessor | None
) -> list[ReadImage]:
    """Adds the images of the pairs that are shown to the report, and returns them."""
    report["images"], report["image_token"] = [], None
    if processor is None:
        return []
    places: dict[bytes, list[str]] = {}  # of the pairs that have each image
    for place, pair in pairs.items():
        for image in pair.row.images:
            places.setdefault(image.key, []).append(place)
    shown = {image.key: image for pair in report["pairs"] for image in pairs[pair["place"]].row.images}
    report["images"] = [
        {"label": image_label(image, processor), "pairs": places[key]} for key, image in shown.items()
    ]
    report["image_token"] = processor.token_id
    return [*shown.values()]


def _packed_row(pairs: Mapping[str, TokenizedPair], recipe: Recipe, image_token: int) -> Json | None:
    """Returns a row as packing makes it from the pairs that were read, in tokens."""
    if not pairs:
        return None
    places, order, fitted = list(pairs), np.arange(len(pairs)), [pair.fitted for pair in pairs.values()]
    lengths = pair_lengths(table_of([join_pairs(fitted, [1.0] * len(pairs), order.tolist())], image_token))
    packing, is_padded = recipe.packing, recipe.packing.mode == "padded"
    sizes = pair_sizes(lengths, share_prompt=recipe.shares_prompts, pads=is_padded)
    longest = 0 if sizes.beginnings is None else int(sizes.beginnings.tokens.max())
    device_type = "cuda" if ranks.uses_cuda() else "cpu"
    budget, usual = (recipe.token_budgets(device_type, number)[0] for number in (longest, 0))
    plan = plan_epoch(sizes, order=order, token_budget=budget, pairs_per_step=packing.pairs_per_step)
    row = max(plan.pack_step(0)[0], key=len)
    # Of what both completions begin with, a row that shares prompts has one copy, as of a beginning.
    shares = recipe.shares_prompts and not is_padded
    once = lengths.shared if shares else lengths.prompt
    again = np.zeros_like(once)
    if sizes.beginnings is not None:
        repeats = sizes.beginnings.repeats(row)
        again[repeats] = sizes.beginnings.tokens[repeats]
    parts = {
        "prompt": once - again if shares else 2 * once,
        "chosen": lengths.prompt + lengths.chosen - once,
        "rejected": lengths.prompt + lengths.rejected - once,
    }
    return {
        "pairs": {places[pair]: {part: int(of[pair]) for part, of in parts.items()} for pair in row},
        "tokens": plan.sizes.of_row(row).tokens,
        "token_budget": budget,
        "token_budget_of_little_memory": usual,  # `budget` needs memory that nobody has asked for here
    }
