"""Stop signals: Ctrl-C, SIGTERM, SIGHUP, and SIGUSR1, by which schedulers announce preemption.

The first signal stops the command at once, except in a `waiting_for_poll` block, where work could be lost:
there it does so when every rank has called `poll`. A second signal stops it at once everywhere.
"""

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_REQUEST_SECONDS = 1.0  # launcher and terminal may each send a signal for one Ctrl-C
POLL_SECONDS = 1.0  # ranks exchange their signals about this often: an exchange waits for the slowest rank


class Interrupted(BaseException):
    """The user or the scheduler asked the run to stop. (Libraries would catch an Exception and retry.)"""

    def __init__(self, signum: int, *, is_urgent: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_status = 128 + (signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
        self.is_urgent = is_urgent  # a second signal came: save nothing, wait for nothing
        self.next_step = "run the same command again"  # how the user continues


@dataclass(slots=True, kw_only=True)
class Interruption:
    """The stop signal that has arrived, if any. While it `waits_for_poll`, the first only sets `signum`."""

    signum: int | None = None
    waits_for_poll: bool = False
    clock: Callable[[], float] = time.monotonic
    _arrived: float = 0.0
    polled: float = field(default_factory=time.monotonic)  # when ranks exchanged their signals
    _calls: int = 0  # of `poll` since then, those that could wait
    _next_exchange: int = 1  # the number of the call at which they exchange signals again

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            if self.clock() - self._arrived >= SAME_REQUEST_SECONDS:
                raise Interrupted(signum, is_urgent=True)
            return
        self.signum, self._arrived = signum, self.clock()
        if not self.waits_for_poll:
            raise Interrupted(signum)

    def ending_at_once(self) -> contextlib.AbstractContextManager[None]:
        """Inside `waiting_for_poll`: a signal stops this block at once; of several ranks, only at `poll`."""
        from dpo_pack.system.ranks import num_ranks  # imports torch

        return self.waiting_for_poll(num_ranks() > 1)

    @contextlib.contextmanager
    def waiting_for_poll(self, waits_for_poll: bool = True) -> Iterator[None]:
        """In this `with` block, the first signal acts only at `poll` or in an `ending_at_once` block."""
        before, self.waits_for_poll = self.waits_for_poll, waits_for_poll
        try:
            if self.signum is not None and not waits_for_poll:
                raise Interrupted(self.signum)
            yield
        finally:
            self.waits_for_poll = before

    def poll(self, *, at_once: bool = True) -> None:
        """Raises Interrupted on all ranks if one got a signal; all ranks must call it. If not `at_once`, they
        exchange signals only about once in POLL_SECONDS."""
        from dpo_pack.system.ranks import every_rank_says, num_ranks  # imports torch

        signum = self.signum or 0
        if num_ranks() > 1:
            self._calls += not at_once
            if not at_once and self._calls < self._next_exchange:
                return
            seconds_a_call = (self.clock() - self.polled) / max(1, self._calls)
            signum, slowest = map(max, zip(*every_rank_says((signum, seconds_a_call)), strict=True))
            # The number is the same on all ranks, so all exchange at the same call.
            self._next_exchange = max(1, int(POLL_SECONDS / max(slowest, 1e-6)))
            self._calls, self.polled = 0, self.clock()
        if signum:
            raise Interrupted(signum)


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Raises `Interrupted` for stop signals in this block; only in the main thread, as Python requires."""
    interruption = Interruption()
    is_main = threading.current_thread() is threading.main_thread()
    with _handled_by(interruption.handle) if is_main else contextlib.nullcontext():
        yield interruption


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    def handle(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            # The terminal is gone. A print to it would fail and prevent the save.
            for descriptor in (1, 2):  # stdout and stderr
                with contextlib.suppress(OSError):  # the descriptor is closed
                    if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                        null = os.open(os.devnull, os.O_WRONLY)
                        os.dup2(null, descriptor)
                        os.close(null)
        handler(signum, frame)

    before = {number: signal.signal(number, handle) for number in taken_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def taken_signals() -> list[signal.Signals]:
    """Returns the stop signals to handle. SIGHUP is left out if it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and is_ignored)]


@contextlib.contextmanager
def recorded() -> Iterator[list[int]]:
    """Yields a list that collects the stop signals of this block, for a process that starts ranks."""
    received: list[int] = []
    with _handled_by(lambda signum, frame: received.append(signum)):
        yield received


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Holds stop signals back from processes that are started in this block, until Python has started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
