"""Changes how a model's layers compute, and not what: faster, with less memory, or compiled.

- On a CPU, oneDNN computes the products of linear layers where it is faster than torch's own.
- The last feed-forward block, after which no position reads another, is computed only at positions whose
  hidden state predicts a scored token.
- Compiled layers of one class use the same function, which takes rows of any length. A row's segments
  (lengths as Python numbers) would become constants of the code. So torch's own attention kernel is an
  operator that gets the segments' number, and a layer is one graph. Of `row_attention` with another kernel
  torch compiles nothing, and so it compiles a layer in parts, before and after it. Activation checkpointing
  wraps the compiled function: if torch compiled it too, it could not split the layer there.

Legend: T tokens of the row, U scored positions, D features in, O features out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack.system import ranks
from dpo_pack.system.errors import UnsupportedModelError
from dpo_pack.system.files import add_to_json, read_json
from dpo_pack.system.launch import num_threads
from dpo_pack.system.machine import cpu_name, is_intel


def text_model(model: PreTrainedModel) -> nn.Module:
    """Returns the part of a model that reads text: all of it, or what is beside the towers and the head."""
    return model if model.config.get_text_config() is model.config else model.get_decoder()


def tower_parameters(model: PreTrainedModel) -> set[nn.Parameter]:
    """Returns the parameters outside of the language model and the head, which are never trained."""
    own = [*text_model(model).parameters(), *model.get_output_embeddings().parameters()]
    return set(model.parameters()).difference(own)


def outermost_layers(model: nn.Module, class_names: frozenset[str] = frozenset()) -> list[nn.Module]:
    """Returns the modules that are layers of the library transformers or of a class in `class_names`; without
    those inside another such module."""
    layers: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in class_names
        if is_layer and module not in inner:
            layers.append(module)
            inner.update(module.modules())
    return layers


def feed_forwards(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module | None]]:
    """Returns (decoder layer, its feed-forward block), at least one; None if the block is not one module."""
    text, num_layers = text_model(model), model.config.get_text_config().num_hidden_layers
    lists = [m for m in text.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    found = []
    for layer in lists[0] if lists else ():
        blocks = [block for name, block in layer.named_children() if name in ("mlp", "feed_forward", "ffn")]
        found.append((layer, blocks[0] if len(blocks) == 1 else None))
    return found or [(text, None)]


@contextlib.contextmanager
def stock_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context in which every module runs its class's own forward; only `times_transposed` still acts."""
    own = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    try:
        yield
    finally:
        for module, forward in own.items():
            module.forward = forward


# ------------------------------------------------------------------------------- products, experts, tiles

# torch computes fp32 products with MKL. On AMD processors with AVX-512 oneDNN computes `x @ weight.T` and
# `grad @ weight` faster, on Intel's only the head's products; `grad.T @ x` is slower on both
# (docs/dev/performance.md). Both compute in plain fp32: they differ by rounding.


def times_transposed(features: Tensor, weight: Tensor) -> Tensor:
    """Computes `features @ weight.T` without gradients: [..., D], [O, D] -> [..., O]."""
    product = _onednn_product()
    if product is None or features.device.type != "cpu" or features.dtype != torch.float32:
        return features @ weight.T
    return product(features, weight, None, "none", [], "")


def speed_up_linears(model: nn.Module) -> None:
    """Makes linear layers call oneDNN on fp32, in place, where it is faster: not on Intel's CPUs."""
    if _onednn_product() is None or is_intel():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, features: Tensor) -> Tensor:
    is_float32 = features.device.type == "cpu" and features.dtype == torch.float32
    if features.ndim < 2 or not is_float32 or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(features, module.weight, module.bias)
    # We flatten to two dimensions: for more, oneDNN returns a view, which a model could not change in place.
    product: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        features.flatten(0, -2), module.weight, module.bias
    )
    unflattened: Tensor = product.unflatten(0, features.shape[:-1])
    return unflattened


class _Linear(torch.autograd.Function):
    """`features @ weight.T + bias`: [T, D], [O, D], [O] or None -> [T, O]."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = _onednn_product()
        assert product is not None
        needs_features, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(features if needs_weight else None, weight if needs_features else None)
        return product(features, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        features, weight = ctx.saved_tensors
        needs_features, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            times_transposed(grad, weight.T) if needs_features else None,
            grad.T @ features if needs_weight else None,
            grad.sum(dim=0) if needs_bias else None,
        )


@functools.cache
def _onednn_product() -> Callable[..., Tensor] | None:
    """Returns torch's binding of oneDNN's product, which is not public; None if missing or not measured."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    try:
        product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return None
    return product


