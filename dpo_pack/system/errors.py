"""Errors that a user can repair. Each message is one line: the mistake, the file or key, and the remedy."""

import re
from collections.abc import Sequence


def without_secrets(text: str) -> str:
    """Returns the text with `...` in place of the user, and of keys in the query, of each URL in it."""
    key = r"([?&;][^\s=&]*(?:key|token|secret|password|sig)\w*=)[^\s&'\"]+"
    return re.sub(rf"(\w://)[^\s/?#'\"]*(?=@)|{key}", r"\1\2...", text, flags=re.IGNORECASE)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, and the next one after a colon; else its class's name."""
    import pickle  # `--help` does without it

    if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run the file's code
        return "its weights are pickled objects that are not tensors; save them as safetensors"
    text = str(error).strip() or type(error).__name__
    return without_secrets(re.sub(r":\s*\n\s*", ": ", text).splitlines()[0])


def one_line(error: BaseException) -> str:
    """Returns an error's class and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error) if str(error).strip() else ''}".rstrip(": ")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host has too little memory. Only torch's own allocators have a class for it."""
    words = r"out of memory|can't allocate memory|BLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    return isinstance(error, RuntimeError) and bool(re.search(words, str(error), re.IGNORECASE))


class DpoPackError(Exception):
    """A command prints one line of it and ends with status 2. Any other exception is a bug of dpo-pack."""

    def __init__(self, message: str) -> None:
        if len(message) > 2000:  # it may quote a million column names of a data file
            message = f"{message[:1000]} ... {message[-1000:]}"
        super().__init__(without_secrets(message))


class RecipeError(DpoPackError):
    """A recipe key or command-line override is wrong; the message names the key."""

    problems: Sequence[str] = ()  # if several keys are wrong, a line for each; `recipe --check` prints them


class DataError(DpoPackError):
    """A data file or one of its rows is wrong; the message names file and row."""


class CacheError(DpoPackError):
    """The token or reference cache cannot be read or written; the message names the path."""


class ModelError(DpoPackError):
    """A model or tokenizer cannot be loaded, or it lacks something that training needs."""


class UnsupportedModelError(ModelError):
    """The model loads but cannot be packed exactly; the message gives the reason and the remedy."""


class RunError(DpoPackError):
    """Something outside recipe, data and model (output_dir, a server, another rank) prevents the run."""
