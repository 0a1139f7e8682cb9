"""Tokens of the engine as the choices of an answer, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from meshwright.runtime.serve.api.text import WINDOW, Speech, Words
from meshwright.runtime.serve.engine import Engine, Ticket, Token


@dataclass(slots=True)
class Piece:
    """What one more token adds to a choice."""

    text: str
    token: Token
    ended: str | None


@dataclass(slots=True)
class Choice:
    """One text of an answer, while it is made.

    Attributes:
        number: its index in the answer. prompt: token ids. ticket: of the engine.
        ids, text, tokens: what was said. first_s, last_s: when, on the monotonic clock.
    """

    number: int
    prompt: list[int]
    ticket: Ticket
    words: Words
    stops: Sequence[str] = ()
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    ended: str | None = None

    async def pieces(self, engine: Engine) -> AsyncIterator[Piece]:
        """Piece by piece until the end; the engine is told where a stop string ends it first."""
        speech = Speech(self.words, self.stops, self.prompt[-WINDOW:])
        async for token in self.ticket:
            self.ids.append(token.token)
            self.tokens.append(token)
            silent = token.ended == "stop"
            text = ""
            if self.words.usable and not silent:
                text = await speech.add(token.token, token.ended is not None)
            elif self.words.usable:
                text = speech.rest()
            ended = "stop" if speech.stopped else token.ended
            if speech.stopped:
                engine.drop(self.ticket)
            self.text += text
            self.ended = ended
            yield Piece(text, token, ended)
            if ended:
                return


class Times:
    """Histograms of what clients wait for, in the text form of Prometheus (exposition format 0.0.4).

    ``first``: seconds from the request to its first token; ``each``: between tokens; ``whole``: to the last.
    """

    BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
    NAMES: ClassVar[dict[str, str]] = {
        "first": "time_to_first_token_seconds",
        "each": "inter_token_latency_seconds",
        "whole": "e2e_request_latency_seconds",
    }

    def __init__(self) -> None:
        self._counts = {name: [0] * (len(self.BOUNDS) + 1) for name in self.NAMES}
        self._sums = dict.fromkeys(self.NAMES, 0.0)

    def note(self, name: str, seconds: float) -> None:
        """One observation."""
        at = next((i for i, bound in enumerate(self.BOUNDS) if seconds <= bound), len(self.BOUNDS))
        self._counts[name][at] += 1
        self._sums[name] += seconds

    def lines(self) -> list[str]:
        """As metrics."""
        out = []
        for name, long in self.NAMES.items():
            out.append(f"# TYPE meshwright_{long} histogram")
            total = 0
            for bound, count in zip((*self.BOUNDS, "+Inf"), self._counts[name], strict=True):
                total += count
                out.append(f'meshwright_{long}_bucket{{le="{bound}"}} {total}')
            out += [f"meshwright_{long}_sum {self._sums[name]:.6f}", f"meshwright_{long}_count {total}"]
        return out


class Watch:
    """Notes when the tokens of one choice come."""

    def __init__(self, times: Times) -> None:
        self._times, self._began, self._last = times, time.monotonic(), 0.0

    def token(self, ended: bool) -> None:
        """One more."""
        now = time.monotonic()
        if self._last:
            self._times.note("each", now - self._last)
        else:
            self._times.note("first", now - self._began)
        self._last = now
        if ended:
            self._times.note("whole", now - self._began)


def metrics(engine: Engine, times: Times) -> str:
    """State of the engine in the text form of Prometheus."""
    schedulers = engine.schedulers
    counts = [s.counts for s in schedulers]
    owned, blocks = sum(s.pool.owned for s in schedulers), sum(s.pool.blocks for s in schedulers)
    rows = [
        ("num_requests_running", "gauge", sum(len(s.running) for s in schedulers)),
        ("num_requests_waiting", "gauge", engine.waiting),
        ("kv_cache_usage_perc", "gauge", round(owned / blocks, 6)),
        ("prompt_tokens_total", "counter", sum(c.prompt_tokens for c in counts)),
        ("generation_tokens_total", "counter", sum(c.new_tokens for c in counts)),
        ("prefix_cache_hits_total", "counter", sum(c.prefix_tokens for c in counts)),
        ("num_preemptions_total", "counter", sum(c.preemptions for c in counts)),
        ("engine_restarts_total", "counter", engine.ranks.restarts),
    ]
    lines = [
        line
        for name, kind, value in rows
        for line in (f"# TYPE meshwright_{name} {kind}", f"meshwright_{name} {value}")
    ]
    return "\n".join([*lines, *times.lines(), ""])


async def completion_logprobs(words: Words, tokens: Sequence[Token], start: int) -> dict[str, Any]:
    """Log probabilities as ``/v1/completions`` tells them; ``start``: characters told before."""
    named = await _names(words, tokens)
    offsets, at = [], start
    for token in tokens:
        offsets.append(at)
        at += len(named[token.token])
    return {
        "tokens": [named[t.token] for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [{named[i]: p for i, p in (*t.top, (t.token, t.logprob))} for t in tokens],
        "text_offset": offsets,
    }


async def chat_logprobs(words: Words, tokens: Sequence[Token]) -> dict[str, Any]:
    """Log probabilities as ``/v1/chat/completions`` tells them."""
    named = await _names(words, tokens)

    def row(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": named[token], "logprob": logprob, "bytes": list(named[token].encode())}

    return {
        "content": [{**row(t.token, t.logprob), "top_logprobs": [row(i, p) for i, p in t.top]} for t in tokens],
        "refusal": None,
    }


async def _names(words: Words, tokens: Sequence[Token]) -> dict[int, str]:
    ids = sorted({t.token for t in tokens} | {i for t in tokens for i, _ in t.top})
    if not words.usable:
        return {i: f"token_id:{i}" for i in ids}
    return dict(zip(ids, await words.pieces(ids), strict=True))


def usage(choices: Sequence[Choice], prompts: int) -> dict[str, int]:
    """Tokens of an answer; ``prompts``: of all its prompts, each counted once."""
    said = sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": said, "total_tokens": prompts + said}
