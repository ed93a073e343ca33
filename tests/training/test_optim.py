"""AdamW's groups and the learning rate of every step."""

from __future__ import annotations

import copy
from functools import partial
from math import cos, pi
from typing import Any, cast, get_args

import pytest
import torch
from support.tiny_models import tiny_config
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Trainer, get_scheduler

from dpo_pack.recipe.training import POLYNOMIAL_LR_END, OptimRecipe
from dpo_pack.system.errors import RecipeError
from dpo_pack.training.optim import (
    build_optimizer,
    check_optimizer,
    clip_gradients,
    rate_factor,
    schedule_warnings,
)

LR = 0.5


def tiny_network() -> nn.Sequential:
    """A matrix, a bias and a norm of each kind, all one, and a matrix that is frozen."""
    network = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(2, 3), nn.Linear(3, 3, bias=False))
    for parameter in network.parameters():
        nn.init.ones_(parameter)
    network[3].requires_grad_(False)
    return network


def rates(name: str, *, num_steps: int, theirs: bool = False, **options: Any) -> list[float]:
    """The learning rate each step is taken with, as a part of the peak; one more than there are steps."""
    optimizer = build("adamw", nn.Linear(1, 1), lr=LR)
    if theirs:
        scheduler = get_scheduler(name, optimizer, options["warmup_steps"], num_steps)
    else:
        options = {"name": name, "num_steps": num_steps, "warmup_steps": 0, "min_lr_ratio": 0.0, **options}
        scheduler = LambdaLR(optimizer, partial(rate_factor, **options))
    taken = []
    for _ in range(num_steps + 1):
        taken.append(float(scheduler.get_last_lr()[0]) / LR)
        optimizer.step()
        scheduler.step()
    return taken


