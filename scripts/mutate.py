"""Changes the package's code in small ways, one at a time, and asks whether a test notices.

    python scripts/mutate.py [--per-module 8] [--seed 0] [--report FILE] [dpo_pack/packing/plan.py ...]

A *mutant* is one module with one change: `<` becomes `<=`, `+` becomes `-`, a statement is left out. A mutant
whose tests all pass has *survived*: no test keeps what that line promises. Without arguments every module of
the package is sampled. A module's tests are the test files that import it; what they do not notice goes to
the test files that import a module which imports it. Each mutant runs in a fork of this process, which has
already imported torch and transformers.

Some changes cannot be noticed, because the program means the same. docs/dev/equivalent_mutants.txt lists
them with the reason; they do not count. Exit status 1 if fewer than 95 of 100 mutants were noticed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib.machinery
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "docs/dev/equivalent_mutants.txt"
LEAST_RATE = 0.95
LIBRARIES = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "pytest",
    "hypothesis",
    "pyarrow.parquet",
)
_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], str]] = {
    ast.Lt: (ast.LtE, "< to <="),
    ast.LtE: (ast.Lt, "<= to <"),
    ast.Gt: (ast.GtE, "> to >="),
    ast.GtE: (ast.Gt, ">= to >"),
    ast.Eq: (ast.NotEq, "== to !="),
    ast.NotEq: (ast.Eq, "!= to =="),
    ast.Is: (ast.IsNot, "is to is not"),
    ast.IsNot: (ast.Is, "is not to is"),
    ast.In: (ast.NotIn, "in to not in"),
    ast.NotIn: (ast.In, "not in to in"),
    ast.Add: (ast.Sub, "+ to -"),
    ast.Sub: (ast.Add, "- to +"),
    ast.Mult: (ast.Div, "* to /"),
    ast.Div: (ast.Mult, "/ to *"),
    ast.FloorDiv: (ast.Mult, "// to *"),
    ast.And: (ast.Or, "and to or"),
    ast.Or: (ast.And, "or to and"),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
# Texts for people, types and declarations: tests of every word would be no better than the words.
_SPEAKING = ("print", "warning", "info", "debug", "warn", "complain", "Argument", "Option", "Field")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    file: Path
    line: int
    change: str
    code: CodeType

    @property
    def source(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8").splitlines()[self.line - 1].strip()

    @property
    def name(self) -> str:
        """The name in the list of equivalent mutants. It has no line number, which other changes move."""
        return f"{self.file} | {self.change} | {self.source}"


def _is_skipped(node: ast.AST) -> bool:
    """Whether nothing inside the node is changed."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in _SPEAKING
    return False


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that may be changed: no annotations, no decorators, no texts."""
    if _is_skipped(node):
        if isinstance(node, ast.Raise):
            yield node
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yields (what is changed, function that changes such a node in place)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        to, what = _OPERATORS[type(node.ops[0])]
        yield what, lambda n: n.ops.__setitem__(0, to())
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        to, what = _OPERATORS[type(node.op)]
        if not (_is_text(node.left) or _is_text(node.right)):
            yield what, lambda n: setattr(n, "op", to())
    if isinstance(node, ast.BoolOp):
        to, what = _OPERATORS[type(node.op)]
        yield what, lambda n: setattr(n, "op", to())
    if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        to, what = _OPERATORS[type(node.op)]
        yield what, lambda n: setattr(n, "op", to())
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield (
            "condition turned round",
            lambda n: setattr(n, "test", ast.UnaryOp(op=ast.Not(), operand=n.test)),
        )
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield f"{node.value} to {not node.value}", lambda n: setattr(n, "value", not n.value)
        elif isinstance(node.value, int) and node.value <= 100:  # larger numbers are bounds that may differ
            yield f"{node.value} to {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
        elif isinstance(node.value, float) and not 0 < node.value < 1e-6:  # small ones are of rounding
            yield f"{node.value} doubled", lambda n: setattr(n, "value", 2 * n.value + (n.value == 0))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield f"{node.func.id} to {_NAMES[node.func.id]}", lambda n: setattr(n.func, "id", _NAMES[n.func.id])
    if isinstance(node, ast.Raise):
        yield "raise left out", None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_skipped(node.value):
        yield "call left out", None


def mutants_of(file: Path) -> list[Mutant]:
    """Returns every mutant of a module; `file` is relative to the repository."""
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = []
    for number, node in enumerate(_nodes(tree)):
        for what, change in _changes(node):
            mutated = copy.deepcopy(tree)
            target = next(n for i, n in enumerate(_nodes(mutated)) if i == number)
            if change is None:
                _leave_out(mutated, target)
            else:
                change(target)
            ast.fix_missing_locations(mutated)
            code = compile(mutated, str(ROOT / file), "exec")
            found.append(Mutant(file, getattr(node, "lineno", 1), what, code))
    return found


def _leave_out(tree: ast.AST, statement: ast.AST) -> None:
    for parent in ast.walk(tree):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and statement in value:
                value[value.index(statement)] = ast.copy_location(ast.Pass(), statement)


def tests_of(file: Path) -> tuple[list[str], list[str]]:
    """Returns the test files that import a module, those named after it first, and those one step further."""
    module = _module(file)
    importers = {_module(path) for path in Path("dpo_pack").rglob("*.py") if module in _imports(path)}
    near, far = [], []
    for test in sorted(Path("tests").rglob("test_*.py"), key=lambda test: test.stat().st_size):
        imported = _imports(test)
        if module in imported:
            near.append(test)
        elif importers & imported:
            far.append(test)
    near.sort(key=lambda test: file.stem not in test.stem)
    return [str(test) for test in near], [str(test) for test in far]


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _imports(file: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def run_tests(tests: list[str], mutant: Mutant | None, seconds: float) -> tuple[int | None, float]:
    """Runs test files in a fork; returns pytest's exit status (None: out of time) and the seconds."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _child(tests, mutant)
    while time.monotonic() - begun < seconds:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), time.monotonic() - begun
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, time.monotonic() - begun


