"""The `dpopack` commands: each parses its arguments and calls one function, of api.py or of a room.

Functions import what they need in their bodies, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import dpo_pack
from dpo_pack import api
from dpo_pack.system.endings import USER_CAN_MEND, VERDICT_STATUSES, ending_of
from dpo_pack.system.errors import RecipeError, UnsupportedModelError
from dpo_pack.system.interrupts import STOP_SIGNALS, interruptible
from dpo_pack.system.process import BEGUN, complain, counted, many_imports, placement, say

if TYPE_CHECKING:
    from dpo_pack.recipe.load import Recipe


class _Commands(TyperGroup):
    """The commands. An option that went, or that is a key of a recipe or of a peer, is answered with ours."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # click's NoSuchOption, of which some releases of typer have a copy
            if (option := getattr(error, "option_name", None)) is not None:
                from dpo_pack.recipe.load import advice_on_option

                name = option.lstrip("-").replace("-", "_")
                if advice := api.REMOVED.get(name) or advice_on_option(name):
                    raise RecipeError(f"no option {option}: {advice}") from None
            option = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
            if type(error).__name__ == "BadParameter" and option.startswith("--"):  # a wrong value
                told = str(getattr(error, "message", error)).removeprefix("Value error, ").rstrip(".")
                raise RecipeError(f"{option}: {told}") from None
            raise


def _complete_key(incomplete: str) -> list[str]:
    from dpo_pack.recipe.load import recipe_fields

    return [f"{key}=" for key in recipe_fields() if key.startswith(incomplete)]


