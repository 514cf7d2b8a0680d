"""Provider vastai against a vast.ai that misbehaves: whatever happens, nothing rented is left or forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.provisioner.plugin import LeftBehind, MayBeLeft, ProviderError, ProviderLine
from services.provisioner.vastai_api import VastClient, VastError
from services.provisioner.vastai_provider import VastAiProvider
from tests.unit.provisioner.vastai_stage import FLEET, VastStage


@pytest.fixture
def market(tmp_path: Path) -> Iterator[VastStage]:
    """Without real machines: for everything that ends before one is needed."""
    made = VastStage(tmp_path, real=False)
    yield made
    made.close()


def client(market: VastStage, key: str = "") -> VastClient:
    return VastClient(key or market.fake.key, {"VASTAI_BASE_URL": market.fake.url}, pace=0.01)


# --- preparation --------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.3", "S1 10.5")
def test_preparation_registers_the_key_once(market: VastStage) -> None:
    market.provider().prepare()
    market.provider().prepare()
    assert market.fake.keys == [market.public]


@pytest.mark.spec("S1 7.3", "S1 10.5")
def test_preparation_refuses_with_one_sentence(market: VastStage) -> None:
    with pytest.raises(ProviderError, match=r"nothing is rented: set \[vastai\] confirm_lease = true"):
        market.provider(confirm_lease=False).prepare()
    with pytest.raises(ProviderError, match=r"refused the key \(Invalid user key\); check VASTAI_API_KEY"):
        market.provider(api_key_file=market.secret("wrong", "nonsense")).prepare()
    market.fake.fault("ssh add", "400")
    with pytest.raises(ProviderError, match="team keys may not"):
        market.provider().prepare()
    assert market.fake.created == []


# --- the interface ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["empty", "truncated", "failed", "500", "hang up", "502"])
def test_what_cannot_be_listed_is_unknown_and_never_none(market: VastStage, kind: str) -> None:
    market.fake.foreign(2)
    market.fake.fault("list", kind, 50)
    with pytest.raises(VastError):
        client(market).list_all()
    market.fake.faults.clear()
    assert len(client(market).list_all()) == 2


@pytest.mark.parametrize("kind", ["429 text", "429 detail", "429 json", "500", "hang up", "truncated"])
def test_reads_are_repeated(market: VastStage, kind: str) -> None:
    market.fake.foreign(1)
    market.fake.fault("list", kind, 3)
    assert len(client(market).list_all()) == 1


def test_the_list_has_pages(market: VastStage) -> None:
    ids = market.fake.foreign(60)
    assert [row["id"] for row in client(market).list_all()] == ids


def test_the_key_is_in_no_address_and_no_error(market: VastStage) -> None:
    market.fake.fault("user", "failed")
    with pytest.raises(VastError) as caught:
        client(market).user()
    assert market.fake.key not in str(caught.value)
    assert all(market.fake.key not in path + body for _, path, body in market.fake.requests)


# --- renting ------------------------------------------------------------------------------------------------------
def fails(market: VastStage, provider: VastAiProvider, kind: type[Exception] = ProviderError) -> str:
    with pytest.raises(kind) as caught:
        market.start(provider)
    return str(caught.value)


@pytest.mark.spec("S1 10.6", "S2 7.1.1")
@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("oci", "OCI runtime create failed"),
        ("exited", "its state is exited"),
        ("offline", "its state is offline"),
        ("outbid", "its state is stopped"),
        ("drift", "it costs \\$0.600 an hour, offered were \\$0.300"),
    ],
)
def test_a_machine_that_will_never_serve_is_given_back_and_three_are_tried(
    market: VastStage, behaviour: str, words: str
) -> None:
    for _ in range(5):
        market.fake.offer(behaviour=behaviour)
    with pytest.raises(ProviderError, match=words):
        market.start(market.provider())
    assert len(market.fake.created) == 3 and not market.fake.instances


def test_a_failed_host_is_not_rented_from_again(market: VastStage) -> None:
    for _ in range(4):
        market.fake.offer(behaviour="exited", host_id=7)
    assert "its state is exited, and no other machine is within the limits" in fails(market, market.provider())
    assert len(market.fake.created) == 1 and not market.fake.instances


def test_limits_of_price_and_hosts(market: VastStage) -> None:
    market.fake.offer(price=0.9)
    market.fake.offer(price=0.1, host_id=5)
    market.fake.offer(price=0.1, verification="deverified")
    assert "no machine within the limits" in fails(market, market.provider(max_dph_total=0.5, excluded_hosts=[5]))
    assert market.fake.created == []


@pytest.mark.parametrize("kind", ["gone 404", "gone 410", "429 text", "429 json"])
def test_an_offer_that_is_gone_is_not_an_attempt(market: VastStage, kind: str) -> None:
    market.fake.offer(price=0.1, behaviour="exited")
    market.fake.offer(price=0.2, behaviour="exited")
    market.fake.fault("create", kind)
    assert "its state is exited" in fails(market, market.provider())
    assert not market.fake.instances


def test_an_error_with_a_contract_is_destroyed(market: VastStage) -> None:
    market.fake.offer(behaviour="exited")
    market.fake.fault("create", "contract")
    fails(market, market.provider())
    assert len(market.fake.created) == 1 and not market.fake.instances


def test_a_rental_without_an_answer_is_found_by_its_label(market: VastStage) -> None:
    market.fake.foreign(30)
    market.fake.list_lag = 1
    market.fake.offer(behaviour="exited")
    market.fake.fault("create", "hang up after")
    assert "its state is exited" in fails(market, market.provider())
    assert len(market.fake.created) == 1 and len(market.fake.instances) == 30


@pytest.mark.parametrize("listing", ["500", "failed"])
def test_a_rental_that_nobody_knows_of_stays_owed(market: VastStage, listing: str) -> None:
    market.fake.offer(behaviour="exited")
    market.fake.offer(behaviour="exited")
    market.fake.fault("create", "hang up after")
    market.fake.fault("list", listing, 100)
    provider, handle_id = market.provider(), market.handle_id()
    with pytest.raises(MayBeLeft):
        market.start(provider, handle_id)
    assert len(market.fake.created) == 1, "never rent again while something may be rented"
    market.fake.faults.clear()
    assert market.provider().stop_left_behind(LeftBehind(handle_id, "vastai", "cafe0123", 1, ""))
    assert not market.fake.instances


def test_a_destruction_is_repeated_until_a_list_proves_it(market: VastStage) -> None:
    market.fake.offer(behaviour="exited")
    market.fake.fault("destroy", "429 text", 3)
    market.fake.fault("destroy", "500", 2)
    market.fake.fault("list", "failed", 1)
    fails(market, market.provider())
    assert not market.fake.instances


def test_a_destruction_that_is_never_proven_stays_owed(market: VastStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.provisioner.vastai_end.DESTROY_S", 1)
    market.fake.offer(behaviour="exited")
    market.fake.offer(behaviour="exited")
    market.fake.fault("destroy", "500", 1000)
    assert "may still run and cost money" in fails(market, market.provider(), MayBeLeft)
    assert len(market.fake.created) == 1


def test_a_start_can_be_cancelled(market: VastStage) -> None:
    market.fake.offer(behaviour="stuck")
    provider, handle_id = market.provider(), market.handle_id()

    def cancel() -> None:
        until = time.monotonic() + 60
        while not market.fake.created and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)  # while its machine is waited for
        provider.cancel_start(handle_id)

    threading.Thread(target=cancel, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(ProviderError, match="the start was cancelled"):
        market.start(provider, handle_id)
    assert time.monotonic() - begin < 60
    assert len(market.fake.created) == 1 and not market.fake.instances


@pytest.mark.spec("S1 9.16")
def test_only_what_bears_our_label_is_ever_destroyed(market: VastStage) -> None:
    market.fake.foreign(26)
    handle_id = market.handle_id()
    (mine,) = market.fake.foreign(1, f"smq-{FLEET}-{handle_id}")
    (other,) = market.fake.foreign(1, f"smq-{FLEET}-{market.handle_id()}")
    left = LeftBehind(handle_id, "vastai", "cafe0123", 1, "")
    assert market.provider().stop_left_behind(left)
    assert mine not in market.fake.instances and other in market.fake.instances
    assert len(market.fake.instances) == 27
    assert not market.provider().stop_left_behind(left)


def test_without_a_key_leftovers_stay_in_the_ledger(tmp_path: Path) -> None:
    from services.provisioner.plugin import Owner

    provider = VastAiProvider(None, "", Owner(), [], tmp_path, {})
    with pytest.raises(ProviderError, match="set VASTAI_API_KEY"):
        provider.stop_left_behind(LeftBehind("h", "vastai", "r", 1, ""))


def test_what_is_asked_for(market: VastStage) -> None:
    market.fake.offer(behaviour="exited")
    fails(market, market.provider(gpu_name="RTX_4090", min_gpu_ram_mb=20000, max_dph_total=0.5, max_hours=2.0))
    searches = [body for method, path, body in market.fake.requests if path == "/api/v0/bundles/"]
    assert '"gpu_name": {"eq": "RTX 4090"}' in searches[0].replace('":{', '": {').replace('":"', '": "')
    (rental,) = [body for _, path, body in market.fake.requests if "/asks/" in path]
    assert "hf_x" not in rental and f"smq-{FLEET}-cafe0123-1-" in rental
    assert "smq_destroy" in rental and "CONTAINER_API_KEY" in rental


def test_lines_tell_what_happens(market: VastStage) -> None:
    market.fake.offer(price=0.25, behaviour="exited")
    seen: list[Any] = []
    provider = market.provider()
    with pytest.raises(ProviderError):
        from common.messages.provision import NodeProvisionSpec

        launch = market.folder / "l.json"
        launch.write_text("{}")
        spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="")
        provider.start_node(market.handle_id(), spec, launch, seen.append)
    lines = [item.line for item in seen if isinstance(item, ProviderLine)]
    assert lines[0].startswith("rented instance") and lines[0].endswith("for $0.250 an hour")
    assert "the machine's last words: last words" in lines
