"""Changes the package's code in small ways, one at a time, and asks whether a test notices.

    python scripts/mutate.py [--slow] [--per-module 3] [--seed 0] [--jobs 2] [--report FILE] [MODULE ...]

A *mutant* is one module with one change: `<` becomes `<=`, `+` becomes `-`, a statement is left out. A mutant
whose tests all pass has *survived*: no test keeps what that line promises. Without arguments, mutants are
drawn from every module of the package, and every test file is used. For named modules, only the test files
that import one of them are used; other tests may notice what survives them. Without
`--slow`, only the quick tests of these files are used.

First each test file runs once, unchanged. That shows which lines each test executes, and how long it takes.
A mutant is then shown the tests that execute its line, near and fast ones first, until one fails. If no test
executes the line, it is shown tests of the same module and of those that import it. Tests that fail unchanged
are not used, and are named. Each run is a fork of this process, which has already imported torch and
transformers. build/mutations.jsonl keeps what is known: the same command goes on where it was stopped, and
what depends on a changed file is done again.

Some changes cannot be noticed, because the program means the same. docs/dev/equivalent_mutants.txt lists them
with the reason; they do not count. Exit status 1 if fewer than 95 of 100 mutants were noticed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import json
import mmap
import operator
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dpo_pack"
EQUIVALENT = "docs/dev/equivalent_mutants.txt"
STATE = Path("build/mutations.jsonl")  # what is known already
LEAST_RATE = 0.95
LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "peft", "hypothesis", "pyarrow.parquet")
# CPU seconds that a mutant's tests take unchanged: those of the first run, of all runs, and of tests that do
# not execute its line.
FIRST_SECONDS, ALL_SECONDS, BLIND_SECONDS = 4.0, 40.0, 15.0
SLACK = 60.0  # seconds beyond six times the time of its tests: the machine may be busy
MEMORY = 8 << 30  # bytes: a mutant may allocate without end
QUICK, ALL = "not slow and not gpu", "not alone and not gpu"
PYTEST = ["-q", "-p", "no:cacheprovider"]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are already imported

_PAIRS = [
    (ast.Lt, "<", ast.LtE, "<="),
    (ast.Gt, ">", ast.GtE, ">="),
    (ast.Eq, "==", ast.NotEq, "!="),
    (ast.Is, "is", ast.IsNot, "is not"),
    (ast.In, "in", ast.NotIn, "not in"),
    (ast.Add, "+", ast.Sub, "-"),
    (ast.Mult, "*", ast.Div, "/"),
    (ast.And, "and", ast.Or, "or"),
]
_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], str]] = {ast.FloorDiv: (ast.Mult, "// to *")}
for _one, _its, _other, _their in _PAIRS:
    _OPERATORS |= {_one: (_other, f"{_its} to {_their}"), _other: (_one, f"{_their} to {_its}")}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
# Texts for people, types and declarations: tests of every word would be no better than the words.
_SPEAKING = ("print", "warning", "info", "debug", "warn", "complain", "Argument", "Option", "Field")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    file: Path
    line: int
    change: str
    node: int  # the place of the changed node among the nodes of the module
    option: int  # the place of the change among the possible changes of the node
    statement: tuple[int, int]  # first and last line; for an `if` or a loop, only its head

    @property
    def source(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8").splitlines()[self.line - 1].strip()

    @property
    def name(self) -> str:
        """The name in the list of equivalent mutants. It has no line number, which other changes move."""
        return f"{self.file} | {self.change} | {self.source}"

    def compiled(self) -> CodeType:
        tree = ast.parse((ROOT / self.file).read_text(encoding="utf-8"))
        target = next(node for place, (node, _) in enumerate(_nodes(tree, tree)) if place == self.node)
        change = list(_changes(target))[self.option][1]
        if change is None:
            _leave_out(tree, target)
        else:
            change(target)
        ast.fix_missing_locations(tree)
        return compile(tree, str(ROOT / self.file), "exec")


def _is_skipped(node: ast.AST) -> bool:
    """Whether nothing inside the node is changed."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion
        return True
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in _SPEAKING
    return False


