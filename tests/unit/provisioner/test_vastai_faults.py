"""Every failure of vast.ai that has been seen (providers.md A2, "must inject"), and the limits of money and time.

After each: nothing rented is left, or the ledger is told that something may be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.provisioner import vastai_end, vastai_offers
from services.provisioner.ledger import LedgerError
from services.provisioner.plugin import Failed, LeftBehind, MayBeLeft, PluginNodeHandle, ProviderError
from services.provisioner.vastai_api import VastClient, VastError
from services.provisioner.vastai_provider import VastAiProvider
from tests.fakes.vastai.server import INJECTIONS
from tests.unit.provisioner.vastai_stage import FLEET, VastStage, no_machines

PROVEN: set[str] = set()
"""Injections that a test of this file covers; the last test compares."""

needs_machines = pytest.mark.skipif(bool(no_machines()), reason=no_machines())


@pytest.fixture
def market(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VastStage]:
    made = VastStage(tmp_path, real=False)
    monkeypatch.setattr("services.provisioner.vastai_provider.STUCK_S", 20)
    yield made
    made.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[VastStage]:
    made = VastStage(tmp_path, real=True)
    yield made
    made.close()


def client(market: VastStage) -> VastClient:
    return VastClient(market.fake.key, {"VASTAI_BASE_URL": market.fake.url}, pace=0.01)


def fails(market: VastStage, provider: VastAiProvider, kind: type[Exception] = ProviderError) -> str:
    with pytest.raises(kind) as caught:
        market.start(provider)
    return str(caught.value)


# --- a machine that will never serve ----------------------------------------------------------------------------------
@pytest.mark.spec("S1 10.6", "S2 7.1.1")
@pytest.mark.parametrize(
    ("behaviour", "covers", "words"),
    [
        ("stuck", "stuck loading", "does not get on for .*: loading Pulling fs layer"),
        ("oci", "created + OCI/CDI", "OCI runtime create failed"),
        ("exited", "exited", "its state is exited"),
        ("offline", "offline", "its state is offline"),
        ("unknown", "unknown", "does not get on|gives no sign of life"),
        ("outbid", "stopped (outbid)", "its state is stopped"),
        ("drift", "price drift", "it costs"),
    ],
)
def test_it_is_given_back_and_another_is_tried(market: VastStage, behaviour: str, covers: str, words: str) -> None:
    market.fake.offer(behaviour=behaviour, host_id=1)
    market.fake.offer(behaviour=behaviour, host_id=2)
    with pytest.raises(ProviderError, match=words):
        market.start(market.provider())
    assert len(market.fake.created) == 2 and not market.fake.instances
    PROVEN.add(covers)


@pytest.mark.parametrize("kind", ["gone 404", "gone 410"])
def test_an_offer_that_is_gone(market: VastStage, kind: str) -> None:
    market.fake.offer(price=0.1, behaviour="exited")
    market.fake.offer(price=0.2, behaviour="exited")
    market.fake.fault("create", kind)
    fails(market, market.provider())
    assert not market.fake.instances
    PROVEN.add("offer gone")


def test_an_offer_that_was_sold_twice_is_left_for_another(market: VastStage) -> None:
    market.fake.offer(price=0.1)
    market.fake.offer(price=0.2, behaviour="exited")
    market.fake.fault("create", "sold twice")
    assert "its state is exited" in fails(market, market.provider())
    assert len(market.fake.created) == 2 and not market.fake.instances
    PROVEN.add("same offer sold twice")


def test_two_of_one_account_never_ask_for_the_same_offer(market: VastStage) -> None:
    market.fake.offer(price=0.1, behaviour="exited")
    market.fake.offer(price=0.2, behaviour="exited")
    providers = [market.provider(), market.provider()]
    for provider in providers:
        provider._state = market.folder / "state"
    threads = [threading.Thread(target=fails, args=(market, provider)) for provider in providers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asked = [path for method, path, _ in market.fake.requests if method == "PUT" and "/asks/" in path]
    assert len(asked) == len(set(asked)) and not market.fake.instances


# --- the paid call ----------------------------------------------------------------------------------------------------
def test_the_list_lags_behind_the_create(market: VastStage) -> None:
    market.fake.offer(behaviour="exited")
    market.fake.list_lag = 3
    market.fake.fault("create", "hang up after")
    fails(market, market.provider())
    assert len(market.fake.created) == 1 and not market.fake.instances
    PROVEN.add("list lags behind create")


@pytest.mark.parametrize("kind", ["hang up after", "slow after"])
def test_a_create_without_an_answer_is_never_asked_again(market: VastStage, kind: str) -> None:
    market.fake.offer(behaviour="exited")
    market.fake.fault("create", kind)
    provider = market.provider()
    provider.client._http.timeout = httpx.Timeout(0.5)
    fails(market, provider)
    assert len(market.fake.created) == 1 and not market.fake.instances
    PROVEN.add("create times out after creating")


@needs_machines
def test_an_instance_that_appears_after_another_was_rented_is_destroyed(real: VastStage) -> None:
    """Its create was not answered, no look found it, and the next offer serves already."""
    real.fake.offer(price=0.1)
    real.fake.offer(price=0.2)
    real.fake.list_lag = 6
    real.fake.fault("create", "hang up after")
    provider = real.provider()
    provider.prepare()
    handle, watched = real.start(provider)
    until = time.monotonic() + 60
    while len(real.fake.instances) > 1 and time.monotonic() < until:
        time.sleep(0.1)
    late, wanted = real.fake.created
    assert list(real.fake.instances) == [wanted] and real.fake.destroyed == [late]
    assert not any(isinstance(item, Failed) for item in watched.seen)
    provider.stop_node(handle, True)
    assert not real.fake.instances


def test_a_late_instance_keeps_the_entry_open(market: VastStage) -> None:
    market.fake.offer(behaviour="exited")
    market.fake.list_lag = 20
    market.fake.fault("create", "hang up after")
    provider, handle_id = market.provider(), market.handle_id()
    with pytest.raises(MayBeLeft, match="may still appear and is looked for"):
        market.start(provider, handle_id)
    (late,) = market.fake.instances.values()
    late.hidden = 2
    now = time.time_ns() // 1_000_000
    # A young entry is looked for more than once: one empty look proves nothing.
    assert provider.stop_left_behind(LeftBehind(handle_id, "vastai", "cafe0123", 1, "", None, now))
    assert not market.fake.instances


@pytest.mark.parametrize(("passed_ms", "settled"), [(1, False), (179_999, False), (180_000, True)])
def test_a_create_that_nobody_saw_is_certain_three_minutes_after_it_was_asked(
    market: VastStage, passed_ms: int, settled: bool
) -> None:
    """Counted from the attempt, not from the intent of a start that took a quarter of an hour before."""
    asked_ms = 841_000
    left = LeftBehind(market.handle_id(), "vastai", "cafe0123", 1, "", None, asked_ms)

    def look() -> bool:
        # The pace scales the limit as well.
        now_ms = asked_ms + int(passed_ms * 0.05)
        return vastai_end.destroy_left_behind(client(market), left, 0.05, lambda: now_ms)

    if settled:
        assert not look()
    else:
        with pytest.raises(ProviderError, match="may have been rented a moment ago"):
            look()


def test_each_create_is_written_down_before_it_is_asked_for(market: VastStage) -> None:
    market.fake.offer(price=0.1)
    market.fake.offer(price=0.2, behaviour="exited")
    for kind in ("429 text", "gone 404"):
        market.fake.fault("create", kind)
    provider, handle_id, before = market.provider(), market.handle_id(), []

    def creates() -> int:
        return sum(method == "PUT" and "/asks/" in path for method, path, _ in market.fake.requests)

    def attempted(named: str) -> None:
        before.append((named, creates()))

    provider._attempted = attempted
    with pytest.raises(ProviderError):
        market.start(provider, handle_id)
    assert before == [(handle_id, number) for number in range(creates())] and creates() >= 3


def test_nothing_is_rented_that_cannot_be_written_down(market: VastStage) -> None:
    market.fake.offer()
    provider = market.provider()

    def full(_: str) -> None:
        raise LedgerError("cannot write the ledger: no space left on device")

    provider._attempted = full
    with pytest.raises(ProviderError, match="no space left"):
        market.start(provider)
    assert not market.fake.created


def test_a_create_error_with_a_contract(market: VastStage) -> None:
    market.fake.offer(behaviour="exited")
    market.fake.fault("create", "contract")
    fails(market, market.provider())
    assert len(market.fake.created) == 1 and not market.fake.instances
    PROVEN.add("create error with new_contract")


# --- answers that are none --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["user", "ssh", "search", "create", "show", "list", "destroy"])
def test_a_storm_of_429_of_every_shape_on_every_call(market: VastStage, op: str) -> None:
    market.fake.offer(behaviour="exited")
    shapes = ("429 text", "429 detail", "429 json")
    for kind in shapes:
        market.fake.fault(op, kind)
    provider = market.provider()
    provider.prepare()
    assert "its state is exited" in fails(market, provider)
    assert len(market.fake.created) == 1 and not market.fake.instances and not market.fake.faults[op]
    PROVEN.update(shapes)


@pytest.mark.parametrize("op", ["user", "search", "show", "list", "destroy"])
def test_a_call_that_fails_in_every_way(market: VastStage, op: str) -> None:
    market.fake.offer(behaviour="exited")
    for kind in ("500", "502", "truncated", "slow"):
        market.fake.fault(op, kind)
    market.fake.slow_s = 2.5
    provider = market.provider()
    provider.client._http.timeout = httpx.Timeout(2.0)
    provider.prepare()
    assert "its state is exited" in fails(market, provider)
    assert len(market.fake.created) == 1 and not market.fake.instances
    PROVEN.update(("5xx", "truncated JSON", "slow"))


def test_a_wrong_key_comes_as_404(market: VastStage) -> None:
    with pytest.raises(VastError, match="refused the key") as caught:
        VastClient("wrong", {"VASTAI_BASE_URL": market.fake.url}, pace=0).show(1)
    assert caught.value.kind == "auth"
    PROVEN.add("401 as 404")


def test_the_old_list_is_an_error_and_never_empty(market: VastStage) -> None:
    with pytest.raises(VastError) as caught:
        client(market)._once("list", "GET", "/api/v0/instances/")
    assert caught.value.kind == "unknown"
    PROVEN.add("410 on the v0 list")


def test_our_instance_on_the_second_page(market: VastStage) -> None:
    market.fake.foreign(26)
    handle_id = market.handle_id()
    (mine,) = market.fake.foreign(1, f"smq-{FLEET}-{handle_id}")
    assert [item.where for item in market.provider().list_owned().owned] == [f"instance {mine}"]
    assert market.provider().stop_left_behind(LeftBehind(handle_id, "vastai", "cafe0123", 1, ""))
    assert len(market.fake.instances) == 26 and mine not in market.fake.instances
    PROVEN.add("pages")


def test_logs_that_come_late_or_never(market: VastStage) -> None:
    (instance,) = market.fake.foreign(1)
    assert client(market).logs(instance) == "last words\n"
    PROVEN.add("result_url 404, then 200")
    market.fake.logs_come = False
    assert client(market).logs(instance) == ""
    PROVEN.add("result_url never")


# --- the way to the machine -------------------------------------------------------------------------------------------
@needs_machines
@pytest.mark.parametrize(
    ("behaviour", "covers"),
    [
        ("proxy", ("ssh port off by one", "ports null", "newline in addresses")),
        ("wrong proxy", ("ssh host wrong",)),
        ("blocked", ("direct address blocked",)),
    ],
)
def test_one_of_the_addresses_leads_there(real: VastStage, behaviour: str, covers: tuple[str, ...]) -> None:
    real.fake.offer(behaviour=behaviour)
    provider = real.provider()
    provider.prepare()
    handle, _ = real.start(provider)
    provider.stop_node(handle, True)
    assert not real.fake.instances
    PROVEN.update(covers)


# --- money and time ---------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 9.16")
@pytest.mark.parametrize(
    ("limit", "words"),
    [({"max_spend": 0.0003}, r"max_spend = 0.0003 dollars"), ({"max_hours": 0.0001}, r"max_hours = 0.0001")],
)
def test_a_limit_is_kept_while_the_machine_starts(market: VastStage, limit: dict[str, float], words: str) -> None:
    """A machine that is stuck costs money, too; the limit is not one of the reasons to take another."""
    market.fake.offer(price=0.0005 if "max_spend" in limit else 0.3, behaviour="stuck")
    market.fake.offer(price=0.3, behaviour="stuck")
    provider = market.provider(**limit)
    if "max_spend" in limit:
        provider._costs["cafe0123"] = 0.0003
    with pytest.raises(ProviderError, match=words):
        market.start(provider)
    assert len(market.fake.created) == 1 and not market.fake.instances


@needs_machines
def test_what_earlier_attempts_cost_counts(real: VastStage) -> None:
    real.fake.offer(price=0.3, behaviour="exited")
    real.fake.offer(price=0.4)
    provider = real.provider(max_spend=1.0)
    provider.prepare()
    handle, watched = real.start(provider)
    assert 0 < provider._costs["cafe0123"] < 0.1
    provider._costs["cafe0123"] = 0.9999
    watched.wait(lambda seen: any(isinstance(item, Failed) for item in seen), 60)
    end = watched.seen[-1]
    assert isinstance(end, Failed) and "max_spend = 1 dollars is reached" in end.reason
    provider.stop_node(handle, True)
    assert not real.fake.instances


def test_rules_of_price(market: VastStage) -> None:
    wanted = market.slice(max_dph_total=0.5, max_spend=0.04, excluded_hosts=[7])
    offers = [
        {"id": 1, "dph_total": 0.3, "machine_id": 1, "host_id": 7},
        {"id": 2, "dph_total": 0.45, "machine_id": 2, "host_id": 2},
        {"id": 3, "dph_total": None, "machine_id": 3, "host_id": 3},
        {"id": 4, "dph_total": 0.39, "machine_id": 4, "host_id": 4},
        {"id": 5, "dph_total": 0.2, "machine_id": 5, "host_id": 5},
    ]
    # 0.45 an hour would have used up four cents in five minutes: not worth the start.
    assert [offer["id"] for offer in vastai_offers.choose(offers, wanted, {5})] == [4]
    assert vastai_offers.filters(wanted)["dph_total"] == {"lte": 0.4}
    assert vastai_offers.longest_hours(0.4, wanted) == pytest.approx(0.1)
    assert vastai_offers.longest_hours(0.4, market.slice(max_hours=2.0, max_spend=4.0)) == 2.0
    assert vastai_offers.longest_hours(0.4, market.slice()) is None
    assert "offered were $0.300" in vastai_offers.overpriced({"dph_total": 0.32}, 0.3, market.slice())
    assert vastai_offers.overpriced({"dph_total": 0.31}, 0.3, market.slice(max_dph_total=0.31)) == ""
    assert vastai_offers.overpriced({"dph_total": 0.31}, 0.3, market.slice(max_dph_total=0.305)) != ""


def test_the_machine_itself_knows_the_limit(market: VastStage) -> None:
    market.fake.offer(price=0.5, behaviour="exited")
    fails(market, market.provider(max_spend=1.0))
    (rental,) = [body for _, path, body in market.fake.requests if "/asks/" in path]
    assert "sleep 7500; smq_destroy" in rental


# --- the end ----------------------------------------------------------------------------------------------------------
def test_all_with_the_label_go_and_nobody_else(market: VastStage) -> None:
    handle_id = market.handle_id()
    market.fake.foreign(2, f"smq-{FLEET}-{handle_id}")
    others = market.fake.foreign(1, f"smq-{FLEET}-{market.handle_id()}") + market.fake.foreign(3)
    vastai_end.destroy(client(market), 0, handle_id, 0.01)
    assert sorted(market.fake.instances) == sorted(others)


@pytest.mark.parametrize(
    ("label", "handle_id", "ours"),
    [
        ("smq-f-h", "h", True),
        ("sgi-1", "sgi-1", True),
        ("sgi-12", "sgi-1", False),
        ("h", "", False),
        ("other-h", "h", False),
        ("", "h", False),
    ],
)
def test_whose_label(label: str, handle_id: str, ours: bool) -> None:
    assert vastai_offers.is_of(label, handle_id) is ours


def test_a_stop_after_the_machine_destroyed_itself(market: VastStage) -> None:
    handle = PluginNodeHandle("cafe0123-1-00", None, {"instance": 4711})
    assert not market.provider().stop_left_behind(LeftBehind(handle.id, "vastai", "cafe0123", 1, "", handle))


def test_every_failure_that_was_seen_has_a_test(request: pytest.FixtureRequest) -> None:
    """Only meaningful when the whole file ran."""
    ran = {item.name.partition("[")[0] for item in request.session.items if item.path == request.path}
    written = {name for name, value in globals().items() if name.startswith("test_") and callable(value)}
    if ran >= written and not no_machines():
        assert set(INJECTIONS) == PROVEN
