"""Ctrl-C, SIGTERM and SIGUSR1: at once while nothing can be lost, at the end of a row while training.

The first signal asks. In a part that defers it, it waits until all ranks have come to a place where they may
stop, `poll`. A second signal, a moment later at least, is not put off by anything.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from dpo_pack.stop_signals import STOP_SIGNALS

# Launchers and terminals may both pass on one Ctrl-C; what comes within this time is the same request.
SAME_REQUEST_SECONDS = 1.0


class Interrupted(BaseException):
    """The user or the scheduler asked the run to stop; `exit_status` is the shell's convention.

    SIGUSR1, by which schedulers announce that they will preempt, ends a run as SIGTERM does. No Exception, as
    KeyboardInterrupt is none: libraries retry after one, or report it as their own failure.
    """

    def __init__(self, signum: int, *, is_urgent: bool = False) -> None:
        """`is_urgent`: it was asked for twice, and nothing more may be saved or waited for."""
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_status = 128 + (signal.SIGTERM if signum == signal.SIGUSR1 else signum)
        self.is_urgent = is_urgent


class Interruption:
    """What has arrived. While `is_deferred`, the first signal only sets `signum`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signum: int | None = None
        self.is_deferred = False
        self._clock = clock
        self._arrived = 0.0

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            if self._clock() - self._arrived >= SAME_REQUEST_SECONDS:
                raise Interrupted(signum, is_urgent=True)
            return
        self.signum, self._arrived = signum, self._clock()
        if not self.is_deferred:
            raise Interrupted(signum)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a first signal waits for `poll`, or for the end of the program."""
        yield from self._deferring(True)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside `deferred`: work that may be left anywhere. Several ranks must still agree, by `poll`."""
        from dpo_pack.ranks import num_ranks

        if num_ranks() > 1:
            yield
            return
        yield from self._deferring(False)

    def _deferring(self, is_deferred: bool) -> Iterator[None]:
        before, self.is_deferred = self.is_deferred, is_deferred
        try:
            if self.signum is not None and not is_deferred:
                raise Interrupted(self.signum)
            yield
        finally:
            self.is_deferred = before

    def poll(self) -> None:
        """Raises Interrupted on every rank if a signal has come to one; every rank calls equally often."""
        from dpo_pack.ranks import largest_number  # not before it is needed: torch takes seconds

        signum = largest_number(self.signum or 0)
        if signum:
            raise Interrupted(signum)


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turn signals to stop into `Interrupted`; outside the main thread Python has no signals to turn."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in before:
        signal.signal(number, interruption.handle)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
