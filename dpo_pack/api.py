"""The commands as Python functions, for scripts and notebooks. `dpopack` calls these functions, too.

    run = dpo_pack.train("recipe.yaml", **{"optim.lr": 1e-6})

A recipe is a path, a dict with the keys of a recipe, or a `Recipe`. Keyword arguments set keys, as KEY=VALUE
does on the command line. Errors that the user can mend are DpoPackErrors with a message of one line.

`train`, `precompute_ref` and `evaluate` run in this process, on one device; if torchrun or accelerate launch
started several processes, each uses its own device. `dpopack` gives a `command`: if the recipe needs several
processes, each of them runs this command.
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

from dpo_pack.system.errors import RecipeError
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.process import many_imports, say

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console

    from dpo_pack.data.view import ShownRecipe
    from dpo_pack.packing.report import PackingReport
    from dpo_pack.recipe.load import Recipe

    AnyPath = str | Path
    AnyRecipe = AnyPath | Mapping[str, Any] | Recipe


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


def train(
    recipe: AnyRecipe,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    verbose: bool = False,
    command: Sequence[str] | None = None,
    **overrides: Any,
) -> Run:
    """Trains, or resumes the run in `output_dir`. Returns the run.

    An interrupt (in a notebook: the stop button) saves the state and then raises KeyboardInterrupt.
    """
    with _on_every_rank(recipe, overrides, command, trains=True, verbose=verbose) as (loaded, console):
        from dpo_pack.trainer import train as run_training

        run_training(loaded, console, overwrite=overwrite, dry_run=dry_run)
    return Run(path=Path(loaded.output_dir))


def precompute_ref(
    recipe: AnyRecipe, *, verbose: bool = False, command: Sequence[str] | None = None, **overrides: Any
) -> dict[str, int]:
    """Computes the reference log-probs that the cache lacks. Returns the numbers of sequences, under the
    names that run.json has for them."""
    with _on_every_rank(recipe, overrides, command, verbose=verbose) as (loaded, console):
        from dpo_pack.run.pairs import prepare_reference
        from dpo_pack.run.setup import prepare

        if loaded.reference.sync is not None:
            raise RecipeError("reference.sync: a reference that follows the policy cannot be precomputed")
        setup = prepare(loaded, console)
        if not setup.objective.needs_reference:
            raise RecipeError("loss.type: this loss needs no reference, so there is nothing to precompute")
        done = prepare_reference(setup)
        console.print(
            f"Cache: {done.cache.directory}; {done.num_cached:,} sequences reused, "
            f"{done.num_computed:,} computed"
        )
        return {
            "reference_sequences_cached": done.num_cached,
            "reference_sequences_computed": done.num_computed,
        }


def evaluate(
    recipe: AnyRecipe,
    model: AnyPath | None = None,
    *,
    compare: tuple[AnyPath, AnyPath] | None = None,
    quiet: bool = False,
    command: Sequence[str] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Prints a model's metrics for each held-out set and returns them, as `dpopack evaluate --json` does.

    model: a directory or a hub id; None: the model in `output_dir`. compare: two models, and their paired
    difference, second minus first.
    """
    if model is not None and compare is not None:
        raise RecipeError("evaluate: give --model or --compare, not both")
    with _on_every_rank(recipe, overrides, command, quiet=quiet) as (loaded, console):
        from dpo_pack.reports import evaluation_tables as tables
        from dpo_pack.run.evaluate import compare_models, evaluate_models

        if compare is None:
            (results,) = evaluate_models(loaded, [None if model is None else str(model)], console)
            tables.render_results(results, console)
            return {name: result.record for name, result in results.items()}
        both = (str(compare[0]), str(compare[1]))
        comparisons = compare_models(*evaluate_models(loaded, both, console), seed=loaded.seed)
        tables.render_comparisons(comparisons, both, console)
        return tables.comparisons_json(comparisons, both)


def inspect_packing(
    recipe: AnyRecipe,
    *,
    ranks: Sequence[int] = (1, 8, 64),
    budgets: Sequence[int] = (4096, 8192, 16384),
    quiet: bool = False,
    **overrides: Any,
) -> PackingReport:
    """Prints how full packed rows are and what packing saves, and returns the numbers; loads no weights."""
    loaded = load(recipe, overrides)
    with many_imports():
        from dpo_pack.reports.packing_tables import render_packing
        from dpo_pack.run.models import CPU, resolve_model
        from dpo_pack.run.pairs import offline_source, packing_report
        from dpo_pack.run.setup import prepare_data, prepare_tokenizer
        from dpo_pack.system.console import make_console

    console = make_console(quiet=quiet)
    data = prepare_data(loaded, prepare_tokenizer(loaded), console)
    policy = resolve_model(loaded, CPU)
    source = offline_source(loaded, data, policy)
    report = packing_report(
        source, data, policy.shape, model=loaded.model.path, num_ranks=ranks, budgets=budgets
    )
    render_packing(report, console)
    return report


def show(
    recipe: AnyRecipe,
    *,
    pairs: Sequence[int] = (),
    dropped: bool = False,
    quiet: bool = False,
    **overrides: Any,
) -> ShownRecipe:
    """Prints pairs as the tokens that the model will get, and returns them; loads no weights.

    pairs: rows of the data to show, counted from 1. dropped: read all rows, and list those that are left out.
    """
    loaded = load(recipe, overrides)
    with many_imports():
        from dpo_pack.reports.pair_views import render_pairs
        from dpo_pack.run.show import show_recipe
        from dpo_pack.system.console import make_console

    console = make_console(quiet=quiet)
    shown = show_recipe(loaded, console, asked_rows=set(pairs), reads_all=dropped)
    render_pairs(shown, console, lists_dropped=dropped)
    return shown


