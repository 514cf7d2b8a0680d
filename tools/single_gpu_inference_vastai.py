"""The vast.ai mode put together: the client's end as broker, REST, ssh, the ledger, and the plan that a person
agrees to before money is spent (S2 1 to 7; design.md 6 rows 20, 38).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from common.bus import KeyPair, mint_keypair
from common.effects import StopSignal
from common.messages.inference import InferenceRequest
from services.provisioner.ledger import SINGLE_GPU_FOLDER, Ledger, LedgerError, LedgerRecord, ledger_folder, reconcile
from services.provisioner.plugin import LeftBehind
from services.provisioner.vastai_api import VastClient
from tools.single_gpu_inference_call import Call, Limits, Result
from tools.single_gpu_inference_client import Interrupted, converse, reply_inbox
from tools.single_gpu_inference_rent import Instance, Landlord, Rental, RentError, give_back
from tools.single_gpu_inference_rest import VastAi, Wanted
from tools.single_gpu_inference_tunnel import NODE_KEY_FILE, Ports, Tunnel
from worker.gpu_node.ends import LOOPBACK, End, broker_end, free_ports
from worker.gpu_node.limits import (
    ANSWER_LIMIT_MS,
    CLIENT_LEAVE_MS,
    CONVERGE_LIMIT_MS,
    DESTROY_LIMIT_MS,
    PROVISION_ATTEMPTS_MAX,
    RESOLVE_LIMIT_MS,
    RUNNING_POLL_MS,
    RUNNING_POLLS_MAX,
)

T = TypeVar("T")
PROVIDER = "vastai"
RequestMaker = Callable[[bytes], InferenceRequest]


def worst_case_ms(answer_ms: int = ANSWER_LIMIT_MS) -> int:
    """The longest that instances can run, one after the other, in all attempts together: a node may also go away at the
    end of each."""
    attempt = RUNNING_POLLS_MAX * RUNNING_POLL_MS + CONVERGE_LIMIT_MS + RESOLVE_LIMIT_MS + answer_ms + DESTROY_LIMIT_MS
    return PROVISION_ATTEMPTS_MAX * attempt


def plan(arguments: argparse.Namespace) -> str:
    """What it will cost at most, in one sentence."""
    longest_ms = worst_case_ms(arguments.limit_s * 1000)
    minutes = -(-longest_ms // 60_000)
    most = arguments.max_dph * longest_ms / 3_600_000
    return (
        f"rents one {arguments.gpu or 'GPU'} on vast.ai at ${arguments.max_dph:g} an hour or less and gives it back "
        f"after the answer: usually minutes, at most {minutes} minutes, ${most:.2f} (traffic is extra)"
    )


class LedgerBook:
    """`Book` on the provisioner's ledger, in a folder of its own."""

    def __init__(self, folder: Path, instance: str) -> None:
        self._ledger = Ledger(folder, instance)

    def intent(self, label: str) -> None:
        self._append(LedgerRecord(op="intent", id=label, provider=PROVIDER))

    def rented(self, label: str, contract: int) -> None:
        self._append(LedgerRecord(op="handle", id=label, facts={"contract": contract}))

    def settled(self, label: str) -> None:
        self._append(LedgerRecord(op="stopped", id=label))

    def close(self) -> None:
        """Removed when everything is settled, else left for the next start."""
        self._ledger.close()

    def _append(self, record: LedgerRecord) -> None:
        try:
            self._ledger.append(record)
        except LedgerError as error:
            raise RentError(str(error)) from None


