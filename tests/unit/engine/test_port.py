"""The engine's port: when its thread is woken."""

from __future__ import annotations

import os
import socket

import pytest

from common.messages.engine import EngineDone, TokenDelta
from worker.engine.mailbox import Mailbox
from worker.engine.port import Port


def delta(text: str) -> TokenDelta:
    return TokenDelta(request_id=1, text=text, tokens=1)


def woken(port: Port) -> bool:
    try:
        os.eventfd_read(port._event)
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("held", [True, False])
def test_a_token_wakes_the_port_only_when_no_text_is_held_for_it_to_join(held: bool) -> None:
    """Its thread would take the interpreter from the next step, once a token. What ends the request does wake it."""
    agent, engine = socket.socketpair()
    port = Port(engine.detach(), Mailbox(), lambda message: message)
    port._forward(delta("first, which leaves at once"))
    if held:
        port._forward(delta("held"))
    port.send(delta("next"))
    assert woken(port) != held
    done = EngineDone(
        request_id=1, final_text="", tokens_generated=3, elapsed_ms=1, prompt_tokens=1, finish_reason="stop"
    )
    port.send(done)
    assert woken(port) and list(port._outgoing) == [delta("next"), done]
    agent.close()
