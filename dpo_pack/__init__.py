"""dpo-pack: DPO fine-tuning that spends its compute on real tokens only.

`dpo_pack.train`, `evaluate`, `inspect_packing` and `show` are the commands as functions: commands/python.py.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_INTERFACE = ("Run", "evaluate", "inspect_packing", "show", "train")


def __getattr__(name: str) -> Any:
    """Imports the Python interface when it is used, so that `dpopack --help` does not wait for torch."""
    if name in _INTERFACE:
        return getattr(importlib.import_module("dpo_pack.commands.python"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
