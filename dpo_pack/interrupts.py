"""Ctrl-C and SIGTERM: at once while nothing can be lost, at the end of the step while training."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """The user or the scheduler asked the run to stop; `exit_status` is the shell's convention.

    No Exception, as KeyboardInterrupt is none: libraries retry after one, or report it as their own failure.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_status = 128 + signum


class Interruption:
    """What has arrived. While `is_deferred`, the first signal only sets `signum`; a second one raises."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.is_deferred = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.is_deferred and self.signum is None:
            self.signum = signum
        else:
            raise Interrupted(signum)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turn SIGINT and SIGTERM into `Interrupted`; outside the main thread Python has no signals to turn."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interruption.handle)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
