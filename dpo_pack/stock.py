"""Each sequence alone under a model's own eager attention: the plain answer, and how far rounding moves it.

Legend: S sequences, each a (context, completion) of token ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack.kernels import stock_layers
from dpo_pack.models import CompletionLogps

Sequences = Sequence[tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]]

# Rounding differs from draw to draw, most of all where it picks another expert.
_NUM_DRAWS = 4


def stock_sums(scorer: CompletionLogps, sequences: Sequences, device: torch.device) -> Tensor:
    """[S] float64 log-probs of each sequence alone, in a batch of one, from the model's own full logits."""
    sums = []
    with eager_attention(scorer.model), stock_layers(scorer.model):
        for context, completion in sequences:
            ids = torch.from_numpy(np.concatenate((context, completion)))[None].to(device)
            logits = scorer.full_logits(input_ids=ids)[0, len(context) - 1 : -1].float()
            logps = logits.log_softmax(dim=-1).gather(1, ids[0, len(context) :, None])
            sums.append(logps.double().sum())
    return torch.stack(sums)


def rounding_noise(scorer: CompletionLogps, compute: Callable[[], Tensor], alone: Tensor) -> float:
    """Mean change of `alone`, what `compute` gives by stock layers, when activations are rounded otherwise.

    Two kernels of the same thing differ by rounding, which now and then picks another expert. Stock sdpa
    against stock eager would show that too, but families with softcaps or sinks have no sdpa, and a single
    comparison may happen to meet no near tie. The largest of a few random draws.
    """
    changes = []
    for _ in range(_NUM_DRAWS):
        with _rounded_otherwise(scorer.model, torch.finfo(scorer.compute_dtype).eps):
            changes.append((compute() - alone).abs().mean())
    return float(torch.stack(changes).max())


@contextlib.contextmanager
def _rounded_otherwise(model: PreTrainedModel, eps: float) -> Iterator[None]:
    """Embeddings and each layer's output, off by up to half a unit in the last place of a dtype."""

    def perturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (perturb(module, inputs, output[0]), *output[1:])
        return output * (1 + eps * (torch.rand_like(output) - 0.5))

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    hooks = [module.register_forward_hook(perturb) for module in (model.get_input_embeddings(), *layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