app = typer.Typer(
    cls=_Commands,
    help="DPO fine-tuning of causal language models: without padding, each prompt computed once for both "
    "completions, reference log-probs cached.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
cache_app = typer.Typer(help="Look after reference log-probs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache_app, name="cache")

RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML recipe, or a run's output_dir: its recipe is read.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Recipe keys to set, e.g. optim.lr=1e-6.", autocompletion=_complete_key
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also print which proofs passed and why this attention is used.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write JSON into a file ('-': print it).")
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one page for a browser.")
]

CacheDir = Annotated[
    Path | None, typer.Option(help="As reference.cache_dir; default: $DPO_PACK_CACHE or ~/.cache/dpo_pack.")
]


def main() -> None:
    """Runs a command. Exit status: 0 success, 2 error of the user, 130 or 143 interrupted, 1 our bug."""
    # transformers imports bitsandbytes if it is installed; it warns of kernels that dpo-pack does not call.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escapes for characters that its encoding lacks
    try:
        with interruptible():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `signals_blocked` has delayed them
            app(prog_name="dpopack")
    except SystemExit:
        raise
    except BaseException as error:
        with contextlib.suppress(RecipeError):  # of a wrong environment, which `error` reports already
            place = placement(os.environ)
            if place is not None and place.num_ranks > 1:
                from dpo_pack.system.launch import report_failure

                sys.exit(report_failure(error, place))
        ending = ending_of(error)
        if ending.message is None:
            raise
        complain(ending.message)
        if ending.is_urgent:
            os._exit(ending.exit_status)
        sys.exit(ending.exit_status)


def _is_first() -> bool:
    place = placement(os.environ)
    return place is None or place.rank == 0


def _load(file: Path, overrides: list[str] | None, *, lenient: bool = False) -> Recipe:
    from dpo_pack.recipe.load import load_recipe

    return load_recipe(file, overrides or (), lenient=lenient)


def _own_command() -> list[str]:
    # With `-m`, Python searches the working directory before installed packages. `-P` turns this off.
    safe_path = [] if sys.path[0] in ("", os.getcwd()) else ["-P"]
    return [sys.executable, *safe_path, "-m", "dpo_pack", *sys.argv[1:]]


def _json(report: object) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def _write(json_file: Path | None, text: str, html_file: Path | None = None, page: str = "") -> None:
    """Writes JSON into the file of --json (`-`: prints it), and a page into that of --html."""
    from dpo_pack.system.files import write_text_atomically

    if json_file == Path("-"):
        print(text, end="")
    elif json_file is not None:
        write_text_atomically(json_file, text)
    if html_file is not None:
        write_text_atomically(html_file, page)
        if json_file != Path("-"):
            say(f"Page: {html_file}")


def parse_numbers(text: str, option: str, form: str) -> tuple[int, ...]:
    """Reads the numbers of an option, such as 1,8,64; `form` is an example. Raises RecipeError."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise RecipeError(f"{option} {text!r}: not positive whole numbers; write them as in {option} {form}")
    return tuple(map(int, numbers))


def parse_bytes(size: str, option: str, forms: str) -> int:
    """Reads the size of an option, such as 80GiB; `forms` are examples. Raises RecipeError."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    with contextlib.suppress(ValidationError):
        if re.search("[a-zA-Z]", size):  # 80 alone would be 80 bytes
            return int(TypeAdapter(ByteSize).validate_python(size))
    raise RecipeError(f"{option}: {size!r} is not a size; write it as {forms}")


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Discard an earlier run in output_dir and start again.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Train a recipe's model, or resume its run.

    First computes the reference log-probs that the cache lacks, then trains with DPO. Uses all visible GPUs
    and writes the model to output_dir/model. Run the same command again to resume an interrupted run.
    """
    import psutil

    os.environ.setdefault(BEGUN, str(psutil.Process().create_time()))  # its other processes have it, too
    loaded = _load(recipe, overrides)
    if placement(os.environ) is None:  # a rank's parent has said it
        say(f"dpo-pack {dpo_pack.__version__} starts: its imports take some seconds")
    api.train(loaded, overwrite=overwrite, verbose=verbose, command=_own_command())


@app.command("precompute-ref")
def precompute_ref(recipe: RecipeFile, overrides: Overrides = None, verbose: Verbose = False) -> None:
    """Compute the reference log-probs that the cache lacks."""
    api.precompute_ref(_load(recipe, overrides), verbose=verbose, command=_own_command())


@app.command("inspect-packing")
def inspect_packing(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="Show the balance of so many processes: 1,8,64.", show_default="the recipe's"),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Compare token budgets; the best is named, for the first number of --ranks.")
    ] = "4096,8192,16384",
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Would a run fit GPUs of 80GiB? Loads no weights.")
    ] = None,
    devices: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --memory: so many GPUs in one machine.")
    ] = 1,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Preview rows, savings and memory, without weights."""
    report = api.inspect_packing(
        _load(recipe, overrides),
        ranks=() if ranks is None else parse_numbers(ranks, "--ranks", "1,8,64"),
        budgets=parse_numbers(budgets, "--budgets", "4096,8192"),
        memory=None if memory is None else parse_bytes(memory, "--memory", "80GiB or 24GB"),
        devices=devices,
        quiet=json_file == Path("-"),
    )
    from dpo_pack.reports.pages import packing_page

    _write(json_file, _json(report), html_file, packing_page(report) if html_file else "")


@app.command()
def show(
    recipe: RecipeFile,
    overrides: Overrides = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            "--pair", metavar="N", help="Show the pair of row N of each file, from 1, with ids; several: 3,8."
        ),
    ] = None,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Read all rows; list those that are left out, by reason.")
    ] = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Show pairs as the model will meet them.

    Warns of common faults in the data. Shows tokens: where the prompt ends, which tokens both completions
    share, which are scored, EOS, which were cut. Shows rows that are left out, and one packed row. Reads only
    the first rows of the data, and no model weights.
    """
    words = [
        word for word in (str(recipe), *(overrides or ())) if word.isdecimal() and not Path(word).exists()
    ]
    if pair and words:
        raise RecipeError(f"--pair takes one word; write --pair {','.join([*pair, *words])}")
    rows = {row for text in pair or () for row in parse_numbers(text, "--pair", "3,8")}
    loaded = _load(recipe, overrides)
    shown = api.show(loaded, pairs=sorted(rows), dropped=dropped, quiet=json_file == Path("-"))
    from dpo_pack.reports.pages import pairs_page
    from dpo_pack.reports.pair_views import to_json

    _write(json_file, to_json(shown.report), html_file, pairs_page(shown) if html_file else "")


@app.command()
def evaluate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A run, directory or hub id.", show_default="the recipe's run"),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="MODEL_A MODEL_B", help="Two models (runs, too), and their difference, B - A."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure a model: held-out accuracy, margin, loss.

    Rewards and log-ratios are relative to the recipe's reference model. Each number has a 95 % interval.
    Tables also show accuracy and margin for each source and for each length ratio of the two completions.
    """
    loaded, command = _load(recipe, overrides, lenient=True), _own_command()
    found = api.evaluate(loaded, model, compare=compare, quiet=json_file == Path("-"), command=command)
    if _is_first():
        _write(json_file, _json(found))


