"""What this code computes is what it computed before, or a version says that it has changed.

A test that fails here names the version to raise. CONTRIBUTING.md says how to make new golden values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.golden import KINDS, LOGP_BOUND, MODELS, Golden, log_probs, plain_log_probs, read_golden


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_golden_ones_or_their_version_is_raised(kind: str) -> None:
    complaint = KINDS[kind].complaint(read_golden()[kind])
    assert complaint is None, complaint


def test_if_transformers_itself_computes_other_log_probs_the_golden_ones_are_made_anew() -> None:
    golden = read_golden()["log_probs"]["values"]
    for family in MODELS:
        np.testing.assert_allclose(
            plain_log_probs(family),
            golden[family],
            rtol=0,
            atol=LOGP_BOUND,
            err_msg=f"{family}: the plain model has other log-probs than before, so the change is not ours; "
            "do not raise NUMERICS_VERSION, run scripts/make_golden_values.py --new-transformers",
        )


def test_the_bound_of_log_probs_is_twice_what_rounding_in_float32_can_do_on_two_cpus() -> None:
    ours = log_probs()
    for family in MODELS:
        exact = np.array(plain_log_probs(family, torch.float64))
        for single in (ours[family], plain_log_probs(family)):
            assert np.abs(np.array(single) - exact).max() < LOGP_BOUND / 4, family


# ---- Each kind of change is noticed


def complaint_about(kind: str, expected: dict[str, Any] | None = None) -> str:
    complaint = KINDS[kind].complaint(expected or read_golden()[kind])
    assert complaint is not None and complaint.isprintable()
    return complaint


def one_changed(values: Any) -> Any:
    """The values, the first of them twice as large or long."""
    if isinstance(values, dict):
        first = next(iter(values))
        return {**values, first: one_changed(values[first])}
    return [one_changed(values[0]), *values[1:]] if isinstance(values, list) else 2 * values


@pytest.mark.parametrize("kind", KINDS)
def test_other_values_name_the_version_to_raise(kind: str) -> None:
    golden: Golden = KINDS[kind]
    written = read_golden()[kind]
    complaint = complaint_about(kind, {**written, "values": one_changed(written["values"])})
    assert f" has other values than before: raise {golden.constant} in " in complaint
