"""A client for HTTP servers with OpenAI's interface. It needs only the standard library.

The client repeats a request after a growing pause if the next try may succeed: the connection failed, the
answer stalled, broke off or was unusable, or the status was 408, 409, 425, 429 or 5xx. Status 401, 403 and
404 stop the run, because a new try would get the same status. Any other status makes only its request fail.

Requests run on daemon threads. So a signal that interrupts the run does not wait for the requests, and the
end of the process does not wait for them. (The end of the process would wait for the threads of a pool.)
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

from dpo_pack.online.interface import Failure
from dpo_pack.system.errors import RunError

Answer = TypeVar("Answer")

_STOPPING = {401: "the API key is refused", 403: "access is refused", 404: "there is no such model or URL"}
_PASSING = frozenset({408, 409, 425, 429})
_INVALID = frozenset({400, 422})  # the status if the server does not know a field
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16
_MOST_READ_BYTES = 2000  # of an error's text
_MOST_SHOWN = 200  # characters of that text


class UnusableAnswer(ValueError):
    """The server's answer cannot be used; another answer to the same request may be usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server that answers requests, and the limits on time, retries and parallel requests."""

    url: str  # up to /v1
    model: str
    api_key: str | None
    timeout_seconds: float  # for a whole request
    retries: int
    concurrency: int
    recipe_key: str  # error messages name this key of the recipe
    first_pause_seconds: float = _FIRST_PAUSE_SECONDS
    refused: set[str] = field(default_factory=set)  # fields that are no longer sent, see ask_all

    def ask_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Any], Answer],
        *,
        optional: Collection[str] = (),
    ) -> list[Answer | Failure]:
        """Returns the answer to each request, in order, as `read` gives it; up to `concurrency` run at once.

        `read` raises UnusableAnswer if the client must ask again. If the server refuses a request and names
        `optional` fields, the client repeats the request without these fields. If the repeated request
        succeeds, the client adds the fields to `refused` and sends them no more. Raises RunError when no
        request can succeed.
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
                    future.set_result(self._ask(path, body, read, optional, stopped))
                except BaseException as error:  # `future.result()` raises this error
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
        optional: Collection[str],
        stopped: threading.Event,
    ) -> Answer | Failure:
        body = _without(body, self.refused)
        reason = ""
        for attempt in range(1 + self.retries):
            pause = self.first_pause_seconds * 2**attempt
            try:
                return read(self._post(path, {"model": self.model, **body}))
            except urllib.error.HTTPError as error:
                text = _error_text(error)
                reason = f"HTTP {error.code}: {text[:_MOST_SHOWN]}"
                if error.code in _STOPPING:
                    raise RunError(
                        f"{self.recipe_key}: {self.url}{path} answers {reason} ({_STOPPING[error.code]}); "
                        f"correct url, model or api_key_env"
                    ) from error
                unknown = body.keys() & set(optional) & set(re.findall(r"\w+", text))
                if error.code in _INVALID and unknown:
                    answer = self._ask(path, _without(body, unknown), read, optional, stopped)
                    if not isinstance(answer, Failure):
                        self.refused.update(unknown)
                    return answer
                if error.code < 500 and error.code not in _PASSING:
                    return Failure(reason=f"{self.url}: {reason}")
                with contextlib.suppress(ValueError):  # a date instead of seconds is ignored
                    pause = max(pause, float(error.headers.get("Retry-After", 0.0)))
            except (OSError, http.client.HTTPException, UnusableAnswer) as error:
                reason = one_line(error)
            if attempt == self.retries or stopped.wait(min(pause, _LONGEST_PAUSE_SECONDS)):
                break
        return Failure(reason=f"{self.url}: {reason} (asked {1 + self.retries} times)")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url, data = self.url.rstrip("/") + path, json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method="POST")
        deadline = time.monotonic() + self.timeout_seconds
        with urllib.request.urlopen(request, timeout=self.timeout_seconds) as response:
            # `timeout` limits the wait for each packet. A server that sends byte after byte never exceeds it.
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
    """Returns an environment variable's content. Raises RunError when it is not set or cannot be a key."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()  # a key that was read from a file ends in a newline
    if not value:
        raise RunError(f"{recipe_key}: environment variable {variable} is not set; set it to the API key")
    if not (value.isascii() and value.isprintable()):
        raise RunError(
            f"{recipe_key}: environment variable {variable} holds characters that are not printable ASCII, "
            "and an HTTP header takes no others; set it to the API key alone"
        )
    return value


def one_line(error: Exception) -> str:
    """Returns an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def _without(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def _error_text(error: urllib.error.HTTPError) -> str:
    text = b""
    with error, contextlib.suppress(OSError, http.client.HTTPException):  # the text may stall or break off
        text = error.read(_MOST_READ_BYTES)
    return " ".join(text.decode("utf-8", "replace").split()) or str(error.reason)
