"""dpo-pack: DPO fine-tuning that spends its compute on real tokens only.

`dpo_pack.train` and the other names of _INTERFACE are the commands as functions: api.py.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_INTERFACE = (
    "Run", "evaluate", "inspect_packing", "merge", "precompute_ref", "push", "recipe_from", "report",
    "sample", "show", "train",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the Python interface when it is used."""
    if name in _INTERFACE:
        return getattr(importlib.import_module("dpo_pack.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
