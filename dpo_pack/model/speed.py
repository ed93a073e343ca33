"""Four ways to compute the same numbers faster. The start-up proofs run with them and so check them.

On the CPU linear layers call oneDNN (`speed_up_linears`). The last layer skips positions that no scored token
needs (`trim_last_layer`). On CUDA layers can call liger-kernel (`apply_liger`). torch.compile can compile the
layers (`compile_layers`).

Legend: T tokens of the row, U scored positions, D features in, O features out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack.system.errors import RecipeError, UnsupportedModelError
from dpo_pack.system.machine import is_intel

# fp32 products on the CPU: torch computes them with MKL, and only bf16 with oneDNN. On AMD processors with
# AVX-512 oneDNN computes `x @ weight.T` and `grad @ weight` faster. On Intel's processors only the head's
# products are faster, because its chunks have few tokens; `grad.T @ x` is slower on both
# (`scripts/measure_settings.py products`). Both libraries compute in plain fp32: they differ by rounding.


def times_transposed(features: Tensor, weight: Tensor) -> Tensor:
    """Computes `features @ weight.T` without gradients: [..., D], [O, D] -> [..., O]."""
    product = _onednn_product()
    if product is None or not _is_cpu_float32(features):
        return features @ weight.T
    return product(features, weight, None, "none", [], "")


def speed_up_linears(model: nn.Module) -> None:
    """Makes the model's linear layers call oneDNN, in place, where it is faster: not on Intel's CPUs.

    If a layer's input is not fp32 on the CPU, or if autocast is on, the layer computes as before.
    """
    if _onednn_product() is None or is_intel():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, features: Tensor) -> Tensor:
    if features.ndim < 2 or not _is_cpu_float32(features) or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(features, module.weight, module.bias)
    # We flatten to two dimensions: for more, oneDNN returns a view, which a model could not change in place.
    product: Tensor = _Linear.apply(features.flatten(0, -2), module.weight, module.bias)  # type: ignore[no-untyped-call]
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


def _is_cpu_float32(features: Tensor) -> bool:
    return features.device.type == "cpu" and features.dtype == torch.float32


@functools.cache
def _onednn_product() -> Callable[..., Tensor] | None:
    """Returns torch's binding of oneDNN's product, which is not public (inductor calls it); None if missing.

    Also None on a CPU without AVX-512: we measured nothing on such CPUs.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    try:
        product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return None
    return product


# The last layer. After its attention no position reads another position. So only positions whose hidden state
# predicts a scored token need its feed-forward block: with long prompts less than half of all positions.
# At all other positions the block's output and its gradients are zero; the residual connection is unchanged.

# Names of the feed-forward block in transformers' decoder layers, if it is one module.
_BLOCK_NAMES = ("mlp", "feed_forward", "ffn")


def last_feed_forward(model: PreTrainedModel) -> nn.Module | None:
    """Returns the last decoder layer's feed-forward block; None if the block is not one module."""
    layer = _last_layer(model)
    if layer is None:
        return None
    blocks = [block for name, block in layer.named_children() if name in _BLOCK_NAMES]
    return blocks[0] if len(blocks) == 1 else None


def trim_last_layer(model: PreTrainedModel) -> None:
    """Makes the last feed-forward block skip unscored positions of packed rows; changes the model in place.

    Inputs that are not packed work as before. Exact if the block never mixes positions; proofs check that.
    """
    layer, block = _last_layer(model), last_feed_forward(model)
    if layer is None or block is None:
        return
    trimmed = _TrimmedBlock(block)
    block.forward = trimmed.forward
    layer.register_forward_pre_hook(trimmed.before_layer, with_kwargs=True)
    for part in layer.children():
        if part is not block and any(part.children()):  # the attention, because a norm does not get the row
            part.register_forward_pre_hook(trimmed.before_part, with_kwargs=True)


