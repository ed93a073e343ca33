"""Content keys of sequences, of data files and of settings.

The caches find their entries by these keys. A key depends on content only, not on a location or a time.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpo_pack.system.files import add_to_json, read_json

KEY_BYTES = 16
# Byte n of a `beginning_key` hashes the first BEGINNINGS[n] characters. Steps are
# small, so that a split takes few characters more than it needs: those after a short prompt are an answer's.
BEGINNINGS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)


def sequence_key(prompt_ids: NDArray[np.int32], completion_ids: NDArray[np.int32]) -> bytes:
    """Returns 16 bytes that name a sequence: its token ids and the position where its completion begins.

    The bytes are blake2b over the prompt's length as int64 and all ids as int32, both little-endian.
    """
    digest = hashlib.blake2b(len(prompt_ids).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(prompt_ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(completion_ids, dtype="<i4").data)
    return digest.digest()


def prompt_key(prompt: object) -> bytes:
    """Returns 16 bytes that name a whole prompt of a source: a text, messages or token ids.

    The tokenizer and the chat template do not change the key, so all models hold out the same prompts.
    """
    text = json.dumps(prompt, sort_keys=True, default=str)  # Arrow has values that JSON lacks, such as dates
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def beginning_key(text: str) -> bytes:
    """Returns 16 bytes; byte n, from 0, is a hash of the first BEGINNINGS[n] characters of the text."""
    parts = (text[:length].encode(errors="surrogatepass") for length in BEGINNINGS)
    return b"".join(hashlib.blake2b(part, digest_size=1).digest() for part in parts)


def content_key(content: object) -> str:
    """Returns 32 hex digits that name a JSON-able value."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileHash:
    stamp: str  # identifies one state of the file
    sha256: str


_FileHashes = dict[str, _FileHash]  # by path


def file_hash(path: Path, memo_path: Path) -> str:
    """Returns sha256 of a file's bytes, in hex. The JSON file `memo_path` keeps the hash for later calls."""
    status = path.stat()
    # Every change of content changes ctime, even if a program sets mtime back (cp -p, rsync -t).
    stamp = f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
    name = str(path.resolve())
    memo: dict[str, _FileHash] = read_json(memo_path, _FileHashes) or {}
    if name in memo and memo[name].stamp == stamp:
        return memo[name].sha256
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    add_to_json(memo_path, _FileHashes, {name: _FileHash(stamp=stamp, sha256=digest)})
    return digest


def directory_hash(directory: Path, memo_path: Path) -> str:
    """Returns one key for the relative names and contents of files below `directory`, except hidden files."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [path.relative_to(directory) for path in files]
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return content_key([[name.as_posix(), file_hash(directory / name, memo_path)] for name in visible])
