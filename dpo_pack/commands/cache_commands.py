"""`dpopack cache`: lists, exports, imports and prunes reference log-probs."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from dpo_pack.system.errors import RecipeError
from dpo_pack.system.process import say

cache_app = typer.Typer(help="Look after reference log-probs.", no_args_is_help=True, rich_markup_mode=None)
CacheDir = Annotated[
    Path | None, typer.Option(help="As reference.cache_dir; default: $DPO_PACK_CACHE or ~/.cache/dpo_pack.")
]


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
            f"{one['sequences']:,} sequences; {one['size_bytes'] / 1e6:,.1f} MB; "
            f"last used {datetime.fromtimestamp(one['last_used']):%Y-%m-%d %H:%M}"
        )
    say(f"{len(found)} namespaces, {sum(one['size_bytes'] for one in found) / 1e6:,.1f} MB")


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

    say(f"{export_namespace(cache_dir, namespace, file):,} sequences written to {file}")


@cache_app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet, see docs/reference-cache.md.")],
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe of their reference model.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Recipe keys to set.")
    ] = None,
) -> None:
    """Add your own reference log-probs to the cache.

    First checks every row, then adds all rows or none. Log-probs that the cache already has do not change.
    """
    from dpo_pack.recipe.load import check_environment, load_recipe

    loaded = load_recipe(recipe, overrides or ())
    check_environment(loaded)
    from dpo_pack.reference.cache import ReferenceCache, import_logps
    from dpo_pack.reference.compute import find_work
    from dpo_pack.run.setup import prepare
    from dpo_pack.system.console import make_console

    setup = prepare(loaded, make_console(), runs_models=False)
    facts = setup.reference_facts
    cache = ReferenceCache(facts.cache_dir, facts.namespace, used_by=facts.label)
    num_added = import_logps(file, cache, setup.tables)
    work = find_work(cache, setup.tables)
    num_sequences = int(work.sides.sum())
    say(
        f"{file}: {num_added:,} sequences added; the cache now has "
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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", older_than)
        if match is None:
            raise RecipeError(f"--older-than: {older_than!r} is not an age; write it as 90d, 12h, 30m or 2w")
        seconds = float(match[1]) * {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[match[2]]
    most = None if max_size is None else parse_bytes(max_size, "--max-size", "20GB, 500MB or 0B")
    for line in prune_cache(cache_dir, older_than_seconds=seconds, most_bytes=most, dry_run=dry_run):
        say(f"{'would remove' if dry_run else 'removing'} {line}")


def parse_bytes(size: str, option: str, forms: str) -> int:
    """Reads the size of an option, such as 80GiB; `forms` are examples. Raises RecipeError."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    with contextlib.suppress(ValidationError):
        if re.search("[a-zA-Z]", size):  # 80 alone would be 80 bytes
            return int(TypeAdapter(ByteSize).validate_python(size))
    raise RecipeError(f"{option}: {size!r} is not a size; write it as {forms}")