def _nodes(node: ast.AST, statement: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields (node that may be changed, its statement): no annotations, no decorators, no texts."""
    if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
        statement = node
    if _is_skipped(node):
        if isinstance(node, ast.Raise):
            yield node, statement
        return
    yield node, statement
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, statement)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yields (what is changed, function that changes such a node in place)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        to, what = _OPERATORS[type(node.ops[0])]
        yield what, lambda n: n.ops.__setitem__(0, to())
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        to, what = _OPERATORS[type(node.op)]
        if not (isinstance(node, ast.BinOp) and (_is_text(node.left) or _is_text(node.right))):
            yield what, lambda n: setattr(n, "op", to())
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition turned round", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield f"{node.value} to {not node.value}", lambda n: setattr(n, "value", not n.value)
        elif isinstance(node.value, int) and node.value <= 100:  # larger numbers are bounds that may differ
            yield f"{node.value} to {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
        elif isinstance(node.value, float) and not 0 < node.value < 1e-6:  # smaller ones bound rounding
            yield f"{node.value} doubled", lambda n: setattr(n, "value", 2 * n.value + (n.value == 0))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield f"{node.func.id} to {_NAMES[node.func.id]}", lambda n: setattr(n.func, "id", _NAMES[n.func.id])
    if isinstance(node, ast.Raise):
        yield "raise left out", None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_skipped(node.value):
        yield "call left out", None


def mutants_of(file: Path) -> list[Mutant]:
    """Returns every mutant of a module; `file` is relative to the repository."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = []
    for place, (node, statement) in enumerate(_nodes(tree, tree)):
        for option, (what, _) in enumerate(_changes(node)):
            line = getattr(node, "lineno", 1)
            found.append(Mutant(file, line, what, place, option, _lines(statement, line)))
    return found


def _lines(statement: ast.AST, line: int) -> tuple[int, int]:
    first, last = getattr(statement, "lineno", line), getattr(statement, "end_lineno", line)
    body = getattr(statement, "body", None)
    if body and not isinstance(statement, ast.Module):
        last = max(first, body[0].lineno - 1)
    return min(first, line), max(last, line)


def _leave_out(tree: ast.AST, statement: ast.AST) -> None:
    for parent in ast.walk(tree):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and statement in value:
                value[value.index(statement)] = ast.copy_location(ast.Pass(), statement)


def drawn(file: Path, number: int, seed: int, equivalent: set[str]) -> list[Mutant]:
    """Returns `number` mutants of a module that are not equivalent.

    A mutant's place in the draw depends on its own text alone, so a change elsewhere in the module leaves it.
    """
    seen: Counter[str] = Counter()
    order = []
    for mutant in mutants_of(file):
        seen[mutant.name] += 1
        key = hashlib.sha256(f"{seed} {mutant.name} {seen[mutant.name]}".encode()).hexdigest()
        order.append((key, mutant))
    order.sort(key=lambda pair: pair[0])
    return [mutant for _, mutant in order if mutant.name not in equivalent][:number]


@dataclass(slots=True)
class KnownTest:
    """What a test does unchanged."""

    seconds: float  # of CPU time
    lines: int  # bit n is set if the test executes line n of all the package's lines


class Lines:
    """Numbers all lines of the package, and notes which of them are executed after `begin`."""

    def __init__(self) -> None:
        self.base: dict[str, int] = {}
        total = 0
        for path in sorted((ROOT / PACKAGE).rglob("*.py")):
            self.base[str(path)] = total
            total += len(path.read_bytes().splitlines()) + 2
        self.total = total
        self._tracers: dict[str, Callable[..., Any]] = {}

    def begin(self) -> None:
        """Notes the lines of this process and of its later forks. Forks made before note their own lines."""
        self._seen = mmap.mmap(-1, self.total)  # shared with later forks
        self._tracers = {name: self._tracer(base) for name, base in self.base.items()}

    def _tracer(self, base: int) -> Callable[..., Any]:
        seen = self._seen

        def trace(frame: Any, event: str, argument: object) -> Any:
            seen[base + frame.f_lineno] = 1
            return trace

        return trace

    def trace(self, frame: Any, event: str, argument: object) -> Any:
        """The function for `sys.settrace`."""
        tracer = self._tracers.get(frame.f_code.co_filename)
        return tracer and tracer(frame, event, argument)

    def take(self) -> int:
        """Returns the lines executed since the last call, one bit each."""
        bits = bytes(self._seen).translate(_DIGITS)[::-1]
        self._seen[:] = bytes(self.total)
        return int(bits, 2)

    def masks(self, mutant: Mutant) -> list[int]:
        """Returns the bits of the mutant's statement, of its module, and of the modules that import it."""
        base, (first, last) = self.base[str(ROOT / mutant.file)], mutant.statement
        importers = [file for file in self.base if _module(mutant.file) in _imports(Path(file))]
        return [
            ((1 << (last - first + 1)) - 1) << (base + first),
            self._module(str(ROOT / mutant.file)),
            functools.reduce(operator.or_, map(self._module, importers), 0),
        ]

    def _module(self, file: str) -> int:
        count = len(Path(file).read_bytes().splitlines()) + 1
        return ((1 << count) - 1) << self.base[file]


_DIGITS = bytes([ord("0"), ord("1")] + [ord("1")] * 254)


class Watch:
    """A pytest plugin that notes what each test of one file executes."""

    def __init__(self, lines: Lines, traced: bool) -> None:
        self.lines, self.traced = lines, traced
        self.tests: dict[str, KnownTest] = {}
        self.failed: set[str] = set()
        self._of_fixtures: Counter[tuple[str, str]] = Counter()
        self._fixtures: dict[str, list[tuple[str, str]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        self.lines.take()
        self._fixtures[item.nodeid] = [
            (name, definition.baseid)
            for name in item.fixturenames
            for definition in item._fixtureinfo.name2fixturedefs.get(name, ())
        ]
        begun = sum(os.times()[:4])  # of CPU time, also of processes that ended: others may be busy
        if self.traced:
            threading.settrace(self.lines.trace)
            sys.settrace(self.lines.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = sum(os.times()[:4]) - begun
            self.tests[item.nodeid] = KnownTest(seconds, self.lines.take() | self._of_fixtures["", ""])
            self._of_fixtures["", ""] = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: object) -> Generator[None, object, object]:
        """What a fixture of several tests executes, all of them execute."""
        if fixturedef.scope == "function":
            return (yield)
        before = self.lines.take()
        try:
            return (yield)
        finally:
            inside = self.lines.take()
            self._of_fixtures[fixturedef.argname, fixturedef.baseid] |= inside
            self._of_fixtures["", ""] |= before | inside  # for the test that runs

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def result(self) -> dict[str, Any]:
        for test, known in self.tests.items():
            for fixture in self._fixtures[test]:
                known.lines |= self._of_fixtures[fixture]
        return {
            "tests": {
                name: [round(known.seconds, 3), zlib.compress(f"{known.lines:x}".encode()).hex()]
                for name, known in self.tests.items()
            },
            "failed": sorted(self.failed),
        }


class Chosen:
    """A pytest plugin that runs these tests in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.tests = tests

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self.tests if test in found]


@dataclass(slots=True)
class Job:
    """What a fork does: returns its exit status within `seconds`."""

    work: Callable[[str], int]  # gets an empty directory
    seconds: float


Work = Generator[Job, int | None, None]  # gets each job's exit status; None: it was out of time


def in_forks(works: Iterable[Work], jobs: int) -> None:
    """Runs the jobs of each work one after the other, and `jobs` works beside each other."""
    waiting = iter(works)
    running: dict[int, tuple[Work, float, str]] = {}

    def advance(work: Work, status: int | None, first: bool = False) -> None:
        try:
            job = next(work) if first else work.send(status)
        except StopIteration:
            return
        directory = tempfile.mkdtemp(prefix="mutate-")
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _child(job, directory)
        running[pid] = work, time.monotonic() + job.seconds, directory

    while True:
        while len(running) < jobs and (work := next(waiting, None)) is not None:
            advance(work, None, first=True)
        if not running:
            return
        for pid, (work, end, directory) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            in_time = bool(ended)
            if not in_time and time.monotonic() < end:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # and the processes that it has left running
            if not in_time:
                os.waitpid(pid, 0)
            shutil.rmtree(directory, ignore_errors=True)
            del running[pid]
            advance(work, os.waitstatus_to_exitcode(status) if in_time else None)
        time.sleep(0.01)


def _child(job: Job, directory: str) -> None:
    status = 99
    try:
        output = os.open(os.environ.get("MUTATE_OUTPUT", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        status = job.work(directory)
    finally:
        os._exit(status)


def _pytest(tests: list[str], marks: str, directory: str, *plugins: object, stop: bool = False) -> int:
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    options = [*PYTEST, "-m", marks, f"--rootdir={ROOT}", f"--basetemp={directory}/pytest"]
    return int(pytest.main([*options, *(["-x"] if stop else []), *files], plugins=list(plugins)))


def _serve(mutant: Mutant) -> None:
    """Makes this process import the mutant in place of its module."""
    loader: Any = importlib.machinery.SourceFileLoader
    original, code = loader.get_code, mutant.compiled()

    def get_code(self: Any, fullname: str) -> Any:
        return code if self.path == str(ROOT / mutant.file) else original(self, fullname)

    loader.get_code = get_code


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


def _hash(paths: Iterable[Path]) -> str:
    state = hashlib.sha256()
    for path in sorted(paths):
        state.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


class State:
    """What is known already: a JSON line each, under a key that changes with what it depends on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.endswith("]"):  # a killed process may leave a part of a line
                    key, value = json.loads(line)
                    self._known[key] = value

    def get(self, key: str) -> Any:
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        self._known[key] = value
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, value]) + "\n")


