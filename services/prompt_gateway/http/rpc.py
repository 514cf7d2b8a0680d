"""The prompt RPC for asyncio: one connection per prompt, closed to cancel it (S1 2.5; wire.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from services.prompt_gateway.bind import split_addr
from services.prompt_gateway.wire import (
    DoneLine,
    ErrorLine,
    FaultLine,
    ProtocolError,
    QueuedLine,
    ShutdownAcceptedLine,
    TextDeltaLine,
    decode_response,
)

LINE_BYTES_MAX = 8 * 1024 * 1024  # final_text of a whole context, JSON-escaped
CONNECT_S = 5.0

Event = TextDeltaLine | DoneLine | QueuedLine


class RpcFault(Exception):
    """The prompt failed: the fault's sentence."""


class RpcRefused(Exception):
    """The RPC did not take the request: the error line's sentence."""


class RpcAway(Exception):
    """There is no RPC, or it went away in the middle of an answer."""


class PromptRpc:
    """address: where the RPC listens now, "" while nobody knows."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        addr = self._address()
        try:
            host, port = split_addr(addr)
            connecting = asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
            return await asyncio.wait_for(connecting, CONNECT_S)
        except (OSError, ValueError, TimeoutError):
            raise RpcAway("the model is not being served yet, or not any more") from None

    async def is_open(self) -> bool:
        """Whether prompts are taken."""
        try:
            _, writer = await self._connect()
        except RpcAway:
            return False
        writer.close()
        return True

    async def submit(self, request: dict[str, Any]) -> AsyncGenerator[Event, None]:
        """The events of one prompt, done last. Leaving the iterator (aclose) cancels the prompt.

        Raises RpcFault, RpcRefused and RpcAway.
        """
        reader, writer = await self._connect()
        try:
            writer.write(msgspec.json.encode({"request_id": 1, "events": ["queued"], **request}) + b"\n")
            while True:
                event = await _next(reader)
                yield event
                if isinstance(event, DoneLine):
                    return
        finally:
            writer.close()


async def _next(reader: asyncio.StreamReader) -> Event:
    try:
        line = await reader.readline()
        response = decode_response(line) if line.endswith(b"\n") else None
    except (OSError, ValueError, ProtocolError) as error:
        raise RpcAway(f"the prompt RPC broke: {error}") from None
    match response:
        case FaultLine():
            raise RpcFault(response.error)
        case ErrorLine():
            raise RpcRefused(response.error)
        case None | ShutdownAcceptedLine():
            raise RpcAway("the prompt RPC went away in the middle of the answer")
        case _:
            return response
