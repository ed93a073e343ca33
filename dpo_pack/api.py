"""The commands as Python functions, for scripts and notebooks. `dpopack` calls these functions, too.

    run = dpo_pack.train("recipe.yaml", **{"optim.lr": 1e-6})

A recipe is a path (of a file or a run), a dict with the keys of a recipe, a `Recipe` or a `Run`. Keyword
arguments set keys, as KEY=VALUE does on the command line. Where a function takes a model, that may be a run.
Errors that the user can mend are DpoPackErrors with a message of one line.

Functions print what the commands print, unless they are `quiet`, which is the default of `show` and
`inspect_packing`. What they return is what the commands write as JSON; `train` returns a Run,
`show` a ShownRecipe. They run in this process, on one
device; under torchrun or accelerate launch each process uses its own. If the recipe needs several processes
and `dpopack` gives a `command`, each process runs the command.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo_pack.system.errors import RecipeError
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.process import many_imports, say

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console

    from dpo_pack.recipe.load import Recipe
    from dpo_pack.run.show import ShownRecipe

    AnyPath = str | os.PathLike[str]
    AnyRecipe = AnyPath | Mapping[str, Any] | Recipe

_DOCTOR = "use 'dpopack doctor RECIPE' (dpo_pack.doctor), which loads, proves and measures as a run does"
_INSPECT = "use 'dpopack inspect-packing RECIPE --memory SIZE --devices N' (dpo_pack.inspect_packing)"
REMOVED = {
    "dry_run": _DOCTOR,
    "full": _DOCTOR,
    "memory": _INSPECT,
    "devices": _INSPECT,
    "template": "copy a file of configs/, or begin with what 'dpopack recipe --defaults' prints",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The output directory of a run. The properties read its files at each access."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

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
    quiet: bool = False,
    verbose: bool = False,
    command: Sequence[str] | None = None,
    **overrides: Any,
) -> Run:
    """Trains, or resumes the run in `output_dir`. Returns the run. An interrupt (in a notebook: the stop
    button) saves the state and then raises KeyboardInterrupt."""
    with _on_every_rank(recipe, overrides, command, trains=True, quiet=quiet, verbose=verbose) as found:
        from dpo_pack.system import ranks
        from dpo_pack.trainer import begin_verdict
        from dpo_pack.trainer import train as run_training

        loaded, console = found
        run_training(loaded, console, overwrite=overwrite)
        is_first = ranks.is_first()
    if is_first and loaded.verdict is not None:  # all ranks have left their devices, or end now
        begin_verdict(loaded.output_dir, loaded.verdict, console)
    return Run(path=Path(loaded.output_dir))


def check(recipe: AnyRecipe, *, quiet: bool = False, **overrides: Any) -> list[str]:
    """Takes the steps of a run on the first rows of each source, without weights, and prints what is in
    order. Returns what is wrong: an empty list if a run would start."""
    try:
        loaded = load(recipe, overrides, trains=True)
    except RecipeError as error:
        return list(error.problems or [str(error)])
    with many_imports():
        from dpo_pack.run.setup import check_recipe

    found, wrong = check_recipe(loaded)
    for line in () if quiet else found:
        say(line)
    return wrong


def doctor(
    recipe: AnyRecipe | None = None,
    *,
    quiet: bool = False,
    command: Sequence[str] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Prints and returns what this machine can do. With a recipe it loads the models as `train` does, proves
    that rows are exact, and estimates the memory of a step; on CUDA it measures that, too.

    The result's `error` says which proof has failed; None: all hold, or there is no recipe.
    """
    if recipe is None:
        from dpo_pack.reports import doctor_tables as tables
        from dpo_pack.system.console import make_console

        return tables.environment(make_console(quiet=quiet))
    with _on_every_rank(recipe, overrides, command, trains=True, quiet=quiet) as (loaded, console):
        from dpo_pack.reports import doctor_tables as tables
        from dpo_pack.run.inputs import prove_and_measure

        environment = tables.environment(console)
        return environment | tables.proofs(*prove_and_measure(loaded, console), console)


