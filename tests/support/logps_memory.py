"""A script for tests/model/test_logps.py: peak memory of the log-prob step, measured in a process of its own.

`python logps_memory.py chunked|naive V N [N ...]` prints, for each number of tokens N in turn, the most
memory in bytes that the process has had resident so far.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from dpo_pack.model.logps import HEAD_BOUNDS, HeadTransform, WantedStatistics, token_logps

HIDDEN_SIZE = 16


def peak_resident_bytes() -> int:
    """Of this program alone: `ru_maxrss` would begin with the peak of the process that started it."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def logps_step(method: str, vocabulary_size: int, num_tokens: int) -> None:
    """Forward and backward through a trained head, with the bounds a model on this device has."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, requires_grad=True)
    weight = torch.randn(vocabulary_size, HIDDEN_SIZE, requires_grad=True)
    targets = torch.randint(vocabulary_size, (num_tokens,))
    if method == "chunked":
        logps, _ = token_logps(
            hidden,
            weight,
            None,
            targets,
            transform=HeadTransform(),
            compute_dtype=torch.float32,
            bounds=HEAD_BOUNDS["cpu"],
            wanted=WantedStatistics(),
        )
    else:
        logps = (hidden @ weight.T).log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
    logps.sum().backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for tokens in sys.argv[3:]:
        logps_step(sys.argv[1], int(sys.argv[2]), int(tokens))
        print(peak_resident_bytes())
