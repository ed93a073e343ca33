"""Every file operation of a process, as the kernel sees it: numbered, and changed where a test asks for it.

Safetensors, tokenizers, Arrow and torch write from native code, which patched functions of Python do not see.
So the process is traced with ptrace. A seccomp filter stops it only at the system calls in `_CALLS`. This is
possible on Linux on x86-64 only, see `IS_POSSIBLE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import platform
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

IS_POSSIBLE = (sys.platform, platform.machine()) == ("linux", "x86_64")
Value = TypeVar("Value")

# System calls by number: the name, and where the path is: "fd" and "path" name the first argument, "at" the
# first two (a directory's descriptor, a path in it).
_CALLS = {
    **{0: ("read", "fd"), 17: ("read", "fd"), 19: ("read", "fd")},
    **{1: ("write", "fd"), 18: ("write", "fd"), 20: ("writev", "fd")},
    **{2: ("open", "path"), 85: ("open", "path"), 257: ("open", "at"), 437: ("open", "at")},
    **{82: ("rename", "path"), 264: ("rename", "at"), 316: ("rename", "at")},
    **{74: ("fsync", "fd"), 75: ("fsync", "fd")},
    **{76: ("truncate", "path"), 77: ("truncate", "fd"), 285: ("truncate", "fd")},
    **{83: ("mkdir", "path"), 258: ("mkdir", "at"), 84: ("rmdir", "path")},
    **{87: ("unlink", "path"), 263: ("unlink", "at")},
    **{88: ("symlink", "at")},  # its first argument, the address of a text, is no descriptor
    **{90: ("chmod", "path"), 91: ("chmod", "fd"), 268: ("chmod", "at")},
}
_NEEDS_SPACE = ("write", "writev", "rename", "fsync", "truncate", "mkdir", "symlink")

_TRACEME, _CONT, _GETREGS, _POKEUSER, _SYSCALL, _SETOPTIONS = 0, 7, 12, 6, 24, 0x4200
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXEC, _SECCOMP, _EXITKILL = 1, 2, 4, 8, 16, 0x80, 0x100000
_SECCOMP_EVENT, _WALL = 7, 0x40000000
_RAX, _RDX, _RSI, _RDI, _ORIG_RAX = 10, 12, 13, 14, 15  # positions among the registers
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_RETURN_TRACE, _RETURN_ALLOW = 0x7FF00000, 0x7FFF0000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One system call on a file, before it happens."""

    call: str
    path: Path
    size: int  # bytes to write; 0 for other calls
    changes: bool  # whether it would change a file or a directory: an fsync does not
    needs_space: bool  # whether a full disk may refuse it


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The operation fails with this error number, and nothing is done."""

    errno: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """Half of the bytes are written. Then `then` is called, and the process goes on after a short write."""

    then: Callable[[], None]


def traced(
    work: Callable[[], int], directories: Sequence[Path], decide: Callable[[Operation], Refusal | Half | None]
) -> int:
    """Runs `work` in a fork and returns its exit status, negative for a signal.

    `decide` is called before each operation on a file below one of the directories; None lets it happen. The
    caller must have no other child processes.
    """
    pid = fork(lambda: _let_trace(work))
    os.waitpid(pid, 0)
    options = _SYSGOOD | _FORK | _VFORK | _CLONE | _EXEC | _SECCOMP | _EXITKILL
    _ptrace(_SETOPTIONS, pid, 0, options)
    _ptrace(_CONT, pid)
    begun, ended = {pid}, 0
    while True:
        try:
            stopped, status = os.waitpid(-1, _WALL)
        except ChildProcessError:
            return ended
        if not os.WIFSTOPPED(status):
            ended = os.waitstatus_to_exitcode(status) if stopped == pid else ended
            continue
        number, event = os.WSTOPSIG(status), status >> 16
        if event == _SECCOMP_EVENT:
            _decide(stopped, directories, decide)
        is_first_stop = number == signal.SIGSTOP and stopped not in begun
        begun.add(stopped)
        _continue(stopped, 0 if event or is_first_stop else number)


def fork(work: Callable[[], int]) -> int:
    """Starts `work` in a fork of this process, and returns the fork's id.

    The fork ends with the status that `work` returns (1 after an exception), without what Python does at its
    end.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads; only this one goes on in the fork
        pid = os.fork()
    if pid != 0:
        return pid
    gc.freeze()  # the end of an inherited object may wait for a thread that only the parent has
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def in_forks(functions: Sequence[Callable[[], Value]]) -> list[Value]:
    """Returns what each function returns in a fork of this process; the forks run side by side.

    An exception there is an AssertionError here.
    """
    pids, pipes = [], []
    for function in functions:
        read_end, write_end = os.pipe()
        pids.append(fork(functools.partial(_send, function, write_end)))
        os.close(write_end)
        pipes.append(read_end)
    values: list[Value] = []
    failures = []
    for pid, read_end in zip(pids, pipes, strict=True):
        with os.fdopen(read_end, "rb") as pipe:
            content = pipe.read()
        os.waitpid(pid, 0)
        value: Any
        value, failure = pickle.loads(content) if content else (None, "the fork ended without a word")
        if failure is not None:
            failures.append(failure)
        values.append(value)
    assert not failures, "\n".join(failures)
    return values


