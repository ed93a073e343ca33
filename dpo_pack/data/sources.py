"""Loads the sources of a recipe: pairs or prompts for training and evaluation, and a report about rows.

A source is a file, a directory or a hub id. The token ids of its pairs are kept on disk, in its store.
Prompts are kept in memory only, because judges read their text, which a store does not have.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dpo_pack.data.beginnings import table_of
from dpo_pack.data.images import ImageProcessor
from dpo_pack.data.ingest import SMALLEST_RANGE, Ingestion, LocatedSource, Progress, write_ranges
from dpo_pack.data.readers import (
    READ_ROWS,
    ColumnNames,
    NumberedRow,
    OpenRows,
    check_first_bytes,
    data_suffix,
    open_files,
    open_tables,
)
from dpo_pack.data.selection import select_pairs
from dpo_pack.data.store import (
    Keys,
    PairTable,
    TokenStore,
    content_key,
    distinct_keys,
    open_store,
    path_hash,
    write_store,
)
from dpo_pack.data.tokenization import BEGINNINGS, TOKENIZATION_VERSION, Prompt, tokenizer_fingerprint
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.packing.lengths import AnyIntArray, FloatArray, IntArray
from dpo_pack.recipe.data import DATA_FILE_SUFFIXES, SELECTING_KEYS, source_names
from dpo_pack.recipe.schema import DataRecipe, EvalFraction, SourceRecipe
from dpo_pack.system.errors import DataError, RecipeError
from dpo_pack.system.files import Json
from dpo_pack.system.process import printable

HELD_OUT = "held_out"  # name of the eval set of `eval: {fraction: ...}`
DEFAULT_SPLIT = "train"
_HUB_KEYS = {"config", "data_dir", "revision"}

# The recipe keys that do not change a source's tokens. A store's name is a hash of the other keys, so a key
# that somebody forgets to list here costs a new store; it never finds tokens of an old value. The
# content of a hub data set, which `datasets` names, depends on config, data_dir and revision.
_SOURCE_KEYS_BESIDE_TOKENS = {
    *("path", "name", "weight", "share", *_HUB_KEYS, *SELECTING_KEYS),
    *("chat_template_kwargs", "image_folder", "turns"),  # see _facts_of_tokens
}
_DATA_KEYS_BESIDE_TOKENS = {
    *("train", "eval", "shuffle", "num_workers"),
    *("scored_turns", "chat_template_kwargs", "continue_final_message", "max_pixels"),  # see _facts_of_tokens
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSource:
    """The pairs of a source. A source of prompts only has pairs whose completions have no tokens."""

    recipe: SourceRecipe
    store: TokenStore
    rows_tokenized: int  # 0 if the store was in the cache
    prompts: tuple[Prompt, ...] = ()  # one for each pair of the store
    columns_read: Mapping[str, str] = field(default_factory=dict)  # field -> column, of rows read now
    reads_all: bool = True  # False: `max_rows` or the source's max_pairs ended the reading


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """All pairs or prompts that the section `data` of a recipe describes."""

    train: PairTable  # of an online run: pairs that have a prompt and empty completions
    eval: dict[str, PairTable]  # the held-out sets by their names in metrics; empty if rows are prompts
    source_weights: FloatArray  # [training sources] how often an epoch has their pairs
    report: Json  # the content of data_report.json
    fingerprint: str  # a hash of the training pairs and source weights
    eval_fingerprint: str  # a hash of the eval sets' names and pairs
    prompts: tuple[Prompt, ...] = ()  # only of an online run, which generates its pairs later
    eval_prompts: dict[str, tuple[Prompt, ...]] = field(default_factory=dict)  # by held-out set


def load_data(
    data: DataRecipe,
    *,
    tokenizer: Tokenizer,
    seed: int,
    cache_dir: Path,
    images: ImageProcessor | None = None,
    progress: Progress | None = None,
    max_new_tokens: int | None = None,
) -> Data:
    """Reads and tokenises the sources, unless `cache_dir` has their tokens; `seed` decides what is held out.
    With `max_new_tokens`, rows are prompts. Raises DataError, ModelError, RecipeError and CacheError."""
    ingest = partial(Ingestion, data=data, tokenizer=tokenizer, images=images, progress=progress)
    tokenizer_key, memo = tokenizer_fingerprint(tokenizer), cache_dir / "file_hashes.json"
    loaded: dict[str, dict[str, LoadedSource]] = {"train": {}, "eval": {}}
    for part, of_part in (("train", data.train), ("eval", data.eval_sources)):
        for number, (source, name) in enumerate(zip(of_part, source_names(of_part), strict=True)):
            located = locate_source(source, f"data.{part}.{number}", memo, reads_images=images is not None)
            ingestion = ingest(located=located, source=source, completion_tokens=max_new_tokens)
            loaded[part][name] = load_source(ingestion, tokenizer_key, cache_dir)
    token = -1 if images is None else images.token_id
    return _divided(loaded, data, seed, token, is_pairs=max_new_tokens is None)


def _divided(
    loaded: dict[str, dict[str, LoadedSource]],
    recipe: DataRecipe,
    seed: int,
    image_token: int,
    *,
    is_pairs: bool,
) -> Data:
    sources, eval_sources, held_out = loaded["train"], loaded["eval"], recipe.eval
    train = table_of([source.store for source in sources.values()], image_token)
    evals = {name: table_of([source.store], image_token) for name, source in eval_sources.items()}
    prompts = tuple(prompt for source in sources.values() for prompt in source.prompts)
    shares = np.array([source.recipe.share or 0.0 for source in sources.values()])
    if shares.all():
        mixed = _mixed(train.source_indices, shares)
        train, prompts = train.select(mixed), tuple(prompts[n] for n in mixed) if prompts else ()
    in_mixture = np.bincount(train.source_indices, minlength=len(shares)).tolist()
    eval_prompts = {name: source.prompts for name, source in eval_sources.items()}
    held_out_by = None
    if isinstance(held_out, EvalFraction):
        *parts, held_out_by = _split(train, sources, held_out.fraction, seed)
        train, evals[HELD_OUT] = (train.select(part) for part in parts)
        if not is_pairs:
            prompts, eval_prompts[HELD_OUT] = (tuple(prompts[n] for n in part) for part in parts)
    recipes = {f"data.train.{number}": source.recipe for number, source in enumerate(sources.values())}
    selection: list[Json] = [{} for _ in recipes]
    if any(source.selecting_keys for source in recipes.values()):
        chosen, selection = select_pairs(train, recipes, seed)
        train = train.select(chosen)
    source_weights = np.array([source.recipe.weight for source in sources.values()], dtype=np.float64)
    of_sources = np.bincount(train.source_indices, minlength=len(source_weights))
    if (of_sources * source_weights < 0.5).all():  # as `epoch_order` rounds
        raise DataError(
            "data.train: with the sources' weights an epoch has no pair; raise data.train.*.weight"
        )
    report: Json = {"train": _describe(train, is_pairs), "eval": {}, "held_out_by": held_out_by}
    report["train"]["sources"] = [
        _of_source(name, one, is_pairs)
        | ({"pairs_in_mixture": number} if one.recipe.share else {})
        | ({"selection": selected} if selected else {})
        for (name, one), number, selected in zip(sources.items(), in_mixture, selection, strict=True)
    ]
    for name, table in evals.items():
        report["eval"][name] = _describe(table, is_pairs) if is_pairs else {"prompts": table.num_pairs}
        if name in eval_sources:
            report["eval"][name]["source"] = _of_source(name, eval_sources[name], is_pairs)
    if is_pairs:
        every = (*sources.values(), *eval_sources.values())
        report |= _repeated(train, [*evals.values()])
        report["rows_tokenized"] = sum(source.rows_tokenized for source in every)
    weighted = content_key([train.fingerprint, source_weights.tolist()])
    return Data(
        train=train,
        eval=evals if is_pairs else {},
        source_weights=source_weights,
        report=report,
        fingerprint=weighted if is_pairs else train.fingerprint,
        eval_fingerprint=content_key([[name, table.fingerprint] for name, table in evals.items()]),
        prompts=prompts,
        eval_prompts={} if is_pairs else eval_prompts,
    )


def _mixed(source_indices: AnyIntArray, shares: FloatArray) -> IntArray:
    """Returns the first pairs of each source that has some, as many as give each its part of the mixture."""
    sizes, parts = np.bincount(source_indices, minlength=len(shares)), shares / shares.sum()
    kept = np.round((sizes / parts)[sizes > 0].min() * parts).astype(np.int64)
    rank = np.arange(len(source_indices)) - (np.cumsum(sizes) - sizes)[source_indices]
    return np.flatnonzero(rank < kept[source_indices])


# ---- Held-out pairs


def _split(
    train: PairTable, sources: dict[str, LoadedSource], fraction: float, seed: int
) -> tuple[IntArray, IntArray, str]:
    """Returns the training pairs, the held-out pairs, and what pairs have in common that stay together."""
    together = keys_together(train, [source.store.summary for source in sources.values()])
    if len(together) == 1:
        ((what, keys),) = together.items()
        return *split_by_prompt(keys, fraction, seed), what
    for what, keys in together.items():  # the first that leaves (1 - fraction) / 2 of the pairs to train on
        with suppress(DataError):
            kept, held_out = split_by_prompt(keys, fraction, seed)
            if len(kept) >= (1 - fraction) / 2 * train.num_pairs:
                return kept, held_out, what
    raise DataError(
        f"data.eval.fraction: the sources have no column of prompts, and too many pairs begin with the same "
        f"{BEGINNINGS[-1]} characters; name the column in data.train.*.columns.prompt, or name a source in "
        "data.eval"
    )


def keys_together(train: PairTable, summaries: Iterable[Mapping[str, Any]]) -> dict[str, Keys]:
    """Returns what pairs have in common that stay together, and its [P, bytes] keys. `summaries`: of sources.
    There are several where prompts are inferred, the shortest beginning first."""
    if any(part.images is not None for part in train.parts):
        return {"image": keys_by_image(train)}
    if not any(summary.get("prompts_inferred") for summary in summaries):
        return {"prompt": train.whole_prompt_keys}
    # Nobody knows where a prompt without a column ends, but pairs of one prompt begin alike. More characters
    # may be a part of an answer.
    lengths = enumerate(BEGINNINGS, start=1)
    return {f"first {length} characters": train.whole_prompt_keys[:, :number] for number, length in lengths}


def keys_by_image(pairs: PairTable) -> Keys:
    """Returns [P, 16] keys: pairs that share an image, also by way of other pairs, have one key, because many
    ask "What is in this image?". A pair without images has the key of its prompt."""
    owners, images = [], []
    for number, part in enumerate(pairs.parts):
        if part.images is not None:
            of_part = np.flatnonzero(pairs.part_indices == number)
            offsets, begins = pairs.offsets[of_part], part.images.pairs["begin"]
            is_here = np.isin(begins, offsets)  # a mixture has a part of the pairs
            owners.append(of_part[np.searchsorted(offsets, begins[is_here])])
            images.append(part.images.records["key"][part.images.pairs["image"][is_here]])
    keys, owner = pairs.whole_prompt_keys.copy(), np.concatenate(owners)
    of_images = np.concatenate(images)
    first, image = distinct_keys(of_images)
    keys[owner] = of_images[first][components(len(first), image, owner)[image]]
    return keys


def components(num: int, members: IntArray, groups: IntArray) -> IntArray:
    """Returns of each of `num` members the smallest that shares a group with it, also by way of others.
    Member members[n] is in group groups[n]."""
    labels, before = np.arange(num), None
    while before is None or (labels != before).any():
        before = labels.copy()
        smallest = np.full(groups.max(initial=-1) + 1, num)
        np.minimum.at(smallest, groups, labels[members])
        np.minimum.at(labels, members, smallest[groups])
    return labels


def split_by_prompt(prompt_keys: Keys, fraction: float, seed: int) -> tuple[IntArray, IntArray]:
    """Returns the indices of the training pairs and of the held-out pairs, at least `fraction` of all,
    whatever their order. Pairs of one prompt stay together. Raises DataError if none is left to train on."""
    prompts, prompt_of_pair = distinct_keys(prompt_keys)
    pairs_of_prompt = np.bincount(prompt_of_pair)
    salt = seed.to_bytes(16, "little", signed=True)
    keys, width = prompt_keys[prompts].tobytes(), prompt_keys.shape[1]
    starts = range(0, len(keys), width)
    ranks = [hashlib.blake2b(keys[at : at + width], key=salt, digest_size=8).digest() for at in starts]
    order = np.argsort(np.frombuffer(b"".join(ranks), dtype="<u8"), kind="stable")
    wanted_pairs = fraction * len(prompt_keys)
    num_held_out = int(np.searchsorted(np.cumsum(pairs_of_prompt[order]), wanted_pairs)) + 1
    if num_held_out >= len(prompts):
        raise DataError(
            f"data.eval.fraction: {fraction} of {len(prompt_keys)} pairs with {len(prompts)} prompts leaves "
            "none to train on; lower the fraction, or name a source in data.eval"
        )
    is_held_out = np.zeros(len(prompts), dtype=bool)
    is_held_out[order[:num_held_out]] = True
    return np.flatnonzero(~is_held_out[prompt_of_pair]), np.flatnonzero(is_held_out[prompt_of_pair])


# ---- The report


def _repeated(train: PairTable, evals: Sequence[PairTable]) -> dict[str, int]:
    keys = [_pair_keys(one.chosen_keys, one.rejected_keys) for one in (train, *evals)]
    swapped = _pair_keys(train.rejected_keys, train.chosen_keys)
    # Equal keys have equal numbers.
    prompt_numbers = distinct_keys(np.concatenate([one.whole_prompt_keys for one in (train, *evals)]))[1]
    pair_numbers = distinct_keys(np.concatenate([swapped, *keys]))[1]
    contradicting, pairs, held_out = np.split(pair_numbers, [train.num_pairs, 2 * train.num_pairs])
    prompts, held_out_prompts = np.split(prompt_numbers, [train.num_pairs])
    return {
        "train_pairs_contradicted": int(np.isin(pairs, contradicting).sum()),
        "train_pairs_in_eval": int(np.isin(pairs, held_out).sum()),
        "train_prompts_in_eval": len(np.intersect1d(prompts, held_out_prompts)),
    }


def _pair_keys(chosen: Keys, rejected: Keys) -> Keys:
    """Returns [P, 16] keys: sums of hashes, which are as seldom equal by chance."""
    first, second = (np.ascontiguousarray(keys).view("<u8") for keys in (chosen, rejected))
    keys: Keys = (first + 3 * second).view(np.uint8)
    return keys


def _of_source(name: str, source: LoadedSource, is_pairs: bool) -> Json:
    store = source.store
    settings = source.recipe.model_dump(include={"path", "split", "weight"})
    counts: Json = {"name": name, **settings, **store.summary}
    if is_pairs:
        counts |= _describe(PairTable.of([store]), is_pairs)
        counts |= {"token_store": str(store.directory), "token_store_reused": source.rows_tokenized == 0}
    return counts


def _describe(pairs: PairTable, is_pairs: bool) -> Json:
    num_prompts = len(distinct_keys(pairs.whole_prompt_keys)[0])
    counts = {"prompts": pairs.num_pairs, "distinct_prompts": num_prompts}
    lengths = {"prompt": pairs.prompt_lengths}
    if is_pairs:
        num_distinct = len(distinct_keys(_pair_keys(pairs.chosen_keys, pairs.rejected_keys))[0])
        counts = {"pairs": pairs.num_pairs, "prompts": num_prompts}
        counts["duplicate_pairs"] = pairs.num_pairs - num_distinct
        lengths |= {"chosen": pairs.chosen_lengths, "rejected": pairs.rejected_lengths}
        longer = np.maximum(pairs.chosen_lengths, pairs.rejected_lengths)
        lengths["longest_sequence"] = pairs.prompt_lengths + longer
    tokens: dict[str, dict[str, float]] = {}
    for name, values in lengths.items():
        parts = {"p50": 50, "p90": 90, "p99": 99, "max": 100}  # lengths that occur, not interpolated
        found = np.percentile(values, [*parts.values()], method="inverted_cdf").astype(int).tolist()
        tokens[name] = {"mean": float(values.mean()), **dict(zip(parts, found, strict=True))}
    return {**counts, "lengths_tokens": tokens}


# ---- Sources


def load_source(ingestion: Ingestion, tokenizer_key: str, cache_dir: Path) -> LoadedSource:
    """Returns the pairs of one source, which are written into the cache if it lacks them. Prompts, and the
    first `max_rows`, are not written. Raises DataError and ModelError."""
    source = ingestion.source
    with ingestion.start() as rows:
        if ingestion.completion_tokens is not None or ingestion.max_rows is not None:
            return _read_source(ingestion, rows)
        facts = _facts_of_tokens(ingestion, tokenizer_key)
        directory = cache_dir / "tokens" / content_key({**facts, "source": ingestion.located.fingerprint})
        store = open_store(directory)
        if store is None and (source.max_pairs or SMALLEST_RANGE) >= SMALLEST_RANGE:
            if (num_rows := ingestion.opened.num_rows) is None:
                with closing(ingestion.located.open().unparsed) as more:
                    num_rows = sum(1 for _ in islice(more, SMALLEST_RANGE))
            if num_rows >= SMALLEST_RANGE:
                store = write_ranges(directory, ingestion, facts)
        if store is None:
            batches = (batch.pairs for batch in ingestion.batches(rows))  # raises DataError if there is none
            store = write_store(directory, batches, ingestion.summary)
    assert store is not None
    num_rows = ingestion.num_rows - ingestion.num_cached
    return LoadedSource(recipe=source, store=replace(store, label=source.path), rows_tokenized=num_rows)


def _read_source(ingestion: Ingestion, rows: Iterator[NumberedRow]) -> LoadedSource:
    """Returns a source of prompts, or the first rows of one of pairs, in memory only."""
    read = list(ingestion.batches(rows))
    return LoadedSource(
        recipe=ingestion.source,
        store=TokenStore.of_ranges((batch.pairs for batch in read), ingestion.summary()),
        rows_tokenized=ingestion.num_rows,
        prompts=tuple(prompt for batch in read for prompt in batch.prompts),
        columns_read=ingestion.columns_read,
        reads_all=next(rows, None) is None,
    )


def _facts_of_tokens(ingestion: Ingestion, tokenizer_key: str) -> Json:
    """Returns all that decides the token ids of given rows; a store's name is a hash of this and of rows."""
    data, settings = ingestion.data, ingestion.settings
    facts: Json = {
        "version": TOKENIZATION_VERSION,
        "tokenizer": tokenizer_key,
        **ingestion.source.model_dump(mode="json", exclude=_SOURCE_KEYS_BESIDE_TOKENS),
        **data.model_dump(mode="json", exclude=_DATA_KEYS_BESIDE_TOKENS),
        "found_format": ingestion.format,
    }
    if settings.content == "messages":  # in transcripts these keys say that `turns` are messages
        facts["scored_turns"] = data.scored_turns
        facts["chat_template_kwargs"] = settings.template_options
        facts["continue_final_message"] = data.continue_final_message
    if (reader := settings.images) is not None:
        facts["images"] = [reader.processor.fingerprint, str(reader.folder), reader.max_pixels]
    return facts


