"""model.compile: the head's passes over logits say what they say uncompiled."""

from __future__ import annotations

import pytest
import torch
from support.heads import TRANSFORMS, chunked, gradients, make_head
from torch._dynamo.utils import counters

from dpo_pack.model.logps import compile_head

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(
    ("dtype", "name", "is_frozen", "kept_chunks"),
    [
        (torch.float64, "scaled and softcapped", False, 2),
        pytest.param(torch.bfloat16, "plain", True, 0, marks=pytest.mark.slow),
        # Each two of these values are together somewhere.
        pytest.param(torch.float64, "plain", True, 2, marks=pytest.mark.slow),
        pytest.param(torch.float64, "plain", False, 0, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "plain", False, 2, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "scaled and softcapped", False, 0, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "scaled and softcapped", True, 2, marks=pytest.mark.slow),
    ],
)
def test_compiled_passes_of_the_head_give_what_plain_ones_give(
    dtype: torch.dtype, name: str, is_frozen: bool, kept_chunks: int
) -> None:
    head, transform = make_head(has_bias=name != "plain", is_frozen=is_frozen), TRANSFORMS[name]
    results = []
    for passes in (None, compile_head(backend="aot_eager")):
        logps, statistics = chunked(
            head, transform, kept_chunks=kept_chunks, compute_dtype=dtype, passes=passes
        )
        results.append([logps.detach(), *statistics, *gradients(head, logps)])
    assert counters["stats"]["unique_graphs"] > 0
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6 if dtype.itemsize == 2 else 1e-12)
