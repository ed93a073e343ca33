"""The steps of any recipe without packing, caches and ranks: a plain padded loop in float64.

Reads the settings of a recipe, and imports nothing from dpo_pack. It has no dropout, no evaluation and no
schedule: the learning rate is constant.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus
from torch.nn.utils.rnn import pad_sequence
from transformers import Adafactor, AutoModelForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPair:
    """Token ids of a pair, a 1 for each completion token that is scored, and the pair's weight."""

    prompt: Sequence[int]
    chosen: Sequence[int]
    rejected: Sequence[int]
    weight: int
    chosen_weights: Sequence[int]
    rejected_weights: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logps:
    """[P] sums of log-probs of both sides of a step's pairs, and the scored tokens of each."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


def plain_steps(
    recipe: Any, pairs: Sequence[PlainPair], steps: Sequence[Sequence[int]]
) -> Iterator[dict[str, float]]:
    """Metrics of each step; `steps` has the positions of each step's pairs."""
    policy = _policy(recipe)
    reference = _reference(recipe, policy)
    trained = [p for p in policy.parameters() if p.requires_grad]
    masters = [p.detach().clone().requires_grad_() for p in trained]
    optimizer = _optimizer(recipe.optim, masters)
    # An adapter is in fp32 on every base.
    is_rounded = recipe.model.dtype == "bfloat16" and not hasattr(policy, "peft_config")
    for number, positions in enumerate(steps, start=1):
        batch = [pairs[i] for i in positions]
        ours, alignments = plain_logps(policy, batch)
        with torch.no_grad():
            theirs = (
                plain_logps(reference, batch)[0]
                if recipe.loss.needs_reference
                else Logps(**{name: torch.zeros_like(getattr(ours, name)) for name in Logps.__slots__})
            )
        weights = torch.tensor([pair.weight for pair in batch], dtype=torch.float64)
        if recipe.loss.weighting == "wpo":
            weights = weights * alignments.exp()
        loss = sum(
            factor * plain_loss(name, ours, theirs, weights, recipe.loss)
            for name, factor in recipe.loss.terms
        )
        loss = loss / len(batch)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        grad_norm = torch.nn.utils.clip_grad_norm_(masters, recipe.optim.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master.bfloat16() if is_rounded else master)
            sync = recipe.reference.sync
            if sync is not None and number % sync.every_steps == 0:
                new = _merged(policy).state_dict()
                for name, weight in reference.state_dict().items():
                    weight.copy_(sync.mixup * new[name] + (1 - sync.mixup) * weight)
        rewards = {
            side: recipe.loss.beta * (getattr(ours, side) - getattr(theirs, side)).mean().item()
            for side in ("chosen", "rejected")
        }
        yield {
            "loss": loss.item(),
            "grad_norm": grad_norm.item(),
            **{f"rewards/{side}": reward for side, reward in rewards.items()},
            "logps/chosen": ours.chosen.mean().item(),
            "logps/rejected": ours.rejected.mean().item(),
        }


def _policy(recipe: Any) -> Any:
    """In float64, with the weights that the run starts from."""
    path = Path(recipe.model.path)
    saved = path / "adapter_config.json"
    base = json.loads(saved.read_text())["base_model_name_or_path"] if saved.is_file() else path
    model = _load(base, recipe)
    if saved.is_file():
        from peft import PeftModelForCausalLM

        model = PeftModelForCausalLM.from_pretrained(model, str(path), is_trainable=True)
    elif recipe.model.lora is not None:
        from peft import LoraConfig, PeftModelForCausalLM

        lora = recipe.model.lora
        torch.manual_seed(recipe.seed)
        config = LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"
        )
        model = PeftModelForCausalLM(model, config)
    return model.double()


def _reference(recipe: Any, policy: Any) -> Any:
    """In float64 and without an adapter. It starts as `reference.path`, else as the policy starts."""
    if recipe.reference.path is not None:
        return _load(recipe.reference.path, recipe).double()
    return _merged(policy)


def _load(path: str | Path, recipe: Any) -> Any:
    dtype = torch.bfloat16 if recipe.model.dtype == "bfloat16" else torch.float32
    # The eager attention of transformers takes its softmax in float32.
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")


def _merged(policy: Any) -> Any:
    """A copy of the policy whose adapter is part of its weights."""
    model = copy.deepcopy(policy)
    return model.merge_and_unload() if hasattr(model, "peft_config") else model


