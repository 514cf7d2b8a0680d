"""The client's main thread at its end of the bus: turn, look, send, until there is a result (S2 2.1, 3.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.actors import Inbox
from common.effects import StopSignal
from common.messages.inference import InferenceFault, InferenceNotReady, InferenceResponse
from tools.single_gpu_inference_call import Call, Result, Seen
from worker.gpu_node.bridges import SERVICE_NAME
from worker.gpu_node.ends import End, main_inbox


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; its text names the signal."""


def reply_inbox() -> Inbox:
    """Inbox<InferenceResponse>: the client's only actor besides its SWIM member."""
    return main_inbox(InferenceResponse, InferenceNotReady, InferenceFault)


def drain(end: End) -> list[Any]:
    """What came since the last look. Raises Interrupted."""
    heard = [message for _, message in end.inbox.drain()]
    for message in heard:
        if isinstance(message, StopSignal):
            raise Interrupted(message.name)
    return heard


def converse(
    end: End, node: bytes, call: Call, note: Callable[[str], None], tend: Callable[[], None] = lambda: None
) -> Result:
    """Pump until the call has a result; `tend` is called each turn. Raises Interrupted."""
    while True:
        tend()
        seen = Seen(end.state(node), end.resolve(SERVICE_NAME), end.host.node.views.link_up)
        for address, request in call.step(seen, drain(end), end.now_ms):
            end.send(node, address, request)
        for text in call.notes:
            note(text)
        call.notes.clear()
        if call.result is not None:
            return call.result
        end.host.turn()
