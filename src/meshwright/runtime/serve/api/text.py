"""Text of a model in an event loop: the process apart that knows it, and texts that grow token by token. No torch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.runtime.tokenizer import FILE, usable

#: Longest that one answer may take: a long prompt takes a second, a hostile template for ever.
ANSWER_S = 20.0
#: Longest line either side writes.
LINE_BYTES = 256 << 20
#: Tokens before a new one that are decoded again with it: what joins across them is shorter.
WINDOW = 8
#: Tokens of one character at most (bytes of UTF-8); so many without an end are no character.
MAX_CHARACTER = 4


class Words:
    """Text and token ids of one checkpoint: one process apart for prompts, another for what is said.

    So neither a long prompt nor an endless chat template holds up the texts of others.

    Args:
        folder: with ``tokenizer.json``; where it has none every call is refused.
    """

    def __init__(self, folder: Path) -> None:
        self.usable = usable(folder)
        self._prompts, self._texts = _Apart(folder), _Apart(folder)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return list(await self._ask(self._prompts, "encode", text, True))

    async def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        return list(await self._ask(self._prompts, "chat", list(messages)))

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """Every token as text of its own."""
        return list(await self._ask(self._texts, "pieces", list(ids)))

    async def step(self, ids: Sequence[int], said: int, whole: bool = False) -> str | None:
        """What tokens add to a text of which ``said`` are told; None while they end within a character.

        ``whole``: nothing is held back, a broken character is told as the replacement character.
        """
        answer = await self._ask(self._texts, "step", list(ids), said, whole)
        return None if answer is None else str(answer)

    async def _ask(self, apart: _Apart, op: str, *args: Any) -> Any:
        """One question to a process apart.

        It is asked to its end even where nobody waits any more, so that its answer is not taken for the next one's.

        Raises:
            InputError: no tokenizer, or it fails or is too slow on this.
        """
        if not self.usable:
            raise InputError(f"this model is served without a {FILE}: give token ids, and ask for return_token_ids")
        answer = await asyncio.shield(apart.exchange({"op": op, "args": args}))
        if "error" in answer:
            raise InputError(str(answer["error"]))
        return answer["out"]

    async def close(self) -> None:
        """End the processes apart."""
        await self._prompts.close()
        await self._texts.close()


class _Apart:
    """One process apart, started when it is first asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        """A question and its answer; the process is started anew where it was stopped."""
        async with self._turn:
            process = self._process or await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            try:
                async with asyncio.timeout(ANSWER_S):
                    await process.stdin.drain()
                    line = await process.stdout.readline()
                return dict(json.loads(line))
            except (TimeoutError, OSError, ValueError):
                await self._end()
                return {"error": "the tokenizer or the chat template of this model gave no answer to this"}

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no module is found in the folder it is started in, which may be that of the model
            "-m",
            "meshwright.runtime.serve.api.text_apart",
            str(self.folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
        )
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def close(self) -> None:
        """End the process apart."""
        async with self._turn:
            await self._end()


class Speech:
    """A text that grows token by token, up to a stop string.

    What may be the beginning of a stop string is held back until it is known not to be.

    Args:
        words: of the model. stops: strings that end the text and are not part of it.
        before: last tokens of the prompt: some tokenizers drop a space that begins a text.
    """

    def __init__(self, words: Words, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._words, self._stops = words, tuple(stops)
        self._ids: list[int] = list(before)
        self._told, self._held = len(self._ids), ""
        self.stopped = False

    async def add(self, token: int, last: bool) -> str:
        """The text that is certain after one more token; ``last``: no other will come."""
        self._ids.append(token)
        start = max(0, self._told - WINDOW)
        broken = len(self._ids) - self._told > MAX_CHARACTER
        new = await self._words.step(self._ids[start:], self._told - start, last or broken)
        if new is None:
            return ""
        self._told = len(self._ids)
        return self._certain(self._held + new, last)

    def rest(self) -> str:
        """What was held back, once no token with text will come."""
        held, self._held = self._held, ""
        return held

    def _certain(self, text: str, last: bool) -> str:
        at = min((i for i in (text.find(stop) for stop in self._stops) if i >= 0), default=-1)
        if at >= 0:
            self.stopped, self._held = True, ""
            return text[:at]
        keep = 0 if last else max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string may begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