WAVE = [0.5 * (1 + cos(pi * step / 4)) for step in range(5)]  # half a wave, from the peak to zero
FLOOR: dict[str, Any] = {"min_lr_ratio": 0.2}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("linear", {}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", FLOOR, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ("linear", {"warmup_steps": 2}, [0.0, 0.5, 1.0, 0.5, 0.0]),
        ("linear", {"warmup_steps": 2, **FLOOR}, [0.0, 0.5, 1.0, 0.6, 0.2]),
        ("linear", {"warmup_steps": 4}, [0.0, 0.25, 0.5, 0.75, 0.0]),  # all warm-up
        ("linear", {"warmup_steps": 4, **FLOOR}, [0.0, 0.25, 0.5, 0.75, 0.2]),  # the last is never used
        ("cosine", {}, WAVE),
        ("cosine", FLOOR, [0.2 + 0.8 * part for part in WAVE]),
        ("cosine", {"warmup_steps": 2}, [0.0, 0.5, 1.0, 0.5, 0.0]),
        ("cosine", {"warmup_steps": 2, **FLOOR}, [0.0, 0.5, 1.0, 0.6, 0.2]),
        ("constant", {}, [1.0] * 5),
        ("constant_with_warmup", {"warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_the_rates_of_a_schedule_by_hand(name: str, options: dict[str, Any], expected: list[float]) -> None:
    """Of four steps and one more."""
    assert rates(name, num_steps=4, **options) == pytest.approx(expected)


@pytest.mark.parametrize("warmup_steps", [0, 2, 7])
@pytest.mark.parametrize("name", get_args(OptimRecipe.model_fields["schedule"].annotation))
def test_the_rates_of_a_schedule_are_those_of_transformers(name: str, warmup_steps: int) -> None:
    end = POLYNOMIAL_LR_END / LR if name == "polynomial" else 0.0
    options: dict[str, Any] = {"num_steps": 8, "warmup_steps": warmup_steps, "min_lr_ratio": end}
    ours, theirs = (rates(name, theirs=it, **options) for it in (False, True))
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(
    ("num_steps", "ratio", "steps", "expected"),
    [(100, 0.1, None, 10), (101, 0.1, None, 11), (3, 0.0, None, 0), (100, 0.1, 0, 0), (100, 0.1, 7, 7)],
)
def test_warm_up_steps_replace_ratios(num_steps: int, ratio: float, steps: int | None, expected: int) -> None:
    assert OptimRecipe(warmup_ratio=ratio, warmup_steps=steps).num_warmup_steps(num_steps) == expected


@pytest.mark.parametrize(
    ("lr", "num_steps", "warmup_steps", "told"),
    [
        (1e-3, 4, 3, ""),
        (1e-3, 4, 4, "only gets to 0.00075"),
        (1e-3, 1, 1, "no weight changes"),
        (1e-12, 4, 0, "too small"),
    ],
)
def test_a_rate_without_effect_is_told(lr: float, num_steps: int, warmup_steps: int, told: str) -> None:
    network = nn.Linear(8, 8)
    warnings = schedule_warnings(
        build("adamw", network), lr=lr, num_steps=num_steps, warmup_steps=warmup_steps
    )
    assert told in (text := "".join(warnings)) and bool(text) == bool(told)
    if told == "too small":  # a B of zeros moves at any rate
        nn.init.zeros_(network.bias)
        assert not [*schedule_warnings(build("adamw", network), lr=lr, num_steps=4, warmup_steps=0)]


def test_the_rate_of_adafactor_is_absolute_as_in_transformers_trainer() -> None:
    """B of a new adapter is 0; a rate relative to it would leave it there."""
    network = nn.Linear(16, 16)
    nn.init.zeros_(network.weight)
    optimizer = build("adafactor", network, lr=1e-2)
    take_steps(network, optimizer, range(1))
    assert network.weight.square().mean().sqrt().item() == pytest.approx(1e-2, rel=0.2)


# ------------------------------------------------------------------------------------- optimizers by name


def build(
    name: str, network: nn.Module, *, lr: float = 0.1, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    return build_optimizer(name, network, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)


def take_steps(network: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_adafactor_keeps_less_than_a_moment_and_goes_on_bitwise_from_its_state() -> None:
    network = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48))
    optimizer = build("adafactor", network, weight_decay=0.1)
    take_steps(network, optimizer, range(3))
    kept = [
        torch.as_tensor(t).numel()
        for values in optimizer.state_dict()["state"].values()
        for t in values.values()
    ]
    assert sum(kept) < 64 * 48 / 4
    other = copy.deepcopy(network)
    resumed = build("adafactor", other, weight_decay=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((network, optimizer), (other, resumed)):
        take_steps(*pair, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_whatever_its_name_an_optimizer_decays_matrices_alone(name: str) -> None:
    network = tiny_network()
    decays: dict[int, float] = {}
    for group in build(name, network, weight_decay=0.1).param_groups:
        decays |= {id(parameter): group["weight_decay"] for parameter in group["params"]}
    assert {decays.get(id(network[0].weight)), decays.get(id(network[2].weight))} == {0.1}
    assert {decays.get(id(network[0].bias)), decays.get(id(network[1].weight))} == {0.0}
    assert id(network[3].weight) not in decays


def decayed_names(network: nn.Module) -> set[str]:
    """Of the trained parameters."""
    (group,) = (g for g in build("adamw", network, weight_decay=0.1).param_groups if g["weight_decay"])
    decayed = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in network.named_parameters() if id(parameter) in decayed}


@pytest.mark.parametrize(
    ("family", "settings", "kept"),
    [
        ("gpt_oss", {}, {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"}),
        ("cohere", {"use_qk_norm": True}, {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}),
        ("llama", {"attention_bias": True}, set()),
    ],
)
def test_of_the_matrices_those_decay_that_decay_in_transformers_trainer(
    family: str, settings: dict[str, Any], kept: set[str]
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, **settings))
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    decayed = decayed_names(model)
    assert {name.split(".", 3)[-1] for name in matrices - decayed} == kept  # "model.layers.1." is cut off
    assert decayed == matrices & set(Trainer.get_decay_parameter_names(cast(Any, None), model))


def test_eight_bit_states_are_refused_without_cuda() -> None:
    with pytest.raises(RecipeError, match=r"^optim\.name: adamw_8bit .*CUDA.*cpu.*optim\.name: adamw$"):
        check_optimizer("adamw_8bit", torch.device("cpu"))
    check_optimizer("adafactor", torch.device("cpu"))


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit"])
def test_an_optimizer_without_master_weights_refuses_one_trained_bfloat16_parameter(name: str) -> None:
    """A saved adapter that holds a whole module has such a one beside its fp32 matrices."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(
        RecipeError, match=rf"^optim\.name: {name} .*bfloat16.* set optim\.name: adamw or model"
    ):
        build(name, network)
    network[1].requires_grad_(False)
    assert build("adafactor", network).param_groups


@pytest.mark.gpu
def test_eight_bit_adamw_follows_adamw() -> None:
    pytest.importorskip("bitsandbytes")
    networks = []
    for name in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        network = nn.Linear(128, 64, bias=False).cuda()
        optimizer = build(name, network, lr=1e-3)
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            network.weight.grad = torch.randn(network.weight.shape, generator=generator).cuda()
            optimizer.step()
        networks.append(network.weight.detach())
    assert (networks[0] - networks[1]).abs().mean() < 0.2 * 1e-3


def test_the_norm_of_bfloat16_gradients_is_computed_in_fp32() -> None:
    model = torch.nn.Linear(999, 1, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.linspace(-1, 1, 999)[None].bfloat16()
    exact = float(model.weight.grad.double().norm())  # no bfloat16 number is as near as 1e-5
    norm = clip_gradients(model, 1.0)
    assert norm.dtype == torch.float32 and abs(float(norm) - exact) < 1e-5 * exact
    assert float(model.weight.grad.double().norm()) == pytest.approx(1.0, abs=4e-3)
