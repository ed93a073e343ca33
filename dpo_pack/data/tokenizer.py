"""The methods of a tokenizer that data/ uses, and the key that names a tokenizer in the caches."""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from dpo_pack.data.formats import Message
from dpo_pack.data.keys import content_key
from dpo_pack.system.errors import ModelError

_TEMPLATE_SECONDS = 5.0  # CPU time to render one row
_TEMPLATE_BYTES = 1 << 30
_STATM = Path("/proc/self/statm")  # on Linux; the first number is the process's size in pages


class _TemplateRuns(BaseException):
    """A template ran too long. A BaseException, so that neither the template nor transformers catches it."""


class Tokenizer(Protocol):
    """The attributes and methods of a transformers tokenizer that dpo-pack uses."""

    @property
    def eos_token(self) -> str | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> str | dict[str, str] | None: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    @property
    def split_special_tokens(self) -> bool: ...
    @property
    def is_fast(self) -> bool: ...
    @property
    def backend_tokenizer(self) -> Any: ...
    def get_chat_template(self, chat_template: str | None, tools: Any) -> str: ...
    def save_pretrained(self, save_directory: str) -> Any: ...
    def __len__(self) -> int: ...
    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...
    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


@contextmanager
def bounded_template(remedy: str) -> Iterator[None]:
    """Stops a chat template, a program that came with the model, if it runs too long or takes much memory.

    Memory is limited on Linux only, time in the main thread only, because no other thread gets signals.
    Raises ModelError; its message ends with `remedy`.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        if _STATM.exists():
            most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + _TEMPLATE_BYTES
            most = most if before[0] == resource.RLIM_INFINITY else min(most, before[0])
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
        if in_main_thread:
            signal.signal(signal.SIGVTALRM, _stop_template)
            # Repeats every second, because Python drops an exception that is raised in a destructor.
            signal.setitimer(signal.ITIMER_VIRTUAL, _TEMPLATE_SECONDS, 1.0)
        yield
    except _TemplateRuns:
        raise ModelError(
            f"the chat template does not end within {_TEMPLATE_SECONDS:g} seconds for a row; {remedy}"
        ) from None
    except MemoryError:
        raise ModelError(
            f"the chat template takes more than {_TEMPLATE_BYTES >> 20:,} MiB for a row; {remedy}"
        ) from None
    finally:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _stop_template(signum: int, frame: object) -> None:
    raise _TemplateRuns


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a key of all parts of a tokenizer that change token ids, templates included, but not its path.

    The versions of the libraries are part of the key, because fixes in the libraries change ids.
    """
    settings = {
        "class": type(tokenizer).__name__,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "split_special_tokens": tokenizer.split_special_tokens,
        "versions": [version("tokenizers"), version("transformers")],
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Every call of the tokenizer sets and unsets these two entries. Our calls neither truncate nor pad.
        del backend["truncation"], backend["padding"]
        return content_key([settings, backend])
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        hashes = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
    return content_key([settings, hashes])
