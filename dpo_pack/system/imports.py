"""Makes a command's imports faster, and imports a user's own function by its name `module:function`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dpo_pack.system.errors import RecipeError, one_line


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """Turns garbage collection off in a block that imports torch and transformers for the first time.

    These imports make about a million objects that live as long as the process. Repeated searches for garbage
    among them would take a sixth of the import time. After the block these objects are frozen, so that later
    collections do not search them either.
    """
    if "transformers" in sys.modules:  # nothing large to import, and a freeze would keep garbage
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def load_function(name: str, recipe_key: str) -> Callable[..., Any]:
    """Returns the function that `name` gives as module:function. Raises RecipeError, in one line."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except AttributeError:
        raise RecipeError(f"{recipe_key}: module {module_name} has no function {function_name}") from None
    except (Exception, SystemExit) as error:
        raise RecipeError(
            f"{recipe_key}: cannot import {module_name}: {one_line(error)} "
            f"(looked in {os.getcwd()} and among installed modules)"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        raise RecipeError(f"{recipe_key}: {name} is {type(function).__name__}, not a function")
    return function
