"""A local OpenAI-style judge that follows a script of faults, then answers well."""

import json
import re
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Opinion = Callable[[str, str], bool]


def contains(answer: str, response: str) -> bool:
    """The judge's own idea of a right response: it ends with the answer, or the letter of the choice, as a word."""
    answer = answer[0] if answer[1:3] == ") " else answer
    return re.search(rf"(?<!\w)(?<!-){re.escape(answer)}\W*$", response) is not None


class JudgeServer:
    """Serves `/v1/chat/completions`; used as a context.

    script: what happens to the first requests, one name each ("good", "busy", "garbage", ...; see `_Handler`).
    always: what happens to all others. opinion: says what is right, given the reference answer and the response.
    """

    def __init__(self, script: Iterable[str] = (), always: str = "good", opinion: Opinion = contains) -> None:
        self.script, self.always, self.opinion = list(script), always, opinion
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.release = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"judge": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def next(self, body: dict[str, Any], key: str | None) -> str:
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            return self.script.pop(0) if self.script else self.always

    def __enter__(self) -> "JudgeServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    judge: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = self.judge.next(body, self.headers["Authorization"]) if self.path == "/v1/chat/completions" else "lost"
        getattr(self, f"_{what}")(body["messages"][0]["content"])

    def log_message(self, *arguments: object) -> None:
        pass

    def _verdict(self, prompt: str) -> str:
        found = re.findall(r"<(reference_answer|response)>\n(.*?)\n</\1>", prompt, re.DOTALL)
        parts = dict(found)
        right = self.judge.opinion(parts["reference_answer"], parts["response"])
        return json.dumps({"extracted": parts["response"][-20:], "reason": "as told", "correct": right})

    def _send(self, status: int, content: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, text: str, end: bytes = b"data: [DONE]\n\n", **headers: str) -> None:
        pieces = [text[place : place + 9] for place in range(0, len(text), 9)]
        events = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        events += [{"choices": [], "usage": {}}]  # type: ignore[dict-item]
        lines = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        self._send(200, b": hello\n\n" + lines + end, "text/event-stream", **headers)

    def _good(self, prompt: str) -> None:
        self._stream("Well.\n```json\n" + self._verdict(prompt) + "\n```")

    def _whole(self, prompt: str) -> None:
        message = {"choices": [{"message": {"content": self._verdict(prompt)}}]}
        self._send(200, json.dumps(message).encode(), "application/json")

    def _whole_nothing(self, prompt: str) -> None:
        self._send(200, b'{"choices": [{"message": {"content": null}}]}', "application/json")

    def _silent(self, prompt: str) -> None:
        self.judge.release.wait(10)

    def _trickle(self, prompt: str) -> None:
        self._send(200, b"", "text/event-stream")
        for _ in range(200):
            if self.judge.release.wait(0.05):
                return
            try:
                self.wfile.write(b": wait\n")
            except OSError:
                return

    def _busy(self, prompt: str) -> None:
        self._send(429, b"slow down", "text/plain", Retry_After="0.01")

    def _busy_until(self, prompt: str) -> None:
        self._send(429, b"slow down", "text/plain", Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")

    def _busy_somehow(self, prompt: str) -> None:
        self._send(503, b"", "text/plain", Retry_After="soon")

    def _broken(self, prompt: str) -> None:
        self._send(500, b"oops", "text/plain")

    def _garbage(self, prompt: str) -> None:
        self._send(200, b"\xff\xfe<html>\ndata: {not json\n\n", "text/event-stream")

    def _page(self, prompt: str) -> None:
        self._send(200, b"<html>Welcome</html>", "text/html")

    def _half(self, prompt: str) -> None:
        self._stream(self._verdict(prompt), end=b"")

    def _cut(self, prompt: str) -> None:
        self._stream(self._verdict(prompt), end=b"", Content_Length="100000")

    def _failing(self, prompt: str) -> None:
        self._stream(self._verdict(prompt), end=b'data: {"error": {"message": "overloaded"}}\n\n')

    def _reset(self, prompt: str) -> None:
        self.close_connection = True

    def _chatty(self, prompt: str) -> None:
        self._stream("I think that it is right.")

    def _vague(self, prompt: str) -> None:
        self._stream('{"correct": "yes"}')

    def _too_long(self, prompt: str) -> None:
        self._send(400, b"the context is too short", "text/plain")

    def _forbidden(self, prompt: str) -> None:
        self._send(401, b"no such key", "text/plain")

    def _lost(self, prompt: str) -> None:
        self._send(404, b"nothing here", "text/plain")