@dataclass(slots=True)
class Tests:
    """Runs every test file once, unchanged, and chooses the tests of a mutant."""

    state: State
    lines: Lines
    marks: str = QUICK  # pytest's expression for the tests that are used
    known: dict[str, KnownTest] = field(default_factory=dict)
    failing: list[str] = field(default_factory=list)

    def learn(self, jobs: int, named: list[Path]) -> None:
        """Uses the test files that import one of the named modules, or all."""
        package = _hash([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "tests/support").rglob("*.py")])
        names = {_module(file) for file in named}
        used = [path for path in (ROOT / "tests").rglob("test_*.py") if not names or names & _imports(path)]
        used.sort(key=lambda path: (-path.stat().st_size, path))  # long files first
        in_forks((self._learn(path.relative_to(ROOT), package) for path in used), jobs)

    def _learn(self, file: Path, package: str) -> Work:
        key = f"{package} {_hash([ROOT / file])} {file}" + (f" {ALL}" if self.marks == ALL else "")
        found = self.state.get(key)
        if found is None:
            result = Path(tempfile.mkdtemp(prefix="mutate-")) / "result.json"

            def watched(tests: list[str], traced: bool) -> Callable[[str], int]:
                def work(directory: str) -> int:
                    self.lines.begin()
                    watch = Watch(self.lines, traced)
                    plugins = [watch] if traced else [watch, Chosen(tests)]
                    _pytest(tests, self.marks, directory, *plugins)
                    result.write_text(json.dumps(watch.result()), encoding="utf-8")
                    return 0

                return work

            found = {"tests": {}, "failed": [str(file)]}
            if (yield Job(watched([str(file)], True), 3600.0)) == 0:
                found = json.loads(result.read_text(encoding="utf-8"))
                # Tracing may have made it fail.
                if found["failed"] and (yield Job(watched(found["failed"], False), 3600.0)) == 0:
                    found["failed"] = json.loads(result.read_text(encoding="utf-8"))["failed"]
            shutil.rmtree(result.parent)
            self.state.put(key, found)
            print(f"{file}: {len(found['tests'])} tests", flush=True)
        for test in found["failed"]:
            print(f"fails unchanged, and is not used: {test}", flush=True)
        self.failing += found["failed"]
        for test, (seconds, lines) in found["tests"].items():
            if test not in found["failed"]:
                self.known[test] = KnownTest(seconds, int(zlib.decompress(bytes.fromhex(lines)), 16))

    def of(self, mutant: Mutant) -> list[list[str]]:
        """Returns the tests to show it, in runs: near and fast ones first."""
        masks = self.lines.masks(mutant)
        name, ranked = _module(mutant.file), []
        for test, known in self.known.items():
            file = Path(test.split("::")[0])
            imports = name in _imports(ROOT / file)
            reach = next((n for n, mask in enumerate(masks) if known.lines & mask), 3)
            if reach < 3 or imports:
                distance = 1 if mutant.file.stem in file.stem else 2 if imports else 4
                ranked.append((reach, (known.seconds + 0.02) * distance, known.seconds + 0.01, test))
        runs: list[list[str]] = [[], []]
        used = blind = 0.0
        for reach, _, seconds, test in sorted(ranked):
            if (reach and (blind := blind + seconds) > BLIND_SECONDS) or used + seconds > ALL_SECONDS:
                continue
            used += seconds
            runs[used > FIRST_SECONDS and bool(runs[0])].append(test)
        return [_by_file(run) for run in runs if run]

    def seconds(self, tests: list[str]) -> float:
        return sum(self.known[test].seconds for test in tests)


