"""The shapes of the datastream's records, key by key as S1 8.3-8.7 print them."""

from __future__ import annotations

import json

import pytest

from common import records


def test_bootstrap_record_has_the_envelope_of_the_specification() -> None:
    payload = records.bootstrap_record("provider_start", "started", 1, 2, {"provider": "process"})
    assert payload == (
        b'{"type":"OrchBootstrap","phase":"provider_start","status":"started","run_id":1,"node_id":2,'
        b'"detail":{"provider":"process"}}'
    )


def test_prompt_record_has_the_envelope_of_the_specification() -> None:
    payload = records.prompt_record("prompt_complete", "ready", 1, 1, 7)
    assert list(json.loads(payload)) == ["type", "phase", "status", "run_id", "node_id", "request_id", "detail"]
    assert json.loads(payload)["request_id"] == 7


@pytest.mark.spec("S1 8.6")
def test_event_record_has_the_shape_of_the_specification() -> None:
    payload = records.event_record("NodeLive", 1, 2, "process", "node 2 runs")
    assert payload == (
        b'{"event":{"run_id":1,"node_id":2,"kind":"NodeLive","provider":"process","message":"node 2 runs"}}'
    )


@pytest.mark.spec("S1 8.6")
def test_only_the_four_kinds_are_events() -> None:
    assert [kind.value for kind in records.EventKind] == [
        "ProvisionStart",
        "NodeLive",
        "ProvisionFailed",
        "NodeStopped",
    ]
    with pytest.raises(ValueError, match="Exploded"):
        records.event_record("Exploded", 1, 2)


@pytest.mark.spec("S1 8.7")
def test_log_record_has_the_shape_of_the_specification() -> None:
    payload = records.log_record(1, 2, records.LogStream.STDERR, 'say "ü"')
    assert payload == '{"line":{"run_id":1,"node_id":2,"stream":"Stderr","line":"say \\"ü\\""}}'.encode()


@pytest.mark.spec("S1 8.7")
@pytest.mark.parametrize(("stream", "last"), [("Stdout", "stdout"), ("stderr", "stderr"), ("Provider", "provider")])
def test_each_stream_of_a_node_has_its_channel(stream: str, last: str) -> None:
    assert records.log_channel(12, stream) == f"mvp.provisioning.logs.node.12.{last}"


def test_an_unknown_stream_has_no_channel() -> None:
    with pytest.raises(ValueError, match="Stdin"):
        records.log_channel(1, "stdin")


def test_a_path_that_is_no_utf8_still_makes_a_record() -> None:
    payload = records.bootstrap_record(
        "provider_start", "failed", 1, 1, {"error": b"no \xff here".decode("utf-8", "surrogateescape")}
    )
    assert json.loads(payload)["detail"] == {"error": "no ? here"}
