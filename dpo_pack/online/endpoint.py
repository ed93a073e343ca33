"""A client for HTTP servers with OpenAI's interface. It needs only the standard library.

The client repeats a request after a growing pause if the next try may succeed: the connection failed, the
answer stalled, broke off or was unusable, or the status was 408, 409, 425, 429 or 5xx. A redirect and status
401, 403 and 404 stop the run, because a new try would get the same status. Any other status makes only its
request fail.

Requests run on daemon threads, because a process that ends does not wait for such threads. (It would wait
for the threads of a pool.) So a run that a signal interrupts does not wait for open requests.

This file does not use httpx, because huggingface_hub 1 installs httpx but huggingface_hub 2 installs httpx2,
and because neither of the two can limit the time of a whole request.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import queue
import re
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dpo_pack.online.interface import Failure
from dpo_pack.system.errors import RunError, one_line

Answer = TypeVar("Answer")

_STOPPING = {
    **dict.fromkeys((301, 302, 303, 307, 308), "a redirect, which is not followed"),
    401: "the API key is refused",
    403: "access is refused",
    404: "there is no such model or URL",
}
_PASSING = frozenset({408, 409, 425, 429})
_INVALID = frozenset({400, 422})  # statuses of a server that does not know a field of the request
_LONGEST_PAUSE_SECONDS = 30.0
_MOST_BYTES = 1 << 25  # of an answer; even 64 completions of 32,768 tokens are smaller
_MOST_SEARCHED = 2000  # characters of a server's error text that are searched for field names
_MOST_SHOWN = 200  # characters of a server's text that an error message quotes


class UnusableAnswer(ValueError):
    """The server's answer cannot be used; another answer to the same request may be usable."""


class _Refused(Exception):
    """The server answered with a status that is not 2xx."""

    def __init__(self, status: int, text: str, retry_after: str) -> None:
        super().__init__()
        self.status, self.text, self.retry_after = status, text, retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server that answers requests, and the limits on time, retries and parallel requests."""

    url: str  # up to /v1
    model: str
    api_key: str | None = field(repr=False)
    timeout_seconds: float  # for a whole request
    retries: int
    concurrency: int
    recipe_key: str  # error messages name this key of the recipe
    first_pause_seconds: float = 0.5
    refused: set[str] = field(default_factory=set)  # refused fields, which are no longer sent

    def ask_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Any], Answer],
        *,
        optional: Collection[str] = (),
    ) -> list[Answer | Failure]:
        """Sends one request for each of `bodies`; returns what `read` makes of the answers, in order.

        A request that fails gives a Failure. At most `concurrency` requests run at once. `read` raises
        UnusableAnswer if the client must ask again. If the server refuses a request and its error text names
        some of the `optional` fields, the client repeats the request without these fields. If that succeeds,
        the client never sends them again. Raises RunError if the server's status means that no request can
        succeed.
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
            except _Refused as error:
                # The key is replaced before the cut, which could leave a part of the key.
                text = self._redacted(error.text)[:_MOST_SEARCHED]
                reason = f"HTTP {error.status}: {' '.join(text.split())[:_MOST_SHOWN]}"
                if error.status in _STOPPING:
                    raise RunError(
                        f"{self.recipe_key}: {self.url}{path} answers {reason} ({_STOPPING[error.status]}); "
                        f"correct url, model or api_key_env"
                    ) from error
                unknown = body.keys() & set(optional) & set(re.findall(r"\w+", text))
                if error.status in _INVALID and unknown:
                    answer = self._ask(path, _without(body, unknown), read, optional, stopped)
                    if not isinstance(answer, Failure):
                        self.refused.update(unknown)
                    return answer
                if error.status < 500 and error.status not in _PASSING:
                    return Failure(reason=f"{self.url}: {reason}")
                with contextlib.suppress(ValueError):  # Retry-After may be a date, which is ignored
                    pause = max(pause, float(error.retry_after))
            except (OSError, http.client.HTTPException, UnusableAnswer) as error:
                reason = self._redacted(one_line(error))[:_MOST_SHOWN]
            if attempt == self.retries or stopped.wait(min(pause, _LONGEST_PAUSE_SECONDS)):
                break
        return Failure(reason=f"{self.url}: {reason} (asked {1 + self.retries} times)")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url, data = self.url.rstrip("/") + path, json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method="POST")
        return _Exchange(request, self.timeout_seconds).answer()

    def _redacted(self, text: str) -> str:
        """Replaces the API key in a server's text, also if quoting has put backslashes into the key."""
        if self.api_key is None:
            return text
        return re.sub("".join(rf"\\*{re.escape(character)}" for character in self.api_key), "[API key]", text)


