"""A client for servers with OpenAI's interface: the package openai, and limits that it lacks.

A request is also repeated if an answer takes too long, is too large or is unusable. A process that ends does
not wait for the threads of a ThreadPool, nor so for open requests.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import TimeoutError as LateError
from multiprocessing.pool import ThreadPool
from types import MappingProxyType
from typing import Any, TypeVar

from rich.console import Console

from dpo_pack.online.interface import Failure
from dpo_pack.recipe.online import EndpointRecipe, values_in
from dpo_pack.system.errors import RunError
from dpo_pack.system.process import printable

Answer = TypeVar("Answer")
Renamed = Mapping[str, str | None]  # field of a request -> its other name; None: the field is left out

_MOST_BYTES = 1 << 25  # of an answer; even 64 completions of 32,768 tokens are smaller
_MOST_SHOWN = 300  # characters of a server's text that an error message quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server that answers requests, and the limits on time, retries and parallel requests."""

    settings: EndpointRecipe
    api_key: str | None = field(repr=False)
    recipe_key: str  # error messages name this key of the recipe
    console: Console = field(default_factory=partial(Console, quiet=True), repr=False)
    refused: dict[str, str | None] = field(default_factory=dict)  # by the server; see `Renamed`

    def ask_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        read: Callable[[Any], Answer],
        *,
        optional: Renamed = MappingProxyType({}),
    ) -> list[Answer | Failure]:
        """Sends a request for each of `bodies`; returns what `read` makes of the answers, in order.

        `read` raises ValueError if the client must ask again. If a server's refusal names `optional` fields,
        the request is repeated without them, or with their other names; if that succeeds, they are never sent
        again, and a warning says so. Raises RunError if no request can succeed."""
        before = set(self.refused)
        with (
            self._client(read) as client,
            ThreadPool(min(self.settings.concurrency, len(bodies)) or 1) as pool,
        ):
            answers = list(pool.imap(lambda body: self._ask(client, path, body, optional), bodies))
        if left_out := sorted(name for name in self.refused.keys() - before if not self.refused[name]):
            self.console.print(
                f"  Warning: {self.recipe_key}: the server refuses the fields {', '.join(left_out)}; it gets "
                "them no longer, so its own settings decide, and it may not sample as the recipe says"
            )
        return answers

    def _ask(self, client: Any, path: str, body: Mapping[str, Any], optional: Renamed) -> Any:
        import httpx2
        from openai import APIConnectionError, APIStatusError

        body = _without(body, self.refused)
        sent = {"model": self.settings.model, **body, **self.settings.extra_body}
        try:
            response = client.post(path, cast_to=httpx2.Response, body=sent)
            return response.extensions["answer"]
        except APIConnectionError as error:
            return Failure(reason=f"{self.settings.url}: {self._quoted(str(error.__cause__))}")
        except APIStatusError as error:
            status, refusal = error.status_code, error.response
        text = refusal.headers.get("location") or refusal.text or refusal.reason_phrase
        reason = f"{self.settings.url}: HTTP {status}: {self._quoted(text)}"
        if status < 400 or status in (401, 403, 404):  # below 400: a redirect, which is not followed
            raise RunError(f"{self.recipe_key}: {reason}; correct url, model or api_key_env")
        named = set(re.findall(r"\w+", text)) - self.settings.extra_body.keys()
        unknown = {name: other for name, other in optional.items() if name in body.keys() & named}
        if status not in (400, 422) or not unknown:
            return Failure(reason=reason)
        answer = self._ask(client, path, _without(body, unknown), optional)
        if not isinstance(answer, Failure):
            self.refused.update(unknown)
        return answer

    def _client(self, read: Callable[[Any], Any]) -> Any:
        """Returns openai's client. Its responses have what `read` returns in `extensions["answer"]`."""
        import httpx2
        from openai import DefaultHttpxClient, OpenAI

        settings, seconds = self.settings, self.settings.timeout_seconds
        # All headers of a request. Those that the package takes from variables OPENAI_* are not among them.
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        headers = {"Content-Type": "application/json", **key}

        class Bounded(DefaultHttpxClient):
            def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
                request = httpx2.Request("POST", request.url, headers=headers, content=request.content)
                response = httpx2.Response(200)  # until the server answers
                content, answer = bytearray(), None

                def receive() -> Any:
                    nonlocal response
                    response = super(Bounded, self).send(request, stream=True, follow_redirects=False)
                    for part in response.iter_bytes():
                        content.extend(part)
                        if len(content) > _MOST_BYTES:
                            raise ValueError(f"the answer has more than {_MOST_BYTES:,} bytes")
                    return read(json.loads(content)) if response.is_success else None

                try:
                    # httpx limits only the wait for each packet, and not the search for the host's address.
                    with ThreadPool(1) as pool:
                        answer = pool.apply_async(receive).get(seconds)
                except (LateError, httpx2.RequestError, ValueError, RecursionError) as error:
                    if response.is_success:  # of any other answer, the status says enough
                        raise httpx2.ReadError(str(error) or f"no whole answer in {seconds:g} s") from error
                response.headers.pop("content-encoding", None)  # `content` is decoded
                return httpx2.Response(
                    response.status_code,
                    headers=response.headers,
                    content=bytes(content),
                    request=request,
                    extensions={"answer": answer},
                )

        http = Bounded(timeout=seconds)
        try:
            return OpenAI(
                base_url=settings.url, api_key="unused", max_retries=settings.retries, http_client=http
            )
        except httpx2.InvalidURL as error:
            raise RunError(f"{self.recipe_key}.url: {error}; correct {settings.url}") from error

    def _quoted(self, text: str) -> str:
        """Returns the beginning of a server's text. The API key is replaced, also with backslashes in it, and
        so are longer texts of extra_body; the key first, because a text may be a part of it."""
        texts = [value for _, value in values_in(self.settings.extra_body) if isinstance(value, str)]
        for value, mark in {self.api_key or "": "[API key]", **dict.fromkeys(texts, "[extra_body]")}.items():
            if len(value) > 3 or value == self.api_key:
                text = re.sub("".join(rf"\\*{re.escape(c)}" for c in value), mark, text)
        text = printable(" ".join(text.split()))
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN].rsplit(' ', 1)[0]} ..."


def _without(body: Mapping[str, Any], refused: Renamed) -> dict[str, Any]:
    names = {name: refused.get(name, name) for name in body}
    return {other: body[name] for name, other in names.items() if other is not None}


def api_key(variable: str | None, recipe_key: str) -> str | None:
    """Returns the API key from the environment. Raises RunError if `variable` holds none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()  # a key that the shell read from a file may end in a newline
    if not key or not key.isascii() or not key.isprintable():
        raise RunError(f"{recipe_key}: set environment variable {variable} to a key of printable ASCII")
    return key