def locate_source(
    source: SourceRecipe, key: str, hash_memo: Path | None, *, reads_images: bool = False
) -> LocatedSource:
    """Finds a source and computes a key of its content, "" without `hash_memo`, a file of hashes. Raises
    DataError if the source or split does not exist, RecipeError if keys of the recipe do not fit it."""
    label, path = source.path, Path(source.path)
    names = ColumnNames(source=source, key=key, reads_images=reads_images)
    unread: list[str] = []
    try:
        if not path.exists():
            return _find_on_hub(names)
        for name in source.model_dump(include=_HUB_KEYS, exclude_none=True):
            raise RecipeError(
                f"{key}.{name}: only data sets of the hub have one, and {label} is a local path; "
                f"leave {name} out, or name the files in {key}.path"
            )
        if path.is_dir():
            path, open_source, unread = _find_directory(path, names)
        else:
            if source.split != DEFAULT_SPLIT:
                raise RecipeError(f"{key}.split: {label} is a file, which has no splits; leave split out")
            if data_suffix(path) not in DATA_FILE_SUFFIXES:
                known = ", ".join(DATA_FILE_SUFFIXES)
                raise DataError(f"{label}: no reader for this kind of file; there are: {known}")
            check_first_bytes(path, label)
            open_source = partial(open_files, [path], names)
        found: Callable[[], str] = str if hash_memo is None else partial(path_hash, path, hash_memo)
        return LocatedSource(
            label=label, key=key, fingerprint=found(), hash=found, open=open_source, files_not_read=unread
        )
    except OSError as error:
        raise DataError(f"{label}: {error.strerror or error}; check the path and its permissions") from error


