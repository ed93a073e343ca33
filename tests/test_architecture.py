"""The rooms of the house: imports between them point down, and none goes round in circles inside one.

Imports under TYPE_CHECKING and inside functions count. A new file never touches this test; a new room is a
line in ROOMS. The numbers below ROOMS may only fall.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dpo_pack"

# Top to bottom: a room imports from itself and from rooms below it.
ROOMS = (
    "__main__",
    "commands",
    "api",
    "trainer",
    "verdicts",
    "audits",
    "reports",
    "run",
    "online",
    "proofs",
    "reference",
    "training",
    "model",
    "data",
    "packing",
    "losses",
    "recipe",
    "system",
)
# Rooms whose code runs for each row: what goes to the device goes through `on_device`.
ROWS = ("model", "training")
HEAVY = {"torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow"}
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_CHAIN = 10  # rooms from __main__
MOST_WITH_A_RECIPE = 21  # functions outside recipe/, commands/ and api.py that take a whole recipe
MOST_ASKING_WHO_IS_FIRST = 0  # calls of `is_first` in run/
MOST_OF_ONE_NAME = 0  # names that two files have
MOST_FILES_OF_RUN = 15  # without `__init__.py`


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, at_top: bool = False) -> Iterator[str]:
    """Dotted names that a file imports, of dpo_pack's the modules; `at_top`: when it is itself imported."""
    tree = tree_of(path)
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def arrows() -> Iterator[tuple[str, str]]:
    """Each module with each module that it imports; without the package itself, which has no room."""
    for module, path in MODULES.items():
        for name in imports(path):
            if name in MODULES and "dpo_pack" not in (module, name):
                yield module, name


def test_imports_between_rooms_point_down() -> None:
    for module, name in arrows():
        own, other = room_of(module), room_of(name)
        assert ROOMS.index(own) <= ROOMS.index(other), f"{module} imports {name}, which is above it"


def test_rooms_form_no_circle_and_no_long_chain() -> None:
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, name in arrows():
        graph[room_of(module)] |= {room_of(name)} - {room_of(module)}
    chains: dict[str, list[str]] = {}  # the longest one from each room
    for room in TopologicalSorter(graph).static_order():  # raises CycleError with the circle
        chains[room] = [room, *max((chains[other] for other in graph[room]), key=len, default=[])]
    assert len(chains["__main__"]) <= LONGEST_CHAIN, chains["__main__"]


def test_only_functions_of_a_whole_run_take_a_whole_recipe() -> None:
    """A section is a value like others: what needs all of it may hold it, but for the innermost rooms."""
    found = [
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if module != "dpo_pack" and room_of(module) not in ("recipe", "commands", "api")
        if isinstance(node, ast.FunctionDef) and re.search(r"\bRecipe\b", types_of(node.args))
    ]
    assert 0 < len(found) <= MOST_WITH_A_RECIPE, found


def types_of(arguments: ast.arguments) -> str:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return " ".join(ast.unparse(one.annotation) for one in every if one.annotation is not None)


def test_run_is_small_and_its_functions_do_not_ask_who_is_rank_0() -> None:
    files = sorted(path for path in (PACKAGE / "run").rglob("*.py") if path.name != "__init__.py")
    assert len(files) <= MOST_FILES_OF_RUN
    asked = [path for path in files for _ in re.findall(r"\bis_first\(", path.read_text(encoding="utf-8"))]
    assert len(asked) <= MOST_ASKING_WHO_IS_FIRST, asked


def test_no_two_files_have_the_same_name() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    twice = [name for name, number in names.items() if number > 1]
    assert len(twice) <= MOST_OF_ONE_NAME, twice


def test_no_import_goes_round_in_circles() -> None:
    graph = {module: [name for name in imports(path) if name in MODULES] for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_rooms_know_only_what_they_need() -> None:
    for room, unknown in {
        "packing": {"torch", "transformers", "accelerate", "datasets", "pyarrow", "pathlib", "os"},
        "losses": {"transformers", "accelerate", "datasets", "pyarrow"},
        "recipe": HEAVY,
        "data": {"torch", "transformers", "accelerate"},
    }.items():
        for path in (PACKAGE / room).rglob("*.py"):
            for name in imports(path):
                assert name.split(".")[0] not in unknown, f"{path}: {name}"
    for room in ("packing", "losses", "recipe"):
        for path in (PACKAGE / room).rglob("*.py"):
            assert not any(name.startswith("dpo_pack.model") for name in imports(path)), path
    for room in ("training", "packing", "losses"):
        for path in (PACKAGE / room).rglob("*.py"):
            assert not any(name.startswith("dpo_pack.recipe") for name in imports(path)), path


def test_what_the_command_line_imports_at_once_is_light() -> None:
    """`dpopack --help` answers at once: what it imports, and what that imports, knows none of the HEAVY."""
    seen, todo = set(), ["dpo_pack.commands.main"]
    while todo:
        module = todo.pop()
        seen.add(module)
        for name in imports(MODULES[module], at_top=True):
            assert name.split(".")[0] not in HEAVY, f"{module}: {name}"
            todo += [name] if name in MODULES and name not in seen else []


def test_every_module_says_what_it_is_and_every_entry_has_a_room() -> None:
    for path in FILES:
        assert ast.get_docstring(tree_of(path)), path
    entries = {entry.stem for entry in PACKAGE.iterdir() if entry.name != "py.typed"}
    assert entries - {"__init__", "__pycache__"} == set(ROOMS)


def test_no_row_is_copied_to_the_device_from_pageable_memory() -> None:
    """Such a copy waits until the device has done all its work."""
    found = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        if "." in module and room_of(module) in ROWS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor")
        and any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not found, found
