"""Images from the web, fetched only from hosts that were listed; every redirect is held to the same list."""

import functools
import http.client
import io
import socket
import ssl
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from deepinfer.core.errors import RequestError

_REDIRECTS = 5
_MOVED = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_KEPT = "%/:=&?~#+!$,;'@()*[]"  # what is left unquoted in a path, quoted characters among it


class Fetcher:
    """Gets files over HTTP and HTTPS; keeps nothing between calls, and uses no proxy, cookie or password."""

    def __init__(self, hosts: Sequence[str], max_bytes: int, seconds: float) -> None:
        """`hosts`: `name` (at the scheme's own port) or `name:port`; empty: nothing is fetched.

        max_bytes: most bytes of a file. seconds: most time for one file, redirects and slow servers included.
        """
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._seconds = seconds

    def __call__(self, url: str) -> bytes:
        """The bytes behind `url`; RequestError for a host that is not listed, and for whatever goes wrong."""
        deadline = time.monotonic() + self._seconds
        place = url
        try:
            for _ in range(_REDIRECTS + 1):
                found = self._get(place, deadline)
                if isinstance(found, bytes):
                    return found
                place = found
        except TimeoutError as error:
            raise RequestError(f"image {_short(url)}: not there after {self._seconds:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"image {_short(url)} cannot be fetched: {type(error).__name__}: {error}") from error
        raise RequestError(f"image {_short(url)}: more than {_REDIRECTS} redirects")

    def _get(self, url: str, deadline: float) -> bytes | str:
        """The body, or where it has moved to."""
        parts = self._checked(url)
        port = parts.port or _PORTS[parts.scheme]
        connection = _connection(parts.scheme, (parts.hostname or "").removesuffix("."), port, _left(deadline))
        connection.response_class = functools.partial(_Response, deadline=deadline)  # type: ignore[assignment]
        try:
            path = urllib.parse.quote(parts.path or "/", safe=_KEPT)
            query = f"?{urllib.parse.quote(parts.query, safe=_KEPT)}" if parts.query else ""
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
            connection.request("GET", path + query, headers=headers)
            response = connection.getresponse()
            if response.status in _MOVED:
                return self._moved(url, parts.scheme, response.getheader("Location"))
            if response.status != 200:
                raise RequestError(f"image {_short(url)}: the server answers {response.status} {response.reason}")
            return self._body(url, response)
        finally:
            connection.close()

    def _checked(self, url: str) -> urllib.parse.SplitResult:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise RequestError(f"image {_short(url)}: only http:// and https:// URLs with a host are fetched")
        if parts.username is not None or parts.password is not None:
            raise RequestError(f"image {_short(url)}: a URL with a name or password in it is not fetched")
        name = parts.hostname.removesuffix(".")
        name = f"[{name}]" if ":" in name else name
        port = parts.port or _PORTS[parts.scheme]
        names = {f"{name}:{port}"} | ({name} if port == _PORTS[parts.scheme] else set())
        if not names & self._hosts:
            listed = ", ".join(sorted(self._hosts)) or "none"
            raise RequestError(
                f"image {_short(url)}: URLs are not fetched from {name}:{port}; image_url_hosts lists {listed}: add it "
                "there, or give a path, a data URL or bytes"
            )
        return parts

    def _moved(self, url: str, scheme: str, location: str | None) -> str:
        if not location:
            raise RequestError(f"image {_short(url)}: the server answers with a redirect to nowhere")
        place = urllib.parse.urljoin(url, location)
        if scheme == "https" and not place.lower().startswith("https:"):
            raise RequestError(f"image {_short(url)}: a redirect from https to {_short(place)} is not followed")
        return place

    def _body(self, url: str, response: http.client.HTTPResponse) -> bytes:
        announced = response.getheader("Content-Length") or ""
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_long(url)
        body = response.read(self._max_bytes + 1)
        if len(body) > self._max_bytes:
            raise self._too_long(url)
        if announced.isdecimal() and len(body) < int(announced):
            raise RequestError(f"image {_short(url)}: the server sent {len(body)} of {announced} bytes")
        return body

    def _too_long(self, url: str) -> RequestError:
        return RequestError(f"image {_short(url)} has more than {self._max_bytes} bytes; max_image_bytes takes no more")


class _Response(http.client.HTTPResponse):
    """A response that must be there, headers and all, by a deadline, however slowly it trickles in."""

    def __init__(self, sock: socket.socket, *arguments: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, deadline))


class _Timed(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._raw, self._deadline = sock, sock.makefile("rb", buffering=0), deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _connection(scheme: str, host: str, port: int, seconds: float) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=seconds)
    return http.client.HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context())


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _short(url: str) -> str:
    return repr(url if len(url) <= 80 else url[:77] + "...")
