"""Views: a table, its deltas and its copies say the same, or the copy knows that it does not know."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.addresses import Role
from common.messages.bus import Delta, MemberEntry, NameEntry, PathEntry, RouteEntry, Snapshot
from common.views import Replica, RouteReplica, Views, ViewTable, item_key


def route(number: int, *, boot: int = 1, name: str = "") -> RouteEntry:
    address = number.to_bytes(32, "big")
    return RouteEntry(address=address, node=address, boot=boot, generation=1, role=Role.AGENT, name=name)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=3),
            st.lists(st.integers(0, 5), max_size=3),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_a_copy_follows_or_asks_again(changes: list[tuple[list[tuple[int, int]], list[int], bool]]) -> None:
    table, copy = ViewTable("routes"), RouteReplica("routes")
    copy.apply(table.snapshot())
    for changed, removed, lost in changes:
        before = table.version
        delta = table.change([route(n, boot=boot) for n, boot in changed], [n.to_bytes(32, "big") for n in removed])
        assert (delta is None) == (table.version == before)
        if delta is None or lost:
            continue
        if not copy.apply(delta):
            assert not copy.known
            assert copy.apply(table.snapshot())
        assert copy.items == table.items and copy.version == table.version and copy.known


def test_a_copy_without_a_snapshot_takes_no_delta() -> None:
    copy = Replica("routes")
    assert not copy.apply(Delta(view="routes", version=1, changed=[route(1)]))
    assert not copy.known and copy.items == {}
    assert copy.apply(Snapshot(view="routes", version=7, items=[route(1)]))
    assert not copy.apply(Delta(view="routes", version=7)), "said twice"
    copy.forget()
    assert not copy.known and copy.items == {}


@pytest.mark.spec("S1 6.2")
def test_routes_by_address_and_by_name() -> None:
    routes = RouteReplica("routes")
    assert routes.owner(b"x" * 32) is None and routes.named("prompt_gateway") is None
    routes.apply(Snapshot(view="routes", version=1, items=[route(1, name="prompt_gateway"), route(2)]))
    assert routes.owner(route(2).address) == route(2)
    assert routes.named("prompt_gateway") == route(1, name="prompt_gateway")
    assert routes.named("") is None
    routes.apply(Delta(view="routes", version=2, removed=[route(1).address]))
    assert routes.named("prompt_gateway") is None


@pytest.mark.spec("S1 7.7")
def test_members_read_unknown_while_nobody_says_otherwise() -> None:
    views = Views()
    node = b"n" * 32
    entry = MemberEntry(node=node, boot=1, logical_id="n", role=Role.AGENT, state="suspect", incarnation=1)
    assert views.members.state(node) == "unknown"
    views.members.apply(Snapshot(view="members", version=1, items=[entry]))
    assert views.members.state(node) == "suspect" and views.members.state(b"o" * 32) == "unknown"
    views.members.forget()
    assert views.members.state(node) == "unknown" and views.members.member(node) is None


def test_a_path_that_is_down_is_seen() -> None:
    views = Views()
    up, down = (PathEntry(broker=b"b" * 32, next_hop=hop * 32, up=hop == b"u") for hop in (b"u", b"d"))
    views.paths.apply(Snapshot(view="paths", version=1, items=[up]))
    assert not views.paths.any_down()
    views.paths.apply(Delta(view="paths", version=2, changed=[down]))
    assert views.paths.any_down()


def test_names_of_views_and_keys_of_items() -> None:
    views = Views()
    assert [views.by_name(name).view for name in ("routes", "members", "paths", "names")] == [
        "routes",
        "members",
        "paths",
        "names",
    ]
    with pytest.raises(KeyError):
        views.by_name("weather")
    assert item_key(NameEntry(name="n", address=b"a" * 32, node=b"b" * 32)) == b"n"
