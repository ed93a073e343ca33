"""How slow this machine's processor is, so that bounds on CPU seconds hold on any machine."""

from __future__ import annotations

import heapq
import json
import statistics
import time

import numpy as np

_NOMINAL_SECONDS = 0.1  # of `_work`, on the machine for which the tests' bounds are written


def slowness() -> float:
    """Returns how many times slower this machine now is than the one the tests' bounds are written for.

    It is at least 1, so a faster machine does not make bounds tighter. It times fixed work: a Python loop,
    numpy and JSON. Busy neighbours, which share caches and cores, slow it as they slow what a test measures.
    """
    return max(1.0, statistics.median(_work() for _ in range(3)) / _NOMINAL_SECONDS)


def _work() -> float:
    """Returns the CPU seconds of the fixed work."""
    begun = time.process_time()
    heap: list[tuple[int, int]] = []
    for number in range(100_000):
        heapq.heappush(heap, (number * 7919 % 100_003, number))
    while heap:
        heapq.heappop(heap)
    np.random.default_rng(0).random(300_000).sort()
    json.loads(json.dumps([{"prompt": str(number), "rank": number} for number in range(20_000)]))
    return time.process_time() - begun
