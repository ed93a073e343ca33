"""How ranks share the training of one model: whole copies (DDP), or shards of one (FSDP2).

Either way a step takes the same gradient, the mean over its pairs: both average over ranks, so
`accumulate_gradients` multiplies by their number. docs/distributed.md says which to choose, and what each
costs.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig

from dpo_pack import ranks
from dpo_pack.console import format_count
from dpo_pack.errors import RecipeError
from dpo_pack.host_memory import machine_memory_bytes
from dpo_pack.layout import Row
from dpo_pack.lora import is_adapter
from dpo_pack.memory import training_bytes
from dpo_pack.model_config import routes_tokens
from dpo_pack.model_shape import num_parameters
from dpo_pack.models import CompletionLogps, RowLogps, resolve_precision
from dpo_pack.recipe import Recipe
from dpo_pack.recipe_online_checks import why_not_sharded

# What `auto` leaves of a device's memory to activations.
STATE_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How the ranks of a run share a model."""

    name: Literal["none", "ddp", "fsdp2"]
    reason: str
    mesh: DeviceMesh | None = None  # of fsdp2: all ranks, or [replicas, ranks that share one]
    cpu_offload: bool = False
    accumulate_unsharded: bool = False

    @property
    def shards(self) -> bool:
        """Whether a rank holds parts of weights only, so that every forward takes all ranks."""
        return self.mesh is not None

    def sentence(self) -> str:
        """What to tell the person who waits."""
        return f"{self.name} on {ranks.num_ranks()} processes ({self.reason})"