def sample(*models: AnyPath, prompts: Sequence[str] = (), num: int | None = None) -> None:
    """Prints what models answer to the same prompts, side by side.

    models: runs, directories of models or hub ids, and at most one recipe file. num: so many held-out prompts
    of the recipe or the first run, if there are no `prompts`.
    """
    with many_imports():
        from dpo_pack.reports.tables import render_completions
        from dpo_pack.run.samples import sample_models
        from dpo_pack.system.console import make_console

    console = make_console()
    asked, completions = sample_models([str(model) for model in models], console, texts=prompts, num=num)
    render_completions(asked, completions, console)


def recipe_from(peer: str, mapping: Mapping[str, Any]) -> str:
    """Returns a recipe (YAML) for settings of trl, axolotl or llamafactory, such as `DPOConfig.to_dict()`.

    Its comments say what became of each key. Raises RecipeError for training that dpo-pack does not have.
    """
    from dpo_pack.recipe.peers.translate import recipe_from as translated

    return translated(peer, mapping)


def merge(
    source: AnyPath,
    out: AnyPath,
    *,
    base: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Path:
    """Merges a LoRA adapter, or that of a run, and its base into one model. Returns the model's directory.

    base: replaces the base that the adapter names. dtype: float32, bfloat16, float16, or auto, as the base.
    """
    with many_imports():
        from dpo_pack.model.lora import unknown_settings
        from dpo_pack.run.export import merge_adapter
        from dpo_pack.system.console import make_console

    console = make_console()
    with console.status("Merging"):
        adapter = merge_adapter(
            Path(source), Path(out), base=base, dtype=dtype, trust_remote_code=trust_remote_code
        )
    for warning in unknown_settings(adapter.directory):
        console.print(warning)
    console.print(f"Merged {adapter.directory} into {adapter.base}: {out}")
    return Path(out)


def push(source: AnyPath, repo: str, *, private: bool = True) -> str:
    """Uploads a run's model, or what `merge` wrote, to the Hugging Face hub. Returns its URL."""
    from dpo_pack.run.run_dir import push as push_run

    url, lines = push_run(Path(source), repo, private=private)
    for line in lines:
        say(line)
    return url


def report(run: AnyPath, *others: AnyPath, output: AnyPath | None = None) -> Path:
    """Writes a page about a run, or one that compares it with others. Returns the path of the page.

    output: the path to write; None: report.html in `run`.
    """
    from dpo_pack.reports.pages import write_run_page

    page = Path(output or Path(run) / "report.html")
    write_run_page([Path(run), *map(Path, others)], page)
    say(f"Page: {page}")
    return page


@contextlib.contextmanager
def _on_every_rank(
    recipe: AnyRecipe,
    overrides: Mapping[str, Any],
    command: Sequence[str] | None,
    *,
    trains: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Iterator[tuple[Recipe, Console]]:
    """Loads the recipe and runs the body on every rank, with a console that prints on rank 0."""
    loaded = load(recipe, overrides, trains=trains)
    with many_imports():
        from dpo_pack.system.files import leaves
        from dpo_pack.system.launch import on_every_rank
    settings = dict(leaves(loaded.model_dump(mode="json"), separator="."))
    number = loaded.distributed.num_processes
    try:
        with on_every_rank(number, command, settings, quiet=quiet, verbose=verbose) as console:
            with many_imports():
                import dpo_pack.trainer  # noqa: F401
            yield loaded, console
    except Interrupted as stopped:
        if command is None and stopped.exit_status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(stopped)) from None
        raise


def load(recipe: AnyRecipe, overrides: Mapping[str, Any] = {}, *, trains: bool = False) -> Recipe:
    """Makes a Recipe from a caller's arguments. Raises RecipeError, also if this machine lacks what it needs.

    Call this before torch is imported: it lets torch's CUDA allocator enlarge its blocks (segments), so rows
    of many lengths waste less memory. A setting of the user is kept. vLLM's sleep mode refuses this setting.
    """
    from dpo_pack.recipe.load import check_environment, load_recipe, parse_recipe

    texts = [f"{key}={json.dumps(_as_yaml(value, key))}" for key, value in overrides.items()]
    if isinstance(recipe, str | Path):
        loaded = load_recipe(Path(recipe), texts)
    elif isinstance(recipe, Mapping):
        loaded = parse_recipe(_as_yaml(recipe, "recipe"), texts)
    else:
        loaded = parse_recipe(recipe.model_dump(mode="json"), texts) if texts else recipe
    has_vllm = loaded.online is not None and loaded.online.generator.type == "vllm"
    if not has_vllm and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    check_environment(loaded, trains=trains)
    return loaded


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


def _copy_of(dataset: Dataset) -> Path:
    from dpo_pack.reference.cache import default_cache_directory

    directory = default_cache_directory() / "datasets"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        written = Path(temporary) / "rows.parquet"
        dataset.to_parquet(str(written))
        with written.open("rb") as file:
            name = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        return written.replace(directory / f"{name}.parquet")
