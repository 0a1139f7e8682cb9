"""One streamed completion over HTTP, timed token by token; any server that speaks the OpenAI API."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from meshwright.errors import InputError

#: Longest line of a stream that is read, and lines of one beside some for every token (what keeps it alive).
MAX_LINE, MAX_LINES = 1 << 20, 10_000
#: What a server's answer may raise while it is read.
BAD = (
    OSError, http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """A server.

    Attributes:
        url: its address, with or without ``/v1``. model: name in its API. key: API key, or None.
        timeout_s: longest wait for the next piece of an answer.
    """

    url: SplitResult
    model: str
    key: str | None = None
    timeout_s: float = 600.0

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        assert self.url.hostname is not None
        return kind(self.url.hostname, self.url.port, timeout=self.timeout_s)

    def path(self, name: str) -> str:
        """Path of an endpoint below ``/v1``."""
        return f"{self.url.path.rstrip('/').removesuffix('/v1')}/v1/{name}"

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(slots=True)
class Timed:
    """What one request met with, in seconds from the start of the run.

    Attributes:
        due_s, sent_s: when it should have been sent, and was. first_s, last_s: first and last token, None: none came.
        tokens: that came. error: why it failed, None: it did not.
    """

    due_s: float
    input_tokens: int
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with one token."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def total_s(self) -> float | None:
        """Time to the last token."""
        return None if self.last_s is None else self.last_s - self.sent_s


def target_of(url: str, model: str | None, key: str | None, timeout_s: float) -> Target:
    """A server that answers, and the name of its model.

    Raises:
        InputError: no address, nobody there, or several models and none named.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{url[:80]!r} is no address of a server; write it as http://127.0.0.1:8000")
    target = Target(parts, model or "", key, timeout_s)
    try:
        connection = target.connect()
        connection.request("GET", target.path("models"), headers=target.headers)
        answer = connection.getresponse()
        body = answer.read(MAX_LINE)
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"{url}: no answer ({error or type(error).__name__}); is the server running?") from None
    if answer.status != 200:
        raise InputError(f"{url}: {target.path('models')} answers {answer.status}; {_said(body)}")
    try:
        names = [str(row["id"]) for row in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{url}: {target.path('models')} does not list models; is it an OpenAI API?") from None
    if model is not None and model not in names:
        raise InputError(f"{url}: model {model!r} is not served; it has {', '.join(names[:5])}")
    if model is None and len(names) != 1:
        raise InputError(f"{url}: {len(names)} models are served; name one with --model")
    return Target(parts, model or names[0], key, timeout_s)


def _said(body: bytes) -> str:
    """The message of an error."""
    try:
        return str(json.loads(body)["error"]["message"])[:120]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:80].decode(errors="replace")


def complete(target: Target, prompt: str | list[int], tokens: int, seed: int, timed: Timed, began: float) -> None:
    """Ask for a completion of exactly so many tokens and note when they come.

    Args:
        prompt: text or token ids. tokens: asked for; the end of a text is ignored. seed: of the sampling (greedy).
        timed: is filled in. began: start of the run on ``time.perf_counter``.
    """
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    connection = target.connect()
    try:
        timed.sent_s = time.perf_counter() - began
        connection.request("POST", target.path("completions"), json.dumps(body), target.headers)
        answer = connection.getresponse()
        if answer.status != 200:
            timed.error = f"{answer.status}: {_said(answer.read(MAX_LINE))}"
            return
        _follow(answer, timed, began, MAX_LINES + 8 * tokens)
    except BAD as error:
        timed.error = f"{type(error).__name__}: {error}"[:160]
    finally:
        connection.close()


def _follow(answer: http.client.HTTPResponse, timed: Timed, began: float, most: int) -> None:
    counted = None
    for event in _events(answer, most):
        if "error" in event:
            timed.error = str(event["error"].get("message", event["error"]))[:160]
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            counted = int(usage["completion_tokens"])
        if event.get("choices"):
            now = time.perf_counter() - began
            if timed.last_s is not None:
                timed.gaps_s.append(now - timed.last_s)
            timed.first_s = now if timed.first_s is None else timed.first_s
            timed.last_s = now
            timed.tokens += 1
    if timed.first_s is None:
        timed.error = "the stream ended without a token"
    timed.tokens = timed.tokens if counted is None else counted


def _events(answer: http.client.HTTPResponse, most: int) -> Iterator[dict[str, Any]]:
    """Server-sent events up to ``[DONE]``, from at most so many lines.

    Raises:
        ValueError: not a stream of JSON objects, it broke off, or it does not end.
    """
    for _ in range(most):
        line = answer.readline(MAX_LINE)
        if not line:
            raise ValueError("the stream broke off")
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        event = json.loads(text)
        if not isinstance(event, dict):
            raise ValueError("an event is no object")
        yield event
    raise ValueError(f"the stream has no end after {most} lines")