ALONE = Strategy(name="none", reason="one process")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedPolicy:
    """The policy as all ranks train it: calls whose gradients are wanted go through it."""

    forward: Callable[[Row], RowLogps]
    without_reduction: Callable[[], AbstractContextManager[Any]]  # gradients add up, and stay where they are
    keeps_gradients: bool = False  # from step to step, as zeros: they are where they are reduced

    def __call__(self, row: Row) -> RowLogps:
        return self.forward(row)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a row; ranks' gradients meet in a step's last one."""
        return contextlib.nullcontext() if is_last else self.without_reduction()

    def idle(self, row: Row) -> None:
        """A row's forward and backward with a gradient of 0, because the other ranks compute one, too.

        The zero comes from above the sums: a loss of 0 x the row's would be NaN where the row's is infinite.
        """
        sums = self.forward(row).sums
        sums.backward(gradient=torch.zeros_like(sums))


def distribute_policy(scorer: CompletionLogps, strategy: Strategy) -> DistributedPolicy:
    """`scorer` on each rank -> one policy that they train together; collective.

    A sharded scorer reduces after each row, so that no rank ever holds a whole gradient, unless the strategy
    accumulates it unsharded.
    """
    match strategy.name:
        case "none":
            return DistributedPolicy(forward=scorer, without_reduction=contextlib.nullcontext)
        case "ddp":
            copies = _copies(scorer)
            return DistributedPolicy(
                forward=copies,
                without_reduction=copies.no_sync,
                keeps_gradients=not copies.find_unused_parameters,
            )
        case "fsdp2":
            # While weights are gathered, an optimizer would be given what is thrown away soon.
            assert all(isinstance(parameter, DTensor) for parameter in scorer.parameters())
            return DistributedPolicy(
                forward=scorer,
                without_reduction=(
                    (lambda: _unsharded_gradients(scorer))
                    if strategy.accumulate_unsharded
                    else contextlib.nullcontext
                ),
            )


def _copies(scorer: CompletionLogps) -> DistributedDataParallel:
    """DDP around it. Buffers never change, so they are not told before each forward.

    DDP's buckets are as large as the gradient and there all the time. Gradients that exist before them become
    views of them, and stay that while they are zeroed in place; else rows would add up in a second gradient.
    """
    # Some routers choose experts by a parameter that gets no gradient, and an optimizer must not see zeros.
    leaves_some_out = routes_tokens(scorer.model.config)
    if not leaves_some_out:
        for parameter in scorer.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        # Newer torch calls it forward_sync_buffers, older ones only know this name.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            scorer,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=leaves_some_out,
        )


@contextlib.contextmanager
def _unsharded_gradients(scorer: Any) -> Iterator[None]:
    scorer.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        scorer.set_requires_gradient_sync(True)


def choose_strategy(recipe: Recipe, config: PretrainedConfig, device: torch.device) -> Strategy:
    """The recipe's strategy for the ranks that are here; collective. Raises RecipeError.

    `config` is the policy's. `auto` shards a model of which training holds so much that too little of a
    device's memory is left to activations.
    """
    settings, num_ranks = recipe.distributed, ranks.num_ranks()
    if num_ranks == 1:
        return _alone(recipe)
    name, reason = settings.strategy, "distributed.strategy"
    if name == "auto":
        needs_copies = why_not_sharded(recipe)
        name, reason = _by_size(recipe, config, device) if needs_copies is None else ("ddp", needs_copies)
    if name == "ddp":
        return Strategy(name="ddp", reason=reason)
    if recipe.optim.name != "adamw":
        raise RecipeError(
            f"optim.name: {recipe.optim.name} updates whole weights only, and fsdp2 ({reason}) has shards of "
            "them; set optim.name: adamw or distributed.strategy: ddp"
        )
    if settings.cpu_offload and device.type != "cuda":
        raise RecipeError(
            f"distributed.cpu_offload: weights are in the memory of the {device.type} already; leave it out"
        )
    return Strategy(
        name="fsdp2",
        reason=reason,
        mesh=_mesh(device, is_hybrid=settings.hybrid),
        cpu_offload=settings.cpu_offload,
        accumulate_unsharded=settings.accumulate_unsharded,
    )


def _alone(recipe: Recipe) -> Strategy:
    settings = recipe.distributed
    if settings.gather_dtype is not None or settings.cpu_offload:
        key = "gather_dtype" if settings.gather_dtype is not None else "cpu_offload"
        raise RecipeError(f"distributed.{key}: shards need several processes, and this is one; leave it out")
    return ALONE


def _by_size(
    recipe: Recipe, config: PretrainedConfig, device: torch.device
) -> tuple[Literal["ddp", "fsdp2"], str]:
    """ddp where a copy, with all that is held of it, leaves room on every device, and why."""
    if config.to_dict().get("quantization_config") is not None:
        return "ddp", "quantised weights are not sharded"
    count = num_parameters(config, trust_remote_code=recipe.model.trust_remote_code)
    is_adapted = recipe.model.lora is not None or is_adapter(recipe.model.path)
    precision = resolve_precision(recipe.model.dtype, recipe.model.autocast, device)
    state = training_bytes(
        num_trained=0 if is_adapted else count,  # an adapter is next to nothing
        num_frozen=count * (is_adapted + (recipe.reference.sync is not None)),
        trained_bytes=precision.parameters.itemsize,
        frozen_bytes=precision.parameters.itemsize,
        optimizer=recipe.optim.name,
    )
    needed = state.total + state.gradients * (num_gradients(config) - 1)
    if precision.casts_weights and not recipe.model.gradient_checkpointing:
        needed += 2.0 * count
    memory = -ranks.largest_number(-device_memory(device))  # of the smallest device
    what = (
        f"what training holds of {format_count(count)} parameters takes {needed / 1e9:.3g} GB, "
        f"a device has {memory / 1e9:.3g} GB"
    )
    return ("ddp" if needed <= STATE_SHARE * memory else "fsdp2"), what


def num_gradients(config: PretrainedConfig) -> int:
    """How often ddp holds the gradient: where it is not kept in DDP's buckets, rows add up beside them."""
    return 2 if routes_tokens(config) else 1


def device_memory(device: torch.device) -> int:
    """Bytes of memory that a rank may count on: of a CPU, its share of what there is for all of them."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.num_ranks()))
    return machine_memory_bytes() // num_here


def _mesh(device: torch.device, *, is_hybrid: bool) -> DeviceMesh:
    num_ranks = ranks.num_ranks()
    if not is_hybrid:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if num_here in (1, num_ranks) or num_ranks % num_here:
        raise RecipeError(
            "distributed.hybrid: shards within nodes and copies over them need several nodes of as many "
            f"processes each, more than one; here are {num_here} of the run's {num_ranks}; leave it out"
        )
    shape = (num_ranks // num_here, num_here)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