def _send(function: Callable[[], Any], write_end: int) -> int:
    outcome: tuple[Any, str | None]
    try:
        outcome = (function(), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump(outcome, pipe)
    return 0


def _let_trace(work: Callable[[], int]) -> int:
    _ptrace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    _install_filter()
    return work()


def _install_filter() -> None:
    """Stops this process for its tracer at each call of `_CALLS`."""
    calls = sorted(_CALLS)
    program = [(0x20, 0, 0, 0)]  # load the call's number
    program += [(0x15, len(calls) - place, 0, number) for place, number in enumerate(calls)]
    program += [(0x06, 0, 0, _RETURN_ALLOW), (0x06, 0, 0, _RETURN_TRACE)]
    code = b"".join(
        operation.to_bytes(2, "little") + bytes((jump, other)) + value.to_bytes(4, "little")
        for operation, jump, other, value in program
    )
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    pointer = ctypes.byref(Program(len(program), ctypes.addressof(buffer)))
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER_MODE, pointer, 0, 0)):
        if _libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def _decide(
    pid: int, directories: Sequence[Path], decide: Callable[[Operation], Refusal | Half | None]
) -> None:
    registers = (ctypes.c_ulonglong * 27)()
    _ptrace(_GETREGS, pid, 0, ctypes.addressof(registers))
    operation = _operation(pid, registers)
    if operation is None or not any(operation.path.is_relative_to(where) for where in directories):
        return
    decision = decide(operation)
    if isinstance(decision, Refusal):
        _ptrace(_POKEUSER, pid, 8 * _ORIG_RAX, -1)  # no call is made
        _ptrace(_POKEUSER, pid, 8 * _RAX, -decision.errno)
    elif isinstance(decision, Half):
        _ptrace(_POKEUSER, pid, 8 * _RDX, registers[_RDX] // 2)
        _ptrace(_SYSCALL, pid)
        os.waitpid(pid, _WALL)  # the call is done
        _ptrace(_POKEUSER, pid, 8 * _RDX, registers[_RDX])
        decision.then()


def _operation(pid: int, registers: ctypes.Array[ctypes.c_ulonglong]) -> Operation | None:
    call, where = _CALLS[registers[_ORIG_RAX]]
    first, second, third = registers[_RDI], registers[_RSI], registers[_RDX]
    try:
        if where == "fd":
            path = os.readlink(f"/proc/{pid}/fd/{first}")
        else:
            name = _text(pid, first if where == "path" else second)
            start = "cwd" if where == "path" or first > 2**31 else f"fd/{first}"  # AT_FDCWD is negative
            path = os.path.join(os.readlink(f"/proc/{pid}/{start}"), name)
    except OSError:
        return None  # the call will fail, too
    there = os.path.lexists(path)
    changes = {
        "read": False,
        "fsync": False,
        "mkdir": not there,
        "symlink": not there,
        "rename": there,
        "rmdir": there,
        "unlink": there,
    }.get(call, True)
    if call == "open":
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if registers[_ORIG_RAX] != 85:
            flags = second if where == "path" else third
        if flags & os.O_DIRECTORY:
            return None
        if not flags & (os.O_WRONLY | os.O_RDWR):
            call = "open to read"
        changes = bool(flags & os.O_TRUNC) or bool(flags & os.O_CREAT and not there)
        if call == "open to read" and not there:
            return None
    return Operation(
        call=call,
        path=Path(os.path.normpath(path)),
        size=third if call == "write" else 0,
        changes=changes,
        needs_space=(call in _NEEDS_SPACE or call == "open") and (changes or call == "fsync"),
    )


def _text(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        content = b""
        while b"\0" not in content:
            content += memory.read(min(256, 4096 - (address + len(content)) % 4096))
    return os.fsdecode(content.partition(b"\0")[0])


def _continue(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # killed meanwhile
        _ptrace(_CONT, pid, 0, number)


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request}: {os.strerror(number)}")
