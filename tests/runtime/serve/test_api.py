"""The HTTP interface: what clients of the OpenAI API send and get, and that nothing they send breaks it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.runtime.serve.api import text as text_module
from meshwright.runtime.serve.api.app import MAX_BODY
from meshwright.runtime.serve.api.schemas import ChatRequest, CompletionRequest
from meshwright.runtime.serve.api.text import Speech, Words, overlap
from tests.runtime import tiny
from tests.runtime.serve.asgi import add_tokenizer, call, instant

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
FIELDS = [*CompletionRequest.model_fields, *ChatRequest.model_fields, "other"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.write(tmp_path_factory.mktemp("spoken"), "llama", vocab_size=256)
    return add_tokenizer(made)


def asked(app: Any, path: str, **body: Any) -> Any:
    async def once() -> Any:
        try:
            return await call(app, path, json.dumps(body).encode())
        finally:
            await app.state.service.words.close()

    return asyncio.run(once())


def events(body: bytes) -> Iterator[dict[str, Any]]:
    lines = [line for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        yield json.loads(line.removeprefix("data: "))


def test_a_completion_of_token_ids(folder: Path) -> None:
    app, service = instant(folder)
    got = asked(app, COMPLETION, prompt=[1, 2, 3], max_tokens=4, n=2, return_token_ids=True, logprobs=1).json
    assert [c["token_ids"] for c in got["choices"]] == [[70, 71, 72, 73]] * 2
    assert got["choices"][1]["prompt_token_ids"] == [1, 2, 3]
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert got["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert service.engine.schedulers[0].pool.owned == 0


def test_a_chat_by_the_models_template(folder: Path) -> None:
    app, _ = instant(folder)
    got = asked(
        app, CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], max_tokens=3,
        return_token_ids=True, logprobs=True, top_logprobs=1,
    ).json  # fmt: skip
    text = asyncio.run(_decoded(folder, got["prompt_token_ids"]))
    assert text == "<user>hi\n<assistant>"
    content = got["choices"][0]["message"]["content"]
    assert content == "".join(row["token"] for row in got["choices"][0]["logprobs"]["content"])


async def _decoded(folder: Path, ids: list[int]) -> str:
    words = Words(folder)
    try:
        return await words.step(ids, 0, True) or ""
    finally:
        await words.close()


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_a_stream_says_the_same_as_a_whole_answer(folder: Path, path: str) -> None:
    app, _ = instant(folder)
    body: dict[str, Any] = {"max_tokens": 5, "return_token_ids": True, "n": 2}
    body |= {"prompt": "ab"} if path == COMPLETION else {"messages": [{"role": "user", "content": "ab"}]}
    whole = asked(app, path, **body).json
    app, _ = instant(folder)
    got = list(events(asked(app, path, **body, stream=True, stream_options={"include_usage": True}).body))
    assert got[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        rows = [e["choices"][0] for e in got[:-1] if e["choices"][0]["index"] == choice["index"]]
        text = "".join(r["text"] if path == COMPLETION else r["delta"]["content"] for r in rows)
        assert text == (choice["text"] if path == COMPLETION else choice["message"]["content"])
        assert [t for r in rows for t in r["token_ids"]] == choice["token_ids"]
        assert [r["finish_reason"] for r in rows] == [None] * 4 + ["length"]


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(folder: Path) -> None:
    app, service = instant(folder)
    plain = asked(app, COMPLETION, prompt=[1], max_tokens=9).json["choices"][0]["text"]
    got = asked(app, COMPLETION, prompt=[1], max_tokens=9, stop=[plain[3:5], "never"]).json["choices"][0]
    assert (got["text"], got["finish_reason"]) == (plain[:3], "stop")
    assert service.engine.schedulers[0].pool.owned == 0


def test_a_client_that_leaves_a_stream_gives_its_blocks_back(folder: Path) -> None:
    from meshwright import engines
    from meshwright.runtime.folder import read_folder
    from meshwright.runtime.serve.api.app import Service, create
    from meshwright.runtime.serve.engine import Engine, EngineConfig
    from meshwright.specs.layout import parse_layout
    from meshwright.specs.placement import place

    model = read_folder(folder)
    placement = place(model.spec, parse_layout("tp=1"), engines.profile("meshwright"))
    engine = Engine(EngineConfig(model, placement, blocks=8, block_size=4))
    app = create(Service(engine, Words(folder), "tiny"))

    async def leave() -> tuple[int, int]:
        body = json.dumps({"prompt": [1, 2, 3, 4, 5], "max_tokens": 5, "stream": True}).encode()
        task = asyncio.create_task(call(app, COMPLETION, body))
        while not engine.schedulers[0].waiting:
            await asyncio.sleep(0.001)
        engine.schedulers[0].next_pass()
        held = engine.schedulers[0].pool.owned
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        list(engine.schedulers[0].done(0, [3]))
        return held, engine.schedulers[0].pool.owned

    assert asyncio.run(leave()) == (2, 0)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": "a", "frequency_penalty": 1}, 400, "frequency_penalty"),
        ({"prompt": "a", "tools": []}, 400, "tools: Extra inputs are not permitted"),
        ({"prompt": [999]}, 400, "token id 999 is outside the vocabulary of 256"),
        ({"prompt": [1] * 60, "max_tokens": 5}, 400, "60 prompt tokens and 5 new ones exceed the 64"),
        ({"prompt": "a", "model": "other"}, 404, "'other' is not served here; it is 'tiny'"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, 400, "outside the vocabulary"),
        ({"prompt": "a", "stream_options": {}}, 400, "streams only"),
        ({"prompt": ""}, 400, "empty prompt"),
        ({}, 400, "prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(folder: Path, body: dict[str, Any], status: int, says: str) -> None:
    app, service = instant(folder)
    got = asked(app, COMPLETION, **body)
    assert got.status == status
    assert says in got.json["error"]["message"]
    assert service.engine.schedulers[0].pool.owned == 0


def test_bounds_of_the_body_the_queue_and_the_key(folder: Path) -> None:
    app, service = instant(folder, key="sesame", queue=3)

    async def all_of_it() -> list[int]:
        body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
        key = {"authorization": "Bearer sesame"}
        got = [
            await call(app, COMPLETION, [b"x" * (MAX_BODY // 2)] * 3, **key),
            await call(app, COMPLETION, body),
            await call(app, COMPLETION, body, authorization="Bearer open"),
            await call(app, COMPLETION, body, **key),
            await call(app, "/v1/models", method="GET"),
            await call(app, "/health", method="GET"),
        ]
        service.engine.pumping = True  # type: ignore[attr-defined]
        got.append(await call(app, COMPLETION, json.dumps({"prompt": [[1]] * 4}).encode(), **key))
        return [answer.status for answer in got]

    assert asyncio.run(all_of_it()) == [413, 401, 401, 200, 401, 200, 429]
    assert not service.engine.schedulers[0].waiting, "all of a request or nothing of it"


def test_metrics_count(folder: Path) -> None:
    app, _ = instant(folder)
    asked(app, COMPLETION, prompt=[1, 2], max_tokens=3)
    got = asyncio.run(call(app, "/metrics", method="GET")).body.decode()
    rows = dict(line.rsplit(" ", 1) for line in got.splitlines() if not line.startswith("#"))
    assert rows["meshwright_generation_tokens_total"] == "3"
    assert rows["meshwright_time_to_first_token_seconds_count"] == "1"
    assert rows['meshwright_inter_token_latency_seconds_bucket{le="+Inf"}'] == "2"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(99999999999) %}{% endfor %}", ""),
        ("{{ 'a' * 99999999999 }}", ""),
        (None, "no chat template"),
    ],
    ids=["attributes", "a long loop", "memory", "none"],
)
def test_a_hostile_chat_template_reaches_nothing(tmp_path: Path, template: str | None, says: str) -> None:
    folder = add_tokenizer(tiny.write(tmp_path, "llama", vocab_size=256), template)
    app, _ = instant(folder)
    got = asked(app, CHAT, messages=[{"role": "user", "content": "hi"}])
    assert got.status == 400
    assert says in got.json["error"]["message"]


def test_a_template_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "ANSWER_S", 2.0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = add_tokenizer(tiny.write(tmp_path, "llama", vocab_size=256), endless)
    app, _ = instant(folder)
    assert "no answer" in asked(app, CHAT, messages=[{"role": "user", "content": "hi"}]).json["error"]["message"]
    assert asked(app, COMPLETION, prompt="ab", max_tokens=1).status == 200, "the next one gets a new process"


def test_text_grows_by_whole_characters_and_holds_back_what_may_be_a_stop(folder: Path) -> None:
    async def spoken(text: str, stops: list[str]) -> tuple[list[str], bool]:
        words = Words(folder)
        try:
            ids = await words.encode(text)
            speech = Speech(words, stops)
            out = []
            for i, token in enumerate(ids):
                out.append(await speech.add(token, i == len(ids) - 1))
                if speech.stopped:
                    break
            return out, speech.stopped
        finally:
            await words.close()

    assert asyncio.run(spoken("a\u00e9\u6f22b", [])) == (["a", "", "\u00e9", "", "", "\u6f22", "b"], False)
    assert asyncio.run(spoken("abcabd", ["abd"])) == (["", "", "abc", "", "", ""], True)
    assert asyncio.run(spoken("xab", ["abd"])) == (["x", "", "ab"], False)
    assert asyncio.run(broken(folder)) == ["", "", "", "", "\ufffd" * 5, "", "\ufffd" * 2]
    assert overlap("abcab", "abd") == 2


async def broken(folder: Path) -> list[str]:
    """Bytes that begin a character and never end one are told in the end."""
    words = Words(folder)
    try:
        begins = (await words.encode("\u00e9"))[0]
        speech = Speech(words)
        return [await speech.add(begins, i == 6) for i in range(7)]
    finally:
        await words.close()


def test_a_space_that_begins_the_text_stays_where_the_tokenizer_drops_it_from_a_prompt(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({"\u2581is": 0, "\u2581Paris": 1}, "\u2581is"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    async def said(before: list[int]) -> str:
        words = Words(tmp_path)
        try:
            return await Speech(words, (), before).add(1, True)
        finally:
            await words.close()

    assert [asyncio.run(said(before)) for before in ([0], [])] == [" Paris", "Paris"]


def test_null_is_what_was_not_said_and_the_chosen_token_is_among_the_likeliest(folder: Path) -> None:
    app, _ = instant(folder)
    got = asked(
        app, COMPLETION, prompt=[1], max_tokens=2, temperature=None, n=None, stop=None, tools=None, logprobs=0,
        stream=None,
    ).json  # fmt: skip
    (row,) = got["choices"]
    assert row["logprobs"]["top_logprobs"] == [{token: -0.5} for token in row["logprobs"]["tokens"]]


def test_no_file_beside_the_model_is_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenizers", "jinja2", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of a stranger was run')")
    monkeypatch.chdir(tmp_path)
    app, _ = instant(folder)
    assert asked(app, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=1).status == 200


def mutated(rng: random.Random) -> tuple[str, str, bytes]:
    """A request that is more or less wrong."""
    path = rng.choice([COMPLETION, CHAT, "/v1/models", "/health", "/nothing", "/v1/completions/../x"])
    junk: list[Any] = [
        None, True, -1, 0, 1e308, 10**40, 3.5, -(1 << 63), "", "a" * 5000, "\x00", "\u202e",
        [], {}, [[]], [None], {"a": 1},
    ]  # fmt: skip
    body: dict[str, Any] = {"prompt": rng.choice(["hi", [1, 2], [[1], [2]]])}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}]}
    for _ in range(rng.randrange(4)):
        body[rng.choice(FIELDS)] = rng.choice(junk)
    if path == CHAT and rng.random() < 0.3:
        body["messages"] = [{"role": rng.choice(["user", "x", None]), "content": rng.choice(junk)}]
    raw = json.dumps(body).encode()
    wrong = rng.random()
    if wrong < 0.1:
        raw = raw[: rng.randrange(len(raw))]
    elif wrong < 0.2:
        raw = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    elif wrong < 0.22:
        raw = b"[" * 100_000
    elif wrong < 0.24:
        raw = raw.replace(b"hi", b"\\ud800")
    return rng.choice(["POST", "POST", "POST", "GET", "PUT", "DELETE"]), path, raw


def hammer(folder: Path, times: int, seed: int) -> dict[int, int]:
    """Statuses of so many malformed requests."""
    app, service = instant(folder)
    rng, seen = random.Random(seed), dict[int, int]()

    async def all_of_them() -> None:
        for _ in range(times):
            method, path, raw = mutated(rng)
            async with asyncio.timeout(30):
                got = await call(app, path, raw, method=method)
            assert got.status < 500, (method, path, raw[:300], got)
            seen[got.status] = seen.get(got.status, 0) + 1
        await service.words.close()

    asyncio.run(all_of_them())
    assert service.engine.schedulers[0].pool.owned == 0
    return seen


@pytest.mark.parametrize(
    "times", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])], ids=str
)
def test_malformed_requests_never_get_a_5xx(folder: Path, times: int) -> None:
    seen = hammer(folder, times, seed=times)
    assert {200, 400, 404, 405} <= seen.keys()


def test_a_fault_of_ours_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.runtime.serve.api.app._first", lambda error: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        hammer(folder, 60, seed=1)


def test_the_openai_client_works_unchanged(folder: Path, serving: Callable[..., str]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=serving(folder, "tp=2"), api_key="none")
    model = client.models.list().data[0].id
    greedy = tiny.oracle(folder, ((104, 105),), 6)[0][0]
    got = client.completions.create(
        model=model, prompt=[104, 105], max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    )
    assert got.choices[0].token_ids == greedy
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=5, seed=3, stream=True
    )
    pieces = [chunk.choices[0] for chunk in stream]
    assert pieces[-1].finish_reason in {"length", "stop"}
    assert pieces[0].delta.role == "assistant"
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        client.completions.create(model=model, prompt="a", presence_penalty=1)
