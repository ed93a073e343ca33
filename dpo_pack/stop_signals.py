"""Signals that ask a command to stop, between the process a person sees and the ranks it starts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def recorded() -> Iterator[list[int]]:
    """The stop signals that arrive meanwhile, in order; nothing else happens because of them."""
    received: list[int] = []

    def record(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    before = {number: signal.signal(number, record) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Processes started meanwhile get no stop signal until they accept it.

    A signal would otherwise end them as it ends any Python that is still starting: with a traceback each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def accept() -> None:
    """From here on what was held back arrives."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