class ClientShell:
    """`Shell`: the client's main thread, whose loop turns while anything is waited for."""

    def __init__(
        self,
        end: End,
        ports: Ports,
        make_request: RequestMaker,
        note: Callable[[str], None],
        *,
        identity: Path | None,
        environ: Mapping[str, str],
    ) -> None:
        self._end, self._ports, self._make_request, self._note = end, ports, make_request, note
        self._identity, self._environ = identity, dict(environ)
        self._stopped = ""

    def call(self, work: Callable[[], T], *, last: bool = False) -> T:
        """On a thread; the loop turns."""
        outcome: list[tuple[T | None, Exception | None]] = []

        def guarded() -> None:
            try:
                outcome.append((work(), None))
            except Exception as error:
                outcome.append((None, error))

        self._end.host.loop.run_job("stop" if last else "start", guarded, {}, lambda _result, _error: None)
        self._look(last)
        while not outcome:
            self._end.host.turn()
            self._look(last)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def pause(self, ms: int, *, last: bool = False) -> None:
        """The loop turns."""
        self._end.turn_until(lambda: self._look(last), ms)

    def _look(self, last: bool) -> None:
        """A signal during what must be done to its end is remembered for what comes after."""
        for _, message in self._end.inbox.drain():
            if isinstance(message, StopSignal):
                self._stopped = message.name
                if last:
                    self._note("stopping as soon as it is clear that nothing is left that costs money")
        if self._stopped and not last:
            raise Interrupted(self._stopped)

    def admit(self) -> KeyPair:
        """The node's key: minted here, let in at our broker, sent over ssh."""
        keys = mint_keypair()
        self._end.admit(keys.public, "gpu-node")
        return keys

    def revoke(self, node: KeyPair) -> None:
        """Out."""
        self._end.revoke(node.public)

    def converse(self, node: KeyPair, instance: Instance, limits: Limits) -> Result:
        """Tunnel, key, membership, name, question."""
        self._look(last=False)
        if not instance.ssh:
            raise RentError("vast.ai names no ssh address for the instance")
        key_file = self._environ.get("NODE_KEY_FILE", NODE_KEY_FILE)
        tunnel = Tunnel(instance.ssh, self._ports, node.secret, identity=self._identity, key_file=key_file)

        def tend() -> None:
            if said := tunnel.tend():
                self._note(f"ssh: {said}")

        try:
            call = Call(node.public, self._make_request(self._end.inbox_addr), limits, self._end.now_ms)
            return converse(self._end, node.public, call, self._note, tend)
        finally:
            tunnel.close()

    def environment(self) -> dict[str, str]:
        """S2 5: the broker's key, and the relay: our broker as the container sees it through the tunnel."""
        return {
            "SEED_ADDR": self._end.key.hex(),
            "SEED_RELAY": f"tcp://{LOOPBACK}:{self._ports.there}",
            **self._environ,
        }


def settle_earlier(folder: Path, shell: ClientShell, landlord: Landlord, note: Callable[[str], None]) -> None:
    """What a killed predecessor left: destroyed before anything new is rented."""

    def stop(left: LeftBehind) -> bool:
        facts = left.handle.facts if left.handle else {}
        contract = int(facts.get("contract", 0))
        note(f"an earlier run left instance {contract or left.id}; destroying it")
        if not give_back(shell, landlord, left.id, contract, note, sure=bool(contract)):
            raise RentError(f"instance {contract or left.id} could not be destroyed")
        return True

    for problem in reconcile(folder, stop).problems:
        note(problem)


def agree(arguments: argparse.Namespace, note: Callable[[str], None]) -> bool:
    """Nobody is charged without having said yes, on the command line or at the terminal."""
    note(plan(arguments))
    if arguments.yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        note("say --yes to agree")
        return False
    print("go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def say(text: str) -> None:
    """The answer; who does not want to read it any more does not keep us from giving the instance back."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def rent_and_ask(
    arguments: argparse.Namespace, make_request: RequestMaker, environ: Mapping[str, str], note: Callable[[str], None]
) -> int:
    """The exit status. Raises RentError, Interrupted."""
    api_key = environ.get("VASTAI_API_KEY", "")
    if not api_key:
        raise RentError("no API key: put it into the variable VASTAI_API_KEY (or say --seed to ask a running gpu-node)")
    if "/" not in arguments.image:
        raise RentError(
            "no image: say --image REGISTRY/NAME, from where the rented machine can pull worker/gpu_node/Dockerfile"
        )
    if shutil.which("ssh") is None:
        raise RentError("there is no ssh on this machine; install it (Debian: apt-get install openssh-client)")
    if arguments.ssh_identity is not None and not arguments.ssh_identity.expanduser().is_file():
        raise RentError(f"the ssh identity {arguments.ssh_identity} does not exist")
    if not agree(arguments, note):
        return 1
    wanted = Wanted(arguments.image, arguments.gpu, arguments.max_dph, arguments.disk_gb)
    landlord = VastAi(VastClient(api_key, environ), wanted)
    here, name = free_ports(), f"client {os.getpid()}"
    end = broker_end(reply_inbox(), keys=mint_keypair(), base=here, admitted=[], logical_id=name, profile="wan")
    book = None
    try:
        instance = secrets.token_hex(6)
        identity = arguments.ssh_identity.expanduser() if arguments.ssh_identity else None
        extra = {"GPU_NODE_MODEL": arguments.model} if arguments.model else {}
        if key_file := environ.get("NODE_KEY_FILE"):
            extra["NODE_KEY_FILE"] = key_file
        shell = ClientShell(end, Ports(here, free_ports()), make_request, note, identity=identity, environ=extra)
        try:
            folder = ledger_folder(environ).with_name(SINGLE_GPU_FOLDER)
            book = LedgerBook(folder, instance)
        except LedgerError as error:
            raise RentError(str(error).replace("no worker is started", "nothing is rented")) from None
        settle_earlier(folder, shell, landlord, note)
        limits = Limits(answer_ms=arguments.limit_s * 1000)
        rental = Rental(shell, landlord, book, f"sgi-{instance}", max_dph=arguments.max_dph, note=note, limits=limits)
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # a closed terminal, too
        return rental.run(say)
    finally:
        if book is not None:
            book.close()
        end.close(CLIENT_LEAVE_MS)
