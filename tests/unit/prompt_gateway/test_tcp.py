"""The gateway on real sockets: fragments, half close, garbage, slow readers, vanished clients, busy ports, closing."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.limits import CLIENT_BUFFER_BYTES_MAX
from common.messages.serve import CloseRpc, RpcClosed, ShutdownRequested
from services.prompt_gateway.bind import split_addr
from tests.unit.prompt_gateway.stack import Stack


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running


def dial(stack: Stack, receive_buffer: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(split_addr(stack.addr))
    return sock


def ask(sock: socket.socket, prompt: str, request_id: int = 1) -> None:
    sock.sendall(json.dumps({"request_id": request_id, "prompt_text": prompt}).encode() + b"\n")


def lines(sock: socket.socket, until: str = "") -> list[dict[str, Any]]:
    """Lines up to one of type `until`, or to the end of file."""
    found = []
    with sock.makefile("rb") as stream:
        for line in stream:
            found.append(json.loads(line))
            if found[-1]["type"] == until:
                break
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [line["type"] for line in found]


@pytest.mark.spec("S1 7.8", "S1 2.5")
def test_a_prompt_in_single_bytes_and_two_in_a_row(stack: Stack) -> None:
    with dial(stack) as sock:
        for byte in b'{"request_id":1,"prompt_text":"echo a b c"}\n':
            sock.sendall(bytes([byte]))
        found = lines(sock, "done")
        assert [line.get("text") for line in found] == ["a", "b", "c", None]
        ask(sock, "echo again", request_id=2)
        assert lines(sock, "done")[-1]["final_text"] == "again"


def test_half_close_gets_the_whole_answer_and_then_the_end(stack: Stack) -> None:
    with dial(stack) as sock:
        sock.sendall(b'{"request_id":1,"prompt_text":"echo a b"}')
        sock.shutdown(socket.SHUT_WR)
        assert kinds(lines(sock)) == ["text_delta", "text_delta", "done"]
    stack.until(lambda: not stack.gateway.connections)


@pytest.mark.parametrize("how", ["close", "reset", "half close, then close"])
@pytest.mark.parametrize("prompt", ["hang", "drip"])
def test_a_client_that_goes_is_noticed_at_once_even_while_nothing_streams(stack: Stack, prompt: str, how: str) -> None:
    sock = dial(stack)
    ask(sock, prompt)
    stack.until(lambda: stack.infers)
    if how.startswith("half"):
        sock.shutdown(socket.SHUT_WR)
        time.sleep(0.05)
        assert stack.cancels == []
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    stack.until(lambda: stack.cancels == [stack.infers[0].request_id])
    stack.until(lambda: not stack.gateway.connections)
    with dial(stack) as other:
        ask(other, "echo x")
        assert lines(other, "done")


@pytest.mark.spec("S1 10.9")
def test_ten_megabytes_without_newline_cost_one_error_line_and_no_memory(stack: Stack) -> None:
    with dial(stack) as other:
        ask(other, "drip")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with dial(stack) as sock:
            chunk = b"x" * 65536
            try:
                for _ in range(160):
                    sock.sendall(chunk)
            except OSError:
                pass
            (line,) = lines(sock)
            assert line["type"] == "error"
            assert "longer than" in line["error"]
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 8 * 1024
        assert kinds(lines(other, "text_delta")) == ["text_delta"]


def test_garbage_ends_the_connection_with_a_readable_error_although_more_garbage_follows(stack: Stack) -> None:
    with dial(stack) as sock:
        ask(sock, "hang", request_id=5)
        stack.until(lambda: stack.infers)
        sock.sendall(b"\x00\xffnonsense\n" * 20_000)
        found = lines(sock)
        assert kinds(found) == ["fault", "error"]
        assert found[0]["request_id"] == 5
    stack.until(lambda: stack.cancels)


@pytest.mark.spec("S1 2.5")
def test_a_client_that_does_not_read_is_cut_off(stack: Stack) -> None:
    with dial(stack, receive_buffer=8192) as sock:
        ask(sock, "flood")
        stack.until(lambda: stack.cancels)
        assert all(c.unsent <= CLIENT_BUFFER_BYTES_MAX for c in list(stack.gateway.connections.values()))
        stack.until(lambda: not stack.gateway.connections)
        with dial(stack) as other:
            ask(other, "echo x")
            assert lines(other, "done")


def test_a_client_that_reads_slowly_but_reads_is_served(stack: Stack) -> None:
    with dial(stack) as sock:
        ask(sock, "drip")
        received = b""
        while len(received) < 2000:
            received += sock.recv(64)
    assert received.count(b"\n") > 20


@pytest.mark.spec("S1 4.10", "S1 10.9")
def test_a_busy_port_is_one_sentence(stack: Stack) -> None:
    with Stack(rpc_bind=stack.addr) as second:
        assert second.error == (
            f"the prompt RPC cannot be bound at {stack.addr}: the address is in use; "
            "stop what listens there, or set [prompt] rpc_addr to another port"
        )


def test_an_address_of_no_interface_is_one_sentence() -> None:
    with Stack(rpc_bind="127.0.0.1:1") as stack:
        if os.geteuid() != 0:
            assert "Permission denied" in stack.error
    with Stack(rpc_bind="[::1]:0") as stack:
        assert stack.addr.startswith("[::1]:") or "[prompt] rpc_addr" in stack.error


def test_the_port_is_free_again_at_once(stack: Stack) -> None:
    with dial(stack) as sock:
        ask(sock, "echo x")
        lines(sock, "done")
        stack.tell(CloseRpc(reason="bye"))
        assert lines(sock) == []
        stack.until(lambda: stack.reports)
    with Stack(rpc_bind=stack.addr) as second:
        assert second.addr == stack.addr


@pytest.mark.spec("S1 9.10")
def test_closing_ends_every_prompt_and_every_connection(stack: Stack) -> None:
    socks = [dial(stack) for _ in range(5)]
    for sock in socks:
        ask(sock, "hang")
    stack.until(lambda: stack.gateway.loop and len(stack.gateway.loop.queue) == 4)
    stack.tell(CloseRpc(reason="shutdown requested by stdin"))
    for sock in socks:
        (line,) = lines(sock)
        assert (line["type"], line["error"]) == ("fault", "shutdown requested by stdin")
    # The clients keep their sockets open: the gateway does not wait for them.
    stack.until(lambda: stack.reports)
    assert stack.reports == [RpcClosed(settled=5)]
    with pytest.raises(ConnectionRefusedError):
        dial(stack)
    for sock in socks:
        sock.close()


def test_idle_clients_do_not_hold_the_end_up(stack: Stack) -> None:
    with dial(stack) as idle, dial(stack) as used:
        ask(used, "echo x")
        lines(used, "done")
        stack.until(lambda: len(stack.gateway.connections) == 2)
        stack.tell(CloseRpc(reason="bye"))
        assert (lines(idle), lines(used)) == ([], [])
        stack.until(lambda: stack.reports == [RpcClosed(settled=0)])


def test_shutdown_request(stack: Stack) -> None:
    with dial(stack) as sock:
        sock.sendall(b'{"type":"shutdown"}\n')
        assert lines(sock, "shutdown_accepted") == [{"type": "shutdown_accepted"}]
    stack.until(lambda: stack.reports == [ShutdownRequested(source="rpc")])


def test_no_descriptor_left_turns_clients_away_instead_of_spinning(stack: Stack) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = dial(stack)
    stack.until(lambda: stack.gateway.connections)
    spare = socket.socket()
    spare.settimeout(60)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    fillers = []
    try:
        try:
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        spare.connect(split_addr(stack.addr))
        assert spare.recv(1) == b""
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with sock:
        ask(sock, "echo x")
        assert lines(sock, "done")
    spare.close()
