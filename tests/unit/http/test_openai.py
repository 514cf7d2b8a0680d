"""The HTTP front with the official client, with plain HTTP, and with clients that behave badly."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from common.limits import PROMPT_QUEUE_LEN_MAX
from tests.unit.http.conftest import MODEL, Front, start_front, stop_front

pytestmark = pytest.mark.e2e

get = functools.partial(httpx.get, timeout=120)
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "echo one two three"}]


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


# --- the official client ---------------------------------------------------------------------------------------
def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "swactor-mq"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("other")


def test_a_chat_answer(client: openai.OpenAI, front: Front) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        max_tokens=7,
        seed=5,
        stop=["END", "\n\n"],
        top_p=0.5,  # type: ignore[arg-type]
    )
    assert answer.choices[0].message.content == "onetwothree"
    assert (answer.choices[0].finish_reason, answer.choices[0].message.role) == ("stop", "assistant")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 1, 4)
    asked = front.stack.infers[0]
    assert [(turn.role, turn.content) for turn in asked.messages] == [
        ("system", "be brief"),
        ("user", "echo one two three"),
    ]
    assert (asked.max_tokens, asked.stop) == (7, ["END", "\n\n"])
    assert asked.sampling is not None
    assert (asked.sampling.temperature, asked.sampling.seed, asked.sampling.top_p) == (0.0, 5, 0.5)


def test_a_streamed_chat_answer(client: openai.OpenAI) -> None:
    with chat(client, "echo a b c", stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "abc"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


def test_completions_are_raw_text(client: openai.OpenAI, front: Front) -> None:
    answer = client.completions.create(model=MODEL, prompt="echo x y")
    assert (answer.choices[0].text, answer.object) == ("xy", "text_completion")
    assert front.stack.infers[0].raw and front.stack.infers[0].prompt == "echo x y"
    assert front.stack.infers[0].max_tokens == 16, "OpenAI's default"
    streamed = client.completions.create(model=MODEL, prompt=["echo x y"], stream=True, max_tokens=3)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "xy"


def test_content_parts_and_the_newer_names(client: openai.OpenAI, front: Front) -> None:
    parts: Any = [{"type": "text", "text": "echo "}, {"type": "text", "text": "ok"}]
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "rules"}, {"role": "user", "content": parts}],
        max_completion_tokens=9,
        user="somebody",
        n=1,
        presence_penalty=0,
    )
    asked = front.stack.infers[0]
    assert [(turn.role, turn.content) for turn in asked.messages] == [("system", "rules"), ("user", "echo ok")]
    assert asked.max_tokens == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 2}, "n is not supported"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 2}, "top_p must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"stop": [""]}, "stop must be"),
        ({"stop": ["x"] * 17}, "at most 16"),
        ({"seed": 2**64}, "seed must be"),
        ({"extra_body": {"no_such": 1}}, "unrecognized request argument: no_such"),
    ],
)
def test_what_is_not_there_is_refused_by_name(steady: Front, options: dict[str, Any], words: str) -> None:
    client = openai.OpenAI(base_url=f"{steady.url}/v1", api_key="none", max_retries=0, timeout=120)
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        chat(client, "echo x", **options)
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here; 'tiny' is"):
        client.chat.completions.create(model="gpt-5", messages=HELLO)  # type: ignore[arg-type]


def test_a_fault_is_a_server_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the engine burned"):
        chat(client, "fault the engine burned")
    with pytest.raises(openai.APIError, match="the engine burned"):
        chat(client, "fault the engine burned", stream=True)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "fault the prompt has 9 tokens, but the context holds 4 and needs room for an answer")
    assert caught.value.code == "context_length_exceeded"


# --- leaving, waiting, crowds ----------------------------------------------------------------------------------
@pytest.mark.spec("S1 2.5")
def test_leaving_a_stream_cancels_the_prompt(client: openai.OpenAI, front: Front) -> None:
    stream = chat(client, "drip", stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    front.stack.until(lambda: front.stack.cancels)
    assert chat(client, "echo next").choices[0].message.content == "next", "the slot is free again"


def test_leaving_without_a_stream_cancels_too(front: Front) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hang"}]}).encode()
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        front.stack.until(lambda: front.stack.infers)
    front.stack.until(lambda: front.stack.cancels)


def test_a_stream_that_waits_is_told_its_position(front: Front, client: openai.OpenAI) -> None:
    blocker = chat(client, "drip", stream=True)
    next(blocker)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "echo later"}], "stream": True}
    with httpx.stream("POST", f"{front.url}/v1/chat/completions", json=body, timeout=120) as waiting:
        lines = waiting.iter_lines()
        assert next(lines) == ": queued 1"
        blocker.close()
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == "later"


def test_a_full_queue_is_429_with_retry_after(front: Front, client: openai.OpenAI) -> None:
    blocker = chat(client, "drip", stream=True)
    next(blocker)
    host, port = front.stack.addr.rsplit(":", 1)
    waiting = []
    for number in range(PROMPT_QUEUE_LEN_MAX):
        sock = socket.create_connection((host, int(port)))
        sock.sendall(b'{"request_id":%d,"prompt_text":"echo x"}\n' % number)
        waiting.append(sock)
    front.stack.until(lambda: front.stack.gateway.loop and len(front.stack.gateway.loop.queue) == PROMPT_QUEUE_LEN_MAX)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="queue full") as caught:
            chat(client, "echo x", stream=stream)
        assert caught.value.response.headers["retry-after"] == "5"
    for sock in waiting:
        sock.close()
    blocker.close()


def test_two_hundred_idle_clients_and_fifty_prompts(front: Front) -> None:
    """Nothing is lost, nothing comes twice, whoever connects and says nothing costs nobody anything."""
    host, port = front.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(200)]
    limits = httpx.Limits(max_connections=60)
    with httpx.Client(timeout=60, limits=limits) as http, ThreadPoolExecutor(50) as pool:

        def ask(number: int) -> str:
            words = " ".join(f"{number}.{at}" for at in range(20))
            body = {"model": MODEL, "messages": [{"role": "user", "content": f"echo {words}"}], "stream": True}
            text = ""
            with http.stream("POST", f"{front.url}/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            for line in lines[:-1]:
                text += json.loads(line)["choices"][0]["delta"].get("content") or ""
            return text

        answers = list(pool.map(ask, range(50)))
    assert answers == ["".join(f"{number}.{at}" for at in range(20)) for number in range(50)]
    assert len(front.stack.infers) == 50
    for sock in idle:
        sock.close()


# --- plain HTTP ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz"])
def test_health(steady: Front, path: str) -> None:
    assert get(steady.url + path).status_code == 200


def test_no_rpc_is_503(tmp_path: Path) -> None:
    process, url = start_front("--rpc-file", str(tmp_path / "prompt_rpc.addr"))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "echo x"}]}
    try:
        assert get(f"{url}/healthz").status_code == 200
        for response in (get(f"{url}/readyz"), httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)):
            assert response.status_code == 503 and "retry-after" in response.headers
            assert response.json()["error"]["code"] == "not_serving"
        # The gateway binds: the front finds it without a restart.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            (tmp_path / "prompt_rpc.addr").write_text(f"127.0.0.1:{listener.getsockname()[1]}")
            assert get(f"{url}/readyz").status_code == 200
    finally:
        stop_front(process)


def test_an_rpc_that_dies_in_mid_answer_is_said_in_the_stream(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def half_an_answer() -> None:
            sock, _ = listener.accept()
            sock.recv(4096)
            sock.sendall(b'{"type":"text_delta","request_id":1,"text":"half"}\n{"type":"text_de')
            sock.close()

        thread = threading.Thread(target=half_an_answer)
        thread.start()
        process, url = start_front("--connect", f"127.0.0.1:{listener.getsockname()[1]}")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        thread.join()
        stop_front(process)
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert "went away in the middle of the answer" in json.loads(lines[-1])["error"]["message"]
    assert "[DONE]" not in lines


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"model":"tiny"}', "application/json", 400),
        (b'{"model":1,"messages":[]}', "application/json", 400),
        (b'{"messages":[{"role":"user","content":7}]}', "application/json", 400),
        (b'{"messages":[{"role":"robot","content":""}]}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b" " * (2 * 1024 * 1024 + 1), "application/json", 413),
    ],
)
def test_bad_bodies(steady: Front, content: bytes, kind: str, status: int) -> None:
    response = httpx.post(
        f"{steady.url}/v1/chat/completions", content=content, headers={"content-type": kind}, timeout=120
    )
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert get(f"{steady.url}/healthz").status_code == 200


def test_unknown_paths_and_other_names_for_this_machine(front: Front) -> None:
    assert get(f"{front.url}/v1/nothing").json()["error"]["code"] == "unknown_url"
    assert get(f"{front.url}/v1/chat/completions").status_code == 405
    response = get(f"{front.url}/v1/models", headers={"host": "evil.example:80"})
    assert response.status_code == 421 and "error" in response.json()
    assert get(f"{front.url}/v1/models", headers={"host": "localhost:1234"}).status_code == 200


def test_a_token(tmp_path: Path, front: Front) -> None:
    token = tmp_path / "token"
    token.write_text("abc-123\n")
    process, url = start_front("--connect", front.stack.addr, "--token-file", str(token))
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="abc-123", max_retries=0, timeout=120) as good:
            assert chat(good, "echo in").choices[0].message.content == "in"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="abc-124", max_retries=0, timeout=120) as bad:
            with pytest.raises(openai.AuthenticationError) as caught:
                chat(bad, "echo in")
            assert caught.value.code == "invalid_api_key"
        assert get(f"{url}/readyz").status_code == 200, "probes have no token"
        assert get(f"{url}/v1/models").status_code == 401
    finally:
        stop_front(process)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--http", "0.0.0.0:0"], "could be reached from other machines without any password"),
        (["--http", "example.org:80"], "it is not IP:PORT"),
        (["--http", "127.0.0.1:99999"], "no port number"),
        (["--http", "127.0.0.1:0", "--token-file", "/nowhere/token"], "cannot be read"),
        (["--http", "127.0.0.1:0", "--token-file", "EMPTY"], "is empty"),
    ],
)
def test_what_keeps_it_from_starting(tmp_path: Path, arguments: list[str], words: str) -> None:
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    command = [sys.executable, "-P", "-m", "services.prompt_gateway.http", "--connect", "127.0.0.1:1"]
    done = subprocess.run(
        [*command, *(str(empty) if word == "EMPTY" else word for word in arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1


def test_a_busy_address_is_one_sentence(front: Front) -> None:
    address = front.url.removeprefix("http://")
    command = [
        sys.executable,
        "-P",
        "-m",
        "services.prompt_gateway.http",
        "--connect",
        "127.0.0.1:1",
        "--http",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "Address already in use" in done.stderr


def test_it_ends_with_its_owner_although_a_stream_is_open(front: Front, client: openai.OpenAI) -> None:
    stream = chat(client, "drip", stream=True)
    next(stream)
    front.process.terminate()
    assert front.process.wait(60) == 0
    front.stack.until(lambda: front.stack.cancels)