def _optimizer(settings: Any, parameters: list[Tensor]) -> torch.optim.Optimizer:
    decayed = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]
    groups: Any = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, settings.weight_decay), (vectors, 0.0))
        if group
    ]
    if settings.name == "adafactor":
        return Adafactor(groups, lr=settings.lr, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def plain_logps(model: Any, batch: Sequence[PlainPair]) -> tuple[Logps, Tensor]:
    """Log-probs of a padded batch [2 P, L], and [P] WPO alignments: sums of means over tokens."""
    sequences = [
        (pair.prompt, side, torch.tensor(weights, dtype=torch.float64))
        for pair in batch
        for side, weights in ((pair.chosen, pair.chosen_weights), (pair.rejected, pair.rejected_weights))
    ]
    ids = pad_sequence([torch.tensor([*prompt, *side]) for prompt, side, _ in sequences], batch_first=True)
    mask = pad_sequence([torch.ones(len(p) + len(s)) for p, s, _ in sequences], batch_first=True)
    log_probs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(dim=-1)
    sums, alignments = [], []
    for row, (prompt, side, weights) in zip(log_probs, sequences, strict=True):
        predicting = row[len(prompt) - 1 : len(prompt) + len(side) - 1]
        tokens = predicting.gather(1, torch.tensor(side)[:, None]).squeeze(1)
        sums.append((weights * tokens).sum())
        alignment = tokens - (2 * predicting).logsumexp(dim=-1)
        alignments.append((weights * alignment).sum().detach() / weights.sum())
    logps = torch.stack(sums).view(-1, 2)
    lengths = torch.stack([weights.sum() for _, _, weights in sequences]).view(-1, 2)
    both = Logps(
        chosen=logps[:, 0], rejected=logps[:, 1], chosen_tokens=lengths[:, 0], rejected_tokens=lengths[:, 1]
    )
    return both, torch.stack(alignments).view(-1, 2).sum(dim=1)


def plain_loss(name: str, policy: Logps, reference: Logps, weights: Tensor, loss: Any) -> Tensor:
    """The weighted sum of one loss over a step's pairs, from the table of docs/losses.md."""
    beta, swapped = loss.beta, loss.label_smoothing
    chosen, rejected = policy.chosen - reference.chosen, policy.rejected - reference.rejected
    if name in ("sft", "cpo"):
        likelihood = -(weights * policy.chosen).sum() / policy.chosen_tokens.mean()
        if name == "sft":
            return likelihood
        preference = _logistic(beta * (policy.chosen - policy.rejected), swapped)
        both: Tensor = (weights * preference).sum() + loss.cpo_alpha * likelihood
        return both
    if name in ("simpo", "orpo"):
        won, lost = policy.chosen / policy.chosen_tokens, policy.rejected / policy.rejected_tokens
        if name == "simpo":
            values = _logistic(beta * (won - lost) - loss.simpo_gamma, swapped)
        else:
            odds = (won - torch.log1p(-won.exp())) - (lost - torch.log1p(-lost.exp()))
            values = -won - beta * logsigmoid(odds)
        return (weights * values).sum()
    a, b = (_score(logratio, loss) for logratio in (chosen, rejected))
    x, y = beta * chosen, beta * rejected
    margin = beta * (a - b)
    per_token = a / policy.chosen_tokens - b / policy.rejected_tokens
    target = 1 / (2 * beta)
    s = torch.sigmoid
    terms: dict[str, Callable[[], Tensor]] = {
        "sigmoid": lambda: _logistic(margin, swapped),
        "robust": lambda: (
            ((1 - swapped) * softplus(-margin) - swapped * softplus(margin)) / (1 - 2 * swapped)
        ),
        "hinge": lambda: (1 - margin).clamp(min=0),
        "ipo": lambda: (per_token - target) ** 2,
        "exo_pair": lambda: (
            s(margin) * (logsigmoid(margin) - log(1 - swapped))
            + s(-margin) * (logsigmoid(-margin) - log(swapped))
        ),
        "nca_pair": lambda: softplus(-x) + softplus(x) / 2 + softplus(y) / 2,
        "bco_pair": lambda: softplus(-x) + softplus(y),
        "sppo_hard": lambda: (chosen - target) ** 2 + (rejected + target) ** 2,
        "apo_zero": lambda: 1 - s(x) + s(y),
        "apo_down": lambda: s(x) + 1 - s(x - y),
        "discopop": lambda: (
            (1 - s(margin / loss.discopop_tau)) * softplus(-margin)
            + s(margin / loss.discopop_tau) * torch.exp(-margin)
        ),
        "sigmoid_norm": lambda: softplus(-beta * per_token),
        "support.combinations:own_loss": lambda: (beta * (chosen - rejected) - 1) ** 2,
    }
    assert name in terms, f"add {name} to `terms` in tests/support/plain_steps.py"
    return (weights * terms[name]()).sum()


def _logistic(logits: Tensor, swapped: float) -> Tensor:
    return (1 - swapped) * softplus(-logits) + swapped * softplus(logits)


def _score(logratio: Tensor, loss: Any) -> Tensor:
    ratio, alpha = logratio.exp(), loss.f_alpha
    scores: dict[str, Callable[[], Tensor]] = {
        "reverse_kl": lambda: logratio,
        "forward_kl": lambda: 1 - 1 / ratio,
        "js_divergence": lambda: torch.log(2 * ratio / (1 + ratio)),
        "alpha_divergence": lambda: (ratio ** (alpha - 1) - 1) / (alpha - 1),
    }
    return scores[loss.f_divergence]()
