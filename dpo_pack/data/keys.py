"""Content keys: of sequences, of data files, of a tokenizer.

They decide what the caches may reuse, so they name content only: never a path, a time or an order.
"""

import contextlib
import hashlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpo_pack.errors import CacheError
from dpo_pack.files import read_json, write_json_atomically

if TYPE_CHECKING:
    from dpo_pack.data.tokenization import Tokenizer

KEY_BYTES = 16


def sequence_key(prompt_ids: NDArray[np.int32], completion_ids: NDArray[np.int32]) -> bytes:
    """16 bytes that name a sequence: its token ids and where its completion begins.

    blake2b over the prompt's length as int64 and all ids as int32, both little-endian.
    """
    digest = hashlib.blake2b(len(prompt_ids).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(prompt_ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(completion_ids, dtype="<i4").data)
    return digest.digest()


def content_key(content: object) -> str:
    """32 hex digits that name a JSON-able value."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


def file_hash(path: Path, memo_path: Path) -> str:
    """sha256 of a file's bytes, in hex; `memo_path` remembers it until the file changes."""
    status = path.stat()
    # ctime moves with every change of content, also where mtime was set back (cp -p, rsync -t).
    stamp = f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
    name = str(path.resolve())
    known = (read_json(memo_path) or {}).get(name, {})
    if known.get("stamp") == stamp:
        return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Read again before writing: other processes add to the same file. A lost entry costs one hash.
    memo = {**(read_json(memo_path) or {}), name: {"stamp": stamp, "sha256": digest}}
    with contextlib.suppress(CacheError):  # a cache that may only be read serves as well
        write_json_atomically(memo_path, memo)
    return digest


def directory_hash(directory: Path, memo_path: Path) -> str:
    """One key for the relative names and contents of all files below `directory`, hidden ones apart."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [path.relative_to(directory) for path in files]
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return content_key([[name.as_posix(), file_hash(directory / name, memo_path)] for name in visible])


def tokenizer_fingerprint(tokenizer: "Tokenizer") -> str:
    """Names everything about a tokenizer that changes token ids, templates included; not where it is.

    The versions of the libraries count too: their fixes change ids.
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
        # Set and unset by every call of the tokenizer; ours neither truncate nor pad.
        del backend["truncation"], backend["padding"]
        return content_key([settings, backend])
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        hashes = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
    return content_key([settings, hashes])
