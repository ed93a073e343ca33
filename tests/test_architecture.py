"""The rooms of the house: imports between them point down, and none goes round in circles inside one.

Imports under TYPE_CHECKING and inside functions count. A new file never touches this test; a new room is a
line in ROOMS.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dpo_pack"

# Top to bottom: a room imports from itself and from rooms below it.
ROOMS = (
    "__main__",
    "commands",
    "trainer",
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
HEAVY = {"torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow"}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path, *, at_top: bool = False) -> Iterator[str]:
    """Dotted names that a file imports, of dpo_pack's the modules; `at_top`: when it is itself imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def test_imports_between_rooms_point_down() -> None:
    for module, path in MODULES.items():
        for name in imports(path):
            if module != "dpo_pack" and name in MODULES and name != "dpo_pack":
                own, other = room_of(module), room_of(name)
                assert ROOMS.index(own) <= ROOMS.index(other), f"{module} imports {name}, which is above it"


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
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
    entries = {entry.stem for entry in PACKAGE.iterdir() if entry.name != "py.typed"}
    assert entries - {"__init__", "__pycache__"} == set(ROOMS)
