"""The attention segments of one row on a device, and the gather that copies shared keys and values for them.

A row holds tokens that sequences share (a prompt) only once. A *segment* is the attention of one sequence:
its queries are the tokens that the sequence adds to the row, its keys are all of the sequence's tokens, its
*path*. The *gathered* keys are the paths of all segments, one behind another. model/layout.py has an example.

Legend: T tokens of the row, K gathered keys, G segments, H heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import deterministic

from dpo_pack.packing.lengths import IntArray

Value = TypeVar("Value")
# A segment with a larger mask is computed in blocks of queries, so memory is linear in its length.
MAX_MASK_BYTES = 1 << 26
_memory: Any = deterministic  # torch's module has this setting as a property, which mypy does not see


class Node(NamedTuple):
    """Adjacent tokens of a row that the same sequences contain: a beginning, the rest of a prompt, a tail."""

    start: int  # row position of the first token
    length: int
    parent: int  # the node that comes before it in its sequences; -1: they begin with this one


def node_runs(nodes: Sequence[Node], last: int) -> list[tuple[int, int]]:
    """Returns the row positions of a sequence whose last node is `last`: (first, behind the last) of each
    series of adjacent ones, in the order of the sequence. There are at most three."""
    runs: list[tuple[int, int]] = []
    while last >= 0:
        start, length, last = nodes[last]
        end = start + length
        runs.append((start, runs.pop()[1] if runs and runs[-1][0] == end else end))
    return runs[::-1]


# No code assigns to the fields of lengths and indices. But the class is not frozen, because torch.compile of
# torch 2.10 takes the fields of a frozen dataclass as constants: it would compile each layer again.
@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class RowSegments:
    """Lengths and indices for the attention of one row; `model(...)` takes them as a keyword argument.
    Segment g attends from `query_lengths[g]` row positions to `key_lengths[g]` gathered keys. Its attention
    is causal, and its last query stands at its last key (bottom-right)."""

    query_lengths: tuple[int, ...]  # [G]
    key_lengths: tuple[int, ...]  # [G]
    cu_seqlens_q: Tensor  # [G+1] int32
    cu_seqlens_k: Tensor  # [G+1] int32
    kv_gather: Gather | None = None  # from the row's T tokens to the K gathered keys; None: they are equal
    nodes: tuple[Node, ...] = ()  # of the row, in its order
    leaves: tuple[int, ...] = ()  # [G] the last node of each sequence, which its segment adds to the row
    # [U] int64, ascending: row positions whose last hidden states are used; None: all positions
    scored_positions: Tensor | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)  # masks and the like, for all layers
    number: int = field(init=False)  # in place of the object, which no operator of torch takes

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _numbered[self.number] = self

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the result of `make`. Calls it only if no layer has asked for the same `key` before."""
        if key not in self.kept:
            self.kept[key] = make()
        value: Value = self.kept[key]
        return value

    def mask(
        self, num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype = torch.bool
    ) -> Tensor:
        """Returns a mask [num_queries, num_keys], True where attention is allowed: causal, bottom-right. Of
        another `dtype` it is numbers to add to logits: 0, -inf. `window` counts the query's own position."""
        name = ("mask", num_queries, num_keys, window, dtype)
        if name not in self.kept:
            device, last = self.cu_seqlens_q.device, num_keys - num_queries  # key that the first query sees
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(last)
            mask = mask if window is None else mask.triu(last - window + 1)
            if dtype != torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
            self.kept[name] = mask
        kept: Tensor = self.kept[name]
        return kept

    def key_runs(self) -> list[list[tuple[int, int]]]:
        """Returns, for each segment, where its keys are among those that a backend gets, see `node_runs`."""
        if self.kv_gather is None:
            return [[run] for run in itertools.pairwise(itertools.accumulate(self.key_lengths, initial=0))]
        return self.once("runs", lambda: [node_runs(self.nodes, leaf) for leaf in self.leaves])

    def blocks(
        self, window: int | None, dtype: torch.dtype = torch.bool, *, has_masks: bool = False
    ) -> list[list[tuple[slice, slice, Tensor | None]]]:
        """Returns, for each segment, the blocks in which its attention is computed: (queries of the row, keys
        of the segment, mask). A segment that is plainly causal has no mask, unless `has_masks`. All blocks
        of the row use parts of one mask of at most MAX_MASK_BYTES, because a mask depends only on the
        distances from the last query and from the last key."""
        lengths = list(zip(self.query_lengths, self.key_lengths, strict=True))
        are_masked = [has_masks or q != k or (window is not None and window < k) for q, k in lengths]
        masked = [of_segment for of_segment, is_masked in zip(lengths, are_masked, strict=True) if is_masked]
        most_queries, most_keys = (max(sizes) for sizes in zip(*masked, strict=True)) if masked else (0, 0)
        size = max(min(most_queries, MAX_MASK_BYTES // max(most_keys * dtype.itemsize, 1)), 1)
        found, first_query = [], 0
        for (num_queries, num_keys), is_masked in zip(lengths, are_masked, strict=True):
            of_segment: list[tuple[slice, slice, Tensor | None]] = []
            if not is_masked:
                of_segment.append((slice(first_query, first_query + num_queries), slice(num_keys), None))
            for begin in range(0, num_queries if is_masked else 0, size):
                end = min(begin + size, num_queries)
                last_key = num_keys - num_queries + end
                hidden = 0 if num_queries <= size or window is None else last_key - (end - begin) - window + 1
                keys = slice(max(hidden, 0), last_key)
                mask = self.mask(size, most_keys, window, dtype)
                part = mask[size - (end - begin) :, most_keys - (last_key - keys.start) :]
                of_segment.append((slice(first_query + begin, first_query + end), keys, part))
            found.append(of_segment)
            first_query += num_queries
        return found


# No size of a tensor is so large: torch.compile would take an equal number for the same one.
_numbers = itertools.count(1 << 40)
_numbered: WeakValueDictionary[int, RowSegments] = WeakValueDictionary()


def numbered(number: int) -> RowSegments:
    """Returns the segments with this number, which something else must keep alive."""
    return _numbered[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The other arguments of an attention backend, as transformers passes them to a layer's attention."""

    scale: float  # factor of the products of queries and keys
    window: int | None  # how many keys a query sees, its own included; None: all
    softcap: float | None  # limit of the logits: softcap * tanh(logit / softcap); None: none
    sinks: Tensor | None  # [H] logits, one more term of each head's softmax, without a value; None: none


def make_segments(
    query_lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device, **others: Any
) -> RowSegments:
    """Returns the segments with these lengths, [G] each; `others` are further fields of RowSegments."""
    cu_seqlens_q, cu_seqlens_k = (
        on_device(np.cumsum([0, *lengths], dtype=np.int32), device)
        for lengths in (query_lengths, key_lengths)
    )
    return RowSegments(
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(key_lengths),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **others,
    )


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies the array to `device` as a tensor; pinned memory, so the host does not wait for CUDA's work."""
    host = torch.from_numpy(array)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@dataclass(eq=False, slots=True, kw_only=True)
class Gather:
    """Copies E entries of a source tensor of n, by index along its first dimension; an entry can be zero.
    The backward pass adds the gradients of copies in a fixed order and in at least fp32. On CUDA that of
    torch's `index_select` adds atomically, in any order, and in bf16 a sum loses small terms."""

    index: Tensor  # [E] int64, index in the source; n means that the entry is zero
    size: int  # n
    has_zeros: bool  # whether an entry is zero

    def __call__(self, source: Tensor) -> Tensor:
        """Copies the entries: [n, ...] -> [E, ...]."""
        taken: Tensor = _Take.apply(source, self)  # type: ignore[no-untyped-call]
        return taken

    def gradient(self, grad: Tensor) -> Tensor:
        """Returns the gradient of the source, of that of the entries."""
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(self.size + self.has_zeros, *grad.shape[1:], dtype=wide)
        with deterministic_kernels():
            total.index_add_(0, self.index, grad.to(wide))
        return total[: self.size].to(grad.dtype)


def make_gather(index: IntArray, size: int, device: torch.device) -> Gather:
    """Makes a Gather on the device: `index` [E] are indices in a source of length `size`, -1 for zeros."""
    is_zero = index < 0
    where = on_device(np.where(is_zero, size, index), device)
    return Gather(index=where, size=size, has_zeros=bool(is_zero.any()))


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """In this context torch's kernels give the same bits each time. Not everywhere: others would raise."""
    before, fills = torch.get_deterministic_debug_mode(), _memory.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode("error")
        _memory.fill_uninitialized_memory = False  # the kernels write all that they allocate
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        _memory.fill_uninitialized_memory = fills


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, where: Gather) -> Tensor:
        ctx.where = where
        if where.has_zeros:
            source = torch.cat((source, source.new_zeros(1, *source.shape[1:])))
        return source.index_select(0, where.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.where.gradient(grads[0]), None


def attend_gathered(
    attend: Callable[..., Tensor], key: Tensor, value: Tensor, gather: Gather | None
) -> Tensor:
    """Returns `attend` of gathered keys and values. For the backward pass autograd keeps those of the row and
    gathers them again. A caller's hooks, as those of checkpointing, get all that is kept."""
    if gather is None:
        return attend(key, value)
    kept: list[Tensor] = []  # all that the kernel keeps; between its forward and backward passes nothing
    gathered = gather(key), gather(value)
    places = [(states.data_ptr(), states.shape, states.stride()) for states in gathered]

    def keep(tensor: Tensor) -> int:
        if (place := (tensor.data_ptr(), tensor.shape, tensor.stride())) in places:
            return places.index(place)
        kept.append(tensor.detach())
        return len(kept) + 1

    with torch.autograd.graph.saved_tensors_hooks(keep, kept.__getitem__):
        out = attend(*gathered)
    if gathered[0].requires_grad:  # the hook runs when the kernel's backward pass has ended
        gathered[0].register_hook(lambda _: kept.clear())
    return _Restore.apply(out, key, value, gather.index, kept)  # type: ignore[no-any-return, no-untyped-call]


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, key: Tensor, value: Tensor, index: Tensor, kept: Any) -> Tensor:
        ctx.save_for_backward(key, value, *kept)
        ctx.index, ctx.kept = index, kept
        kept.clear()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        key, value, *others = ctx.saved_tensors
        ctx.kept[:] = [*(states.index_select(0, ctx.index) for states in (key, value)), *others]
        return grads[0], None, None, None, None


def as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts to autocast's dtype if autocast is on, for kernels for which torch has no autocast rule."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)