@app.command()
def verdict(
    run: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A finished run, a model or an adapter.")
    ],
    overrides: Overrides = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL_OR_RUN", help="Compare with it.", show_default="its start")
    ] = None,
    judge: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE.yaml", help="An item of verdict.judges; may be repeated."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(metavar="NAME,FILE.yaml", help="As verdict.tasks.")] = None,
    command: Annotated[str | None, typer.Option(metavar="CMD", help="As verdict.command.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="For the files, without a run.")] = None,
    trust_recipe: Annotated[
        bool, typer.Option("--trust-recipe", help="Run code and ask servers that the run's recipe names.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Say whether a model is better than its start.

    Judges compare the answers of both models to held-out prompts; lm-eval or a command of yours measures
    both. Exit status: 0 better, 3 worse or mixed, 4 cannot tell. See docs/verdict.md.
    """
    from dpo_pack.recipe.text import read_yaml
    from dpo_pack.system.files import text_of

    values: dict[str, Any] = {} if command is None else {"command": command}
    values |= {} if tasks is None else {"tasks": [task.strip() for task in tasks.split(",")]}
    for file in judge or ():
        if not (text := text_of(file)):
            raise RecipeError(f"--judge: {file} is no file that can be read; give one that holds a judge")
        read = read_yaml(text, where=str(file))
        values.setdefault("judges", []).extend(read if isinstance(read, list) else [read])
    texts = [f"verdict.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    with many_imports():
        from dpo_pack.system.console import make_console
        from dpo_pack.verdicts.comparison import give_verdict

    console = make_console(quiet=json_file == Path("-"))
    texts = [*(overrides or ()), *texts]
    found = give_verdict(run, texts, console, against=against, output=output, trusts_recipe=trust_recipe)
    _write(json_file, _json(found))
    raise typer.Exit(VERDICT_STATUSES[found["conclusion"]])


@app.command()
def audit(
    recipe: RecipeFile,
    overrides: Overrides = None,
    folds: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Score pairs by models that have not seen them.")
    ] = None,
    train_pairs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --folds: the most pairs that a model trains on.", show_default="20000"
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="With --folds: the learning rate.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="output_dir/audit/audit.parquet")
    ] = None,
) -> None:
    """Find training pairs that are wrong, or only long.

    Writes a row for each pair: copies, contradictions, lengths, the reference's margin, what a finished run
    in output_dir logged. With --folds, adapters that train on other pairs say how improbable its label is.
    data.train.N.keep trains on the pairs that such a file names; see docs/audit.md.
    """
    options: dict[str, Any] = {"train_pairs": train_pairs, "lr": lr, "output": output}
    api.audit(_load(recipe, overrides), folds=folds or 0, command=_own_command(), **options)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The output_dir of one or more runs.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page.", show_default="RUN/report.html; comparison.html of several"
        ),
    ] = None,
) -> None:
    """Write a page about a run, or compare several.

    The page has curves, evaluations, warnings, samples, the pairs with the lowest margins, data, recipe and
    versions. It is one file that loads no other file. Unfinished runs can be shown, too.
    """
    api.report(*runs, output=output)


@app.command()
def sample(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_MODEL... [RECIPE]",
            help="Runs' output_dirs, models' directories or hub ids; a recipe names other prompts.",
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Complete this; may be given more than once."),
    ] = None,
    num: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Complete N held-out prompts instead of 3.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="An answer ends after N tokens.", show_default="the recipe's"),
    ] = None,
) -> None:
    """Show what models answer to the same prompts.

    Completions are greedy. For a run, the model that it began with answers, too. Without --prompt, the
    prompts are held-out prompts of the recipe.
    """
    api.sample(*models, prompts=prompt or (), num=num, max_new_tokens=max_new_tokens)


@app.command("doctor")
def doctor_command(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A YAML recipe, or a run's output_dir.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine can do; prove packing exact.

    Lists devices and attention backends, with the reason if a backend cannot be used, and what a CPU's
    products reach in fp32 and bf16, which train and recipe --check then know. With a recipe, it also
    loads the models as train does: small packed rows must give the same log-probs as each sequence alone. It
    estimates the memory of a step, and on CUDA measures it on the largest row. It writes into caches only.
    """
    loaded = None if recipe is None else _load(recipe, overrides)
    report = api.doctor(loaded, quiet=as_json, command=_own_command())
    if as_json and _is_first():
        print(_json(report), end="")
    if report.get("error"):
        raise UnsupportedModelError(report["error"])


@app.command()
def merge(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_ADAPTER", help="A run's output_dir, or an adapter's directory.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Run, directory or hub id.", show_default="the adapter's own"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the merged weights; auto: that of the base's weights."),
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the base.")
    ] = False,
) -> None:
    """Merge a LoRA adapter and its base into one model."""
    api.merge(source, out, base=base, dtype=dtype, trust_remote_code=trust_remote_code)


@app.command("push")
def push_command(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's output_dir, or what 'dpopack merge' wrote.")
    ],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the hub: owner/name.")],
    private: Annotated[
        bool, typer.Option("--private/--public", help="A new repository is private or public.")
    ] = True,
) -> None:
    """Upload a run's model to the Hugging Face hub.

    The model, its card and report.html go up in one commit. Of an unfinished run, the model of its newest
    checkpoint goes up. The token comes from HF_TOKEN or 'hf auth login'.
    """
    api.push(source, repo, private=private)


@app.command("recipe")
def recipe_command(
    defaults: Annotated[bool, typer.Option("--defaults", help="Print a short recipe to begin with.")] = False,
    every_key: Annotated[
        bool, typer.Option("--all", help="With --defaults: every key, its meaning and its default.")
    ] = False,
    peer: Annotated[
        tuple[str, Path] | None,
        typer.Option("--from", metavar="PEER FILE", help="Translate a file of trl, axolotl or llamafactory."),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
    check: Annotated[
        Path | None, typer.Option("--check", metavar="RECIPE", help="Say whether a recipe would start.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Print or check a recipe; translate another trainer's.

    --from reads a config or a command line of TRL, or a config of axolotl or LLaMA-Factory. The recipe says
    what became of each key.
    """
    from dpo_pack.recipe.load import BEGINNING, recipe_defaults, recipe_schema

    if sum((defaults, schema, check is not None, peer is not None)) != 1:
        raise RecipeError("recipe: give one of --defaults, --from PEER FILE, --schema and --check FILE")
    if every_key and not defaults:
        raise RecipeError("recipe: --all is an option of --defaults; give both")
    if peer is not None:
        from dpo_pack.recipe.peers.translate import NO_COUNTERPART, translate

        translated = translate(*peer)
        print(translated, end="")
        listed = translated.replace("\n#   ", " ")
        for line in re.findall(r"(?m)^# - (.*(?:; did you mean |: must be ).*)", listed):
            complain(line)
        if NO_COUNTERPART in translated:
            complain("Some settings have no counterpart in dpo-pack; the recipe lists them at its top")
    elif defaults:
        print(recipe_defaults() if every_key else BEGINNING, end="")
    elif schema:
        print(json.dumps(recipe_schema(), indent=2))
    elif check is not None:
        say(f"Checking {check}, the models' files and the first rows of the data ...")
        try:
            wrong = api.check(loaded := _load(check, overrides))
        except RecipeError as error:
            wrong = list(error.problems or [str(error)])
        for line in wrong:
            complain(" ".join(f"error: {line}".split()))
        if wrong:
            raise typer.Exit(USER_CAN_MEND)
        if loaded.sharing_note:
            say(f"Note: {loaded.sharing_note}")
        say(f"{check} is in order")


# --------------------------------------------------------------------------------------- reference log-probs


@cache_app.command("list")
def list_namespaces(
    cache_dir: CacheDir = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List models with cached log-probs, and how many."""
    from dpo_pack.reference.cache import find_namespaces

    found = find_namespaces(cache_dir)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for one in found:
        say(f"{one['namespace'][:12]}  {', '.join(one['models']) or 'unknown model'}")
        say(
            f"{'':12}  {one['parameters']}{' + ' + one['autocast'] if one['autocast'] else ''}; "
            f"{counted(one['sequences'], 'sequence')}; {one['size_bytes'] / 1e6:,.1f} MB; "
            f"last used {datetime.fromtimestamp(one['last_used']):%Y-%m-%d %H:%M}"
        )
    say(f"{counted(len(found), 'namespace')}, {sum(one['size_bytes'] for one in found) / 1e6:,.1f} MB")


@cache_app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The Parquet file to write.")],
    namespace: Annotated[
        str, typer.Option(help="Beginning of a name that `list` shows; default: the only one.")
    ] = "",
    cache_dir: CacheDir = None,
) -> None:
    """Write all log-probs of a model into one Parquet file.

    `dpopack cache import` reads this file, here or on another machine.
    """
    from dpo_pack.reference.cache import export_namespace

    say(f"{counted(export_namespace(cache_dir, namespace, file), 'sequence')} written to {file}")


@cache_app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet, see docs/reference-cache.md.")],
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe of their reference model.")],
    overrides: Overrides = None,
) -> None:
    """Add your own reference log-probs to the cache.

    First checks every row, then adds all rows or none. Log-probs that the cache already has do not change.
    """
    loaded = api.load(_load(recipe, overrides))
    import torch

    from dpo_pack.reference.cache import ReferenceCache, import_logps
    from dpo_pack.reference.compute import find_work
    from dpo_pack.run.setup import prepare
    from dpo_pack.system import ranks
    from dpo_pack.system.console import make_console

    setup = prepare(loaded, make_console(), for_device=torch.device("cuda" if ranks.uses_cuda() else "cpu"))
    facts = setup.reference_facts
    cache = ReferenceCache(facts.cache_dir, facts.namespace, used_by=facts.label)
    num_added = import_logps(file, cache, setup.tables)
    work = find_work(cache, setup.tables)
    num_sequences = int(work.sides.sum())
    say(
        f"{file}: {counted(num_added, 'sequence')} added; the cache now has "
        f"{num_sequences - int(work.missing.sum()):,} of the recipe's {num_sequences:,} sequences"
    )


@cache_app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove what was not used for so long: 90d, 12h.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove the longest unused until the rest fits: 20GB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove log-probs by age or size.

    Even without an option, removes damaged parts that a run has moved aside, and temporary files of killed
    runs. Does not remove files that dpopack has not written.
    """
    from dpo_pack.reference.cache import prune_cache

    seconds = None
    if older_than is not None:
        if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", older_than)) is None:
            raise RecipeError(f"--older-than: {older_than!r} is not an age; write it as 90d, 12h, 30m or 2w")
        seconds = float(match[1]) * {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[match[2]]
    most = None if max_size is None else parse_bytes(max_size, "--max-size", "20GB, 500MB or 0B")
    for line in prune_cache(cache_dir, older_than_seconds=seconds, most_bytes=most, dry_run=dry_run):
        say(f"{'would remove' if dry_run else 'removing'} {line}")


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Handles the options that stand before a command."""
    if version:
        say(f"dpo-pack {dpo_pack.__version__}")
        raise typer.Exit
