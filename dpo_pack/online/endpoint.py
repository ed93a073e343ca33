"""A client for HTTP servers with OpenAI's interface, on the standard library alone.

A request that fails in a way that may pass (no connection, a stalled or broken answer, 408, 429, 5xx, or an
answer that says something else than was asked for) is sent again after a growing pause. What cannot pass by
itself (401, 403, 404) stops the run; any other refusal is of that request only.

Requests run on daemon threads: who is interrupted while waiting for them waits no longer, and neither does
the end of the process, which would join the threads of a pool.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dpo_pack.errors import RunError
from dpo_pack.online.interface import Failure

Answer = TypeVar("Answer")

_STOPPING = {401: "the API key is refused", 403: "access is refused", 404: "there is no such model or URL"}
_PASSING = frozenset({408, 409, 425, 429})
_INVALID = frozenset({400, 422})  # what servers answer to a field they do not know
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16
_MOST_READ_BYTES = 2000  # of what a server says to an error
_MOST_SHOWN = 200  # characters of it


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
    refused: set[str] = field(default_factory=set)  # fields that are no longer sent, see ask_all

    def ask_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Any], Answer],
        *,
        spare: Collection[str] = (),
    ) -> list[Answer | Failure]:
        """What `read` makes of the answer to each request, in order, several under way at once.

        `read` raises UnusableAnswer for what should be asked again. A server that refuses fields of `spare`
        by name is asked without them; when that helps they are `refused`, and not sent again. Raises RunError
        when no request can succeed.
        """
        futures: list[Future[Answer | Failure]] = [Future() for _ in bodies]
        waiting: queue.SimpleQueue[tuple[Future[Answer | Failure], Mapping[str, Any]]] = queue.SimpleQueue()
        for request in zip(futures, bodies, strict=True):
            waiting.put(request)
        stopped = threading.Event()

        def work() -> None:
            while not stopped.is_set():
                try:
                    future, body = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    future.set_result(self._ask(path, body, read, spare, stopped))
                except BaseException as error:  # raised where the answer is waited for
                    future.set_exception(error)

        try:
            for _ in range(min(self.concurrency, len(bodies))):
                threading.Thread(target=work, name=self.recipe_key, daemon=True).start()
            return [future.result() for future in futures]
        finally:
            stopped.set()

    def _ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], Answer],
        spare: Collection[str],
        stopped: threading.Event,
    ) -> Answer | Failure:
        body = _without(body, self.refused)
        reason = ""
        for attempt in range(1 + self.retries):
            pause = self.first_pause_seconds * 2**attempt
            try:
                return read(self._post(path, {"model": self.model, **body}))
            except urllib.error.HTTPError as error:
                said = _said(error)
                reason = f"HTTP {error.code}: {said[:_MOST_SHOWN]}"
                if error.code in _STOPPING:
                    raise RunError(
                        f"{self.recipe_key}: {self.url}{path} answers {reason} ({_STOPPING[error.code]}); "
                        f"correct url, model or api_key_env"
                    ) from error
                unknown = body.keys() & set(spare) & set(re.findall(r"\w+", said))
                if error.code in _INVALID and unknown:
                    answer = self._ask(path, _without(body, unknown), read, spare, stopped)
                    if not isinstance(answer, Failure):
                        self.refused.update(unknown)
                    return answer
                if error.code < 500 and error.code not in _PASSING:
                    return Failure(reason=f"{self.url}: {reason}")
                pause = max(pause, _retry_after(error))
            except (OSError, http.client.HTTPException, UnusableAnswer) as error:
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
            if attempt == self.retries or stopped.wait(min(pause, _LONGEST_PAUSE_SECONDS)):
                break
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
    """The content of an environment variable. Raises RunError when it is not set or cannot be a key."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()  # files that keys are read from end in a newline
    if not value:
        raise RunError(f"{recipe_key}: environment variable {variable} is not set; set it to the API key")
    if not (value.isascii() and value.isprintable()):
        raise RunError(
            f"{recipe_key}: environment variable {variable} holds characters that are not printable ASCII, "
            "which no HTTP header takes; set it to the API key alone"
        )
    return value


def _without(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def _said(error: urllib.error.HTTPError) -> str:
    text = b""
    with error, contextlib.suppress(OSError, http.client.HTTPException):  # it may stall or hang up here too
        text = error.read(_MOST_READ_BYTES)
    return " ".join(text.decode("utf-8", "replace").split()) or str(error.reason)


def _retry_after(error: urllib.error.HTTPError) -> float:
    """The pause a server asks for, in seconds; 0 where it asks for none or for a date."""
    try:
        return float(error.headers.get("Retry-After", 0.0))
    except ValueError:
        return 0.0
