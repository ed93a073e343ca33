"""Finds a source (a file, a directory or a hub id) and computes a key of its content."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpo_pack.data.keys import directory_hash, file_hash
from dpo_pack.data.readers import (
    READ_ROWS,
    READERS,
    ColumnNames,
    NumberedRow,
    OpenRows,
    data_suffix,
    open_rows,
    rows_of_columns,
)
from dpo_pack.recipe.schema import SourceRecipe
from dpo_pack.system.errors import DataError, RecipeError, first_line
from dpo_pack.system.hub import check_dataset

DEFAULT_SPLIT = "train"
_MEDIA_TYPE = re.compile(r"\b(Image|Video|Audio|Pdf|Nifti)\(")  # column types of `datasets` that are refused
_Found = tuple[str, Callable[[], OpenRows]]  # the fingerprint, and a function that opens the source


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSource:
    """A source that exists and can be opened."""

    label: str  # the path or hub id, as the user wrote it
    key: str  # its recipe key, "data.train.0"
    fingerprint: str  # names its content
    open: Callable[[], OpenRows]  # raises DataError if the source cannot be read


def locate_source(
    source: SourceRecipe, key: str, hash_memo: Path | None, *, prompts_suffice: bool = False
) -> LocatedSource:
    """Finds a source and computes a key of its content. `hash_memo` is a file that keeps the hashes of files.

    If `hash_memo` is None, files are not hashed, and their key is empty. If `prompts_suffice`, the rows of
    the source need no completions. Raises DataError if the source or split does not exist, RecipeError if the
    recipe names a split of a source without splits.
    """
    label = source.path
    names = ColumnNames(mapping=source.columns, label=label, key=key, prompts_suffice=prompts_suffice)
    path = Path(label)
    try:
        if path.exists():
            _check_has_no_hub_keys(source, key)
        if path.is_file():
            found = _find_file(path, source.split, names, hash_memo)
        elif path.is_dir():
            found = _find_directory(path, source.split, names, hash_memo)
        elif data_suffix(path) in READERS or label.startswith((".", "/", "~")) or label.count("/") > 1:
            raise DataError(f"{label}: no such file or directory in {Path.cwd()}; correct {key}.path")
        else:  # a hub id is "name" or "owner/name"
            check_dataset(label, f"{key}.path")
            dataset = _load_dataset(label, source.split, names, **_hub_options(source))
            found = str(dataset._fingerprint), lambda: _open_dataset(dataset, names)
    except OSError as error:
        raise DataError(f"{label}: {error.strerror or error}; check the path and its permissions") from error
    return LocatedSource(label=label, key=key, fingerprint=found[0], open=found[1])


_HUB_KEYS = {"config": "name", "data_dir": "data_dir", "revision": "revision"}  # ours -> of `datasets`


def _check_has_no_hub_keys(source: SourceRecipe, key: str) -> None:
    for name in _HUB_KEYS:
        if getattr(source, name) is not None:
            raise RecipeError(
                f"{key}.{name}: only data sets of the hub have one, and {source.path} is a local path; "
                f"leave {name} out, or name the files in {key}.path"
            )


def _hub_options(source: SourceRecipe) -> dict[str, str]:
    """Returns config, data_dir and revision, if set, as arguments of `datasets.load_dataset`."""
    values = {theirs: getattr(source, ours) for ours, theirs in _HUB_KEYS.items()}
    return {name: value for name, value in values.items() if value is not None}


def _find_file(path: Path, split: str, names: ColumnNames, hash_memo: Path | None) -> _Found:
    if split != DEFAULT_SPLIT:
        raise RecipeError(f"{names.key}.split: {names.label} is a file, which has no splits; leave split out")
    if data_suffix(path) not in READERS:
        raise DataError(f"{names.label}: no reader for this kind of file; there are: {', '.join(READERS)}")
    fingerprint = "" if hash_memo is None else file_hash(path, hash_memo)
    return fingerprint, lambda: READERS[data_suffix(path)](path, names)


def _find_directory(path: Path, split: str, names: ColumnNames, hash_memo: Path | None) -> _Found:
    """Tells how to open a directory: `datasets` saved it, with or without splits, or it has data files."""
    load = _load_saved
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if (child / "state.json").is_file())
        if split not in splits:
            there_are = ", ".join(splits)
            raise DataError(f"{names.label}: no split {split!r}; {names.key}.split can be: {there_are}")
        path = path / split
    elif (path / "state.json").is_file():
        if split != DEFAULT_SPLIT:
            raise RecipeError(f"{names.key}.split: {names.label} is saved without splits; leave split out")
    elif any(data_suffix(file) in READERS for file in path.rglob("*")):
        load = _load_dataset
    else:
        suffixes = ", ".join(READERS)
        raise DataError(f"{names.label}: no data files in it ({suffixes}); correct {names.key}.path")
    fingerprint = "" if hash_memo is None else directory_hash(path, hash_memo)
    return fingerprint, lambda: _open_dataset(load(str(path), split, names), names)


def _open_dataset(dataset: Any, names: ColumnNames) -> OpenRows:
    # `datasets` would decode images while it reads a row, so such columns are refused by their types.
    media = [name for name, kind in dataset.features.items() if _MEDIA_TYPE.search(repr(kind))]
    if media:
        raise DataError(
            f"{names.label}: column {media[0]!r} has images, video or audio, and only text is read; "
            "remove the column if the text alone is enough"
        )

    def read(columns: Sequence[str] | None) -> Iterator[NumberedRow]:
        wanted = list(columns or dataset.column_names)
        return rows_of_columns(dataset.select_columns(wanted).iter(batch_size=READ_ROWS))

    columns = [(field.name, str(field.type)) for field in dataset.features.arrow_schema]
    return open_rows(read, names, "row", columns=columns, num_rows=len(dataset))


def _load_saved(path: str, split: str, names: ColumnNames) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # the library raises errors of Arrow, of JSON and of its own
        raise DataError(
            f"{names.label}: `datasets` cannot load it ({_cause(error)}); save it again with save_to_disk"
        ) from error


def _load_dataset(path: str, split: str, names: ColumnNames, **hub_options: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(path, split=split, **hub_options)
    except Exception as error:  # the library raises errors of HTTP, of Arrow and of its own
        if "Unknown split" in str(error):
            raise DataError(
                f"{names.label}: {_cause(error)}; set {names.key}.split to the split you want"
            ) from error
        if "BuilderConfig" in str(error) or "Config name is missing" in str(error):
            raise DataError(
                f"{names.label}: {' '.join(str(error).split())[:500]}; set {names.key}.config to one of them"
            ) from error
        remedy = (
            f"mend the files or name one of them in {names.key}.path"
            if Path(path).is_dir()
            else f"no local file has this name: correct {names.key}.path, or check the network and HF_TOKEN"
        )
        raise DataError(f"{names.label}: `datasets` cannot load it ({_cause(error)}); {remedy}") from error


def _cause(error: BaseException) -> str:
    """Returns the first line of the innermost error, because libraries name the cause in that error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