class _CastExperts:
    """Experts whose weights are in another dtype; all else is theirs."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self.experts = experts
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return value.to(self.dtype) if name.endswith("_proj") else value


def _experts(module: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        module = _CastExperts(module, torch.get_autocast_dtype(device))
    out: Tensor = grouped_mm_experts_forward(module, hidden, *routing)
    return out


def cast_experts() -> None:
    """Makes experts compute in autocast's dtype. Autocast has no rule for transformers' grouped product, and
    on CUDA torch computes it in fp32 one expert after another, and waits for the device each time."""
    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = _experts


def tile_feed_forwards(model: PreTrainedModel, num_tokens: int, *, has_experts: bool) -> None:
    """Makes feed-forward blocks compute at most `num_tokens` tokens at a time, in place; the backward pass
    computes each tile once more. Raises UnsupportedModelError."""
    blocks = [block for _, block in feed_forwards(model) if block is not None]
    # Each must read hidden states and nothing else.
    are_plain = all(len(inspect.signature(block.forward).parameters) == 1 for block in blocks)
    if has_experts or not are_plain or len(blocks) < len(feed_forwards(model)):
        raise UnsupportedModelError(
            f"model.mlp_tile_tokens: not every layer of {type(model).__name__} has a feed-forward block that "
            "computes each token by itself; leave it out"
        )
    for block in blocks:
        block.forward = functools.partial(_tiling(), block.forward, num_tokens)


@functools.cache
def _tiling() -> Callable[..., Tensor]:
    # One object, because torch would compile the layers again for another.
    # Not recursive: a row of one tile runs the compiled block. `checkpoint` is never compiled.
    tiling: Callable[..., Tensor] = torch.compiler.disable(
        _in_tiles, recursive=False, reason="rows have many lengths"
    )
    return tiling


def _in_tiles(whole: Callable[..., Tensor], num_tokens: int, features: Tensor) -> Tensor:
    num_tiles = -(-features.shape[:-1].numel() // num_tokens)
    if num_tiles <= 1:
        return whole(features)
    tiles = features.tensor_split(num_tiles, dim=1)  # [B, L, D] along L
    recomputed = functools.partial(checkpoint, whole, use_reentrant=False)
    return torch.cat(list(map(recomputed, tiles)), dim=1)


def trim_last_layer(model: PreTrainedModel) -> None:
    """Makes the last feed-forward block skip unscored positions of packed rows, in place. Exact if the block
    never mixes positions; proofs check that."""
    layer, block = feed_forwards(model)[-1]
    if block is None:
        return
    trimmed = _TrimmedBlock(whole=block.forward)
    block.forward = trimmed.forward
    layer.register_forward_pre_hook(trimmed.before_layer, with_kwargs=True)
    for part in layer.children():
        if part is not block and any(part.children()):  # the attention, because a norm does not get the row
            part.register_forward_pre_hook(trimmed.before_part, with_kwargs=True)


@dataclass(eq=False, slots=True, kw_only=True)
class _TrimmedBlock:
    whole: Callable[..., Any]
    positions: Tensor | None = None  # [U], None: all

    def before_layer(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        segments = keywords.get("row_segments")
        self.positions = None if segments is None else segments.scored_positions

    def before_part(self, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # Activation checkpointing does not run the layer's hooks when it recomputes a layer.
        if "row_segments" in keywords:
            self.before_layer(part, inputs, keywords)

    def forward(self, features: Tensor, *others: Any, **options: Any) -> Any:
        """Runs the block: [1, T, D] -> [1, T, D], zero at positions that the row does not need."""
        if self.positions is None or others or options:
            return self.whole(features, *others, **options)
        needed = self.whole(features.index_select(1, self.positions))  # [1, U, D]
        if not isinstance(needed, Tensor):  # a block with a router also returns router values
            return self.whole(features)
        return needed.new_zeros(features.shape).index_copy(1, self.positions, needed)


# ------------------------------------------------------------------------------ checkpointing, compilation

# Selective checkpointing. A layer keeps what takes long to compute and recomputes the rest: norms, activation
# functions, rotary positions, casts. The kernels have other names on the CPU and in the package flash-attn.
_KEPT_OPERATIONS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"),
    *("mkldnn::_linear_pointwise", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
    *("aten::_scaled_dot_product_cudnn_attention", "dpo_pack::attend"),
    *("flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"),
)


def keep_products() -> tuple[Any, Any]:
    """Returns the contexts of torch's checkpointing for a layer's forward and for its recomputation."""

    def policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        is_kept = operation.name().partition(".")[0] in _KEPT_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def keep_inputs_on_host(
    checkpoint: Callable[..., Any], layer: Callable[..., Any], /, *inputs: Any, **options: Any
) -> Any:
    """Runs `checkpoint(layer, *inputs, **options)`. Until the backward pass, the host keeps the inputs."""

    def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
        # Copies wait in the device's queue, and the host waits for none, because its memory is pinned.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def back(kept: tuple[torch.device, Tensor]) -> Tensor:
        return kept[1].to(kept[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(to_host, back):
        return checkpoint(layer, *inputs, **options)


def checkpoint_activations(
    model: PreTrainedModel, *, keeps_products: bool = False, offloads: bool = False
) -> None:
    """Makes layers recompute activations: with `keeps_products` not those of products and attention, with
    `offloads` from inputs that the host keeps."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if keeps_products:
        settings["context_fn"] = keep_products
    with warnings.catch_warnings():
        # Newer transformers call this activation_checkpointing_enable; older ones have only this name.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(settings)
    for module in model.modules():  # transformers recomputes in training mode only
        module.training = bool(vars(module).get("gradient_checkpointing"))
        if offloads and module.training:
            plain: Any = module._gradient_checkpointing_func
            vars(module)["_gradient_checkpointing_func"] = functools.partial(keep_inputs_on_host, plain)


