"""Renting with a scripted vast.ai: every row of S2 7.1 to 7.4, and that no path leaves an instance (S2 7.5.1)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.bus import mint_keypair
from tools.single_gpu_inference_call import Limits, Outcome, Result
from tools.single_gpu_inference_client import Interrupted, reply_inbox
from tools.single_gpu_inference_rent import (
    CreateFailed,
    Instance,
    NoOffer,
    Offer,
    Rental,
    RentError,
    give_back,
)
from tools.single_gpu_inference_tunnel import Ports
from tools.single_gpu_inference_vastai import ClientShell
from worker.gpu_node.ends import broker_end, free_ports
from worker.gpu_node.limits import RUNNING_POLL_MS, RUNNING_POLLS_MAX

RUNNING = Instance("running", ssh=(("h", 22),))
LOADING = Instance("loading")
ANSWERED = Result(Outcome.ANSWERED, "Paris")


class World:
    """vast.ai, the shell and the ledger in one, with a script for each."""

    def __init__(self) -> None:
        self.offers = [Offer(number, 1, "RTX 4090", 0.1 * number, "Norway, NO") for number in (1, 2, 3, 4)]
        self.creates: list[Exception | None] = []
        """What the next creates raise."""
        self.polls: list[Instance | Exception | None] = [LOADING, LOADING, RUNNING]
        self.results: list[Result | Exception] = [ANSWERED]
        self.destroy_errors = 0
        self.lag = 0
        """How many lists do not show a new instance yet."""
        self.interrupt_at = ""
        self.alive: dict[int, str] = {}
        self.done: list[str] = []
        self.notes: list[str] = []
        self.answers: list[str] = []
        self.book: dict[str, str] = {}
        self.now_ms = 0
        self.admitted: set[int] = set()
        self._next, self._poll = 100, 0
        self.answered_first: list[str] = []
        self.rental = Rental(self, self, self, "sgi", max_dph=0.35, note=self.notes.append)

    def run(self) -> int:
        return self.rental.run(self.answers.append)

    # Landlord
    def find_offer(self, excluded: frozenset[int]) -> Offer:
        self._step("find")
        left = [offer for offer in self.offers if offer.id not in excluded]
        if not left:
            raise NoOffer("no GPU is for rent")
        return left[0]

    def create(self, offer: Offer, label: str, env: dict[str, str]) -> int:
        assert self.book[label] == "intent", "written down before it is created"
        self._step(f"create {offer.id}")
        self._poll = 0
        failure = self.creates.pop(0) if self.creates else None
        if failure is None or (isinstance(failure, CreateFailed) and (failure.uncertain or failure.contract)):
            self._next += 1
            self.alive[self._next] = label
            if isinstance(failure, CreateFailed) and failure.contract:
                failure.contract = self._next
        if failure is not None:
            raise failure
        return self._next

    def instance(self, contract: int) -> Instance | None:
        self._step("poll")
        found = self.polls[min(self._poll, len(self.polls) - 1)]
        self._poll += 1
        if isinstance(found, Exception):
            raise found
        return found

    def logs(self, contract: int, lines: int) -> str:
        assert contract in self.alive
        self._step(f"logs {lines}")
        return "\n".join(f"line {number}" for number in range(100))

    def destroy(self, contract: int) -> None:
        self.answered_first = self.answers[:]
        self.done.append(f"destroy {contract}")
        if self.destroy_errors:
            self.destroy_errors -= 1
            raise RentError("vast.ai answered 500: x")
        self.alive.pop(contract, None)

    def labelled(self, label: str) -> set[int]:
        if self.lag:
            self.lag -= 1
            return set()
        return {contract for contract, name in self.alive.items() if name == label}

    # Book
    def intent(self, label: str) -> None:
        self.book[label] = "intent"

    def rented(self, label: str, contract: int) -> None:
        self.book[label] = str(contract)

    def settled(self, label: str) -> None:
        del self.book[label]

    # Shell
    def call(self, work: Callable[[], Any], *, last: bool = False) -> Any:
        before = len(self.done)
        result = work()
        if self.interrupt_at and any(step.startswith(self.interrupt_at) for step in self.done[before:]) and not last:
            raise Interrupted("SIGINT")
        return result

    def pause(self, ms: int, *, last: bool = False) -> None:
        self.now_ms += ms
        if self.interrupt_at == "pause" and not last:
            raise Interrupted("SIGINT")

    def admit(self) -> int:
        self.admitted.add(len(self.admitted))
        return max(self.admitted)

    def revoke(self, node: int) -> None:
        self.admitted.discard(node)

    def converse(self, node: int, instance: Instance, limits: Limits) -> Result:
        assert node in self.admitted and instance is RUNNING
        self._step("converse")
        if self.interrupt_at == "converse":
            raise Interrupted("SIGINT")
        result = self.results.pop(0) if self.results else ANSWERED
        if isinstance(result, Exception):
            raise result
        return result

    def environment(self) -> dict[str, str]:
        return {"SEED_ADDR": "ab", "SEED_RELAY": "tcp://127.0.0.1:7"}

    def _step(self, what: str) -> None:
        self.done.append(what)

    def settled_all(self) -> bool:
        """S2 7.5.1: nothing runs, nothing is open in the ledger, no key is let in."""
        return not self.alive and not self.book and not self.admitted and not self.rental.left


@pytest.mark.spec("S2 6.3", "S2 7.5.1")
def test_find_create_poll_ask_destroy() -> None:
    world = World()
    assert world.run() == 0 and world.answers == ["Paris"] and world.settled_all()
    assert world.answered_first == ["Paris"], "nobody waits for the landlord"
    assert world.done == ["find", "create 1", "poll", "poll", "poll", "converse", "destroy 101"]
    assert world.now_ms == 2 * RUNNING_POLL_MS


@pytest.mark.spec("S2 7.1.1")
def test_no_offers_is_status_1_and_nothing_to_clean_up() -> None:
    world = World()
    world.offers = []
    assert world.run() == 1 and world.done == ["find"] and world.notes == ["no GPU is for rent"] and world.settled_all()


@pytest.mark.spec("S2 7.1.2")
def test_a_refused_create_takes_the_next_cheapest_up_to_three_times() -> None:
    world = World()
    world.creates = [CreateFailed("gone"), CreateFailed("gone"), None]
    assert world.run() == 0
    assert [step for step in world.done if step.startswith("create")] == ["create 1", "create 2", "create 3"]
    world = World()
    world.creates = [CreateFailed("gone")] * 3
    assert world.run() == 1 and "3 attempts failed" in world.notes and world.settled_all()
    assert not any(step.startswith("create 4") for step in world.done)


@pytest.mark.spec("S2 7.1.2", "S2 7.5.1")
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_create_whose_answer_is_lost_is_found_by_its_label_and_destroyed(lag: int) -> None:
    world = World()
    world.creates = [CreateFailed("no answer", uncertain=True)]
    world.lag = lag
    assert world.run() == 0 and world.settled_all()
    assert "destroy 101" in world.done and "destroy 102" in world.done


@pytest.mark.spec("S2 7.1.2", "S2 7.5.1")
def test_a_refusal_that_names_a_contract_is_destroyed() -> None:
    world = World()
    world.creates = [CreateFailed("bid too low", contract=1)]
    assert world.run() == 0 and world.settled_all() and "destroy 101" in world.done


@pytest.mark.spec("S2 7.1.3")
@pytest.mark.parametrize(
    "bad",
    [
        Instance("exited"),
        Instance("error"),
        Instance("loading", intended="stopped"),
        Instance("created", message="Error response from daemon: failed to inject CDI devices"),
        Instance("created", message="OCI runtime create failed"),
        Instance("running", dph=9.0),
        None,
    ],
)
def test_an_instance_that_will_not_run_is_destroyed_at_once_and_the_next_offer_tried(bad: Instance | None) -> None:
    world = World()
    world.polls = [LOADING, bad]
    assert world.run() == 1 and world.settled_all()
    assert world.done.count("poll") == 6, "no more polls after it is known"
    assert [step for step in world.done if "destroy" in step] == ["destroy 101", "destroy 102", "destroy 103"]
    assert [step for step in world.done if "create" in step] == ["create 1", "create 2", "create 3"]


@pytest.mark.spec("S2 7.1.3")
def test_sixty_polls_are_the_limit_and_a_failed_read_is_no_verdict() -> None:
    world = World()
    world.polls = [LOADING, RentError("vast.ai answered 502: x"), LOADING]
    assert world.run() == 1 and world.settled_all()
    assert world.done.count("poll") == 3 * RUNNING_POLLS_MAX and world.now_ms == 3 * RUNNING_POLLS_MAX * RUNNING_POLL_MS


@pytest.mark.spec("S2 7.2.1", "S2 7.3.1")
@pytest.mark.parametrize("outcome", [Outcome.NOT_JOINED, Outcome.NODE_GONE])
def test_no_convergence_fetches_40_lines_destroys_and_retries_elsewhere(outcome: Outcome) -> None:
    world = World()
    world.results = [Result(outcome, "x"), ANSWERED]
    assert world.run() == 0 and world.settled_all()
    assert [step for step in world.done if "logs" in step or "destroy" in step or "create" in step] == [
        "create 1",
        "logs 40",
        "destroy 101",
        "create 2",
        "destroy 102",
    ]
    assert world.notes.count("remote: line 60") == 1 and "remote: line 59" not in world.notes


@pytest.mark.spec("S2 7.2.2")
def test_a_name_that_does_not_resolve_destroys_and_ends_without_a_retry() -> None:
    world = World()
    world.results = [Result(Outcome.NOT_RESOLVED, "the name did not resolve")]
    assert world.run() == 1 and world.settled_all() and world.done.count("find") == 1
    assert world.done[-1] == "destroy 101" and not any("logs" in step for step in world.done)
    assert world.notes[-1] == "the name did not resolve"


@pytest.mark.spec("S2 7.3.2", "S2 7.3.3", "S2 7.3.5")
@pytest.mark.parametrize("outcome", [Outcome.FAULT, Outcome.TIMED_OUT])
def test_a_fault_or_timeout_fetches_60_lines_destroys_and_ends(outcome: Outcome) -> None:
    world = World()
    world.results = [Result(outcome, "why")]
    assert world.run() == 1 and world.settled_all() and world.answers == []
    assert (
        world.done[-2:] == ["logs 60", "destroy 101"] and "remote: line 99" in world.notes and world.notes[-1] == "why"
    )


@pytest.mark.spec("S2 7.4.1")
def test_destroy_is_repeated_until_it_is_confirmed() -> None:
    world = World()
    world.destroy_errors = 5
    assert world.run() == 0 and world.settled_all()
    assert world.done.count("destroy 101") == 6
    assert len([note for note in world.notes if "could not be destroyed yet" in note]) == 1


@pytest.mark.spec("S2 7.4.1")
def test_what_cannot_be_destroyed_stays_in_the_ledger_and_is_said() -> None:
    world = World()
    world.destroy_errors = 10_000
    assert world.run() == 1 and world.answers == ["Paris"]
    assert world.rental.left == [101] and world.book == {"sgi-1": "101"}
    assert any("may still run and cost money" in note for note in world.notes)
    world.destroy_errors = 0
    assert give_back(world, world, "sgi-1", 101, world.notes.append, sure=True) and not world.alive


@pytest.mark.spec("S2 7.4.1")
def test_accepted_is_not_gone_while_it_is_still_listed() -> None:
    world = World()
    world.alive[7] = "sgi-9"
    world.destroy = lambda contract: world.done.append("destroy")  # type: ignore[method-assign]
    assert not give_back(world, world, "sgi-9", 7, world.notes.append, sure=True)
    assert world.done.count("destroy") > 10


@pytest.mark.spec("S2 7.5.1")
@pytest.mark.parametrize("at", ["find", "create", "poll", "pause", "converse", "logs"])
def test_ctrl_c_at_every_step_leaves_nothing(at: str) -> None:
    world = World()
    world.interrupt_at = at
    world.results = [Result(Outcome.TIMED_OUT, "x")]
    if at == "create":
        # Waited for even so; the signal is then found at the next step.
        world.polls = [RUNNING]
        assert world.run() == 1
    else:
        with pytest.raises(Interrupted):
            world.run()
    assert world.settled_all()


@pytest.mark.spec("S2 7.5.1")
@pytest.mark.parametrize("error", [RentError("ssh"), RuntimeError("a bug")])
def test_an_error_anywhere_still_destroys(error: Exception) -> None:
    world = World()
    world.results = [error]
    with pytest.raises(type(error)):
        world.run()
    assert world.settled_all()


@pytest.mark.spec("S2 7.5.1")
def test_a_signal_while_something_must_be_done_to_its_end_counts_afterwards() -> None:
    """Ctrl-C during the paid call: the call is waited for, nothing further is begun."""
    notes: list[str] = []

    def interrupted_call() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        until = time.monotonic() + 60
        while not notes and time.monotonic() < until:
            time.sleep(0.01)
        return "created"

    end = broker_end(reply_inbox(), keys=mint_keypair(), base=free_ports(), admitted=[], logical_id="client")
    shell = ClientShell(end, Ports(1, 2), lambda _: pytest.fail("asked"), notes.append, identity=None, environ={})
    try:
        assert shell.call(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            shell.call(lambda: 1 // 0)
        # In the middle of the call, however long that takes.
        assert shell.call(interrupted_call, last=True) == "created"
        assert len(notes) == 1
        for step in (lambda: shell.call(lambda: pytest.fail("begun")), lambda: shell.pause(10)):
            with pytest.raises(Interrupted, match="SIGINT"):
                step()
        with pytest.raises(Interrupted):
            shell.converse(mint_keypair(), RUNNING, Limits())
        assert shell.call(lambda: "destroyed", last=True) == "destroyed"
    finally:
        end.close(0)