def _find_on_hub(names: ColumnNames) -> LocatedSource:
    source, label, key = names.source, names.source.path, names.key
    is_path = data_suffix(Path(label)) in DATA_FILE_SUFFIXES or label.startswith((".", "/", "~"))
    if is_path or label.count("/") > 1:
        raise DataError(f"{label}: no such file or directory in {Path.cwd()}; correct {key}.path")
    options = {"name": source.config, "data_dir": source.data_dir, "revision": source.revision}
    dataset = _load_dataset(label, names, {"split": source.split, **options})
    fingerprint, open_source = str(dataset._fingerprint), partial(_open_dataset, dataset, names)
    return LocatedSource(
        label=label, key=key, fingerprint=fingerprint, hash=lambda: fingerprint, open=open_source
    )


def _find_directory(path: Path, names: ColumnNames) -> tuple[Path, Callable[[], OpenRows], list[str]]:
    """Returns the directory of the split, saved by `datasets` or not, how to open it, and unread files."""
    label, split = names.source.path, names.source.split
    files, unread, is_saved = list[Path](), list[str](), True
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if (child / "state.json").is_file())
        if split not in splits:
            there_are = ", ".join(splits)
            raise DataError(f"{label}: no split {split!r}; {names.key}.split can be: {there_are}")
        path = path / split
    elif (path / "state.json").is_file():
        if split != DEFAULT_SPLIT:
            raise RecipeError(f"{names.key}.split: {label} is saved without splits; leave split out")
    elif any(data_suffix(file) in DATA_FILE_SUFFIXES for file in path.rglob("*")):
        is_saved = False
        files, unread = _files_of_split(path, split)
        for file in files:
            check_first_bytes(file, str(file))
    else:
        raise DataError(
            f"{label}: no data files in it ({', '.join(DATA_FILE_SUFFIXES)}); correct {names.key}.path"
        )

    def open_source() -> OpenRows:
        if files and all(data_suffix(file).startswith((".json", ".csv")) for file in files):
            return open_files(files, names)
        options = {} if is_saved else {"split": split}
        return _open_dataset(_load_dataset(str(path), names, options, is_saved=is_saved), names)

    return path, open_source, unread


