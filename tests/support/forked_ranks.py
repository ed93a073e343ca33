"""Ranks that `start_ranks` starts as forks of this process, which has imported everything already."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import pytest
from accelerate.state import PartialState

from dpo_pack.system import launch
from dpo_pack.system.interrupts import STOP_SIGNALS
from support.file_operations import fork


def fork_ranks(monkeypatch: pytest.MonkeyPatch, main: Callable[[], object]) -> None:
    """Lets each rank call `main` with its own `sys.argv` and environment, in place of a new interpreter."""

    starter = SimpleNamespace(Popen=functools.partial(_Fork, main), DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(launch, "subprocess", starter)


class _Fork:
    """What `start_ranks` uses of subprocess.Popen."""

    def __init__(
        self,
        main: Callable[[], object],
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = fork(functools.partial(_rank, main, command, env, pass_fds))

    def poll(self) -> int | None:
        if self._status is None:
            self._take(*os.waitpid(self.pid, os.WNOHANG))
        return self._status

    def wait(self) -> int | None:
        if self._status is None:
            self._take(*os.waitpid(self.pid, 0))
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _take(self, pid: int, status: int) -> None:
        if pid:
            self._status = os.waitstatus_to_exitcode(status)


def _rank(
    main: Callable[[], object], command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]
) -> int:
    """Does what the rank does, and returns its exit status; handlers and descriptors are as after exec."""
    os.setsid()
    for number in STOP_SIGNALS:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    for descriptor in range(3, 256):
        if descriptor not in pass_fds:
            with contextlib.suppress(OSError):  # it is not open
                os.close(descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(command[1:])
    PartialState._reset_state()  # the parent's says that there is one process
    try:
        main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