def _child(tests: list[str], mutant: Mutant | None) -> None:
    import pytest

    status = 99
    try:
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = True
        if mutant is not None:
            _serve(mutant)
        chosen = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        chosen += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are imported already
        status = int(pytest.main([*chosen, *tests]))
    finally:
        os._exit(status)


def _serve(mutant: Mutant) -> None:
    """Makes this process import the mutant in place of its module."""
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        return mutant.code if self.path == str(ROOT / mutant.file) else original(self, fullname)

    loader.get_code = get_code


def equivalent_mutants() -> dict[str, str]:
    """Returns the mutants that mean the same as the program, with the reason."""
    if not EQUIVALENT.is_file():
        return {}
    lines = [line for line in EQUIVALENT.read_text(encoding="utf-8").splitlines() if " || " in line]
    return dict(line.split(" || ", 1) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", help="files of dpo_pack/; none: all of them")
    parser.add_argument("--per-module", type=int, default=8, help="mutants drawn from each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    for name in LIBRARIES:
        __import__(name)
    equivalent, lines = equivalent_mutants(), []
    killed = total = 0
    files = [Path(name) for name in arguments.modules]
    for file in files or sorted(path.relative_to(ROOT) for path in (ROOT / "dpo_pack").rglob("*.py")):
        found = [mutant for mutant in mutants_of(file) if mutant.name not in equivalent]
        drawn = random.Random(f"{arguments.seed} {file}").sample(found, min(arguments.per_module, len(found)))
        survivors = drawn
        for tests in filter(None, tests_of(file)):
            if not survivors:
                break
            status, seconds = run_tests(tests, None, 3600.0)
            if status != 0:
                print(f"{file}: tests fail unchanged, status {status}: {' '.join(tests)}", flush=True)
                return 2
            survivors = [
                mutant for mutant in survivors if run_tests(tests, mutant, 60.0 + 4 * seconds)[0] == 0
            ]
        if not drawn:
            continue
        killed, total = killed + len(drawn) - len(survivors), total + len(drawn)
        lines += [f"{file}: {len(drawn) - len(survivors)} of {len(drawn)} noticed"]
        lines += [f"    survived, line {m.line}: {m.change}: {m.source}" for m in survivors]
        print("\n".join(lines[-len(survivors) - 1 :]), flush=True)
    rate = killed / max(total, 1)
    lines.append(f"{killed} of {total} mutants noticed, {rate:.1%}; seed {arguments.seed}")
    print(lines[-1])
    if arguments.report:
        arguments.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(rate < LEAST_RATE)


if __name__ == "__main__":
    sys.exit(main())