class _Exchange(threading.Thread):
    """A request and its answer with one time limit: finding the host, connecting, sending, reading, parsing.

    The exchange has its own thread, because the search for a host's address cannot be interrupted, and
    because a socket's timeout limits only the wait for each packet: a slow server may send for hours.
    """

    def __init__(self, request: urllib.request.Request, seconds: float) -> None:
        super().__init__(daemon=True)
        self._request, self._seconds = request, seconds
        self._connections = _Connections()
        self._response: http.client.HTTPResponse | None = None
        self._content = b""
        self._parsed: Any = None
        self._failure: Exception | None = None

    def answer(self) -> Any:
        """Runs the exchange. Raises _Refused, UnusableAnswer, HTTPException or OSError."""
        self.start()
        self.join(self._seconds)
        failure, response = self._failure, self._response
        if self.is_alive():
            failure = TimeoutError(f"no whole answer in {self._seconds:g} s")
            self._connections.end()
        if response is not None and not 200 <= response.status < 300:
            text = response.headers["Location"] or self._content.decode("utf-8", "replace")
            raise _Refused(
                response.status, text.strip() or response.reason, response.headers["Retry-After"] or ""
            )
        if failure is not None:
            raise failure
        return self._parsed

    def run(self) -> None:
        opener = urllib.request.build_opener(self._connections, _AnyStatus)
        try:
            with opener.open(self._request, timeout=self._seconds) as response:
                self._response = response
                self._content = response.read(_MOST_BYTES + 1)
            if len(self._content) > _MOST_BYTES:
                raise UnusableAnswer(f"the answer has more than {_MOST_BYTES:,} bytes")
            try:
                self._parsed = json.loads(self._content)
            except (ValueError, RecursionError):  # RecursionError: JSON that is nested too deep
                raise UnusableAnswer("the answer is not JSON") from None
        except Exception as error:  # `answer` raises the error in the thread that waits
            self._failure = error


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Accepts every status. So no redirect is followed, and the API key is sent to no other server."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections that another thread can end."""

    def __init__(self) -> None:
        super().__init__(context=_tls())
        self._sockets: list[socket.socket] = []
        self._is_over = False

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        kind = functools.partial(self._connection, http.client.HTTPConnection)
        return self.do_open(kind, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        kind = functools.partial(self._connection, http.client.HTTPSConnection)
        return self.do_open(kind, request, context=_tls())

    def _connection(self, kind: Callable[..., Any], host: str, **options: Any) -> Any:
        connection = kind(host, **options)
        connection.response_class = self._response  # called with the socket, before reading
        return connection

    def _response(self, connected: socket.socket, **options: Any) -> http.client.HTTPResponse:
        self._sockets.append(connected)
        if self._is_over:
            raise TimeoutError
        return http.client.HTTPResponse(connected, **options)

    def end(self) -> None:
        self._is_over = True
        for connected in self._sockets:
            with contextlib.suppress(OSError):  # the connection has ended already
                connected.shutdown(socket.SHUT_RDWR)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def api_key(variable: str | None, recipe_key: str) -> str | None:
    """Returns the API key from the environment. Raises RunError if `variable` is not set or holds no key."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()  # a key that the shell read from a file may end in a newline
    if not value:
        raise RunError(f"{recipe_key}: environment variable {variable} is not set; set it to the API key")
    if not (value.isascii() and value.isprintable()):
        raise RunError(
            f"{recipe_key}: environment variable {variable} holds characters that are not printable ASCII, "
            "and an HTTP header takes no others; set it to the API key alone"
        )
    return value


def _without(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}
