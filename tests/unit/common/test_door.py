"""The door for workers from elsewhere: ports, bus files, and which provider gets which (design.md 3, relay)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from common.addresses import Plane, Role
from common.door import Door, DoorError, free_ports, remote_door, tcp_endpoints
from common.messages.config import ConfigResolved
from common.security import init, main, read_bus_file
from services.orchestrator.door import choose_door

KEY = "ab" * 32


def test_four_ports_from_one_address() -> None:
    assert tcp_endpoints("10.0.0.5:19800") == {
        Plane.CONTROL: "tcp://10.0.0.5:19800",
        Plane.PROMPT: "tcp://10.0.0.5:19801",
        Plane.EDGE: "tcp://10.0.0.5:19802",
        Plane.STREAM: "tcp://10.0.0.5:19803",
    }


def test_free_ports_are_free_and_neighbours() -> None:
    first = free_ports("127.0.0.1")
    for port in range(first, first + 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(DoorError, match=r"203\.0\.113\.9 is no address of this machine"):
        free_ports("203.0.113.9")


@pytest.mark.parametrize("relay", [False, True])
def test_bus_files_with_a_door(tmp_path: Path, relay: bool) -> None:
    door = Door("10.0.0.5:19800", "box.example:19900")
    files = {role: read_bus_file(path) for role, path in init(tmp_path / "r", relay=relay, door=door).items()}
    broker = Role.RELAY if relay else Role.ROUTER
    assert files[broker].door == tcp_endpoints("10.0.0.5:19800")
    assert all(endpoint.startswith("ipc:") for endpoint in files[broker].endpoints.values())
    assert files[Role.PROVISIONER].worker_endpoints == tcp_endpoints("box.example:19900")
    assert files[Role.PROVISIONER].worker_key == files[broker].keys.public
    others = [file for role, file in files.items() if role not in (broker, Role.PROVISIONER)]
    assert not any(file.door for file in others)
    if relay:
        assert all(endpoint.startswith("ipc:") for endpoint in files[Role.ROUTER].uplink_endpoints.values())


def test_bus_files_with_a_relay_elsewhere(tmp_path: Path) -> None:
    door = remote_door(f"curve://{KEY}@relay.example:19800")
    files = {role: read_bus_file(path) for role, path in init(tmp_path / "r", relay=False, door=door).items()}
    assert Role.RELAY not in files
    assert files[Role.ROUTER].uplink_key == files[Role.PROVISIONER].worker_key == bytes.fromhex(KEY)
    assert files[Role.ROUTER].uplink_endpoints == tcp_endpoints("relay.example:19800")
    assert files[Role.PROVISIONER].worker_endpoints == tcp_endpoints("relay.example:19800")


def test_without_a_door_everything_is_ipc(tmp_path: Path) -> None:
    files = {role: read_bus_file(path) for role, path in init(tmp_path / "r", relay=True).items()}
    assert all(endpoint.startswith("ipc:") for endpoint in files[Role.PROVISIONER].worker_endpoints.values())


def test_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "r"), "--relay", "--bind", "127.0.0.1:19800"]) == 0
    assert read_bus_file(tmp_path / "r" / "bus" / "relay.json").door == tcp_endpoints("127.0.0.1:19800")
    assert main(["init", str(tmp_path / "r"), "--relay-url", "nonsense"]) == 1
    assert "nonsense is no relay" in capsys.readouterr().err


def resolved(provider: str, **more: str) -> ConfigResolved:
    return ConfigResolved(digest="", provider=provider, **more)


def test_each_provider_has_its_door() -> None:
    assert choose_door(resolved("process"), {}) is None
    tunnelled = choose_door(resolved("vastai"), {})
    assert (
        tunnelled is not None and tunnelled.bind.startswith("127.0.0.1:") and tunnelled.advertise == "127.0.0.1:19840"
    )
    own = choose_door(resolved("docker", relay_bind="10.0.0.5:19800"), {})
    assert own == Door("10.0.0.5:19800", "10.0.0.5:19800")
    elsewhere = choose_door(resolved("docker", relay_url=f"curve://{KEY}@h:1"), {})
    assert elsewhere == Door(advertise="h:1", key=bytes.fromhex(KEY))
    with pytest.raises(DoorError, match=r"provider external needs an address .* set \[relay\] bind_addr"):
        choose_door(resolved("external"), {})
    with pytest.raises(DoorError, match="no engine answers at unix:///nowhere"):
        choose_door(resolved("docker"), {"DOCKER_HOST": "unix:///nowhere"})
