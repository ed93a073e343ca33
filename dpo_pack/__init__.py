"""dpo-pack: DPO fine-tuning that spends its compute on real tokens only.

`dpo_pack.train` and the other names of _INTERFACE are the commands as functions: api.py.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_INTERFACE = (
    "Run", "evaluate", "inspect_packing", "merge", "precompute_ref", "push", "report", "sample", "show",
    "train",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the Python interface when it is used."""
    if name in _INTERFACE:
        return getattr(importlib.import_module("dpo_pack.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# What follows goes together with dpo_pack/train.py, a module that has the name of a function.


class _Train(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("dpo_pack.api").train(*args, **kwargs)


class _Package(ModuleType):
    """This package. Python sets a submodule as an attribute of its package when it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train":
            value.__class__ = _Train
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
