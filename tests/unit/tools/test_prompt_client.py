"""The prompt client and the plain chat, against the real gateway with a scripted worker and against broken servers."""

from __future__ import annotations

import io
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.messages.node_agent import ChatMessage, Sampling
from common.messages.serve import CloseRpc, ShutdownRequested
from services.prompt_gateway.wire import DoneLine, FaultLine, QueuedLine, TextDeltaLine
from tests.unit.prompt_gateway.stack import Stack
from tools import chat
from tools.prompt_client import PromptClient, PromptClientError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running


# --- the client -----------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 2.5")
def test_events_come_typed_and_end_with_the_terminal(stack: Stack) -> None:
    with PromptClient.connect(stack.addr) as client:
        events = list(client.submit("echo a b"))
        assert [type(event) for event in events] == [TextDeltaLine, TextDeltaLine, DoneLine]
        assert isinstance(events[-1], DoneLine)
        assert (events[-1].request_id, events[-1].final_text) == (1, "ab")
        assert list(client.submit("fault no memory")) == [FaultLine(request_id=2, error="no memory")]
        assert client.complete("echo x").request_id == 3
        with pytest.raises(PromptClientError, match=r"^no memory$"):
            client.complete("fault no memory")
        assert client.complete("echo x", request_id=2**64 - 1).request_id == 2**64 - 1


def test_every_option_reaches_the_worker(stack: Stack) -> None:
    with PromptClient.connect(stack.addr) as client:
        options = {"max_tokens": 5, "stop": ["x"], "sampling": {"top_k": 4, "seed": 1}}
        client.complete("echo a", raw=True, **options)
        client.complete(messages=[{"role": "user", "content": "echo b"}])
    first, second = stack.infers
    assert (first.prompt, first.raw, first.max_tokens, first.stop) == ("echo a", True, 5, ["x"])
    assert first.sampling == Sampling(top_k=4, seed=1)
    assert second.messages == [ChatMessage(role="user", content="echo b")]


def test_positions_in_the_queue_are_events(stack: Stack) -> None:
    with PromptClient.connect(stack.addr) as busy, PromptClient.connect(stack.addr) as client:
        busy.submit("hang")
        stack.until(lambda: stack.infers)
        events = client.submit("echo a", queued_events=True)
        assert next(events) == QueuedLine(request_id=1, position=1)
        busy.close()
        assert isinstance(list(events)[-1], DoneLine)


def test_closing_the_client_cancels(stack: Stack) -> None:
    client = PromptClient.connect(stack.addr)
    events = client.submit("drip")
    next(events)
    with pytest.raises(PromptClientError, match="not complete"):
        client.submit("echo a")
    client.close()
    stack.until(lambda: stack.cancels)


def test_protocol_errors_and_the_end_of_the_stack_are_sentences(stack: Stack) -> None:
    with PromptClient.connect(stack.addr) as client, pytest.raises(PromptClientError, match="sampling"):
        list(client.submit("echo a", sampling={"temperature": -1}))
    with PromptClient.connect(stack.addr) as client, pytest.raises(PromptClientError, match="needs prompt_text"):
        client.complete()
    with PromptClient.connect(stack.addr) as client, pytest.raises(PromptClientError, match="Unicode"):
        client.submit("\ud800")
    with PromptClient.connect(stack.addr) as client:
        events = client.submit("drip")
        next(events)
        stack.tell(CloseRpc(reason="the run is over"))
        assert list(events)[-1] == FaultLine(request_id=1, error="the run is over")
        with pytest.raises(PromptClientError, match=r"closed|broke"):
            client.complete("echo a")
    stack.until(lambda: stack.reports)
    with pytest.raises(PromptClientError, match=f"no prompt RPC at {stack.addr}: Connection refused"):
        PromptClient.connect(stack.addr)


def test_shutdown(stack: Stack) -> None:
    with PromptClient.connect(stack.addr) as client:
        client.shutdown_run()
    stack.until(lambda: stack.reports == [ShutdownRequested(source="rpc")])


def test_waiting_for_the_rpc_ends_when_it_is_there_or_the_stack_is_dead() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        addr = f"127.0.0.1:{free.getsockname()[1]}"
    tries: list[float] = []

    def alive() -> str:
        tries.append(time.monotonic())
        return "the orchestrator has exited with status 1" if len(tries) == 3 else ""

    with pytest.raises(PromptClientError, match=r"^the orchestrator has exited with status 1$"):
        PromptClient.connect(addr, wait_s=60, alive_check=alive)
    assert tries[2] - tries[0] > 0.15
    began = time.monotonic()
    with pytest.raises(PromptClientError, match="Connection refused"):
        PromptClient.connect(addr, wait_s=0.3)
    assert 0.25 < time.monotonic() - began < 30
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", int(addr.rpartition(":")[2])))
        threading.Timer(0.2, server.listen).start()
        PromptClient.connect(addr, wait_s=60).close()


