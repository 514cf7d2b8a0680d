"""Renting one GPU for one answer: find, create, poll, ask, give back (S2 4, 7.1 to 7.4). What vast.ai, ssh and the
ledger are stands behind protocols, so that every path is a test.

The one rule: whoever creates an instance destroys it, on every path (S2 7.5). It is written down before it is created,
and stays written down until a successful answer says that it is gone; the next start reads that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tools.single_gpu_inference_call import Limits, Outcome, Result
from worker.gpu_node.limits import (
    ANSWER_LOG_LINES,
    CONVERGE_LOG_LINES,
    DESTROY_LIMIT_MS,
    DESTROY_RETRY_MS,
    PROVISION_ATTEMPTS_MAX,
    RUNNING_POLL_MS,
    RUNNING_POLLS_MAX,
)

T = TypeVar("T")
BROKEN = ("exited", "error", "offline")
BROKEN_WORDS = ("Error", "failed")
EMPTY_LISTS_MIN = 4  # lists lag behind a create by one to three reads (providers.md A2)
PROGRAM = "single-gpu-inference"


class RentError(Exception):
    """vast.ai or the way there failed; one sentence without secrets."""


class NoOffer(RentError):
    """S2 7.1, row 1."""


class CreateFailed(RentError):
    """S2 7.1, row 2. contract: an instance that exists all the same (providers.md A2), 0 if none is known.

    uncertain: the answer did not come, the instance may exist.
    """

    def __init__(self, text: str, *, contract: int = 0, uncertain: bool = False) -> None:
        super().__init__(text)
        self.contract, self.uncertain = contract, uncertain


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine for rent. dph: US dollars an hour."""

    id: int
    host: int
    gpu_name: str
    dph: float
    place: str = ""


@dataclass(frozen=True, slots=True)
class Instance:
    """What vast.ai says of an instance. ssh: (host, port) to try, in this order. dph: what it costs now, 0: unknown."""

    status: str
    intended: str = "running"
    message: str = ""
    ssh: tuple[tuple[str, int], ...] = ()
    dph: float = 0.0


class Landlord(Protocol):
    """vast.ai: blocking calls. All raise RentError."""

    def find_offer(self, excluded: frozenset[int]) -> Offer:
        """The cheapest that fits and is not excluded (offer ids). Raises NoOffer."""

    def create(self, offer: Offer, label: str, env: dict[str, str]) -> int:
        """The contract id. Raises CreateFailed."""

    def instance(self, contract: int) -> Instance | None:
        """None: it does not exist."""

    def logs(self, contract: int, lines: int) -> str:
        """The last lines of its log."""

    def destroy(self, contract: int) -> None:
        """Returns when vast.ai has accepted it or knows no such instance."""

    def labelled(self, label: str) -> set[int]:
        """Contracts with this label: a successful and whole answer."""


class Book(Protocol):
    """The ledger: on disk before the next step."""

    def intent(self, label: str) -> None:
        """An instance with this label is about to be created."""

    def rented(self, label: str, contract: int) -> None:
        """It has this contract."""

    def settled(self, label: str) -> None:
        """It is gone, or never came to be."""


class Shell(Protocol):
    """The client's main thread: the bus goes on while something is waited for."""

    def call(self, work: Callable[[], T], *, last: bool = False) -> T:
        """Run blocking work on a thread. Raises Interrupted at once; with `last`, never: it is always waited for."""

    def pause(self, ms: int, *, last: bool = False) -> None:
        """Let time pass. Raises Interrupted unless `last`."""

    def admit(self) -> Any:
        """A fresh key for a node, let in at our broker; what `converse` and `revoke` take."""

    def revoke(self, node: Any) -> None:
        """Out with it."""

    def converse(self, node: Any, instance: Instance, limits: Limits) -> Result:
        """Open the tunnel, hand over the key, ask. Raises Interrupted, RentError."""

    def environment(self) -> dict[str, str]:
        """SEED_ADDR, SEED_RELAY and what else the container is told (S2 5)."""


@dataclass(frozen=True, slots=True)
class _Again(Exception):
    """This attempt failed for the host's reasons: another offer may do."""

    reason: str