def precompute_ref(
    recipe: AnyRecipe,
    *,
    quiet: bool = False,
    verbose: bool = False,
    command: Sequence[str] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Computes the reference log-probs that the cache lacks.

    Returns `num_cached` and `num_computed` (different sequences), and `sets`: for train and each held-out set
    the rows of its pairs in their source, and their log-probs in nats under TRL's names, as lists.
    """
    with _on_every_rank(recipe, overrides, command, quiet=quiet, verbose=verbose) as (loaded, console):
        from dpo_pack.run.pairs import prepare_reference
        from dpo_pack.run.setup import prepare

        if loaded.reference.sync is not None:
            raise RecipeError("reference.sync: a reference that follows the policy cannot be precomputed")
        setup = prepare(loaded, console)
        if not setup.objective.needs_reference:
            raise RecipeError("loss.type: this loss needs no reference, so there is nothing to precompute")
        done = prepare_reference(setup)
        console.print(f"Cache: {done.cache.directory}")
        values = [(table.row_numbers, done.values.of(table)) for table in setup.tables]
        sets = {
            name: {
                "row": rows.tolist(),
                "ref_chosen_logps": logps[:, 0].tolist(),
                "ref_rejected_logps": logps[:, 1].tolist(),
            }
            for name, (rows, logps) in zip(("train", *setup.data.eval), values, strict=True)
        }
        return {"num_cached": done.num_cached, "num_computed": done.num_computed, "sets": sets}


def evaluate(
    recipe: AnyRecipe,
    model: AnyPath | None = None,
    *,
    compare: tuple[AnyPath, AnyPath] | None = None,
    quiet: bool = False,
    command: Sequence[str] | None = None,
    **overrides: Any,
) -> dict[str, dict[str, Any]]:
    """Prints a model's metrics for each held-out set and returns them, by the set's name.

    model: a run, a directory or a hub id; None: the model of `output_dir`. compare: two models, whose metrics
    are returned as `a` and `b`, and their paired `difference`, b minus a.
    """
    if model is not None and compare is not None:
        raise RecipeError("evaluate: give --model or --compare, not both")
    with _on_every_rank(recipe, overrides, command, quiet=quiet, lenient=True) as (loaded, console):
        for line in loaded.dropped:
            effect = ", so no loss is shown" if line.startswith("loss.") else ""
            console.print(f"Note: evaluated without {line}{effect}")
        from dpo_pack.reports.tables import render_evaluations
        from dpo_pack.run.checkpoint import model_of
        from dpo_pack.run.evaluate import compare_models, evaluate_models

        names = [os.fspath(name) for name in compare or [model or loaded.output_dir]]
        with contextlib.ExitStack() as stack:
            paths = [stack.enter_context(model_of(name, console)) for name in names]
            results = evaluate_models(loaded, paths, console)
        sets = {name: result.record for name, result in results[0].items()}
        if compare is not None:
            sets = compare_models(results, names, seed=loaded.seed)
        render_evaluations(sets, console, beta=loaded.loss.beta)
        return sets


def verdict(
    model: AnyPath,
    *,
    against: AnyPath | None = None,
    output: AnyPath | None = None,
    trust_recipe: bool = False,
    quiet: bool = False,
    **overrides: Any,
) -> dict[str, Any]:
    """Says whether a model is better than its start, by the sources of evidence in its section `verdict`.

    model: a finished run, or a model or an adapter, whose verdict goes to the directory `output`. against:
    None: the run's start, or the adapter's base. trust_recipe: run code and ask servers that the run's recipe
    names. Returns `conclusion` ("better", "worse", "mixed", "cannot tell"), `sentence` and `sources`.
    """
    with many_imports():
        from dpo_pack.system.console import make_console
        from dpo_pack.verdicts.comparison import give_verdict

    return give_verdict(
        os.fspath(model),
        _as_texts(overrides),
        make_console(quiet=quiet),
        against=None if against is None else os.fspath(against),
        output=None if output is None else Path(output),
        trusts_recipe=trust_recipe,
    )


def audit(
    recipe: AnyRecipe,
    *,
    folds: int = 0,
    train_pairs: int | None = None,
    lr: float | None = None,
    output: AnyPath | None = None,
    quiet: bool = False,
    command: Sequence[str] | None = None,
    **overrides: Any,
) -> Path:
    """Writes a row for each training pair, and a page beside it, to `output`: None is audit/audit.parquet in
    `output_dir`. Returns its path.

    folds: at least 2: adapters that train on other folds score each pair; 0: nothing is trained.
    train_pairs: the most pairs that such an adapter trains on; None: 20,000. lr: None: see docs/audit.md.
    """
    with _on_every_rank(recipe, overrides, command, quiet=quiet) as (loaded, console):
        from dpo_pack.audits.audit import FoldOptions, audit_pairs, check_output
        from dpo_pack.run.setup import prepare
        from dpo_pack.system import ranks
        from dpo_pack.trainer import train as run_training

        path = Path(output or loaded.output_dir / "audit" / "audit.parquet")
        given: Any = {key: one for key, one in (("train_pairs", train_pairs), ("lr", lr)) if one is not None}
        if given and not folds:
            raise RecipeError("--train-pairs, --lr: only models of --folds have them; give --folds, too")
        options = FoldOptions(num_folds=folds, **given) if folds else None
        ranks.first_does_for_all(lambda: check_output(loaded.inputs, path))
        audit_pairs(prepare(loaded, console), path, run_training, options)
    return path


def inspect_packing(
    recipe: AnyRecipe,
    *,
    ranks: Sequence[int] = (),
    budgets: Sequence[int] = (4096, 8192, 16384),
    memory: int | None = None,
    devices: int = 1,
    quiet: bool = True,
    **overrides: Any,
) -> dict[str, Any]:
    """Returns how full packed rows are and what packing saves; loads no weights.

    ranks: numbers of processes whose balance is measured; none: the number of processes of a run here.
    memory: also estimate whether a run fits `devices` GPUs of so many bytes each.
    """
    loaded = load(recipe, overrides)
    with many_imports():
        import torch

        from dpo_pack.reports.packing import packing_report, render_packing
        from dpo_pack.run.memory_estimate import memory_report, print_memory_report
        from dpo_pack.run.pairs import offline_source
        from dpo_pack.run.setup import prepare
        from dpo_pack.system.console import make_console
        from dpo_pack.system.ranks import uses_cuda

    console = make_console(quiet=quiet)
    device = torch.device("cuda" if memory is not None or uses_cuda() else "cpu")
    setup = prepare(loaded, console, for_device=device)
    source, number = offline_source(setup), loaded.distributed.num_processes
    usual = (max(1, torch.cuda.device_count()) if number == "auto" else number,)
    data, shape, model = setup.data, setup.policy_facts.shape, loaded.model.path
    report = packing_report(source, data, shape, model=model, num_ranks=ranks or usual, budgets=budgets)
    render_packing(report, console)
    if loaded.sharing_note:
        console.print(f"Note: {loaded.sharing_note}")
    if memory is not None:
        plan = replace(source.first_plan, num_ranks=devices)
        report["memory"] = memory_report(setup, plan, device_bytes=memory, num_devices=devices)
        print_memory_report(report["memory"], console)
    return report


def show(
    recipe: AnyRecipe,
    *,
    pairs: Sequence[int] = (),
    dropped: bool = False,
    quiet: bool = True,
    **overrides: Any,
) -> ShownRecipe:
    """Returns pairs as the tokens that the model will get; loads no weights.

    pairs: rows of the data to show, counted from 1. dropped: read all rows, and list those that are left out.
    """
    loaded = load(recipe, overrides)
    with many_imports():
        from dpo_pack.reports.pair_views import render_pairs
        from dpo_pack.run.show import show_recipe
        from dpo_pack.system.console import make_console

    console = make_console(quiet=quiet)
    shown = show_recipe(loaded, console, asked_rows=set(pairs), reads_all=dropped)
    render_pairs(shown.report, console, lists_dropped=dropped)
    return shown


def sample(
    *models: AnyPath,
    prompts: Sequence[str] = (),
    num: int | None = None,
    max_new_tokens: int | None = None,
    quiet: bool = False,
) -> list[dict[str, str]]:
    """Prints what models answer to the same prompts, side by side.

    models: runs, directories of models or hub ids, and at most one recipe file. num: so many held-out prompts
    of the recipe or the first run, if there are no `prompts`. max_new_tokens: the most tokens of an answer;
    default: logging.samples.max_new_tokens. Returns for each model and prompt its source
    (the held-out set), prompt, model and completion.
    """
    from dpo_pack.reports.tables import render_completions
    from dpo_pack.run.checkpoint import model_of
    from dpo_pack.run.samples import sample_models
    from dpo_pack.system.console import make_console

    console, names = make_console(quiet=quiet), [os.fspath(model) for model in models]
    with contextlib.ExitStack() as stack:
        paths = {name: stack.enter_context(model_of(name, console)) for name in names}
        options: dict[str, Any] = {"texts": prompts, "num": num, "max_new_tokens": max_new_tokens}
        asked, answers = sample_models(names, console, paths=paths, **options)
    render_completions(asked, answers, console)
    return [
        {"source": source, "prompt": prompt, "model": model, "completion": completion}
        for model, completions in answers.items()
        for (source, prompt), completion in zip(asked, completions, strict=True)
    ]


def merge(
    source: AnyPath,
    out: AnyPath,
    *,
    base: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Path:
    """Merges a LoRA adapter, or that of a run, and its base into one model. Returns the model's directory.

    base: replaces the base that the adapter names. dtype: float32, bfloat16, float16, or auto, as the base.
    """
    from dpo_pack.run.checkpoint import model_of
    from dpo_pack.run.export import merge_adapter
    from dpo_pack.system.console import make_console, shown

    console = make_console(quiet=quiet)
    with contextlib.ExitStack() as stack:
        found = Path(stack.enter_context(model_of(os.fspath(source), console)))
        replacement = None if base is None else stack.enter_context(model_of(base, console))
        stack.enter_context(shown(console, f"Merging {found} into its base"))
        adapter, lines = merge_adapter(
            found, Path(out), base=replacement, dtype=dtype, trust_remote_code=trust_remote_code
        )
    for line in lines:
        console.print(line)
    console.print(f"Merged {adapter.directory} into {adapter.base}: {out}")
    return Path(out)


def push(source: AnyPath, repo: str, *, private: bool = True, quiet: bool = False) -> str:
    """Uploads a run's model, or what `merge` wrote, to the Hugging Face hub. Returns its URL."""
    from dpo_pack.run.checkpoint import model_of
    from dpo_pack.system.console import make_console
    from dpo_pack.system.hub import check_upload, upload_model

    console, source = make_console(quiet=quiet), Path(source)
    check_upload(repo)
    with model_of(str(source), console) as model:
        url, lines = upload_model(Path(model), source / "report.html", repo, private=private)
    for line in lines:
        console.print(line)
    return url


def report(run: AnyPath, *others: AnyPath, output: AnyPath | None = None, quiet: bool = False) -> Path:
    """Writes a page about a run, or one that compares it with others, to `output`: None is report.html in
    `run`, or comparison.html in the working directory. Returns its path."""
    from dpo_pack.reports.pages import write_run_page

    page = Path(output or ("comparison.html" if others else Path(run) / "report.html"))
    write_run_page([Path(run), *map(Path, others)], page)
    if not quiet:
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
    lenient: bool = False,
) -> Iterator[tuple[Recipe, Console]]:
    """Loads the recipe and runs the body on every rank, with a console that prints on rank 0."""
    loaded = load(recipe, overrides, trains=trains, lenient=lenient)
    with many_imports():
        from dpo_pack.system.launch import on_every_rank
    number, settings = loaded.distributed.num_processes, functools.partial(_settings_of, loaded)
    try:
        with on_every_rank(number, command, settings, quiet=quiet, verbose=verbose) as console:
            with many_imports():
                import dpo_pack.trainer  # noqa: F401
            yield loaded, console
    except Interrupted as stopped:
        if command is None and stopped.exit_status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(stopped)) from None
        raise


