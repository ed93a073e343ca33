"""Where a source is: a file, a directory, the Hugging Face hub; and what names its content."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo_pack.data.keys import directory_hash, file_hash
from dpo_pack.data.readers import (
    READ_ROWS,
    READERS,
    ColumnNames,
    NumberedRow,
    OpenRows,
    data_suffix,
    open_file,
)
from dpo_pack.errors import DataError, RecipeError
from dpo_pack.hub import check_dataset

if TYPE_CHECKING:
    from dpo_pack.recipe_schema import SourceRecipe

DEFAULT_SPLIT = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSource:
    """A source that exists and can be opened."""

    label: str  # the path or hub id, as the user wrote it
    key: str  # its recipe key, "data.train.0"
    fingerprint: str  # of its content
    open: Callable[[], OpenRows]  # raises DataError when it cannot be read


def locate_source(
    source: "SourceRecipe", key: str, hash_memo: Path, *, prompts_suffice: bool = False
) -> LocatedSource:
    """Finds a source and names its content; `hash_memo` remembers hashes of files.

    `prompts_suffice`: its rows need no completions.
    Raises DataError when there is no such source or split, RecipeError when it has no splits to choose from.
    """
    label = source.path
    columns: dict[str, str] = {ours: theirs for ours, theirs in source.columns.items()}
    names = ColumnNames(mapping=columns, label=label, key=key, prompts_suffice=prompts_suffice)
    path = Path(label)
    try:
        if path.is_file():
            return _located_file(path, source.split, names, hash_memo)
        if path.is_dir():
            return _located_directory(path, source.split, names, hash_memo)
    except OSError as error:
        raise DataError(f"{label}: {error.strerror or error}; check the path and its permissions") from error
    if _looks_like_path(label):
        raise DataError(f"{label}: no such file or directory in {Path.cwd()}; correct {key}.path")
    check_dataset(label, f"{key}.path")
    dataset = _load_dataset(label, source.split, names)
    return _located_dataset(lambda: dataset, str(dataset._fingerprint), names)


def _located_file(path: Path, split: str, names: ColumnNames, hash_memo: Path) -> LocatedSource:
    if split != DEFAULT_SPLIT:
        raise RecipeError(f"{names.key}.split: {names.label} is a file, which has no splits; leave split out")
    if data_suffix(path) not in READERS:
        raise DataError(f"{names.label}: no reader for this kind of file; there are: {', '.join(READERS)}")
    return LocatedSource(
        label=names.label,
        key=names.key,
        fingerprint=file_hash(path, hash_memo),
        open=lambda: open_file(path, names),
    )


def _located_directory(path: Path, split: str, names: ColumnNames, hash_memo: Path) -> LocatedSource:
    """What `datasets` saved, with splits or without, or a directory of data files."""
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
        fingerprint = directory_hash(path, hash_memo)
        return _located_dataset(lambda: _load_dataset(str(path), split, names), fingerprint, names)
    else:
        suffixes = ", ".join(READERS)
        raise DataError(f"{names.label}: no data files in it ({suffixes}); correct {names.key}.path")
    return _located_dataset(lambda: _load_saved(path, names), directory_hash(path, hash_memo), names)


def _located_dataset(load: Callable[[], Any], fingerprint: str, names: ColumnNames) -> LocatedSource:
    return LocatedSource(
        label=names.label,
        key=names.key,
        fingerprint=fingerprint,
        open=lambda: _open_dataset(load(), names),
    )


def _open_dataset(dataset: Any, names: ColumnNames) -> OpenRows:
    columns = tuple(dataset.column_names)
    selected = names.select(columns)
    rows = _dataset_rows(dataset.select_columns(list(selected.values())), selected)
    return OpenRows(rows=rows, row_word="row", columns=columns, num_rows=len(dataset))


def _dataset_rows(dataset: Any, selected: dict[str, str]) -> Generator[NumberedRow, None, None]:
    number = 0
    for batch in dataset.iter(batch_size=READ_ROWS):
        for values in zip(*(batch[theirs] for theirs in selected.values()), strict=True):
            number += 1
            yield number, dict(zip(selected, values, strict=True))


def _load_saved(path: Path, names: ColumnNames) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises what its parts raise: Arrow's, JSON's, its own
        raise DataError(
            f"{names.label}: `datasets` cannot load it ({_cause(error)}); save it again with save_to_disk"
        ) from error


def _load_dataset(path: str, split: str, names: ColumnNames) -> Any:
    import datasets

    try:
        return datasets.load_dataset(path, split=split)
    except Exception as error:  # the library raises what its parts raise: HTTP's, Arrow's, its own
        if "Unknown split" in str(error):
            raise DataError(f"{names.label}: {_cause(error)} Set {names.key}.split") from error
        remedy = (
            f"mend the files or name one of them in {names.key}.path"
            if Path(path).is_dir()
            else f"nor is it a local file: correct {names.key}.path, or check the network and HF_TOKEN"
        )
        raise DataError(f"{names.label}: `datasets` cannot load it ({_cause(error)}); {remedy}") from error


def _looks_like_path(label: str) -> bool:
    """Hub ids are "name" or "owner/name", without a data file's suffix."""
    return data_suffix(Path(label)) in READERS or label.startswith((".", "/", "~")) or label.count("/") > 1


def _cause(error: BaseException) -> str:
    """The first line of the innermost error, where libraries say what happened."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