def _by_file(tests: list[str]) -> list[str]:
    """Keeps the tests of a file together, so that its fixtures are made once."""
    files = [test.split("::")[0] for test in tests]
    return sorted(tests, key=lambda test: files.index(test.split("::")[0]))


@dataclass(slots=True)
class Results:
    """How each mutant ended: `noticed`, `out of time` or `survived`."""

    state: State
    tests: Tests
    key: str
    endings: dict[Mutant, str] = field(default_factory=dict)
    unfit: list[str] = field(default_factory=list)  # modules whose tests fail unchanged in this order

    def judge(self, file: Path, mutants: list[Mutant]) -> Work:
        """Judges the mutants of a module, after a look whether its tests pass unchanged."""
        for number, mutant in enumerate(mutants):
            key = f"{self.key} {self.tests.marks} {mutant.file} {mutant.node} {mutant.option}"
            ending = self.state.get(key)
            runs = self.tests.of(mutant)
            if ending is None and number == 0 and runs:
                status = yield self._job(None, runs[0])
                if status != 0:
                    print(f"{file}: its tests fail unchanged, status {status}", flush=True)
                    self.unfit.append(str(file))
                    return
            if ending is None:
                ending = "survived"
                for run in runs:
                    status = yield self._job(mutant, run)
                    if status != 0:
                        ending = "out of time" if status is None else "noticed"
                        break
                self.state.put(key, ending)
            self.endings[mutant] = ending
            if ending == "survived":
                print(f"survived: {mutant.file}:{mutant.line}: {mutant.change}: {mutant.source}", flush=True)
        endings = [self.endings[mutant] for mutant in mutants]
        print(f"{file}: {len(mutants) - endings.count('survived')} of {len(mutants)} noticed", flush=True)

    def _job(self, mutant: Mutant | None, tests: list[str]) -> Job:
        def work(directory: str) -> int:
            if mutant is not None:
                _serve(mutant)
            return _pytest(tests, self.tests.marks, directory, Chosen(tests), stop=mutant is not None)

        return Job(work, SLACK + 6 * self.tests.seconds(tests))


