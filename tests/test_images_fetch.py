"""Images from the web, against a server of this test: only listed hosts, whatever a server answers."""

import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from deepinfer import LLM, RequestError, SamplingParams
from deepinfer.text.fetch import Fetcher
from deepinfer.text.pixels import load_image
from deepinfer.text.sources import ImageLimits


def png(side: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (255, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class Handler(BaseHTTPRequestHandler):
    """What a path does is its first part."""

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))  # type: ignore[attr-defined]
        kind, _, rest = self.path.lstrip("/").partition("/")
        {"image": self.image, "to": self.to, "status": self.status, "trickle": self.trickle, "headers": self.headers_}[
            kind.partition("?")[0]
        ](rest)

    def image(self, what: str) -> None:
        body = png() if what != "text" else b"<html>not found</html>"
        self.send_response(200)
        if what == "long":
            self.send_header("Content-Length", "999999999999")
        elif what == "cut":
            self.send_header("Content-Length", str(len(body) + 10))
        elif what == "endless":
            body *= 1000
        self.end_headers()
        self.wfile.write(body)

    def to(self, place: str) -> None:
        self.send_response(302)
        if place:
            self.send_header("Location", place.replace("PORT", str(self.server.server_address[1])))
        self.end_headers()

    def status(self, number: str) -> None:
        self.send_error(int(number))

    def trickle(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        self._slowly(png())

    def headers_(self, _: str) -> None:
        self._slowly(b"HTTP/1.0 200 OK\r\nX-Long: " + b"x" * 1000)

    def _slowly(self, body: bytes) -> None:
        try:
            for byte in body:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def port(server: ThreadingHTTPServer) -> int:
    server.asked.clear()  # type: ignore[attr-defined]
    return int(server.server_address[1])


def get(port: int, path: str, seconds: float = 5.0, max_bytes: int = 10_000, host: str = "127.0.0.1") -> bytes:
    return Fetcher([f"127.0.0.1:{port}"], max_bytes, seconds)(f"http://{host}:{port}/{path}")


@pytest.mark.parametrize(
    "path", ["image", "image?a=1&b=%20", "image/ä ö", "to//image", "to/http://127.0.0.1:PORT/image"]
)
def test_a_listed_host_is_asked(port: int, path: str) -> None:
    assert get(port, path) == png()


def test_the_list_is_of_hosts_and_ports(port: int) -> None:
    for hosts in (["127.0.0.1"], [f"localhost:{port}"], ["127.0.0.1:80"], []):
        with pytest.raises(
            RequestError, match=rf"URLs are not fetched from 127\.0\.0\.1:{port}; image_url_hosts lists"
        ):
            Fetcher(hosts, 1000, 5)(f"http://127.0.0.1:{port}/image")
    assert Fetcher([f"LOCALHOST:{port}"], 1000, 5)(f"http://LocalHost.:{port}/image") == png()


def test_a_name_alone_means_the_usual_port(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher(["example.org", "[::1]"], 1000, 5)
    for url in ("http://example.org/", "https://EXAMPLE.org:443/a", "http://example.org:80", "http://[::1]/x"):
        assert fetcher._checked(url).hostname in ("example.org", "::1")
    for url in (
        "http://example.org:8080/", "https://example.org:80/", "http://www.example.org/", "http://example.org.evil/",
        "http://example.org@evil/", "http://evil\\@example.org/", "http://evil#@example.org/", "http:///example.org",
        "http://example.org:x/", "ftp://example.org/", "http://2130706433/", "gopher://example.org", "http://[::1",
    ):  # fmt: skip
        with pytest.raises((RequestError, ValueError)):
            fetcher._checked(url)
        with pytest.raises(RequestError):
            fetcher(url)


def test_nobody_else_is_asked_on_the_way(server: ThreadingHTTPServer, port: int) -> None:
    """A listed server that sends us on to another one, which listens on the same port."""
    for place in ("http://localhost:PORT/image", "//localhost:PORT/image", "http://127.0.0.1:1/", "file:///etc/passwd"):
        with pytest.raises(RequestError, match=r"URLs are not fetched from|only http:// and https://"):
            get(port, f"to/{place}")
    assert {host for host, _ in server.asked} == {f"127.0.0.1:{port}"}  # type: ignore[attr-defined]
    assert all(path.startswith("/to/") for _, path in server.asked)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("to/", "a redirect to nowhere"),
        ("to/" * 10 + "image", "cannot be fetched|redirect"),
        ("status/404", "the server answers 404 Not Found"),
        ("status/500", "the server answers 500"),
        ("image/long", "has more than 10000 bytes; max_image_bytes takes no more"),
        ("image/endless", "has more than 10000 bytes; max_image_bytes takes no more"),
        ("image/cut", "the server sent|IncompleteRead"),
    ],
)
def test_bad_answers_have_one_error(port: int, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        get(port, path)


def test_redirects_in_a_circle(port: int) -> None:
    with pytest.raises(RequestError, match="more than 5 redirects"):
        get(port, "to//to//to//to//to//to//to//to//image")


@pytest.mark.parametrize("path", ["trickle", "headers"])
def test_a_slow_server_gets_no_more_time(port: int, path: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match=r"not there after 0\.3 s"):
        get(port, path, seconds=0.3)
    assert time.monotonic() - begin < 2


def test_nobody_listens() -> None:
    with pytest.raises(RequestError, match="cannot be fetched: ConnectionRefusedError"):
        get(1, "image")


def test_a_server_without_encryption(port: int) -> None:
    with pytest.raises(RequestError, match="cannot be fetched: SSLError"):
        Fetcher([f"127.0.0.1:{port}"], 1000, 5)(f"https://127.0.0.1:{port}/image")


def test_encryption_is_not_given_up_on_the_way() -> None:
    with pytest.raises(RequestError, match="a redirect from https to 'http://a/c' is not followed"):
        Fetcher(["a"], 1000, 5)._moved("https://a/b", "https", "http://a/c")
    assert Fetcher(["a"], 1000, 5)._moved("https://a/b", "https", "/c") == "https://a/c"


def test_what_comes_is_opened_like_a_file(port: int) -> None:
    limits = ImageLimits(url_hosts=(f"127.0.0.1:{port}",))
    assert load_image(f"http://127.0.0.1:{port}/image", limits).size == (4, 4)
    with pytest.raises(RequestError, match=rf"http://127\.0\.0\.1:{port}/image/text is not a readable image"):
        load_image(f"http://127.0.0.1:{port}/image/text", limits)


def test_the_setting_reaches_chats(tiny_checkpoint: Path, server: ThreadingHTTPServer, port: int) -> None:
    chat = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/image"}}]}
    ]
    short = SamplingParams(temperature=0, max_tokens=2)
    open_, closed = LLM(tiny_checkpoint, image_url_hosts=[f"127.0.0.1:{port}"]), LLM(tiny_checkpoint)
    assert open_.chat(chat, short, use_tqdm=False)[0].error is None
    asked = len(server.asked)  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match=r"image 0: image .* image_url_hosts lists none"):
        closed.chat(chat, short, use_tqdm=False)
    assert len(server.asked) == asked == 1  # type: ignore[attr-defined]
