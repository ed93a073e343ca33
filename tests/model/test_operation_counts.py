"""Operations, casts and bytes of a row are pinned: a lost fusion or an added cast fails, without a device.

On CUDA each operation is a launch, and each byte that an elementwise operation reads or writes takes time. If
a change makes a number smaller, write the smaller number here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.marks import slow
from support.operation_counts import Costs, layer_costs, row_costs
from torch._subclasses.fake_tensor import DataDependentOutputException

import dpo_pack.model.scorer as scorer_module
from dpo_pack.model.attention import BACKENDS

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="the numbers are those of transformers 5.23"
)
FP32: dict[str, Any] = {"dtype": torch.float32, "autocast": torch.bfloat16}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "autocast": None}
# (operations, casts among them, bytes) of one layer's forward and backward, for a row of 69 tokens.
PINNED = {
    ("llama", "fp32"): (Costs(50, 14, 560_392), Costs(98, 23, 1_221_456)),
    ("llama", "bf16"): (Costs(40, 4, 400_328), Costs(85, 10, 929_648)),
    ("qwen3", "fp32"): (Costs(66, 18, 729_368), Costs(128, 25, 1_633_928)),
    ("qwen3", "bf16"): (Costs(56, 8, 529_528), Costs(117, 14, 1_262_568)),
    ("phi3", "fp32"): (Costs(46, 10, 542_728), Costs(95, 19, 1_217_040)),
    ("phi3", "bf16"): (Costs(40, 4, 409_160), Costs(86, 10, 1_004_720)),
}


def assert_at_most(found: tuple[int, ...], pinned: tuple[int, ...]) -> None:
    assert all(ours <= most for ours, most in zip(found, pinned, strict=True)), (found, pinned)


@pytest.mark.parametrize(("family", "types"), [*list(PINNED)[:2], *slow(*list(PINNED)[2:])])
def test_a_layer_runs_no_more_operations_casts_and_bytes_than_are_pinned(family: str, types: str) -> None:
    for found, pinned in zip(
        layer_costs(family, **(FP32 if types == "fp32" else BF16)), PINNED[family, types], strict=True
    ):
        assert_at_most(found, pinned)


# torch hides this one of its own from people, and not from a filter that makes warnings errors.
def test_a_row_without_the_statistics_of_metrics_runs_no_more_than_is_pinned_and_less_than_with_them() -> (
    None
):
    """Embeddings, two layers, the head in one chunk, sums: eleven operations over logits less."""
    without, backward = row_costs("llama", num_layers=2, **BF16)
    with_them, same_backward = row_costs("llama", num_layers=2, measures=True, **BF16)
    assert_at_most(without, Costs(128, 19, 1_091_688))
    assert_at_most(backward, Costs(215, 26, 2_381_964))
    assert same_backward == backward
    assert with_them.operations >= without.operations + 11 and with_them.num_bytes > without.num_bytes


def test_an_added_cast_and_a_read_of_the_host_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = BACKENDS["torch_varlen"]

    def with_a_cast(*tensors: object, **options: object) -> torch.Tensor:
        return kernel(*tensors, **options).float().bfloat16()

    monkeypatch.setitem(BACKENDS, "torch_varlen", with_a_cast)
    forward, backward = layer_costs("llama", **BF16)
    pinned_forward, pinned_backward = PINNED["llama", "bf16"]
    assert forward.casts == pinned_forward.casts + 2 and backward.casts == pinned_backward.casts + 2
    monkeypatch.setitem(BACKENDS, "torch_varlen", kernel)

    def reading(*arguments: torch.Tensor) -> torch.Tensor:
        assert arguments[0].sum().item() < 0
        return arguments[0]

    monkeypatch.setattr(scorer_module, "sequence_sums", reading)
    with pytest.raises(DataDependentOutputException):
        row_costs("llama", num_layers=2, **BF16)
