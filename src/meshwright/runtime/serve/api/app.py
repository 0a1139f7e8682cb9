"""HTTP: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health``, ``/metrics``.

A request becomes one ticket of the engine a choice; a client that leaves drops its tickets, which frees their blocks.
Whatever a client sends is answered with 4xx and the error object of the OpenAI API where it cannot be served; 503 means
that the ranks are gone.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteError
from starlette.types import Receive, Scope, Send

from meshwright.errors import InputError, MeshwrightError
from meshwright.runtime.job import Sampling
from meshwright.runtime.serve.api import answers
from meshwright.runtime.serve.api.answers import Choice, Piece, Times, Watch
from meshwright.runtime.serve.api.schemas import Asked, ChatRequest, CompletionRequest
from meshwright.runtime.serve.api.text import Words
from meshwright.runtime.serve.engine import Engine, Token
from meshwright.runtime.serve.scheduler import QueueFull

#: Largest body of a request.
MAX_BODY = 8 << 20
SEED_BITS = 32


@dataclass(slots=True)
class Service:
    """What the endpoints share.

    Attributes:
        engine: that computes. words: text of its model. name: under which it is served. key: asked of clients, or None.
    """

    engine: Engine
    words: Words
    name: str
    key: str | None = None
    times: Times = field(default_factory=Times)
    began: int = field(default_factory=lambda: int(time.time()))

    async def read(self, request: Request, kind: type[Asked]) -> Any:
        """The body of a request, checked.

        Raises:
            HTTPException: no or another key, a body too large, or not what ``kind`` says; another model.
        """
        self.admit(request)
        body = await _body(request)
        try:
            asked = kind.model_validate_json(body)
        except ValidationError as error:
            raise HTTPException(400, _first(error)) from None
        if asked.model not in {None, self.name}:
            raise HTTPException(404, f"model {str(asked.model)[:80]!r} is not served here; it is {self.name!r}")
        return asked

    def admit(self, request: Request) -> None:
        """Ask for the key, where there is one."""
        if self.key is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as they were sent
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise HTTPException(401, "this server asks for an API key: Authorization: Bearer KEY")

    def submit(self, asked: Asked, prompts: list[list[int]], most: int | None, logprobs: int | None) -> list[Choice]:
        """Tickets for every choice of every prompt; all or none."""
        made: list[Choice] = []
        seed = secrets.randbits(SEED_BITS) if asked.seed is None else asked.seed
        room = self.engine.capacity
        eos = [*asked.stop_token_ids, *(() if asked.ignore_eos else self.engine.config.model.settings.eos)]
        vocab = self.engine.config.placement.spec.vocab
        if any(token >= vocab for token, _ in asked.bias):
            raise InputError(f"logit_bias: a token id is outside the vocabulary of {vocab}")
        if asked.stops and not self.words.usable:
            raise InputError("stop strings need a tokenizer, which this model is served without; use stop_token_ids")
        try:
            for prompt in prompts:
                for _ in range(asked.n):
                    sampling = Sampling(
                        asked.temperature, max(0, asked.top_k), asked.top_p, (seed + len(made)) % (1 << SEED_BITS)
                    )
                    new = max(1, room - len(prompt)) if most is None else most
                    ticket = self.engine.submit(prompt, new, sampling, eos=eos, logprobs=logprobs, bias=asked.bias)
                    made.append(Choice(len(made), prompt, ticket, self.words, asked.stops))
        except MeshwrightError:
            self.drop(made)
            raise
        return made

    def drop(self, choices: list[Choice]) -> None:
        """Nobody waits for these any more."""
        for choice in choices:
            self.engine.drop(choice.ticket)

    async def collect(self, choices: list[Choice]) -> None:
        """All choices to their ends."""

        async def one(choice: Choice) -> None:
            watch = Watch(self.times)
            async for piece in choice.pieces(self.engine):
                watch.token(piece.ended is not None)

        tasks = [asyncio.ensure_future(one(choice)) for choice in choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def merged(self, choices: list[Choice]) -> AsyncIterator[tuple[Choice, Piece]]:
        """Pieces of all choices as they come."""
        queue: asyncio.Queue[tuple[Choice, Piece] | Exception | None] = asyncio.Queue()

        async def one(choice: Choice) -> None:
            watch = Watch(self.times)
            try:
                async for piece in choice.pieces(self.engine):
                    watch.token(piece.ended is not None)
                    queue.put_nowait((choice, piece))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(one(choice)) for choice in choices]
        try:
            left = len(tasks)
            while left:
                got = await queue.get()
                if isinstance(got, Exception):
                    raise got
                if got is None:
                    left -= 1
                else:
                    yield got
        finally:
            for task in tasks:
                task.cancel()
            self.drop(choices)


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:40] for part in first["loc"][:4])
    return f"{where}: {first['msg']}"[:300] if where else str(first["msg"])[:300]


async def _body(request: Request) -> bytes:
    """The body, up to its bound.

    Raises:
        HTTPException: it is larger.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise HTTPException(413, f"the body is over {MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


async def _unless_left(request: Request, work: Coroutine[Any, Any, None], leave: Callable[[], None]) -> bool:
    """Wait for ``work`` unless the client leaves first; whether it was done."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            return False
        done.result()
        return True
    finally:
        gone.cancel()
        done.cancel()
        leave()


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"Retry-After": "1"} if status in {429, 503} else None
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status, headers)


def _asks(kind: type[BaseModel]) -> dict[str, Any]:
    """The body of a request, for ``/openapi.json``."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(definitions[str(node["$ref"]).rsplit("/", 1)[1]])
            return {key: inlined(value) for key, value in node.items()}
        return [inlined(value) for value in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}


def create(service: Service) -> FastAPI:
    """The application around an engine that has started."""
    app = FastAPI(title="meshwright", docs_url=None, redoc_url=None)

    @app.exception_handler(StarletteError)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteError)
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(MeshwrightError)
    async def failed(_: Request, error: Exception) -> Response:
        status = 429 if isinstance(error, QueueFull) else 400 if isinstance(error, InputError) else 503
        return _error(status, str(error))

    @app.get("/health")
    async def health() -> Response:
        if service.engine.healthy:
            return JSONResponse({"status": "ok", "restarts": service.engine.ranks.restarts})
        return _error(503, service.engine.ranks.trouble or "the ranks are loading")

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(answers.metrics(service.engine, service.times), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        service.admit(request)
        room = service.engine.capacity
        row = {"id": service.name, "object": "model", "created": service.began, "owned_by": "meshwright"}
        return {"object": "list", "data": [row | {"max_model_len": room}]}

    @app.post("/v1/completions", openapi_extra=_asks(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked: CompletionRequest = await service.read(request, CompletionRequest)
        prompts = [p if isinstance(p, list) else await service.words.encode(p) for p in asked.prompts]
        choices = service.submit(asked, prompts, asked.max_tokens, asked.logprobs)
        return await _answer(request, service, asked, choices, sum(map(len, prompts)), chat=False)

    @app.post("/v1/chat/completions", openapi_extra=_asks(ChatRequest))
    async def chat(request: Request) -> Response:
        asked: ChatRequest = await service.read(request, ChatRequest)
        prompt = await service.words.chat([message.plain() for message in asked.messages])
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        choices = service.submit(asked, [prompt], asked.max_completion_tokens or asked.max_tokens, logprobs)
        return await _answer(request, service, asked, choices, len(prompt), chat=True)

    return app


async def _answer(
    request: Request, service: Service, asked: Asked, choices: list[Choice], prompts: int, *, chat: bool
) -> Response:
    """The whole answer, or a stream of it."""
    head: dict[str, Any] = {
        "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": service.name,
    }
    if asked.stream:
        if chat:
            head["object"] = "chat.completion.chunk"
        return _Stream(
            lambda: service.drop(choices),
            _events(service, asked, choices, prompts, head, chat=chat),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
    if not await _unless_left(request, service.collect(choices), lambda: service.drop(choices)):
        return _error(499, "the client left")
    rows = [await _whole(service, asked, choice, chat=chat) for choice in choices]
    body = head | {"choices": rows, "usage": answers.usage(choices, prompts)}
    if chat and asked.return_token_ids:
        body["prompt_token_ids"] = choices[0].prompt
    return JSONResponse(body)


def _told(asked: Asked) -> bool:
    """Whether log probabilities were asked for."""
    return bool(asked.logprobs) if isinstance(asked, ChatRequest) else getattr(asked, "logprobs", None) is not None


async def _logprobs(service: Service, tokens: Sequence[Token], start: int, *, chat: bool) -> dict[str, Any]:
    """Log probabilities as the endpoint tells them; ``start``: characters told before."""
    if chat:
        return await answers.chat_logprobs(service.words, tokens)
    return await answers.completion_logprobs(service.words, tokens, start)


async def _whole(service: Service, asked: Asked, choice: Choice, *, chat: bool) -> dict[str, Any]:
    """One finished choice."""
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": choice.text, "refusal": None}} if chat else {"text": choice.text}
    )
    logprobs = None
    if _told(asked):
        logprobs = await _logprobs(service, choice.tokens, 0, chat=chat)
    row = {"index": choice.number, **said, "logprobs": logprobs, "finish_reason": choice.ended}
    if asked.return_token_ids:
        row["token_ids"] = choice.ids
        if not chat:
            row["prompt_token_ids"] = choice.prompt
    return row


async def _events(
    service: Service, asked: Asked, choices: list[Choice], prompts: int, head: dict[str, Any], *, chat: bool
) -> AsyncIterator[str]:
    """Server-sent events, the last one ``[DONE]``."""
    begun: set[int] = set()
    told: dict[int, int] = {}
    try:
        async for choice, piece in service.merged(choices):
            first = choice.number not in begun
            begun.add(choice.number)
            row: dict[str, Any] = {"index": choice.number, "logprobs": None}
            if _told(asked):
                start = told.get(choice.number, 0)
                row["logprobs"] = await _logprobs(service, [piece.token], start, chat=chat)
                told[choice.number] = start + len(piece.text)
            if chat:
                row["delta"] = ({"role": "assistant"} if first else {}) | {"content": piece.text}
            else:
                row["text"] = piece.text
            row["finish_reason"] = piece.ended
            if asked.return_token_ids:
                row["token_ids"] = [piece.token.token]
                if first:
                    row["prompt_token_ids"] = choice.prompt
            yield _event(head | {"choices": [row]} | ({"usage": None} if asked.usage_too else {}))
        if asked.usage_too:
            yield _event(head | {"choices": [], "usage": answers.usage(choices, prompts)})
        yield "data: [DONE]\n\n"
    except MeshwrightError as error:
        yield _event({"error": {"message": str(error), "type": "server_error", "param": None, "code": 503}})


class _Stream(StreamingResponse):
    """A stream that lets go of its tickets, also where the client left before the first event."""

    def __init__(self, leave: Callable[[], None], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
