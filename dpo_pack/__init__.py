"""dpo-pack: DPO fine-tuning that spends its compute on real tokens only.

`dpo_pack.train`, `evaluate`, `inspect_packing` and `show` are the commands as functions: commands/python.py.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_INTERFACE = dict.fromkeys(
    ("Run", "evaluate", "inspect_packing", "show", "train"), "dpo_pack.commands.python"
) | {"recipe_from": "dpo_pack.recipe.peers.translate"}


def __getattr__(name: str) -> Any:
    """Imports the Python interface when it is used, so that `dpopack --help` does not wait for torch."""
    if name in _INTERFACE:
        return getattr(importlib.import_module(_INTERFACE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Train(ModuleType):
    """The module dpo_pack/train.py, which can be called: it has the name of the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("dpo_pack.commands.python").train(*args, **kwargs)


class _Package(ModuleType):
    """This package. Python sets a submodule as an attribute of its package when it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train":
            value.__class__ = _Train
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
