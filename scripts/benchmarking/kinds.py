"""Kinds of operations in a step, and which an operator is of."""

from __future__ import annotations

MATRIX_PRODUCTS = "matrix products of the layers"
HEAD_PRODUCTS = "matrix products of the head"
ATTENTION = "attention"
HEAD_STATISTICS = "log-softmax and statistics of the head"
OPTIMIZER = "optimizer and clipping"
OTHER_OPERATORS = "elementwise, norms, gathers, copies"
OUTSIDE = "outside operators: Python, launches, waiting"
KINDS = (
    MATRIX_PRODUCTS, ATTENTION, HEAD_PRODUCTS, HEAD_STATISTICS, OTHER_OPERATORS, OPTIMIZER, OUTSIDE,
)  # fmt: skip
PRODUCTIVE_KINDS = (MATRIX_PRODUCTS, HEAD_PRODUCTS, ATTENTION)

# After the library's name, which is aten or mkldnn.
_PRODUCT_OPERATORS = frozenset(
    {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "linear", "_linear_pointwise"}
)
# Parts of the names of operators and autograd nodes; the operators that these call count as part of them.
_ATTENTION_NAMES = ("Segments", "attention", "varlen", "flash_attn")
_HEAD_NAMES = ("ChunkedLogps",)
_OPTIMIZER_NAMES = ("Optimizer.", "adamw", "clip_grad", "_foreach_")


def kind_of(names: list[str]) -> str:
    """The kind of an operator by its lineage, its own name first."""

    def is_within(parts: tuple[str, ...]) -> bool:
        return any(part in name for name in names for part in parts)

    if is_within(_ATTENTION_NAMES):
        return ATTENTION
    if names[0].rpartition("::")[2] in _PRODUCT_OPERATORS:
        return HEAD_PRODUCTS if is_within(_HEAD_NAMES) else MATRIX_PRODUCTS
    if is_within(_HEAD_NAMES):
        return HEAD_STATISTICS
    if is_within(_OPTIMIZER_NAMES):
        return OPTIMIZER
    return OTHER_OPERATORS if "::" in names[0] or "Backward" in names[0] else OUTSIDE
