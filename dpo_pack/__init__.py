"""dpo-pack: DPO fine-tuning that spends its compute on real tokens only.

`dpo_pack.train` and the other names of __all__ are the commands as functions: api.py.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = (
    "DpoPackError", "Recipe", "Run", "audit", "check", "doctor", "evaluate", "inspect_packing", "merge",
    "precompute_ref", "push", "recipe_from", "report", "sample", "show", "train", "verdict",
)  # fmt: skip
_ELSEWHERE = {
    "DpoPackError": "dpo_pack.system.errors",
    "Recipe": "dpo_pack.recipe.load",
    "recipe_from": "dpo_pack.recipe.peers.translate",
}


def __getattr__(name: str) -> Any:
    """Imports the Python interface when it is used."""
    if name in __all__:
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "dpo_pack.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *__all__]