def _files_of_split(path: Path, split: str) -> tuple[list[Path], list[str]]:
    """Returns the files of a directory's split, none if `datasets` must read them, and the names of those in
    no split. We read JSON and CSV ourselves, because `datasets` guesses the types of values."""
    import datasets

    try:
        config = datasets.load_dataset_builder(str(path)).config
    except Exception:  # `_load_dataset` says why
        return [], []
    options = vars(config)
    splits = {str(name): [*map(Path, files)] for name, files in (config.data_files or {}).items()}
    found = {file.resolve() for files in splits.values() for file in files}
    ignored = datasets.data_files.FILES_TO_IGNORE  # descriptions
    others = (file for file in sorted(path.rglob("*")) if data_suffix(file) in DATA_FILE_SUFFIXES)
    others = (file for file in others if file.resolve() not in found and file.name not in ignored)
    unread = [name for file in others if "/." not in f"/{(name := printable(str(file.relative_to(path))))}"]
    is_read_by_us = options.get("field") is None and options.get("sep", ",") == ","
    return splits.get(split, []) if is_read_by_us else [], unread


def _open_dataset(dataset: Any, names: ColumnNames) -> OpenRows:
    def read(columns: list[str]) -> Iterator[Any]:
        return iter(dataset.select_columns(columns).with_format("arrow").iter(batch_size=READ_ROWS))

    return open_tables(read, names, dataset.features.arrow_schema, len(dataset))


def _load_dataset(
    path: str, names: ColumnNames, options: Mapping[str, str | None], *, is_saved: bool = False
) -> Any:
    """Loads a data set of the hub or a directory; `is_saved`: one that `save_to_disk` wrote."""
    import datasets

    try:
        return (datasets.load_from_disk if is_saved else datasets.load_dataset)(path, **options)
    except Exception as error:  # the library raises errors of HTTP, Arrow, JSON and of its own
        cause: BaseException = error
        while cause.__cause__ is not None:  # libraries name the cause in the innermost error
            cause = cause.__cause__
        remedy = f"correct {names.key}.path, .split or .config"
        if Path(path).is_dir():
            remedy = f"mend the files, or {remedy}"
        else:
            remedy += ", or check the network and HF_TOKEN; no local file has this name"
        told = " ".join(str(cause).split())[:500]  # it may list the configurations or splits
        raise DataError(f"{names.source.path}: `datasets` cannot load it ({told}); {remedy}") from error
