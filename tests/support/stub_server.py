"""A local server with OpenAI's interface that misbehaves as told: fails, stalls, babbles, hangs up."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[str, dict[str, Any]], Any]  # path and body of a request -> the answer, for JSON, or Refusal


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is none."""

    status: int
    text: str


@dataclass(slots=True)
class Stub:
    """What a server does, request by request, and what it has been asked."""

    reply: Reply
    faults: list[str] = field(default_factory=list)  # of the first requests; then it answers
    stall_seconds: float = 1.0
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    """Runs the stub on a free local port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stub.lock:
                stub.requests.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
                stub.headers.append(dict(self.headers))
                fault = stub.faults.pop(0) if stub.faults else "none"
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has given up
                self._answer(fault, body)

        def _answer(self, fault: str, body: dict[str, Any]) -> None:
            status, _, then = fault.partition(" ")
            if fault.isdigit():
                self._send(int(fault), b'{"error": "as told\\nin two lines"}')
            elif status.isdigit():  # the body of the error is cut off, or never comes
                self.send_response(int(status))
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"40\r\nso far")
                time.sleep(stub.stall_seconds if then == "stall" else 0.0)
            elif fault == "stall":
                time.sleep(stub.stall_seconds)
            elif fault == "flood":
                self.send_response(200)
                self.end_headers()
                while True:  # until the client hangs up
                    self.wfile.write(b" " * 4096)
            elif fault == "brackets":
                self._send(200, b"[" * 100_000)
            elif status == "redirect":
                self.send_response(302)
                self.send_header("Location", then)
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif status == "echo":  # of the API key, `then` more characters before it
                content = "." * int(then) + str(self.headers["Authorization"])
                self._send(500, content.encode())
            elif status == "status-line":
                self.wfile.write(f"HTTP/1.1 {self.headers['Authorization']}\r\n\r\n".encode())
            elif fault == "trickle":
                self.send_response(200)
                self.end_headers()
                for _ in range(int(stub.stall_seconds / 0.05)):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
            elif fault == "garbage":
                self._send(200, b"<html>not what you asked for</html>")
            elif fault == "nonsense":
                self._send(200, b'{"choices": [{"text": 7}]}')
            elif fault == "none":
                self._send(*self._reply(body))
            else:
                assert fault == "hang up"

        def _reply(self, body: dict[str, Any]) -> tuple[int, bytes]:
            """Under way until it is sent: a client that has its answer may ask again before we know it."""
            with stub.lock:
                stub.num_under_way += 1
                stub.most_under_way = max(stub.most_under_way, stub.num_under_way)
            try:
                answer = stub.reply(self.path, body)
                if isinstance(answer, Refusal):
                    return answer.status, answer.text.encode()
                return 200, json.dumps(answer).encode()
            finally:
                with stub.lock:
                    stub.num_under_way -= 1

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hanging(released: threading.Event) -> Reply:
    """Says nothing until it is released."""

    def reply(path: str, body: dict[str, Any]) -> dict[str, Any]:
        released.wait(90.0)
        return {}

    return reply


def completions(texts: Callable[[int, int], str]) -> Reply:
    """A /completions that answers with `texts(seed, number)`, ended by EOS."""

    def reply(path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/v1/completions"
        choices = [
            {"index": n, "text": texts(body["seed"], n), "finish_reason": "stop"} for n in range(body["n"])
        ]
        return {"choices": choices}

    return reply


def verdicts(says: Callable[[str, str], str]) -> Reply:
    """A /chat/completions that compares the two answers in its question with `says(first, second)`."""

    def reply(path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/v1/chat/completions"
        question = body["messages"][-1]["content"]
        first, second = question.partition("[Answer A]\n")[2].split("\n\n[Answer B]\n")
        content = says(first, second.partition("\n\nWhich answer")[0])
        return {"choices": [{"message": {"role": "assistant", "content": content}}]}

    return reply
