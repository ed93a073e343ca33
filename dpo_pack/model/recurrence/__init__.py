"""Makes recurrent layers, which carry a state from token to token, compute packed rows.

A recurrent layer is a function (inputs, initial state) -> (outputs, final state). So a row is exact if each
shared part (model/layout.py) starts from the zero state, and each tail from the final state of its own shared
part. In the same way a convolution over w tokens needs the last w - 1 inputs of the shared part.

transformers has no interface for such layers. But the code of all families has the same form: the module's
forward projects its input, token by token, and calls one of a few functions (the keys of `KERNELS`) on the
whole sequence. We run the module's own forward, but where it calls such a function, we run the same function
on the shared parts of the row and then on the tails. We never use the module's cache: it changes states in
place, which cuts or corrupts gradients.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dpo_pack.model.recurrence.kernels import DELTA_CHUNK, KERNELS, MAMBA2_CHUNK

RowFunction = Callable[..., Any]

# A function that computes a whole layer. It would mix the sequences of a row, and ignore an adapter of the
# output projection, whose weight it reads. A row's layers act as if its package were not installed.
_WHOLE_LAYER = "mamba2_split_conv1d_scan_combined"
_KIMI_CHUNK = 64  # tokens of a chunk in flash-linear-attention's kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentCall:
    """One call of a function in `KERNELS` by a layer. Start-up proofs compute it in another way too. There,
    a call of attention is one."""

    name: str  # in KERNELS
    stock: RowFunction  # the replaced function, which takes one sequence or a batch of equal lengths
    arguments: tuple[Any, ...]
    options: dict[str, Any]  # includes `row_segments`
    kernel: RowFunction | None = None  # the function of another package that computes it

    def run(self) -> Any:
        function, is_torch = self.kernel or self.stock, self.kernel is None
        return KERNELS[self.name].compute(function, is_torch, *self.arguments, **self.options)


def recurrence_sizes(module: nn.Module) -> tuple[float, float]:
    """Returns (products, fp32 numbers kept for the backward pass) of a module's recurrence for one token.
    Each number of the state is multiplied once when it is written and once when it is read, in the delta rule
    twice. The kept numbers are those of the tensors that autograd saves for a row in which pads and the ends
    of chunks are a quarter of all places; Kimi's are those that flash-linear-attention 0.6 saves."""
    names, sizes = _row_functions(module), vars(module)
    if not names:
        return 0.0, 0.0
    channels = sum(2.0 * len(part.weight) for part in module.children() if isinstance(part, nn.Conv1d))
    if "torch_chunk_gated_delta_rule" in names:
        heads, keys, values = sizes["num_v_heads"], sizes["head_k_dim"], sizes["head_v_dim"]
        factor, kept = 3, 12 * keys + 5 * values + keys * values / DELTA_CHUNK + 5 * DELTA_CHUNK
    elif "chunk_kimi_delta_attention" in names:
        heads, keys, values = sizes["num_heads"], sizes["head_dim"], sizes["head_dim"]
        factor, kept = 3, 5 * keys + 2 * _KIMI_CHUNK
    elif "mamba2_chunk_scan" in names:
        heads, keys, values = sizes["num_heads"], sizes["ssm_state_size"], sizes["head_dim"]
        factor, kept = 2, 8 * keys + 11 * values + 2 * keys * values / MAMBA2_CHUNK + 4 * MAMBA2_CHUNK
    else:
        return 0.0, channels / 2  # a short convolution has no activation function
    return float(factor * heads * keys * values), float(channels + heads * kept)


def _row_functions(module: nn.Module) -> set[str]:
    return KERNELS.keys() & set(_own_forward(module).__code__.co_names)


def _own_forward(module: nn.Module) -> types.FunctionType:
    forward: Any = inspect.unwrap(type(module).forward)
    variables = inspect.getclosurevars(forward).nonlocals if forward.__closure__ else {}
    # The decorator `force_accelerate_hooks` of transformers 5.15 sets no `__wrapped__`.
    own: types.FunctionType = inspect.unwrap(variables.get("forward_func", forward))
    return own


@contextlib.contextmanager
def torch_recurrences(model: nn.Module) -> Iterator[None]:
    """Context in which inputs that are no packed rows use transformers' own functions in torch. Packages that
    transformers calls where they are installed refuse fp32, or round more in it, and so are not exact."""
    code = vars(sys.modules[type(model).__module__])
    own = {name: code[name] for name in (*KERNELS, _WHOLE_LAYER) if name in code}
    code.update({name: inspect.unwrap(function) for name, function in own.items()})
    try:
        yield
    finally:
        code.update(own)


def wrap_recurrent_layers(model: nn.Module) -> None:
    """Makes the model's recurrent layers compute packed rows, in place. Other inputs work as before."""
    for module in model.modules():
        if _row_functions(module):
            on_row = _with_row_functions(_own_forward(module))
            module.forward = functools.partial(_forward, module, on_row)


@functools.cache
def _with_row_functions(forward: types.FunctionType) -> RowFunction:
    """Returns a copy of a module's forward that calls our functions in place of those in `KERNELS`. Cached,
    because torch would compile the layers again for another object; see model/fast_layers.py."""
    theirs = forward.__globals__
    ours = {name: _seam(name, inspect.unwrap(theirs[name])) for name in KERNELS if name in theirs}
    if _WHOLE_LAYER in theirs:
        ours[_WHOLE_LAYER] = lambda *arguments, **options: None
    code, defaults, closure = forward.__code__, forward.__defaults__, forward.__closure__
    changed = types.FunctionType(code, {**theirs, **ours}, forward.__name__, defaults, closure)
    changed.__kwdefaults__ = forward.__kwdefaults__
    on_row: RowFunction = torch.compiler.disable(changed, reason="a row's layout is not compiled")
    return on_row


def _seam(name: str, stock: RowFunction) -> RowFunction:
    def seam(
        *arguments: Any,
        row_recurrence: Callable[[RecurrentCall], Any] = RecurrentCall.run,
        row_kernels: Mapping[str, RowFunction] = MappingProxyType({}),
        **options: Any,
    ) -> Any:
        kernel = row_kernels.get(name)
        call = RecurrentCall(name=name, stock=stock, arguments=arguments, options=options, kernel=kernel)
        return row_recurrence(call)

    return seam


def _forward(module: nn.Module, on_row: RowFunction, /, *arguments: Any, **options: Any) -> Any:
    forward = type(module).forward if options.get("row_segments") is None else on_row
    return forward(module, *arguments, **options)
