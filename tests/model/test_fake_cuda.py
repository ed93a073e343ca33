"""A CUDA build of torch without a GPU: what a row and a model's forward do there, but for the numbers.

A fake tensor has no values: whoever asks for one, as a wait for the device does, gets an error, and so does
who mixes devices. Whole steps need the fake driver of scripts/test_cuda_build.sh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import fake_cuda, has_fake_driver
from support.groups import make_row as make_row_of
from support.groups import random_groups
from support.operation_counts import Counting
from support.tiny_models import tiny_config
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoModelForCausalLM

from dpo_pack.losses.preference import make_objective
from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, BackendChoice, cuda, register_attention
from dpo_pack.model.facts import router_balance
from dpo_pack.model.fast_layers import (
    cast_experts,
    checkpoint_activations,
    tile_feed_forwards,
    trim_last_layer,
)
from dpo_pack.model.layout import Row
from dpo_pack.model.logps import WantedStatistics
from dpo_pack.model.lora import attach_adapter, compute_restored
from dpo_pack.model.parallel import DistributedPolicy
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.recipe.training import LossRecipe
from dpo_pack.training.batches import GlobalBatch, PairRow
from dpo_pack.training.metrics import column, join_values, pair_values
from dpo_pack.training.optim import NonfiniteGuard, build_optimizer, clip_gradients
from dpo_pack.training.references import LiveReference
from dpo_pack.training.step_loss import ExpertBalance, pair_losses

pytestmark = pytest.mark.cuda_build
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    register_attention()
    with fake_cuda(backward=has_fake_driver()):
        yield


def make_row(*, num_completions: int = 2) -> Row:
    return make_row_of(random_groups(*[(9, 5, 7, 6)[: 1 + num_completions]] * 3), device=CUDA)


def make_scorer(family: str, *, autocast: torch.dtype | None = None) -> CompletionLogps:
    """Weights in bf16, or in fp32 under autocast."""
    dtype = torch.bfloat16 if autocast is None else torch.float32
    with CUDA:
        model = AutoModelForCausalLM.from_config(
            tiny_config(family), attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    trim_last_layer(model)
    return CompletionLogps(model, backend=BACKENDS["torch_varlen"], autocast=autocast).eval()


def test_waiting_for_the_device_is_noticed() -> None:
    with pytest.raises(DataDependentOutputException):
        make_row().input_ids.sum().item()


@pytest.mark.parametrize("gathers", [True, False])
def test_the_operator_of_attention_waits_for_nothing(gathers: bool) -> None:
    """Its code, which fake tensors do not reach elsewhere: gathers, kernels, and the gathers' gradients."""
    segments = make_row().segments
    assert segments is not None and segments.kv_gather is not None
    segments = segments if gathers else replace(segments, kv_gather=None)
    num_keys = sum(segments.query_lengths if gathers else segments.key_lengths)
    queries, keys = (
        torch.zeros(tokens, heads, 8, device=CUDA, dtype=torch.bfloat16)
        for tokens, heads in ((sum(segments.query_lengths), 4), (num_keys, 2))
    )
    asked = (segments.number, 0.5, -1)
    with Counting() as forward:
        results = cuda._attend._init_fn(queries, keys, keys, *asked)
    with Counting() as backward:
        grads = cuda._attend_backward._init_fn(results[0], queries, keys, keys, *results, *asked)
    assert [grad.shape for grad in grads] == [queries.shape, keys.shape, keys.shape]
    assert all(each.is_cuda and each.dtype == torch.bfloat16 for each in (results[0], *grads))
    assert forward.names.total() == (3 if gathers else 1)
    assert backward.names.total() == (12 if gathers else 2)


