"""Errors a user can mend. Each message is one line: what is wrong, where, and how to mend it."""


class DpoPackError(Exception):
    """Base of every error the command line turns into one line and exit status 2.

    Anything else that escapes is our bug: a traceback and exit status 1.
    """


class RecipeError(DpoPackError):
    """A recipe key or command-line override is wrong; the message names the key."""


class DataError(DpoPackError):
    """A data file or one of its rows is wrong; the message names file and row."""


class CacheError(DpoPackError):
    """The token or reference cache cannot be read or written; the message names the path."""


class ModelError(DpoPackError):
    """A model or tokenizer cannot be loaded or lacks something training needs."""


class UnsupportedModelError(ModelError):
    """The model loads but cannot be packed exactly; the message gives the reason and the remedy."""


class RunError(DpoPackError):
    """`output_dir` or an earlier run in it stands in the way; the message gives the ways out."""