class Rental:
    """One run of the program: up to three attempts, one answer."""

    def __init__(
        self,
        shell: Shell,
        landlord: Landlord,
        book: Book,
        label: str,
        *,
        max_dph: float,
        note: Callable[[str], None],
        limits: Limits | None = None,
    ) -> None:
        self._shell, self._landlord, self._book, self._label, self._note = shell, landlord, book, label, note
        self._max_dph = max_dph
        self._limits = limits or Limits()
        self._excluded: set[int] = set()
        self.left: list[int] = []
        """Contracts that are not confirmed to be gone."""

    def run(self, answer: Callable[[str], None]) -> int:
        """The exit status. answer: called with the text, before the instance is given back."""
        for attempt in range(1, PROVISION_ATTEMPTS_MAX + 1):
            label = f"{self._label}-{attempt}"
            try:
                offer = self._shell.call(lambda: self._landlord.find_offer(frozenset(self._excluded)))
                self._excluded.add(offer.id)
                self._note(
                    f"attempt {attempt}: offer {offer.id}, {offer.gpu_name} in {offer.place}, ${offer.dph:.3f} an hour"
                )

                result = self._attempt(offer, label, answer)
            except _Again as again:
                self._note(again.reason)
                continue
            except NoOffer as error:
                self._note(str(error))
                return 1
            status = 0 if result.outcome is Outcome.ANSWERED and not self.left else 1
            if result.outcome is not Outcome.ANSWERED:
                self._note(result.text)
            return status
        self._note(f"{PROVISION_ATTEMPTS_MAX} attempts failed")
        return 1

    # --- one attempt ------------------------------------------------------------------------------------------
    def _attempt(self, offer: Offer, label: str, answer: Callable[[str], None]) -> Result:
        node = self._shell.admit()
        contract, sure = 0, True
        try:
            self._book.intent(label)
            try:
                contract = self._create(offer, label)
            except CreateFailed as error:
                contract, sure = error.contract, not error.uncertain
                raise _Again(f"offer {offer.id} could not be rented: {error}") from None
            self._book.rented(label, contract)
            instance = self._wait_for_running(contract)
            result = self._shell.converse(node, instance, self._limits)
            if result.outcome is Outcome.ANSWERED:
                answer(result.text)
            if result.outcome in (Outcome.NOT_JOINED, Outcome.NODE_GONE):
                self._show_logs(contract, CONVERGE_LOG_LINES)
                raise _Again(result.text)
            if result.outcome in (Outcome.FAULT, Outcome.TIMED_OUT):
                self._show_logs(contract, ANSWER_LOG_LINES)
            return result
        finally:
            self._shell.revoke(node)
            self._give_back(label, contract, sure)

    def _create(self, offer: Offer, label: str) -> int:
        """S2 7.1, row 2. Waited for even when interrupted: it decides whether there is something to destroy."""
        env = self._shell.environment()
        return self._shell.call(lambda: self._landlord.create(offer, label, env), last=True)

    def _wait_for_running(self, contract: int) -> Instance:
        """S2 7.1, row 3."""
        said = ""
        for _ in range(RUNNING_POLLS_MAX):
            try:
                found = self._shell.call(lambda: self._landlord.instance(contract))
            except RentError as error:
                found, said = Instance("unknown"), f"vast.ai could not be asked: {error}"
            else:
                if found is None:
                    raise _Again(f"instance {contract} is gone before it ran")
                if found.dph > self._max_dph:
                    raise _Again(f"instance {contract} costs ${found.dph:.3f} an hour, more than is allowed")
                if found.status == "running" and found.intended == "running":
                    return found
                broken = found.status in BROKEN or found.intended == "stopped"
                if broken or any(word in found.message for word in BROKEN_WORDS):
                    raise _Again(f"instance {contract} will not run: {found.message or found.status}")
                if found.message and found.message != said:
                    said = found.message
                    self._note(f"instance {contract}: {said}")
            self._shell.pause(RUNNING_POLL_MS)
        raise _Again(f"instance {contract} did not run within {RUNNING_POLLS_MAX * RUNNING_POLL_MS // 1000} s ({said})")

    def _show_logs(self, contract: int, lines: int) -> None:
        try:
            text = self._shell.call(lambda: self._landlord.logs(contract, lines))
        except RentError as error:
            self._note(f"no logs of instance {contract}: {error}")
            return
        for line in text.splitlines()[-lines:]:
            self._note(f"remote: {line}")

    # --- giving back --------------------------------------------------------------------------------------------
    def _give_back(self, label: str, contract: int, sure: bool) -> None:
        """S2 7.4, closed: until a successful answer says that it is gone; else the ledger has it for the next start."""
        if give_back(self._shell, self._landlord, label, contract, self._note, sure=sure):
            self._book.settled(label)
        else:
            self.left.append(contract)


def give_back(
    shell: Shell, landlord: Landlord, label: str, contract: int, note: Callable[[str], None], *, sure: bool
) -> bool:
    """Destroy whatever has this contract or this label, until vast.ai lists none of it. Never interrupted.

    sure: the contract says all; otherwise the answer to the create was lost, and a list may lag behind it: one that is
    empty counts only when it was so several times.
    """
    trouble, empty = "", 0
    known = {contract} if contract else set()
    for turn in range(DESTROY_LIMIT_MS // DESTROY_RETRY_MS):
        if turn:
            shell.pause(DESTROY_RETRY_MS, last=True)
        try:
            for each in sorted(known):
                shell.call(lambda each=each: landlord.destroy(each), last=True)  # type: ignore[misc]
            listed = shell.call(lambda: landlord.labelled(label), last=True)
        except RentError as error:
            if not trouble:
                note(f"the instance could not be destroyed yet: {error}; trying again, it costs money until then")
            trouble = str(error)
            continue
        empty = 0 if listed else empty + 1
        if empty >= (1 if sure else EMPTY_LISTS_MIN):
            for each in sorted(known):
                note(f"instance {each} is destroyed")
            return True
        known |= listed
    note(
        f"instance {contract or label} may still run and cost money: destroy it in the vast.ai console, or start "
        f"{PROGRAM} again, which destroys it first ({trouble or 'vast.ai still lists it'})"
    )
    return False
