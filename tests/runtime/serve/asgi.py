"""Requests to the application without a socket, an engine without ranks, and a small tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI

from meshwright import engines
from meshwright.runtime.folder import read_folder
from meshwright.runtime.serve.api.app import Service, create
from meshwright.runtime.serve.api.text import Words
from meshwright.runtime.serve.engine import Engine, EngineConfig
from meshwright.runtime.serve.scheduler import Limits
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Answer(NamedTuple):
    """Status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Instant(Engine):
    """The engine with its scheduler, but every pass is answered at once: token 70, then 71, ..."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.ranks.ready = True
        self.pumping = False

    def _pump(self) -> None:
        if self.pumping:
            return
        self.pumping = True
        for scheduler in self.schedulers:
            while (made := scheduler.next_pass()) is not None:
                chosen = [(70 + len(line.new) % 20, -0.5, ((70 + len(line.new) % 20, -0.5),)) for line in made.wanted]
                for line, token in self._done(self.pool, 0, {"n": made.number, "chosen": chosen}):
                    self._say(line, token)
        self.pumping = False


def instant(folder: Path, key: str | None = None, queue: int = 64) -> tuple[FastAPI, Service]:
    """The application around an engine without ranks."""
    model = read_folder(folder)
    placement = place(model.spec, parse_layout("tp=1"), engines.profile("meshwright"))
    engine = Instant(EngineConfig(model, placement, blocks=64, block_size=4, limits=Limits(8, 16, 64, queue)))
    service = Service(engine, Words(folder), "tiny", key)
    app = create(service)
    app.state.service = service
    return app, service


async def call(
    app: FastAPI, path: str, body: bytes | Sequence[bytes] = b"", method: str = "POST", **headers: str
) -> Answer:
    """One request to its end."""
    parts = [body] if isinstance(body, bytes) else list(body)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            return {"type": "http.disconnect"} if any(not m.get("more_body") for m in sent[1:]) else await never()
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def never() -> dict[str, Any]:
        import asyncio

        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    raw, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": raw,
        "raw_path": raw.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    start = next(m for m in sent if m["type"] == "http.response.start")
    found = {k.decode(): v.decode() for k, v in start["headers"]}
    return Answer(start["status"], found, b"".join(m.get("body", b"") for m in sent[1:]))


def add_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer of single bytes beside a checkpoint of at least 256 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder
