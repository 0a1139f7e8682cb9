"""The control link between the scheduler and its ranks: frames of JSON on a TCP connection that knows both its ends.

A frame is four bytes of length and UTF-8 JSON; nothing on it is unpickled or executed. Whoever connects is asked for
the HMAC of a fresh nonce under the secret of this run, and asks for one in turn (challenge and response, RFC 2104).
Strangers are cut off before a frame of theirs is read. No torch.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import struct
import threading
from typing import Any

from meshwright.errors import MeshwrightError

#: Longest frame that is read.
MAX_FRAME = 64 << 20
NONCE, PROOF = 32, 32
#: Longest wait for the other end while both prove themselves.
GREET_S = 10.0
_LENGTH = struct.Struct(">I")


class LinkError(MeshwrightError):
    """The other end of a control link is gone, or is a stranger."""

    exit_code = 1


def new_secret() -> str:
    """A secret for one run, hexadecimal."""
    return secrets.token_hex(32)


def _proof(secret: str, nonce: bytes, who: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), who + nonce, "sha256")


def pack(message: Any) -> bytes:
    """A frame.

    Raises:
        LinkError: it would be longer than is read.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise LinkError(f"a control message of {len(body)} bytes; at most {MAX_FRAME} are sent")
    return _LENGTH.pack(len(body)) + body


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise LinkError(f"a control message of {length} bytes; at most {MAX_FRAME} are read")
    return int(length)


class Link:
    """The end of a rank: plain blocking calls.

    Args:
        host, port: where the scheduler listens. secret: of this run. hello: what the scheduler is told first.

    Raises:
        LinkError: nobody listens there, or who does is a stranger.
    """

    def __init__(self, host: str, port: int, secret: str, hello: dict[str, Any]) -> None:
        try:
            self._socket = socket.create_connection((host, port), timeout=GREET_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._file = self._socket.makefile("rb")
            theirs, mine = self._exactly(NONCE), secrets.token_bytes(NONCE)
            self._socket.sendall(_proof(secret, theirs, b"rank") + mine)
            known = hmac.compare_digest(self._exactly(PROOF), _proof(secret, mine, b"scheduler"))
        except OSError as error:
            raise LinkError(f"no scheduler at {host}:{port} ({error}); is the address reachable from here?") from None
        if not known:
            raise LinkError(f"who listens at {host}:{port} does not know the secret of this run")
        self._socket.settimeout(None)
        self._turn = threading.Lock()
        self.send(hello)

    def send(self, message: Any) -> None:
        """Send a frame, from any thread."""
        with self._turn:
            self._socket.sendall(pack(message))

    def receive(self) -> Any:
        """The next frame; None when the scheduler has left."""
        try:
            return json.loads(self._exactly(_length(self._exactly(_LENGTH.size))))
        except (LinkError, OSError, ValueError):
            return None

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise LinkError("the scheduler closed the control link")
        return data

    def close(self) -> None:
        """Leave."""
        self._file.close()
        self._socket.close()


class Peer:
    """The end of the scheduler: one rank's connection in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def greet(self, secret: str) -> dict[str, Any]:
        """Prove both ends to each other; what the rank says first.

        Raises:
            LinkError: a stranger.
        """
        nonce = secrets.token_bytes(NONCE)
        self._writer.write(nonce)
        try:
            async with asyncio.timeout(GREET_S):
                answer = await self._reader.readexactly(PROOF + NONCE)
                if not hmac.compare_digest(answer[:PROOF], _proof(secret, nonce, b"rank")):
                    raise LinkError("a stranger on the control port")
                self._writer.write(_proof(secret, answer[PROOF:], b"scheduler"))
                hello = await self.receive()
        except (OSError, EOFError, TimeoutError):
            raise LinkError("a stranger on the control port") from None
        if not isinstance(hello, dict):
            raise LinkError("a rank that says nothing on the control port")
        return hello

    def send(self, frame: bytes) -> None:
        """Queue a frame made by ``pack``."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> Any:
        """The next frame; None when the rank is gone."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            return json.loads(await self._reader.readexactly(_length(head)))
        except (OSError, EOFError, ValueError, LinkError):
            return None

    def close(self) -> None:
        """Cut it."""
        self._writer.close()
