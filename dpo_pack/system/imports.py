"""Makes a command's imports faster, and imports a user's own function by its name `module:function`."""

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
    """Collects no garbage while torch and transformers are imported, which would take a sixth of the time."""
    if "transformers" in sys.modules or not gc.isenabled():  # a freeze would keep garbage
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_function(name: str, recipe_key: str) -> Callable[..., Any]:
    """Returns the function that `name` gives as module:function. Raises RecipeError."""
    module_name, _, function_name = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except AttributeError:
        raise RecipeError(f"{recipe_key}: module {module_name} has no function {function_name}") from None
    except (Exception, SystemExit) as error:
        why = f"{one_line(error)} (looked in {here} and among installed modules)"
        raise RecipeError(f"{recipe_key}: cannot import {module_name}: {why}") from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        raise RecipeError(f"{recipe_key}: {name} is {type(function).__name__}, not a function")
    return function
