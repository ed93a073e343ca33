"""A client for HTTP servers with OpenAI's interface, on the standard library alone.

A request that fails in a way that may pass (no connection, a stalled or broken answer, 408, 429, 5xx, or an
answer that says something else than was asked for) is sent again after a growing pause. What cannot pass by
itself (401, 403, 404) stops the run; any other refusal is of that request only.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from dpo_pack.errors import RunError
from dpo_pack.online.interface import Failure

Answer = TypeVar("Answer")

_STOPPING = {401: "the API key is refused", 403: "access is refused", 404: "there is no such model or URL"}
_PASSING = frozenset({408, 409, 425, 429})
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16


class UnusableAnswer(ValueError):
    """An answer that is not what was asked for; the next one may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, and how patiently."""

    url: str  # up to /v1
    model: str
    api_key: str | None
    timeout_seconds: float  # for a whole request
    retries: int
    concurrency: int
    recipe_key: str  # to name in errors
    first_pause_seconds: float = _FIRST_PAUSE_SECONDS

    def ask_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], read: Callable[[Any], Answer]
    ) -> list[Answer | Failure]:
        """What `read` makes of the answer to each request, in order, several under way at once.

        `read` raises UnusableAnswer for what should be asked again. Raises RunError when no request can
        succeed.
        """
        if not bodies:
            return []
        with ThreadPoolExecutor(max_workers=min(self.concurrency, len(bodies))) as pool:
            futures = [pool.submit(self._ask, path, body, read) for body in bodies]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _ask(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Answer]) -> Answer | Failure:
        reason = ""
        for attempt in range(1 + self.retries):
            pause = self.first_pause_seconds * 2**attempt
            try:
                return read(self._post(path, {"model": self.model, **body}))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_said(error)}"
                if error.code in _STOPPING:
                    raise RunError(
                        f"{self.recipe_key}: {self.url}{path} answers {reason} ({_STOPPING[error.code]}); "
                        f"correct url, model or api_key_env"
                    ) from error
                if error.code < 500 and error.code not in _PASSING:
                    return Failure(reason=f"{self.url}: {reason}")
                pause = max(pause, _retry_after(error))
            except (OSError, http.client.HTTPException, UnusableAnswer) as error:
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
            if attempt < self.retries:
                time.sleep(min(pause, _LONGEST_PAUSE_SECONDS))
        return Failure(reason=f"{self.url}: {reason} (asked {1 + self.retries} times)")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(
            self.url.rstrip("/") + path, data=json.dumps(body).encode(), headers=headers, method="POST"
        )
        deadline = time.monotonic() + self.timeout_seconds
        with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:
            # The timeout above is that of one packet: a server that trickles would never meet it.
            parts: list[bytes] = []
            while part := response.read1(_CHUNK_BYTES):
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer in {self.timeout_seconds:g} s")
        try:
            return json.loads(b"".join(parts))
        except ValueError as error:
            raise UnusableAnswer("the answer is not JSON") from error


def api_key(variable: str | None, recipe_key: str) -> str | None:
    """The content of an environment variable. Raises RunError when it is not set."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise RunError(f"{recipe_key}: environment variable {variable} is not set; set it to the API key")
    return value


def _said(error: urllib.error.HTTPError) -> str:
    text = error.read(2000).decode("utf-8", "replace")
    return " ".join(text.split())[:200] or str(error.reason)


def _retry_after(error: urllib.error.HTTPError) -> float:
    """The pause a server asks for, in seconds; 0 where it asks for none or for a date."""
    try:
        return float(error.headers.get("Retry-After", 0.0))
    except ValueError:
        return 0.0
