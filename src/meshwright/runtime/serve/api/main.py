"""Start the engine, serve until a signal, end everything that was started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from meshwright.errors import InputError
from meshwright.runtime.serve.api.app import Service, create
from meshwright.runtime.serve.api.text import Words
from meshwright.runtime.serve.engine import Engine, EngineConfig
from meshwright.runtime.serve.split import SplitEngine

#: Seconds that open streams are given when the server is told to end.
GRACE_S = 5


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens, what it calls its model, and the key it asks for (None: none)."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    key: str | None = None


def run(config: EngineConfig, address: Address, ready: Callable[[str], None]) -> None:
    """Serve; ``ready`` is told the address once requests can come.

    Raises:
        InputError: the port is taken. MeshwrightError: the ranks failed.
    """
    asyncio.run(_run(config, address, ready))


async def _run(config: EngineConfig, address: Address, ready: Callable[[str], None]) -> None:
    engine = Engine(config) if config.decode is None else SplitEngine(config)
    words = Words(config.model.folder)
    service = Service(engine, words, address.name or config.placement.spec.name, address.key)
    settings = uvicorn.Config(
        create(service),
        host=address.host,
        port=address.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(settings)
    try:
        listener = settings.bind_socket()
    except SystemExit:
        raise InputError(f"port {address.port} on {address.host} is taken; choose another with --port") from None
    try:
        await engine.start()
        port = listener.getsockname()[1]
        ready(f"http://{address.host}:{port}")
        await server.serve(sockets=[listener])
    finally:
        await engine.stop()
        await words.close()
        listener.close()