def equivalent_mutants() -> set[str]:
    """Returns the mutants that mean the same as the program. A line of the file is `file | change | source ||
    reason`."""
    path = ROOT / EQUIVALENT
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {line.rsplit(" || ", 1)[0] for line in lines if " || " in line}


def modules(names: list[str]) -> list[Path]:
    """Returns the modules of these files and directories, relative to the repository; of none, all."""
    paths = [ROOT / name for name in names or [PACKAGE]]
    found = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sorted(file.relative_to(ROOT) for file in found)


def page(results: Results, num_equivalent: int, command: str) -> str:
    """Returns the result as a page of Markdown."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, ending in results.endings.items():
        rooms["/".join(mutant.file.parts[1:2])][ending] += 1
    total = sum(rooms.values(), Counter())
    survivors = [mutant for mutant, ending in results.endings.items() if ending == "survived"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    versions = ", ".join(f"{name} {version(name)}" for name in (*LIBRARIES[:2], "pytest"))
    kind = "test" if results.tests.marks == ALL else "quick test"
    lines = [
        "# Mutations",
        "",
        "<!-- Written by scripts/mutate.py; edit the script instead. -->",
        "",
        f"`{command}`",
        f"at commit {commit.stdout.strip() or 'unknown'}, Python {platform.python_version()}, {versions}.",
        "",
        f"A mutant is one module with one small change. It is noticed when a {kind} fails, or does not",
        f"end. The mutants were drawn from {len({m.file for m in results.endings})} modules.",
        f"{num_equivalent} more mean the same as the program ([list]({Path(EQUIVALENT).name})), and do not",
        "count.",
        "",
        f"**{sum(total.values()) - total['survived']} of {sum(total.values())} noticed, {_rate(total):.1%}**;"
        f" {total['out of time']} of them because the tests did not end.",
        "",
        "| room | mutants | noticed | rate |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {room} | {sum(c.values())} | {sum(c.values()) - c['survived']} | {_rate(c):.0%} |"
        for room, c in sorted(rooms.items())
    ]
    lines += ["", "## Survivors", ""] if survivors else ["", "No mutant survived."]
    lines += [f"- `{m.file}`, line {m.line}, {m.change}: `{m.source}`" for m in survivors]
    if unused := [*results.tests.failing, *results.unfit]:
        lines += ["", "## Not used, because tests fail unchanged", "", *(f"- `{name}`" for name in unused)]
    return "\n".join(lines) + "\n"


def _rate(endings: Counter[str]) -> float:
    return 1 - endings["survived"] / max(sum(endings.values()), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"files or directories of {PACKAGE}/; none: all modules")
    parser.add_argument("--slow", action="store_true", help="also use the slow tests")
    parser.add_argument("--per-module", type=int, default=3, help="mutants drawn from each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes beside each other")
    parser.add_argument("--report", type=Path, help="write the result here, as Markdown")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        __import__(name)
    named = modules(arguments.modules) if arguments.modules else []
    state = State(STATE)
    tests = Tests(state, Lines(), ALL if arguments.slow else QUICK)
    tests.learn(arguments.jobs, named)
    everything = _hash([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    results = Results(state, tests, everything)
    equivalent = equivalent_mutants()
    draws = (
        (file, drawn(file, arguments.per_module, arguments.seed, equivalent))
        for file in modules(arguments.modules)
    )
    in_forks((results.judge(file, found) for file, found in draws if found), arguments.jobs)
    total = Counter(results.endings.values())
    rate = _rate(total)
    print(f"{sum(total.values()) - total['survived']} of {sum(total.values())} mutants noticed, {rate:.1%}")
    if arguments.report:
        command = " ".join(["python scripts/mutate.py", *sys.argv[1:]])
        arguments.report.write_text(page(results, len(equivalent), command), encoding="utf-8")
    return 2 if results.unfit else int(rate < LEAST_RATE)


if __name__ == "__main__":
    sys.exit(main())