def compiler_obstacle(device: torch.device) -> str | None:
    """Returns why torch.compile cannot be used on `device`, or None when it can."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "clang++")
    if not any(shutil.which(name) for name in names):
        return f"torch.compile needs a C++ compiler, and there is no {' or '.join(names)}"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs the package triton on CUDA, and it is not installed"
    return None


def compile_layers(
    model: PreTrainedModel, *, backend: str | Callable[..., Any] = "inductor", falls_back: bool = False
) -> None:
    """Compiles the model's layers, in place. torch compiles each part of a layer at its first use. With
    `falls_back`, torch runs code uncompiled where it cannot compile it, and raises no error. Raises
    UnsupportedModelError if the model's code does not mark its layers."""
    layers: list[Any] = outermost_layers(text_model(model))
    if not layers:
        raise UnsupportedModelError(
            f"model.compile: {type(model).__name__} does not say what its layers are, so they cannot be "
            "compiled one by one; set model.compile: false"
        )
    # torch compiles variants of one function: with and without gradients, autocast or an adapter, and for
    # several kinds of layers. By default it compiles 8 at most, and runs further variants uncompiled.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.suppress_errors = falls_back
    # On CUDA this fusion puts guards on the number of tokens, so rows of other lengths would compile again.
    if hasattr(torch._inductor.config.triton, "mix_order_reduction"):  # not in torch 2.10
        torch._inductor.config.triton.mix_order_reduction = False
    # DDP reduces gradients layer by layer anyway, so to cut a layer's code at DDP's buckets gains nothing.
    torch._dynamo.config.optimize_ddp = False
    # On CUDA inductor recommends TF32, but proofs in fp32 would fail with TF32, and autocast is in bf16.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    # torch itself reads this attribute where it compiles a layer in parts, for example a recurrent layer.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module).pop("forward", None)  # of `speed_up_linears`; compiled code calls other products
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
    for layer in layers:
        plain = type(layer).forward
        while plain.__code__.co_name == "forward_with_checkpointing":  # transformers' wrapper
            plain = plain.__wrapped__
        if plain not in compiled:
            compiled[plain] = torch.compile(plain, backend=backend, dynamic=True)
        layer.forward = functools.partial(_run_compiled, layer, compiled[plain])


def _run_compiled(layer: Any, compiled: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    # As transformers' checkpointing wrapper, but with the compiled forward.
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(functools.partial(compiled, layer, **options), *arguments)
    return compiled(layer, *arguments, **options)


# ------------------------------------------------------------------------------- what products reach on a CPU

_SPEEDS = "cpu_gflops.json", dict[str, dict[str, PositiveFloat]]  # a file of the cache, its content


@torch.no_grad()
def measure_products(cache_dir: Path, width: int = 1024) -> dict[str, float]:
    """Measures for half a second what a linear layer reaches on this CPU: GFLOP/s by dtype. The cache
    keeps it for `bfloat16_gain`. Ranks that call it together share the CPU, as in a run."""
    torch.set_num_threads(num_threads())  # a run's
    layers = [nn.Linear(width, width, bias=False, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    speed_up_linears(nn.ModuleList(layers))
    for num_rows in (32, 512, 4096):  # few first: bf16 is very slow without instructions for it
        found, size = {"float32": 0.0, "bfloat16": 0.0}, 2e-9 * num_rows * width**2
        end = time.monotonic() + 0.15
        while time.monotonic() < end:  # in turns: other processes slow down both
            for name, layer in zip(found, layers, strict=True):
                rows, begun = torch.ones(num_rows, width, dtype=layer.weight.dtype), time.perf_counter()
                layer(rows)
                found[name] = max(found[name], size / (time.perf_counter() - begun))
        if min(found.values()) < size / 0.03:
            break
    (name, shape), entry = _SPEEDS, {speed_key(num_threads()): found}
    ranks.only_first_does(lambda: add_to_json(cache_dir / name, shape, entry))
    return found


def bfloat16_gain(cache_dir: Path, threads: int) -> float:
    """Returns how many times as fast as fp32 `measure_products` found bf16 on this CPU; 0.0: not measured."""
    name, shape = _SPEEDS
    found: dict[str, float] = (read_json(cache_dir / name, shape) or {}).get(speed_key(threads), {})
    return found.get("bfloat16", 0.0) / found.get("float32", float("inf"))


def speed_key(threads: int) -> str:
    names = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE")
    variables = (f"{name}={os.environ.get(name)}" for name in names)
    return ", ".join((cpu_name(), f"torch {torch.__version__}", f"{threads} threads", *variables))