@pytest.mark.parametrize("addr", ["nowhere", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_a_wrong_address_is_a_sentence(addr: str) -> None:
    with pytest.raises(PromptClientError, match=addr):
        PromptClient.connect(addr)


def server(answer: bytes) -> str:
    """One connection, one answer whatever was asked, end of file."""
    sock = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with sock, sock.accept()[0] as client:
            client.recv(65536)
            client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (
            b'{"type":"text_delta","request_id":2,"text":"a"}\n',
            "protocol error: text_delta of request 2 came for request 1",
        ),
        (b'{"type":"shutdown_accepted"}\n', "protocol error: shutdown_accepted"),
        (b'{"type":"later"}\n', "protocol error: no prompt RPC response"),
        (b"HTTP/1.1 400 Bad Request\r\n", "protocol error: no prompt RPC response"),
        (b'\n{"type":"error","error":"go away"}\n', "^go away$"),
        (b'{"type":"text_del', "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_servers_that_do_not_speak_the_protocol(answer: bytes, names: str) -> None:
    with PromptClient.connect(server(answer)) as client, pytest.raises(PromptClientError, match=names):
        list(client.submit("x"))


def test_silence_can_be_limited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addr = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            PromptClient.connect(addr, read_timeout_s=0.05) as client,
            pytest.raises(PromptClientError, match=r"sent nothing for 0\.05 s"),
        ):
            list(client.submit("x"))


# --- the chat -------------------------------------------------------------------------------------------------------
def talk(addr: str, text: str, **options: object) -> tuple[int, str, str]:
    out, log = io.StringIO(), io.StringIO()
    status = chat.run_chat(addr, stdin=io.StringIO(text), stdout=out, stderr=log, **options)  # type: ignore[arg-type]
    return status, out.getvalue(), log.getvalue()


def test_lines_of_stdin_are_one_conversation(stack: Stack) -> None:
    status, out, log = talk(stack.addr, "echo a b\n\necho c", system="be brief", max_tokens=7)
    assert (status, out, log) == (0, "ab\nc\n", "")
    assert [(m.role, m.content) for m in stack.infers[1].messages] == [
        ("system", "be brief"),
        ("user", "echo a b"),
        ("assistant", "ab"),
        ("user", "echo c"),
    ]
    assert stack.infers[1].max_tokens == 7


def test_a_failed_turn_is_said_and_taken_back_and_new_forgets(stack: Stack) -> None:
    status, out, log = talk(stack.addr, "fault no memory\necho a\n/new\necho b\n")
    assert (status, out, log) == (1, "a\nb\n", "mvp-chat: error: no memory\n")
    assert [len(infer.messages) for infer in stack.infers] == [1, 1, 1]


def test_no_stack_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--connect", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "mvp-chat: no prompt RPC at 127.0.0.1:1: Connection refused\n"


def test_the_end_of_the_stack_between_two_turns(stack: Stack) -> None:
    conversation = chat.Chat(stack.addr, out=io.StringIO(), log=io.StringIO())
    assert conversation.say("echo a")
    stack.tell(CloseRpc(reason="bye"))
    stack.until(lambda: stack.reports)
    with pytest.raises(PromptClientError, match="no prompt RPC"):
        conversation.say("echo b")
    assert len(conversation.history) == 2


def test_ctrl_c_stops_the_answer_and_keeps_the_chat_and_ctrl_d_leaves(stack: Stack) -> None:
    """On a real terminal: the signal, the half-typed line, what was said so far."""
    main_end, chat_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tools.chat", "--connect", stack.addr],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"},
        stdin=chat_end,
        stdout=chat_end,
        stderr=chat_end,
        start_new_session=True,
    )
    os.close(chat_end)
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(main_end, 4096):
                seen.extend(data)
        except OSError:
            pass  # the terminal of a process that ended

    threading.Thread(target=read, daemon=True).start()

    def see(fact: Callable[[str], bool]) -> None:
        try:
            stack.until(lambda: fact(seen.decode(errors="replace")), 60)
        except AssertionError:
            pytest.fail(f"the terminal shows {seen!r}")

    try:
        see(lambda text: text.endswith("> "))
        os.write(main_end, b"drip\n")
        see(lambda text: text.count("drip ") > 3)
        process.send_signal(signal.SIGINT)
        see(lambda text: "[stopped]" in text and text.endswith("> "))
        stack.until(lambda: stack.cancels)
        process.send_signal(signal.SIGINT)
        see(lambda text: text.count("> ") >= 3)
        os.write(main_end, b"echo a b\n")
        see(lambda text: "ab\r\n" in text and text.endswith("> "))
        os.write(main_end, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main_end)
    said = stack.infers[1].messages
    assert [message.role for message in said] == ["user", "assistant", "user"]
    assert said[1].content.startswith("drip drip")
