"""The routes: OpenAI's completions over the prompt RPC, models, health (field-complaints C10; design.md 6 rows 9, 34).

One prompt is active at a time; others wait in the gateway's queue. A client that leaves cancels its prompt, streaming
or not. While a stream waits in the queue it gets `: queued N` comments, which clients skip.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.prompt_gateway.http.rpc import Event, PromptRpc, RpcAway, RpcFault, RpcRefused
from services.prompt_gateway.http.shapes import (
    Answer,
    Asked,
    BadRequest,
    error_body,
    error_kind,
    parse_chat,
    parse_completion,
    usage_of,
)
from services.prompt_gateway.wire import DoneLine, QueuedLine, TextDeltaLine

BODY_BYTES_MAX = 2 * 1024 * 1024  # the RPC takes lines of 1 MiB; JSON escapes may double a text
RETRY_AFTER_S = 5
JSON = "application/json"

_encode = msgspec.json.Encoder().encode


def error_response(message: str, status: int, *, param: str = "", code: str = "", retry: bool = False) -> Response:
    """An error as OpenAI's clients expect it."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if retry else None
    body = error_body(message, kind=error_kind(status), param=param, code=code)
    return Response(body, status, headers, JSON)


def failure(error: Exception) -> tuple[int, str, str]:
    """(HTTP status, message, code) of what the RPC said."""
    text = str(error)
    match error:
        case RpcFault() if text.startswith("queue full"):
            return 429, text, "queue_full"
        case RpcRefused() if "clients are connected already" in text:
            return 429, text, "too_many_connections"
        case RpcRefused():
            return 400, text, "invalid_request"
        case RpcFault() if "the context holds" in text:
            return 400, text, "context_length_exceeded"
        case RpcFault():
            return 500, text, "prompt_fault"
        case _:
            return 503, text, "not_serving"


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed with the connection, at once: that cancels the prompt."""

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        super().__init__(source, headers={"cache-control": "no-store"}, media_type="text/event-stream")
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


class Front:
    """The HTTP front of one prompt RPC."""

    def __init__(self, rpc: PromptRpc, model: str) -> None:
        self._rpc, self._model, self._created = rpc, model, int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._one_model),
                Route("/health", self._health),
                Route("/healthz", self._health),
                Route("/readyz", self._ready),
            ],
            exception_handlers={404: _not_found, 405: _not_found, 500: _internal},
        )

    # --- health and models --------------------------------------------------------------------------------------
    async def _health(self, request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type=JSON)

    async def _ready(self, request: Request) -> Response:
        if await self._rpc.is_open():
            return Response(b'{"status":"ready"}', media_type=JSON)
        return error_response("the model is not being served yet, or not any more", 503, code="not_serving", retry=True)

    def _model_object(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "swactor-mq"}

    async def _models(self, request: Request) -> Response:
        return Response(_encode({"object": "list", "data": [self._model_object()]}), media_type=JSON)

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["model"] != self._model:
            return error_response("this model is not served here", 404, param="model", code="model_not_found")
        return Response(_encode(self._model_object()), media_type=JSON)

    # --- completions --------------------------------------------------------------------------------------------
    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, chat=True)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, chat=False)

    async def _answer(self, request: Request, parse: Callable[[bytes, str], Asked], *, chat: bool) -> Response:
        try:
            asked = parse(await _body(request), self._model)
        except BadRequest as error:
            return error_response(str(error), error.status, param=error.param, code=error.code)
        except ClientDisconnect:
            return Response(status_code=499)
        answer = Answer(chat=chat, answer_id=secrets.token_hex(12), created=int(time.time()), model=self._model)
        events = self._rpc.submit(asked.rpc)
        try:
            first = await _or_gone(anext(events), request)
            if asked.stream and first is not None:
                return EventStream(_stream(first, events, answer, include_usage=asked.include_usage))
            done = None if first is None else await _or_gone(_finish(first, events), request)
        except (RpcFault, RpcRefused, RpcAway) as error:
            await events.aclose()
            status, message, code = failure(error)
            return error_response(message, status, code=code, retry=status in (429, 503))
        except BaseException:
            await events.aclose()
            raise
        await events.aclose()
        if done is None:
            return Response(status_code=499)
        usage = usage_of(done.prompt_tokens, done.tokens_generated)
        return Response(_encode(answer.whole(done.final_text, done.finish_reason, usage)), media_type=JSON)


async def _body(request: Request) -> bytes:
    """Raises BadRequest. The content type also keeps web pages of others from posting without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise BadRequest("the Content-Type must be application/json", status=415)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_BYTES_MAX:
            raise BadRequest(f"the body is longer than {BODY_BYTES_MAX} bytes", status=413)
    return bytes(data)


async def _or_gone(work: Any, request: Request) -> Any:
    """What `work` gives, or None when the client left first; the work is cancelled then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _finish(first: Event, events: AsyncIterator[Event]) -> DoneLine:
    """The done line; text comes whole in it."""
    if isinstance(first, DoneLine):
        return first
    async for event in events:
        if isinstance(event, DoneLine):
            return event
    raise RpcAway("the answer ended without its end")


def _line(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


async def _stream(
    first: Event, events: AsyncGenerator[Event, None], answer: Answer, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events. A failure after the first byte is an error object in the stream, without [DONE]."""
    started = False
    event: Event = first
    try:
        while True:
            if isinstance(event, QueuedLine):
                yield f": queued {event.position}\n\n".encode()
            elif not started:
                started = True
                if (head := answer.first()) is not None:
                    yield _line(head)
            if isinstance(event, TextDeltaLine):
                yield _line(answer.delta(event.text))
            elif isinstance(event, DoneLine):
                yield _line(answer.last(event.finish_reason))
                if include_usage:
                    yield _line(answer.usage(usage_of(event.prompt_tokens, event.tokens_generated)))
                yield b"data: [DONE]\n\n"
                return
            event = await anext(events)
    except (RpcFault, RpcRefused, RpcAway) as error:
        status, message, code = failure(error)
        yield b"data: " + error_body(message, kind=error_kind(status), code=code) + b"\n\n"
    finally:
        await events.aclose()


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return error_response(f"no such endpoint: {request.method} {request.url.path}", status, code="unknown_url")


async def _internal(request: Request, error: Exception) -> Response:
    return error_response("internal error of the HTTP front", 500)
