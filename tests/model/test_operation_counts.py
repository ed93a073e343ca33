"""Operations, casts and bytes of a row are pinned: a lost fusion or an added cast fails, without a device.

On CUDA each operation is a launch, and each byte that an elementwise operation reads or writes takes time. If
a change makes a number smaller, write the smaller number here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.marks import slow
from support.operation_counts import Costs, layer_costs, row_costs
from support.reference_pairs import load_scorer
from support.tiny_models import VOCABULARY, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

import dpo_pack.model.scorer as scorer_module
from dpo_pack.model.attention import BACKENDS
from dpo_pack.model.fast_layers import compile_layers
from dpo_pack.model.layout import packed_row
from dpo_pack.proofs import proof_groups

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="the numbers are those of transformers 5.23"
)
FP32: dict[str, Any] = {"dtype": torch.float32, "autocast": torch.bfloat16}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "autocast": None}
# (operations, casts among them, bytes) of one layer's forward and backward, for a row of 69 tokens.
# Attention, with the gathers before its kernel, is one operator; test_fake_cuda.py counts what is in it.
PINNED = {
    ("llama", "fp32"): (Costs(48, 14, 538_624), Costs(87, 20, 1_147_640)),
    ("llama", "bf16"): (Costs(38, 4, 386_432), Costs(71, 4, 851_800)),
    ("qwen3", "fp32"): (Costs(64, 18, 707_600), Costs(117, 22, 1_560_112)),
    ("qwen3", "bf16"): (Costs(54, 8, 515_632), Costs(103, 8, 1_184_720)),
    ("phi3", "fp32"): (Costs(44, 10, 520_960), Costs(84, 16, 1_143_224)),
    ("phi3", "bf16"): (Costs(38, 4, 395_264), Costs(72, 4, 926_872)),
}


def assert_at_most(found: tuple[int, ...], pinned: tuple[int, ...]) -> None:
    assert all(ours <= most for ours, most in zip(found, pinned, strict=True)), (found, pinned)


@pytest.mark.parametrize(("family", "types"), [*list(PINNED)[:2], *slow(*list(PINNED)[2:])])
def test_a_layer_runs_no_more_operations_casts_and_bytes_than_are_pinned(family: str, types: str) -> None:
    for found, pinned in zip(
        layer_costs(family, **(FP32 if types == "fp32" else BF16)), PINNED[family, types], strict=True
    ):
        assert_at_most(found, pinned)


def test_a_row_without_the_statistics_of_metrics_runs_no_more_than_is_pinned_and_less_than_with_them() -> (
    None
):
    """Embeddings, two layers, the head in one chunk, sums, a token's rounding: eleven operations over logits
    less."""
    without, backward = row_costs("llama", num_layers=2, **BF16)
    with_them, same_backward = row_costs("llama", num_layers=2, measures=True, **BF16)
    assert_at_most(without, Costs(127, 16, 1_068_336))
    assert_at_most(backward, Costs(187, 14, 2_226_268))
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


@pytest.mark.parametrize("compiles", [False, *slow(True)])
def test_experts_compute_in_the_dtype_of_autocast_and_all_at_once(compiles: bool, tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    scorer = load_scorer(tmp_path)
    scorer.autocast = torch.bfloat16
    if compiles:
        compile_layers(scorer.model, backend="eager")
    kinds: Counter[str] = Counter()

    class Experts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "grouped_mm" in func.name():
                kinds.update(f"{func.name()} {tensor.dtype}" for tensor in args[:2])
            return func(*args, **(kwargs or {}))

    row = packed_row(proof_groups(VOCABULARY), torch.device("cpu"), share_prompt=True)
    limits = torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True, suppress_errors=False)
    with limits, Experts():  # type: ignore[no-untyped-call]
        scorer(row).sums.sum().backward()
    assert kinds == {"aten::_grouped_mm torch.bfloat16": 24}  # forward, both gradients
