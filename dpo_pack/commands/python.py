"""The commands as Python functions, for scripts and notebooks.

    import dpo_pack
    run = dpo_pack.train("recipe.yaml", **{"optim.lr": 1e-6})
    run.metrics[-1]["rewards/accuracies"]

A recipe is a path, a dict with the keys of a recipe, or a `Recipe`. Keyword arguments set keys, as KEY=VALUE
does on the command line. Errors that the user can mend are DpoPackErrors with a message of one line.

A value can be a Python object that YAML cannot hold; the recipe then keeps text. A function becomes
`module:name`, so a resumed run needs a function of this name. A `datasets.Dataset` as a source's path is
copied to a parquet file in the cache directory, named by a hash; the recipe keeps the path of the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo_pack.commands.main import let_segments_grow
from dpo_pack.recipe.load import Recipe, check_environment, load_recipe, parse_recipe
from dpo_pack.system.errors import RecipeError
from dpo_pack.system.imports import many_imports
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.placement import placement

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console

    from dpo_pack.data.view import ShownRecipe
    from dpo_pack.packing.report import PackingReport

AnyRecipe = str | Path | Mapping[str, Any] | Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The output directory of a run. The properties read its files at each access."""

    path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one dict for each logged step or evaluation."""
        text = (self.path / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def evaluation(self) -> dict[str, Any]:
        """The metrics of the newest evaluation by held-out set; empty if no pairs are held out."""
        info = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        return dict(info.get("evaluation") or {})

    @property
    def model_path(self) -> Path:
        return self.path / "model"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"


def train(recipe: AnyRecipe, *, overwrite: bool = False, **overrides: Any) -> Run:
    """Trains, or resumes the run in `output_dir`, as `dpopack train` does. Returns the finished run.

    Trains in this process, on one device; if torchrun or accelerate launch started several processes, each
    trains on its own device. An interrupt (in a notebook: the stop button) saves the state and then raises
    KeyboardInterrupt.
    """
    with _prepared(recipe, overrides, trains=True) as (loaded, console):
        from dpo_pack.train import train as run_training

        run_training(loaded, console, overwrite=overwrite)
    return Run(path=Path(loaded.output_dir))


def evaluate(recipe: AnyRecipe, model: str | Path | None = None, **overrides: Any) -> dict[str, Any]:
    """Returns a model's metrics for each held-out set, as `dpopack evaluate --json` writes them.

    model: a directory or a hub id; None: the model in `output_dir`.
    """
    with _prepared(recipe, overrides) as (loaded, console):
        from dpo_pack.reports.evaluation_tables import render_results, results_json
        from dpo_pack.run.evaluation import evaluate_models

        (results,) = evaluate_models(loaded, [None if model is None else str(model)], console)
        render_results(results, console)
        return results_json(results)


def inspect_packing(
    recipe: AnyRecipe,
    *,
    ranks: Sequence[int] = (1, 8, 64),
    budgets: Sequence[int] = (4096, 8192, 16384),
    **overrides: Any,
) -> PackingReport:
    """Prints how full packed rows are and what packing saves, and returns the numbers; loads no weights."""
    with _prepared(recipe, overrides) as (loaded, console):
        from dpo_pack.reports.packing_tables import render_packing
        from dpo_pack.run.batches import inspect_recipe

        report = inspect_recipe(loaded, console, num_ranks=ranks, budgets=budgets)
        render_packing(report, console)
        return report


def show(
    recipe: AnyRecipe, *, pairs: Sequence[int] = (), dropped: bool = False, **overrides: Any
) -> ShownRecipe:
    """Prints pairs as the tokens that the model will get, and returns them; loads no weights.

    pairs: rows of the data to show, counted from 1. dropped: read all rows, and list those that are left out.
    """
    with _prepared(recipe, overrides) as (loaded, console):
        from dpo_pack.reports.pair_views import render_pairs
        from dpo_pack.run.show import show_recipe

        shown = show_recipe(loaded, console, asked_rows=set(pairs), reads_all=dropped)
        render_pairs(shown, console, lists_dropped=dropped)
        return shown


@contextlib.contextmanager
def _prepared(
    recipe: AnyRecipe, overrides: Mapping[str, Any], *, trains: bool = False
) -> Iterator[tuple[Recipe, Console]]:
    """Loads and checks the recipe; if a launcher started several processes, connects them."""
    loaded = load(recipe, overrides)
    let_segments_grow(loaded)
    check_environment(loaded, trains=trains)
    with many_imports():
        import dpo_pack.train  # noqa: F401
        from dpo_pack.commands.launch import on_every_rank
    try:
        with on_every_rank(loaded) as console:
            yield loaded, console
    except Interrupted as stopped:
        if stopped.exit_status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(stopped)) from None
        raise


def load(recipe: AnyRecipe, overrides: Mapping[str, Any]) -> Recipe:
    """Makes a Recipe from a caller's arguments, for one process unless a launcher started this one.

    Raises RecipeError if the recipe is not valid or asks for several processes.
    """
    texts = [f"{key}={json.dumps(_as_yaml(value, key))}" for key, value in overrides.items()]
    if isinstance(recipe, str | Path):
        loaded = load_recipe(Path(recipe), texts)
    elif isinstance(recipe, Mapping):
        loaded = parse_recipe(_as_yaml(recipe, "recipe"), texts)
    else:
        loaded = parse_recipe(recipe.model_dump(mode="json"), texts)
    if placement(os.environ) is not None:
        return loaded
    if loaded.distributed.num_processes not in ("auto", 1):
        raise RecipeError(
            "distributed.num_processes: a call from Python trains in its own process; leave it at auto, or "
            "start the script with torchrun, or use 'dpopack train'"
        )
    return parse_recipe(loaded.model_dump(mode="json"), ["distributed.num_processes=1"])


def _as_yaml(value: Any, key: str) -> Any:
    """Returns the value; a function, path or `Dataset` in it is replaced by text, which YAML can hold."""
    if isinstance(value, Mapping):
        return {name: _as_yaml(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_yaml(each, f"{key}.{number}") for number, each in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value):
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        if getattr(sys.modules.get(module), name, None) is not value:
            raise RecipeError(f"{key}: {value} has no name in its module; define it there with def")
        return f"{module}:{name}"
    datasets = sys.modules.get("datasets")  # None: not imported, so no Dataset can exist
    return str(_copy_of(value)) if datasets and isinstance(value, datasets.Dataset) else value


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _copy_of(dataset: Dataset) -> Path:
    """Writes the rows to a parquet file in the cache directory, named by its hash; returns its path."""
    from dpo_pack.reference.cache import default_cache_directory

    directory = default_cache_directory() / "datasets"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        written = Path(temporary) / "rows.parquet"
        with _without_bars():
            dataset.to_parquet(str(written))
        with written.open("rb") as file:
            name = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        copy = directory / f"{name}.parquet"
        os.replace(written, copy)
        return copy
