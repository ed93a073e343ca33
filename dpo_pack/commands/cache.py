"""`dpopack cache`: lists, verifies, exports, imports and prunes reference log-probs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from dpo_pack.system.errors import CacheError, RecipeError
from dpo_pack.system.output import say

cache_app = typer.Typer(
    help="Look after cached reference log-probs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="As reference.cache_dir; default: $DPO_PACK_CACHE, else ~/.cache/dpo_pack.",
    ),
]
Namespaces = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAMESPACE]...", help="Beginnings of names that `list` shows; default: all."),
]


@cache_app.command("list")
def list_namespaces(
    cache_dir: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List models with cached log-probs, and how many."""
    from dpo_pack.reference.maintenance import find_namespaces

    directory = _directory(cache_dir)
    found = find_namespaces(directory)
    if as_json:
        print(json.dumps([{"namespace": n.name, **asdict(n)} for n in found], indent=2, default=str))
        return
    for namespace in found:
        precision = namespace.parameters + (f" + {namespace.autocast}" if namespace.autocast else "")
        last_used = datetime.fromtimestamp(namespace.last_used)
        tokens = f", {namespace.sequences_per_token:,} per token" if namespace.sequences_per_token else ""
        say(f"{namespace.name[:12]}  {', '.join(namespace.models) or 'unknown model'}")
        say(
            f"{'':12}  {precision}; {namespace.sequences:,} sequences{tokens}; "
            f"{_format_bytes(namespace.size_bytes)}; last used {last_used:%Y-%m-%d %H:%M}"
        )
    total = _format_bytes(sum(namespace.size_bytes for namespace in found))
    say(f"{_count(len(found), 'namespace')}, {total}, in {directory}")


@cache_app.command()
def verify(namespaces: Namespaces = None, cache_dir: CacheDir = None) -> None:
    """Compare every part (file of log-probs) with its checksum.

    The exit status is 2 if a part is bad. This command changes nothing. The next run that reads a bad part
    moves it aside and computes its sequences again.
    """
    from dpo_pack.reference.maintenance import choose_namespaces, find_damage

    num_parts, damage = 0, []
    directory = _directory(cache_dir)
    chosen = choose_namespaces(directory, namespaces or ())
    if not chosen:
        say(f"nothing to verify: no cached log-probs in {directory}")
    for namespace in chosen:
        found = list(find_damage(namespace))
        num_parts += namespace.parts
        damage += found
        state = f"{len(found)} bad" if found else "none damaged"
        say(f"{namespace.name}: {_count(namespace.parts, 'part')}, {state}")
        for part, reason in found:
            say(f"  {part}: {reason}")
    if damage:
        raise CacheError(
            f"{len(damage)} of {num_parts} parts are bad, the first is {damage[0][0]} ({damage[0][1]}); the "
            "next run sets them aside and computes their sequences again"
        )


@cache_app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The Parquet file to write.")],
    namespace: Annotated[
        str | None, typer.Option(help="Beginning of a name that `list` shows; default: the only one.")
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="Export the sequences of this recipe's data, with their rows and hashes of their texts."
        ),
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Write log-probs into one Parquet file.

    `dpopack cache import` reads this file, here or on another machine.
    """
    if recipe is not None:
        if namespace is not None or cache_dir is not None:
            raise RecipeError(
                "cache export: --recipe says which namespace and cache; leave --namespace and --cache-dir out"
            )
        from dpo_pack.recipe.load import check_environment, load_recipe

        loaded = load_recipe(recipe)
        check_environment(loaded)
        from dpo_pack.commands.cache_exchange import export_recipe
        from dpo_pack.system.console import make_console

        say(f"{export_recipe(loaded, file, make_console()):,} sequences written to {file}")
        return
    from dpo_pack.reference.maintenance import choose_namespaces, export_namespace

    directory = _directory(cache_dir)
    found = choose_namespaces(directory, [namespace] if namespace else ())
    if len(found) != 1:
        raise CacheError(
            f"{directory} has {len(found)} namespaces; name one with --namespace (`dpopack cache list`)"
        )
    say(f"{export_namespace(found[0], file):,} sequences written to {file}")


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
    from dpo_pack.commands.cache_exchange import import_into
    from dpo_pack.system.console import make_console

    import_into(loaded, file, make_console())


@cache_app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove what was not used for so long: 90d, 12h.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Remove the longest unused until the rest fits: 20GB, 500MB."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove log-probs by age or size.

    Even without an option, removes damaged parts that a run has moved aside, and temporary files of killed
    runs. Does not remove files that dpopack has not written.
    """
    from dpo_pack.reference.maintenance import plan_prune, remove

    removals = plan_prune(
        _directory(cache_dir),
        older_than_seconds=None if older_than is None else _seconds(older_than),
        most_bytes=None if max_size is None else _bytes(max_size),
    )
    for removal in removals:
        what = "" if removal.is_whole else f"{_count(len(removal.files), 'file')} of "
        say(
            f"{'would remove' if dry_run else 'removing'} {what}{removal.name}, "
            f"{_format_bytes(removal.size_bytes)}: {removal.reason}"
        )
        left = [] if dry_run else remove(removal)
        if left:
            say(f"  kept in {removal.directory}, because dpo-pack did not write it: {', '.join(left)}")
    if dry_run:
        total = _format_bytes(sum(removal.size_bytes for removal in removals))
        say(f"{total} in all; nothing was removed")
    elif not removals:
        say("nothing to remove")


def _directory(cache_dir: Path | None) -> Path:
    from dpo_pack.reference.cache import default_cache_directory

    return cache_dir or default_cache_directory()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_AGE_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", age)
    if match is None:
        raise RecipeError(f"--older-than: {age!r} is not an age; write it as 90d, 12h, 30m or 2w")
    return float(match[1]) * _AGE_SECONDS[match[2]]


def _bytes(size: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise RecipeError(f"--max-size: {size!r} is not a size; write it as 20GB, 500MB or 0B") from None


def _format_bytes(size: int) -> str:
    from pydantic import ByteSize

    return ByteSize(size).human_readable(decimal=True, separator=" ")
