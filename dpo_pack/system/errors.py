"""Errors that a user can repair. Each message is one line: the mistake, the file or key, and the remedy."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class DpoPackError(Exception):
    """Base class of all errors for which the command line prints one line and ends with exit status 2.

    Any other exception is a bug of dpo-pack: the command prints a traceback and ends with exit status 1.
    """


class RecipeError(DpoPackError):
    """A recipe key or command-line override is wrong; the message names the key."""


class DataError(DpoPackError):
    """A data file or one of its rows is wrong; the message names file and row."""


class CacheError(DpoPackError):
    """The token or reference cache cannot be read or written; the message names the path."""


class ModelError(DpoPackError):
    """A model or tokenizer cannot be loaded, or it lacks something that training needs."""


class UnsupportedModelError(ModelError):
    """The model loads but cannot be packed exactly; the message gives the reason and the remedy."""


class RunError(DpoPackError):
    """`output_dir`, or an earlier run in it, prevents the run; the message gives the remedies."""