class _TrimmedBlock:
    """A feed-forward block's forward, and the positions at which the current row needs the block."""

    def __init__(self, block: nn.Module) -> None:
        self.whole = block.forward
        self.positions: Tensor | None = None  # [U], None: all

    def before_layer(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Runs before the layer's forward: stores the positions at which the row needs hidden states."""
        segments = keywords.get("row_segments")
        self.positions = None if segments is None else segments.scored_positions

    def before_part(self, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Runs before the attention's forward and stores the positions again. Activation checkpointing does
        not run the layer's hooks when it recomputes a layer, so `positions` could be another row's."""
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


def _last_layer(model: PreTrainedModel) -> nn.Module | None:
    """Finds the first ModuleList with as many modules as the model has layers; returns its last module."""
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    return lists[0][-1] if lists else None


# liger-kernel (Hsu et al. 2024, arXiv 2410.10989) computes RMSNorm, rotary positions and gated MLPs in one
# pass each: memory limits their speed. We do not use its losses, because we need log-probs of tokens.

# For each family: the options of liger-kernel that we switch on.
LIGER_FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), ("rope", "rms_norm", "geglu")),
    **dict.fromkeys(
        ("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"),
        ("rope", "rms_norm", "swiglu"),
    ),
}

# By module of transformers: the original functions that liger-kernel has replaced for all models of a family.
_replaced: dict[str, dict[str, Callable[..., Any]]] = {}


def check_kernels(kernels: str, config: PretrainedConfig, device: torch.device) -> None:
    """Checks `model.kernels`. Raises RecipeError (wrong device) or UnsupportedModelError (wrong family)."""
    if kernels == "none":
        return
    if device.type != "cuda":
        raise RecipeError(
            f"model.kernels: liger's kernels run on CUDA devices, and this is {device.type}; set "
            "model.kernels: none"
        )
    family = config.get_text_config().model_type
    if family not in LIGER_FAMILIES:
        raise UnsupportedModelError(
            f"model.kernels: liger has no kernels that we use for {family}, only for "
            f"{', '.join(LIGER_FAMILIES)}; set model.kernels: none"
        )


def apply_liger(model: PreTrainedModel) -> None:
    """Makes the layers of `model` compute with liger-kernel, in place; other models keep their own layers.

    But liger-kernel replaces functions, such as the rotation of queries and keys, for all models of a family
    in this process. Raises UnsupportedModelError when the package does not fit the installed transformers.
    """
    family = model.config.get_text_config().model_type
    code = sys.modules[type(model).__module__]
    before = dict(vars(code))
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[family](
            model=model,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            **dict.fromkeys(LIGER_FAMILIES[family], True),
        )
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise UnsupportedModelError(
            f"model.kernels: liger-kernel {_version('liger-kernel')} does not fit {family} of transformers "
            f"{_version('transformers')} ({error}); install another, or set model.kernels: none"
        ) from error
    finally:
        _keep_classes(code.__name__, before)


def _keep_classes(name: str, before: dict[str, Any]) -> None:
    """Restores a module's classes after liger-kernel, because fingerprints use their source files."""
    code = vars(sys.modules[name])
    for key, plain in before.items():
        if code[key] is plain:
            continue
        if isinstance(plain, type):
            code[key] = plain
        else:
            _replaced.setdefault(name, {}).setdefault(key, plain)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


@contextlib.contextmanager
def stock_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context in which every module runs its class's own forward; only `times_transposed` still acts."""
    own = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    code = vars(sys.modules[type(model).__module__])
    plain = _replaced.get(type(model).__module__, {})
    other = {key: code[key] for key in plain}
    code.update(plain)
    try:
        yield
    finally:
        code.update(other)
        for module, forward in own.items():
            module.forward = forward


# Selective checkpointing. A layer keeps what takes long to compute and recomputes the rest: norms, activation
# functions, rotary positions, casts. The kernels have other names on the CPU and in the package flash-attn.
_KEPT_OPERATIONS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"),
    *("mkldnn::_linear_pointwise", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
    *("aten::_scaled_dot_product_cudnn_attention", "torch_attn::_varlen_attn"),
    *("flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"),
)


def keep_products() -> tuple[Any, Any]:
    """Returns the contexts of torch's checkpointing for a layer's forward and for its recomputation."""

    def policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        is_kept = operation.name().partition(".")[0] in _KEPT_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


# torch.compile, one layer at a time. All layers of one class use the same compiled function, so 80 layers
# compile as fast as two. The function takes rows of any length. torch does not compile `row_attention`:
# attention kernels would not get faster, and a row's segments (lengths as Python numbers) would become
# constants of the code. So torch compiles a layer in two parts, before and after it. Activation checkpointing
# wraps the compiled function: if torch compiled checkpointing too, it could not split the layer there.

# torch compiles variants of one function: with and without gradients, autocast or an adapter, and for several
# kinds of layers. By default it compiles 8 variants at most, and runs further variants uncompiled.
_MOST_VARIANTS = 64


def compiler_obstacle(device: torch.device) -> str | None:
    """Returns why torch.compile cannot be used on `device`, or None when it can.

    It needs a C++ compiler for its CPU code and CUDA launchers, and on CUDA also triton.
    """
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "clang++")
    if not any(shutil.which(name) for name in names):
        return f"torch.compile needs a C++ compiler, and there is no {' or '.join(names)}"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs the package triton on CUDA, and it is not installed"
    return None


def check_compiler(device: torch.device) -> None:
    """Raises RecipeError if torch.compile cannot be used on `device`."""
    obstacle = compiler_obstacle(device)
    if obstacle is not None:
        raise RecipeError(f"model.compile: {obstacle}; install what is missing, or set model.compile: false")


def compiles(setting: bool | str, model: PreTrainedModel, device: torch.device) -> bool:
    """Returns `model.compile` as true or false; auto: on CUDA, if compiler and model allow it."""
    if setting != "auto":
        return bool(setting)
    return device.type == "cuda" and compiler_obstacle(device) is None and bool(outermost_layers(model))


def compile_layers(
    model: PreTrainedModel, *, backend: str | Callable[..., Any] = "inductor", falls_back: bool = False
) -> None:
    """Compiles the model's layers, in place. torch compiles each part of a layer at its first use.

    With `falls_back`, torch runs code uncompiled where it cannot compile it, and raises no error. Raises
    UnsupportedModelError if the model's code does not mark its layers.
    """
    layers: list[Any] = outermost_layers(model)
    if not layers:
        raise UnsupportedModelError(
            f"model.compile: {type(model).__name__} does not say what its layers are, so they cannot be "
            "compiled one by one; set model.compile: false"
        )
    torch._dynamo.config.recompile_limit = _MOST_VARIANTS
    torch._dynamo.config.suppress_errors = falls_back
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
        plain = _without_checkpointing(type(layer))
        if plain not in compiled:
            compiled[plain] = torch.compile(plain, backend=backend, dynamic=True)
        layer.forward = functools.partial(_run_compiled, layer, compiled[plain])


def outermost_layers(model: nn.Module, class_names: frozenset[str] = frozenset()) -> list[nn.Module]:
    """Returns the modules that are layers of the library transformers or of a class in `class_names`.

    A module inside another such module is left out."""
    layers: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in class_names
        if is_layer and module not in inner:
            layers.append(module)
            inner.update(module.modules())
    return layers


def _without_checkpointing(kind: type[GradientCheckpointingLayer]) -> Callable[..., Any]:
    """Returns a layer's forward without the checkpointing wrappers that transformers puts around it."""
    forward: Any = kind.forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    plain: Callable[..., Any] = forward
    return plain


def _run_compiled(layer: Any, compiled: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Does the same as transformers' checkpointing wrapper, but with the compiled forward."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(functools.partial(compiled, layer, **options), *arguments)
    return compiled(layer, *arguments, **options)
