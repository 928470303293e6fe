"""One chat completion from an OpenAI-style endpoint, whatever the network does meanwhile."""

import asyncio
import email.utils
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

import httpx2 as httpx

from eval.harness.errors import EvalError

_AGAIN = (408, 409, 425, 429)  # and every status from 500 on
_FATAL = (401, 403, 404)


class NoReplyError(Exception):
    """This request cannot be answered, or was not after every attempt; others may be."""


@dataclass(frozen=True)
class Endpoint:
    """Where the judge answers. base_url: up to and with "/v1"."""

    base_url: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True)
class Patience:
    """How often and how long to try: seconds for one attempt, pauses that double from `pause` to `longest_pause`."""

    attempts: int = 8
    timeout: float = 600.0
    pause: float = 1.0
    longest_pause: float = 60.0

    def before(self, attempt: int, asked: float | None) -> float:
        """Seconds to wait before an attempt, 1 being the first repetition; no less than the server asked for."""
        doubled = min(self.longest_pause, self.pause * 2.0 ** min(attempt - 1, 60))
        drawn = random.uniform(0.5, 1.0) * doubled  # so that clients refused together do not come back together
        return drawn if asked is None else max(drawn, min(asked, 10 * self.longest_pause))


class _Again(Exception):
    """An attempt failed in a way that may pass.

    pause: seconds that the server asked for. unreachable: there was no server.
    """

    def __init__(self, reason: str, pause: float | None = None, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.pause, self.unreachable = pause, unreachable


class JudgeClient:
    """Asks one endpoint, as many questions at a time as it is asked; used as an asynchronous context."""

    def __init__(self, endpoint: Endpoint, patience: Patience, connections: int) -> None:
        headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
        self._endpoint, self._patience = endpoint, patience
        self._url = endpoint.base_url.rstrip("/") + "/chat/completions"
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(headers=headers, timeout=patience.timeout, limits=limits)

    async def __aenter__(self) -> "JudgeClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, prompt: str) -> str:
        """The text of the reply to one user message.

        NoReplyError if there is none after all attempts, or the server refuses this message. EvalError if there is no
        server, or it refuses everything: a wrong key, a wrong model or a wrong address.
        """
        for attempt in range(1, self._patience.attempts):
            try:
                return await self._attempt(prompt)
            except _Again as again:
                await asyncio.sleep(self._patience.before(attempt, again.pause))
        try:
            return await self._attempt(prompt)
        except _Again as again:
            if again.unreachable:
                raise EvalError(f"the judge at {self._url} cannot be reached ({again}); what it said is kept") from None
            raise NoReplyError(f"no reply after {self._patience.attempts} attempts; the last one: {again}") from None

    async def _attempt(self, prompt: str) -> str:
        body = {"model": self._endpoint.model, "messages": [{"role": "user", "content": prompt}], "stream": True}
        try:
            async with (
                asyncio.timeout(self._patience.timeout),  # of the whole: a reply that trickles is cut off as well
                self._http.stream("POST", self._url, json=body) as response,
            ):
                await self._check(response)
                if response.headers.get("content-type", "").startswith("application/json"):
                    return _whole(await response.aread())
                return "".join([piece async for piece in _pieces(response.aiter_lines())])
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise EvalError(f"EVAL_JUDGE_BASE_URL={self._endpoint.base_url} is no usable address: {error}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Again(f"{type(error).__name__}: {error}", unreachable=True) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise _Again(f"not finished after {self._patience.timeout:g} s") from error

    async def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        if status in _AGAIN or status >= 500:
            raise _Again(f"status {status}", _retry_after(response.headers.get("retry-after")))
        detail = (await response.aread()).decode("utf-8", "replace")[:300]
        if status in _FATAL:
            raise EvalError(
                f"the judge at {self._url} refuses with status {status} ({detail}); check EVAL_JUDGE_BASE_URL, "
                f"EVAL_JUDGE_API_KEY and EVAL_JUDGE_MODEL={self._endpoint.model}"
            )
        raise NoReplyError(f"refused with status {status}: {detail}")


def _retry_after(value: str | None) -> float | None:
    """Seconds that a server asks to wait, given as a number or as a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _whole(content: bytes) -> str:
    """The text of a reply from a server that does not stream."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise _Again(f"not a chat completion: {content[:80]!r}") from error
    if not isinstance(text, str):
        raise _Again("a chat completion without text")
    return text


async def _pieces(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The pieces of a streamed reply; it must come to its end, or it is none."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        yield _delta(data)
    raise _Again("the stream broke off")


def _delta(data: str) -> str:
    try:
        event = json.loads(data)
        if "error" in event:
            raise _Again(f"error in the stream: {str(event['error'])[:200]}")
        choices = event["choices"]
        return (choices[0]["delta"].get("content") or "") if choices else ""
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Again(f"not an event of a chat completion: {data[:80]!r}") from error