LOSSES: dict[str, dict[str, Any]] = {"sigmoid": {}, "wpo": {"weighting": "wpo"}}
STEPS = [
    *(
        (family, "fp32", "sigmoid", "")
        for family in ("llama", "qwen2", "qwen3", "olmo2", "phi3", "gemma3_text")
    ),
    *(
        (family, "bf16", "sigmoid", "")
        for family in ("llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
    ),
    ("llama", "fp32", "wpo", ""),
    *(
        ("llama", "fp32", "sigmoid", other)
        for other in ("checkpointing", "selective", "lora", "offload", "tiles", "moving")
    ),
    ("qwen3", "bf16", "sigmoid", "checkpointing"),
    ("llama", "bf16", "sigmoid", "lora"),
    ("llama", "bf16", "sigmoid", "qlora"),
    ("qwen3_moe", "fp32", "sigmoid", "router"),
]


@pytest.mark.skipif(not has_fake_driver(), reason="scripts/test_cuda_build.sh loads the fake driver")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "types", "loss", "other"), STEPS)
def test_no_step_waits(
    family: str, types: str, loss: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows forward and backward, clipping, the guard and the optimizer; then an evaluation's forward."""
    dtype, autocast = (torch.bfloat16, None) if types == "bf16" else (torch.float32, torch.bfloat16)
    with CUDA:
        model = AutoModelForCausalLM.from_config(
            tiny_config(family), attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    cast_experts()
    if other == "tiles":
        tile_feed_forwards(model, 16, has_experts=False)
    trim_last_layer(model)
    adapter = None
    if other == "qlora":
        _quantise(model)
    if other in ("lora", "qlora"):
        settings = LoraRecipe(r=4, alpha=8)
        monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)  # by swapping tensors
        with CUDA:
            adapter = attach_adapter(
                model, settings, base="a", revision=None, recipe_key="model.path", reads_weights=True
            )
        autocast = torch.bfloat16
    scorer = CompletionLogps(
        model, backend=BACKENDS["torch_varlen"], autocast=autocast, adapter=adapter,
        wanted=WantedStatistics(squares=loss == "wpo"),
    ).eval()  # fmt: skip
    if other in ("checkpointing", "selective", "offload"):
        checkpoint_activations(model, keeps_products=other == "selective", offloads=other == "offload")
    reference = moving_reference(family, autocast) if other == "moving" else None
    policy = DistributedPolicy(forward=scorer)
    if other == "router":
        router = router_balance(model, 0.01)
        assert router is not None
        policy = ExpertBalance(settings=router, scorer=scorer, alone=policy).policy
    recipe = LossRecipe(**LOSSES[loss])
    objective = make_objective(recipe.terms, recipe.options, weighting=recipe.weighting)
    optimizer = build_optimizer("adamw", scorer, lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    guard = NonfiniteGuard(stops=True)
    rows = [pair_row(other) for _ in range(2)]
    batch = GlobalBatch(
        epoch=0.0, num_pairs=6, num_tokens=100, mean_chosen_tokens=5.0, rows=rows, row_pairs=[],
        common_passes=2,
    )  # fmt: skip
    if reference is not None:
        batch = reference.score_batch(batch)
    values = []
    with policy.step(batch.passes):
        for row in batch.rows:
            output = policy.forward(row.row)
            losses = pair_losses(objective, output, row, batch.mean_chosen_tokens)
            losses.sum().backward()
            values.append(pair_values(output, row, losses))
    joined = join_values(values, CUDA)
    norm = clip_gradients(scorer, 1.0)
    guard.skip_if_nonfinite(optimizer, column(joined, "loss"), norm, step=1, pairs=batch.pair_indices)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if reference is not None:
        reference.follow(scorer, step=1)
    assert norm.is_cuda and joined.is_cuda
    with torch.no_grad():
        pair_losses(objective, scorer(rows[0].row), rows[0], 5.0)


def moving_reference(family: str, autocast: torch.dtype | None) -> LiveReference:
    choice = BackendChoice(name="torch_varlen", reason="")
    loaded = LoadedModel(scorer=make_scorer(family, autocast=autocast), attention=choice, replaced={})
    return LiveReference(model=loaded, device=CUDA, follow_every=1, mixup=0.6)


def _quantise(model: Any) -> None:
    """Gives the layers bitsandbytes' weights in nf4 with quantised scales: without values, so not by it."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

    model.is_loaded_in_4bit = model.is_quantized = True
    for module in model.base_model.modules():
        if type(module) is torch.nn.Linear:
            length = module.weight.numel()
            num_blocks = -(-length // 64)
            scales = QuantState(
                absmax=torch.zeros(-(-num_blocks // 256), device=CUDA), blocksize=256, dtype=torch.float32,
                code=torch.zeros(256, device=CUDA),
            )  # fmt: skip
            packed = torch.zeros(length // 2, 1, dtype=torch.uint8, device=CUDA)
            weight: Any = torch.nn.Parameter(packed, requires_grad=False)
            weight.quant_state = QuantState(
                absmax=torch.zeros(num_blocks, dtype=torch.uint8, device=CUDA), blocksize=64,
                shape=module.weight.shape, code=torch.zeros(16, device=CUDA), dtype=torch.bfloat16,
                quant_type="nf4", offset=torch.zeros((), device=CUDA), state2=scales,
            )  # fmt: skip
            weight.compress_statistics, weight.quant_type = True, "nf4"
            module.__class__, module.weight = Linear4bit, weight
            vars(module)["compute_dtype"] = torch.bfloat16
    compute_restored(model)


def pair_row(kind: str) -> PairRow:
    """Three pairs."""
    row = make_row()
    if kind == "router":
        row = replace(row, token_copies=torch.ones(row.num_tokens, device=CUDA))

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=CUDA)

    return PairRow(
        row=row,
        reference=zeros(3, 2),
        pair_weights=zeros(3),
        pair_indices=np.arange(3),
        score_margins=np.zeros(3),
    )
