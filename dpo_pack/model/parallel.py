"""Several ranks (processes) train one model: each has a whole copy (DDP) or a shard (torch's FSDP2).

Both average gradients over ranks where a step needs sums, so a row's loss is divided by a rank's share of the
step's pairs. docs/distributed.md compares them and their costs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpo_pack.model.config import routes_tokens
from dpo_pack.model.fast_layers import outermost_layers, text_model, tower_parameters
from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.system import ranks
from dpo_pack.system.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The way in which the ranks of a run train one model."""

    name: Literal["none", "ddp", "fsdp2"]
    reason: str
    mesh: DeviceMesh | None = None  # for fsdp2: all ranks, or [replicas, ranks of one replica]
    cpu_offload: bool = False
    accumulate_unsharded: bool = False

    @property
    def shards(self) -> bool:
        """Whether each rank holds only parts of the weights, so that every forward needs all ranks."""
        return self.mesh is not None

    def sentence(self) -> str:
        return f"{self.name} on {ranks.num_ranks()} processes ({self.reason})"


ALONE = Strategy(name="none", reason="one process")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedPolicy:
    """The policy that all ranks train. Every pass that needs gradients must call its `forward`."""

    forward: Callable[[Row], RowLogps]
    # Makes a context in which each rank adds up its own gradients, and ranks do not exchange them.
    without_reduction: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    keeps_gradients: bool = False  # whether gradients stay, as zeros, in DDP's buckets between steps
    # Makes the context of the passes of a step over this rank's rows, see `stays_gathered`.
    step: Callable[[Sequence[Row]], AbstractContextManager[Any]] = contextlib.nullcontext

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Context for a row's forward and backward. Gradients need no reduction before a step's last row."""
        return contextlib.nullcontext() if is_last else self.without_reduction()

    def idle(self, row: Row) -> None:
        """Runs a row with a gradient of 0, as a rank without rows must while others compute rows."""
        output = self.forward(row)
        # A loss of 0 x (the row's loss) would be NaN for an infinite loss.
        output.sums.backward(gradient=torch.zeros_like(output.sums))


def distribute_policy(
    scorer: CompletionLogps,
    strategy: Strategy,
    accelerator: Accelerator | None = None,
    *,
    stays_gathered: bool = False,
) -> DistributedPolicy:
    """Turns the ranks' scorers into one policy that all ranks train together. Every rank must call it. With
    `stays_gathered` each rank gathers the shards once a step, and holds all weights until its end."""
    if strategy.name == "ddp":
        copies = _copies(scorer, accelerator or Accelerator(cpu=not ranks.uses_cuda()))
        return DistributedPolicy(
            forward=copies,
            without_reduction=copies.no_sync,
            keeps_gradients=not copies.find_unused_parameters,
        )
    policy = DistributedPolicy(forward=scorer)
    if strategy.shards:
        # While weights are gathered, parameters are temporary tensors. An optimizer must not get them.
        assert all(isinstance(p, DTensor) for p in scorer.parameters() if p.requires_grad)
        if strategy.accumulate_unsharded:
            policy = replace(policy, without_reduction=functools.partial(_unsharded_gradients, scorer))
        if stays_gathered:
            policy = replace(policy, step=functools.partial(_gathered, scorer))
    return policy


def _copies(scorer: CompletionLogps, accelerator: Accelerator) -> DistributedDataParallel:
    """Wraps the scorer in DDP, through accelerate. Buffers never change, so DDP need not send them."""
    # Some routers have a parameter that gets no gradient. An optimizer must get None for it, not zeros.
    leaves_some_out = routes_tokens(scorer.model.config)
    # DDP's buckets (its send buffers) are as large as all gradients. Gradients that exist before DDP become
    # views of the buckets, and do not need this memory a second time.
    if not leaves_some_out:
        for parameter in scorer.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        # Newer torch calls `broadcast_buffers` forward_sync_buffers; older torch has only this name.
        warnings.simplefilter("ignore", FutureWarning)
        accelerator.ddp_handler = DistributedDataParallelKwargs(
            broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=leaves_some_out
        )
        # Else accelerate names the GPU by its number on the node, but a rank may see only its own, as 0.
        with patch_environment(ACCELERATE_BYPASS_DEVICE_MAP="true"):
            copies = accelerator.prepare_model(scorer, device_placement=False)
    assert isinstance(copies, DistributedDataParallel)
    return copies


@contextlib.contextmanager
def _unsharded_gradients(scorer: Any) -> Iterator[None]:
    scorer.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        scorer.set_requires_gradient_sync(True)


@contextlib.contextmanager
def _gathered(scorer: Any, rows: Sequence[Row]) -> Iterator[None]:
    sharded = [module for module in scorer.modules() if isinstance(module, FSDPModule)]

    def set_reshard(frees: bool) -> None:
        scorer.stays_gathered = not frees
        scorer.set_reshard_after_backward(frees)
        for module in sharded:
            if module is not scorer:
                module.set_reshard_after_forward(frees, recurse=False)

    set_reshard(False)
    try:
        yield
    finally:
        set_reshard(True)
        for module in sharded:
            module.reshard()


def shard_model(scorer: CompletionLogps, strategy: Strategy, device: torch.device) -> None:
    """Turns every parameter into a DTensor of rank 0's values, in place; other ranks' may be on the meta
    device. Every rank must call it. A layer gathers its weights for its own passes, the scorer's forward the
    others. Raises UnsupportedModelError if the model does not allow sharding."""
    assert strategy.mesh is not None
    model = scorer.model
    _check_same_tensors(model)
    trained = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad]
    wide = [name for name, dtype in trained if dtype.itemsize >= 4]
    if wide and len(wide) < len(trained):  # FSDP2 reduces a layer's gradients together
        raise UnsupportedModelError(
            f"model.dtype: {type(model).__name__} keeps {wide[0]} in float32 beside weights of a lower "
            "precision, and shards must be of one type; set model.dtype: float32 or distributed.strategy: ddp"
        )
    part = model if scorer.vision is None else text_model(model)
    layers = outermost_layers(part, frozenset(model._no_split_modules or ()))
    if not layers:
        raise UnsupportedModelError(
            f"distributed.strategy: {type(model).__name__} does not say what its layers are, so it cannot be "
            "sharded; set distributed.strategy: ddp"
        )
    is_low = scorer.gather_dtype is not None or any(p.dtype.itemsize < 4 for p in scorer.parameters())
    precision = MixedPrecisionPolicy(
        param_dtype=scorer.gather_dtype,  # None: the shards' dtype
        reduce_dtype=torch.float32 if is_low else None,
        cast_forward_inputs=False,  # positions and a row's layout keep their dtypes
    )
    offload = CPUOffloadPolicy() if strategy.cpu_offload else OffloadPolicy()
    # Routers without autocast, and offloaded shards on their way to a device, keep the weights' own dtype.
    sends_casts = not (strategy.cpu_offload or routes_tokens(model.config))
    for layer in layers:
        _fill(layer, device)
        fully_shard(layer, mesh=strategy.mesh, mp_policy=precision, offload_policy=offload)
        if sends_casts and scorer.autocast is not None:
            _send_as_cast(layer, scorer.autocast)
    _fill(scorer, device)
    # A rank whose row has no image does not run the towers, so they stay whole on every rank.
    whole = set() if scorer.vision is None else tower_parameters(model)
    fully_shard(scorer, mesh=strategy.mesh, mp_policy=precision, offload_policy=offload, ignored_params=whole)
    _free_outside_layers(scorer)


def _send_as_cast(layer: Any, dtype: torch.dtype) -> None:
    """Makes ranks send the weights of a layer's linear modules, which autocast rounds anyway, in its `dtype`.
    torch looks for a shard's two functions in `_init_extensions`; without it, weights are sent as they are.
    """

    # torch counts the parameters that are not given, so all five have names. Each rank must send as much.
    def send(
        shard: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        sent = shard.new_zeros((-(-outer_size[0] // mesh.size(-1)), *outer_size[1:]), dtype=dtype)
        sent[: len(shard)] = shard
        return (sent,), None

    def receive(gathered: Any, metadata: None, wide: torch.dtype, *, out: Tensor | None = None) -> Any:
        """Writes the gathered weight to `out`. If `out` is None, returns (the weight, tensors to free)."""
        whole: Tensor = gathered[0]
        widened = whole.to(wide) if out is None else None
        if out is not None:
            with torch.no_grad(), _unsafe_preserve_version_counter(out):
                out.copy_(whole[: len(out)])
        whole.untyped_storage().resize_(0)
        return None if widened is None else (widened, (widened,))

    linear = [module for module in layer.modules() if type(module) is nn.Linear]
    cast = {id(parameter) for module in linear for parameter in module.parameters(recurse=False)}
    state = layer._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for shard in (shard for group in groups if group is not None for shard in group.fsdp_params):
        parameter: DTensor = shard.sharded_param
        is_wider = parameter.dtype.itemsize > dtype.itemsize
        if id(parameter) in cast and is_wider and hasattr(shard, "_init_extensions"):
            local: Any = parameter._local_tensor
            local.fsdp_pre_all_gather = functools.partial(send, local)
            local.fsdp_post_all_gather = receive
            shard._init_extensions()


def _free_outside_layers(scorer: Any) -> None:
    """Makes a forward without gradients free the weights outside of layers (a backward pass frees them
    itself), and `with_own_weights` gather and free them."""
    register_fsdp_forward_method(scorer, "with_own_weights")
    gathering, scorer.stays_gathered = scorer.with_own_weights, False

    def free(scorer: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and not scorer.stays_gathered:
            scorer.reshard()

    def with_own_weights(compute: Callable[[], Any]) -> Any:
        try:
            return gathering(compute)
        finally:
            if not scorer.stays_gathered:
                scorer.reshard()

    scorer.register_forward_hook(free)
    scorer.with_own_weights = with_own_weights


def _check_same_tensors(model: nn.Module) -> None:
    """Checks that all ranks have built the same tensors; dtypes and what is trained come from rank 0."""
    mine = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    mine += [(name, ()) for name, _ in model.named_buffers(remove_duplicate=False)]
    if any(theirs != mine for theirs in ranks.every_rank_says(mine)):
        raise UnsupportedModelError(
            f"distributed.strategy: {type(model).__name__} has other tensors when it is built without its "
            "weights, so it cannot be sharded; set distributed.strategy: ddp"
        )
    kinds = ranks.first_says([(parameter.dtype, parameter.requires_grad) for parameter in model.parameters()])
    for parameter, (dtype, is_trained) in zip(model.parameters(), kinds, strict=True):
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(is_trained)
    buffers = [buffer for _, buffer in model.named_buffers(remove_duplicate=False)]
    sizes = ranks.first_says([(buffer.shape, buffer.dtype) for buffer in buffers])
    if not ranks.is_first():
        for buffer, (shape, dtype) in zip(buffers, sizes, strict=True):  # can depend on the weights' files
            buffer.data = buffer.new_empty(shape, dtype=dtype)


@torch.no_grad()
def _fill(module: nn.Module, device: torch.device) -> None:
    """Copies rank 0's values of what is not sharded yet to every rank; tied parameters stay tied."""
    filled: dict[int, Tensor] = {}
    for part in module.modules():
        own = (part.named_parameters(recurse=False), part.named_buffers(recurse=False))
        for name, tensor in list(itertools.chain(*own)):
            if isinstance(tensor, DTensor):
                continue
            if id(tensor) not in filled:
                value = tensor.detach()
                value = value.to(device) if ranks.is_first() else torch.empty_like(value, device=device)
                value = value.contiguous()
                dist.broadcast(value, src=0)
                is_parameter = isinstance(tensor, nn.Parameter)
                filled[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            setattr(part, name, filled[id(tensor)])


def is_sharded(model: nn.Module) -> bool:
    """Returns whether each rank holds only parts of the model's weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, detached; of another tensor the whole."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full_state(model: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Returns the model's saved tensors on rank 0's CPU, an empty dict elsewhere. Every rank must call it."""
    state, whole = dict[str, Tensor](), dict[int, Tensor]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if trained_only and not (tensor.requires_grad or ".lora_" in name):
            continue
        if id(tensor) not in whole:
            value = tensor.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            whole[id(tensor)] = value.cpu() if ranks.is_first() else value.new_empty(0)
        if ranks.is_first():
            state[name] = whole[id(tensor)]
    return state