def _settings_of(recipe: Recipe) -> dict[str, Any]:
    """Returns what all ranks must have. Messages show what differs, but no server: of those, a digest."""
    from dpo_pack.recipe.text import without_servers

    tree = recipe.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(tree["online"]).encode()).hexdigest()[:12]
    return {**without_servers(tree), "online (a digest of it, with its servers)": digest}


def load(
    recipe: AnyRecipe, overrides: Mapping[str, Any] = {}, *, trains: bool = False, lenient: bool = False
) -> Recipe:
    """Makes a Recipe, and sets what torch reads when it is imported. Raises RecipeError, also if this machine
    lacks what the recipe needs."""
    from dpo_pack.recipe.load import check_environment, load_recipe, parse_recipe

    for name in overrides.keys() & REMOVED.keys():
        raise RecipeError(f"{name}: {REMOVED[name]}")
    texts = _as_texts(overrides)
    if isinstance(recipe, str | os.PathLike):
        loaded = load_recipe(Path(recipe), texts, lenient=lenient)
    elif isinstance(recipe, Mapping):
        loaded = parse_recipe(_as_yaml(recipe, "recipe"), texts)
    else:
        loaded = parse_recipe(recipe.model_dump(mode="json"), texts) if texts else recipe
    # Blocks that grow waste less memory with rows of many lengths. vLLM's sleep mode refuses them.
    has_vllm = loaded.online is not None and loaded.online.generator.type == "vllm"
    if not has_vllm and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Threads of OpenMP that wait for each other give up their core early: another process may need it.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # about 0.03 ms; else some ms
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # ms; else 200
    # oneDNN keeps compiled products by their shapes, each about 0.4 MB, and each length of a row has its own.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # else 1024
    check_environment(loaded, trains=trains)
    return loaded


def _as_texts(overrides: Mapping[str, Any]) -> list[str]:
    """Returns overrides as the command line has them: KEY=VALUE."""
    # YAML refuses the two escapes that JSON in ASCII writes for a character beyond U+FFFF.
    return [
        f"{key}={json.dumps(_as_yaml(value, key), ensure_ascii=False)}" for key, value in overrides.items()
    ]


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
    import tempfile

    from dpo_pack.reference.cache import default_cache_directory

    directory = default_cache_directory() / "datasets"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        written = Path(temporary) / "rows.parquet"
        dataset.to_parquet(str(written))
        with written.open("rb") as file:
            name = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        return written.replace(directory / f"{name}.parquet")
