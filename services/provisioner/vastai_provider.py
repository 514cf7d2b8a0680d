"""Provider `vastai`: the worker runs on a rented GPU (S1 7.3, 7.5; S2 7.1; providers.md A; rust-swactor.md 8.3).

Money decides the order: label and ledger before the paid call, the call never repeated blindly, every way out ends in a
destruction that only a successful list proves. What is not proven stays in the ledger.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common.config_slices import VastAiSlice
from common.messages.provision import NodeProvisionSpec
from common.security import read_secret_file
from services.provisioner import processes, vastai_wheel
from services.provisioner import vastai_end as end
from services.provisioner import vastai_offers as offers
from services.provisioner import vastai_scripts as scripts
from services.provisioner.plugin import (
    Failed,
    LeftBehind,
    Listing,
    MayBeLeft,
    NotHere,
    Owner,
    PluginNodeHandle,
    ProviderError,
    ProviderLine,
    Sink,
)
from services.provisioner.process_provider import NEVER_PASSED
from services.provisioner.vastai_api import Cancelled, VastClient, VastError
from services.provisioner.vastai_ssh import Machine, Session

NAME = "vastai"
ATTEMPTS = 3
START_S = 840  # below the provisioner's own limit, so that it is we who clean up
GONE_READS = 2  # a row may lag behind its creation
STUCK_S = 300  # neither state nor message of a starting machine has changed for so long: an image's pull tells more
LATE_S = 600  # so long after a create without an answer its instance may still appear
RATE_TRIES, RATE_S = 5, 12  # the create has a penalty of 12 s (A2)
NO_OFFER = "vast.ai has no machine within the limits of [vastai]; relax them or try later"
UNKNOWN_S = 120  # no heartbeat of the machine for so long while it starts
TUNNEL_GONE_MS = 2000


@dataclass(slots=True)
class Rented:
    """One instance of ours."""

    instance: int
    handle_id: str
    price: float
    since: float = field(default_factory=time.monotonic)
    session: Session | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def hours(self) -> float:
        """Since it was rented."""
        return (time.monotonic() - self.since) / 3600


class VastAiProvider:
    """One per provisioner. forwards: (port on the machine, host:port here); state: for locks and known hosts;
    attempted: writes down, before the call, that a machine is asked for under this handle id."""

    name = NAME

    def __init__(
        self,
        config: VastAiSlice | None,
        image: str,
        owner: Owner,
        forwards: list[tuple[int, str]],
        state: Path,
        environment: Mapping[str, str],
        redact: Callable[[bytes], bytes] = bytes,
        attempted: Callable[[str], None] = lambda _: None,
        pace: float = 1.0,
    ) -> None:
        self._config, self._image, self._owner, self._forwards = config, image, owner, forwards
        self._state, self._environment, self._redact, self._pace = state, dict(environment), redact, pace
        self._attempted = attempted
        self._lock = threading.Lock()
        self._rented: dict[str, Rented] = {}
        self._cancelled: set[str] = set()
        self._excluded: set[int] = set()
        self._uncertain: dict[str, float] = {}
        """Handle id → until when an instance of a create without an answer may still appear, monotonic seconds."""
        self._costs: dict[str, float] = {}
        """Run → dollars of its machines that are gone."""
        self._client: VastClient | None = None
        self._wheel: tuple[str, bytes] | None = None

    # --- preparation (S1 7.3) -------------------------------------------------------------------------------------
    @property
    def client(self) -> VastClient:
        """Raises ProviderError without a key."""
        if self._client is None:
            if self._config is not None:
                key = read_secret_file(Path(self._config.api_key_file)).decode().strip()
            else:
                key = self._environment.get("VASTAI_API_KEY", "")
            if not key:
                raise ProviderError("it is rented at vast.ai and there is no key to ask with: set VASTAI_API_KEY")
            self._client = VastClient(key, self._environment, self._pace)
        return self._client

    @property
    def config(self) -> VastAiSlice:
        """Raises ProviderError where there is none (for leftovers only)."""
        if self._config is None:
            raise ProviderError("provider vastai has no configuration")
        return self._config

    def prepare(self) -> None:
        """The key is right, renting is wanted, and the account knows the ssh identity."""
        if not self.config.confirm_lease:
            raise ProviderError("nothing is rented: set [vastai] confirm_lease = true to agree to the costs")
        self.client.user()
        wanted = self.config.ssh_public_key
        if not wanted:
            raise ProviderError("the ssh identity was not prepared")
        if not self._registered(wanted):
            self.client.add_ssh_key(wanted)
            if not self._registered(wanted):
                raise ProviderError("vast.ai does not keep the ssh key; add it at https://cloud.vast.ai/manage-keys/")

    def _registered(self, wanted: str) -> bool:
        for row in self.client.ssh_keys():
            known = str(row.get("public_key") or row.get("key") or "").split()
            if known[:2] == wanted.split()[:2] and not row.get("deleted_at"):
                return True
        return False

    # --- start ----------------------------------------------------------------------------------------------------
    def start_node(self, handle_id: str, spec: NodeProvisionSpec, launch_file: Path, sink: Sink) -> PluginNodeHandle:
        """Rent, wait, deploy; up to three machines. On an error nothing is rented, or the error is MayBeLeft."""
        until = time.monotonic() + START_S
        failures: list[str] = []

        def say(text: str) -> None:
            sink(ProviderLine(text))

        for _ in range(ATTEMPTS):
            rented: Rented | None = None
            try:
                rented, offer = self._rent(handle_id, spec, say)
                machine = self._await_machine(rented, offer, handle_id, until, launch_file, say)
                session = Session(machine, self._forwards, sink, self._redact)
                with self._lock:
                    rented.session = session
                    self._rented[handle_id] = rented
                session.start()
                threading.Thread(
                    target=self._watch, args=(rented,), name=f"vast-{rented.instance}", daemon=True
                ).start()
                facts: dict[str, str | int] = {"instance": rented.instance, "price": f"{rented.price:.4f}"}
                return PluginNodeHandle(handle_id, None, facts)
            except MayBeLeft:
                raise
            except Exception as error:
                failures.append(str(error))
                say(f"attempt {len(failures)} failed: {error}")
                self._give_back(handle_id, rented, error)
                if isinstance(error, Cancelled) or time.monotonic() > until or _hopeless(error):
                    break
        last = failures[-1]
        if len(failures) > 1:
            if last == NO_OFFER:
                last = f"{failures[-2]}, and no other machine is within the limits of [vastai]"
            last = f"{last} (after {len(failures)} attempts)"
        if self._is_uncertain(handle_id):
            raise MayBeLeft(f"{last}; a rental that vast.ai did not answer may still appear and is looked for")
        raise ProviderError(last)

    def cancel_start(self, handle_id: str) -> None:
        """A start under way ends as soon as it can; what it rented is destroyed."""
        with self._lock:
            self._cancelled.add(handle_id)

    def _give_back(self, handle_id: str, rented: Rented | None, error: Exception) -> None:
        if rented is None:
            return
        try:
            self._destroy(rented.instance, handle_id)
        except ProviderError as second:
            raise MayBeLeft(f"{error}; {second}") from None
        finally:
            self._count(rented)

    def _count(self, rented: Rented) -> None:
        with self._lock:
            run = _run_of(rented.handle_id)
            self._costs[run] = self._costs.get(run, 0.0) + rented.hours * rented.price

    def _limit_reached(self, rented: Rented) -> str:
        with self._lock:
            before = self._costs.get(_run_of(rented.handle_id), 0.0)
        return offers.spent(rented.hours, before + rented.hours * rented.price, self.config)

    def _is_cancelled(self, handle_id: str) -> bool:
        with self._lock:
            return handle_id in self._cancelled

    def _is_uncertain(self, handle_id: str) -> bool:
        return time.monotonic() < self._uncertain.get(handle_id, 0.0)

    def _rent(
        self, handle_id: str, spec: NodeProvisionSpec, say: Callable[[str], None]
    ) -> tuple[Rented, dict[str, Any]]:
        config, client = self.config, self.client
        cancelled = partial(self._is_cancelled, handle_id)
        own = read_secret_file(Path(config.onstart_file)).decode() if config.onstart_file else ""
        body = {
            "client_id": "me",
            "image": spec.image or self._image,
            "disk": config.disk_gb,
            "label": offers.label(self._owner.fleet, handle_id),
            "runtype": "ssh_direc ssh_proxy",
            "env": {name: value for name, value in spec.env.items() if name not in NEVER_PASSED},
            "cancel_unavail": True,
            "price": None,
        }
        # The same offer is sold twice to two who ask at once, and one of them never starts (A3).
        with self._account(cancelled):
            found = offers.choose(client.search(offers.filters(config), cancelled), config, self._excluded)
            if not found:
                raise NoOffer(NO_OFFER)
            for offer in found[:10]:
                if cancelled():
                    raise Cancelled("the start was cancelled")
                price = float(offer["dph_total"])
                onstart = scripts.onstart(own, client.base, offers.longest_hours(price, config))
                if len(onstart) > scripts.ONSTART_CHARS_MAX:
                    raise ProviderError(
                        "[vastai] onstart is too long: vast.ai takes 4096 characters, of which 1500 are ours"
                    )
                instance = self._create(int(offer["id"]), body | {"onstart": onstart}, handle_id, cancelled, say)
                if instance:
                    say(f"rented instance {instance} (machine {offer.get('machine_id')}) for ${price:.3f} an hour")
                    return Rented(instance, handle_id, price), offer
        raise ProviderError("vast.ai sold every machine within the limits to somebody else; try again")

    def _create(
        self,
        offer: int,
        body: Mapping[str, Any],
        handle_id: str,
        cancelled: Callable[[], bool],
        say: Callable[[str], None],
    ) -> int:
        """The instance; 0 if this offer cannot be had. Asked again only where it was certainly not carried out."""
        for left in reversed(range(RATE_TRIES)):
            # A start may come here a quarter of an hour after its intent; who finds us dead counts from here.
            self._attempted(handle_id)
            try:
                return self.client.create(offer, body)
            except VastError as error:
                if error.contract is not None:
                    self._destroy(error.contract, handle_id)
                    return 0
                if error.kind == "gone":
                    return 0
                if error.kind == "unknown":
                    return self._find(handle_id, error, say)
                if error.kind != "rate" or not left:
                    raise
            self.client.sleep(RATE_S * self._pace, cancelled)
        raise AssertionError("unreachable")

    def _find(self, handle_id: str, error: VastError, say: Callable[[str], None]) -> int:
        """Nobody knows whether it was carried out: the list does, after a while. 0: it seems that it was not."""
        self._uncertain[handle_id] = time.monotonic() + LATE_S * self._pace
        say(f"{error}; looking whether it was rented")
        try:
            # A young row is not listed at once: the first look comes after a pause.
            self.client.sleep(end.FIND_PAUSE_S * self._pace, lambda: False)
            found = end.find(self.client, handle_id, end.FIND_READS, self._pace)
        except VastError as second:
            raise MayBeLeft(f"{error}, and what was rented cannot be listed: {second}") from None
        if found:
            self._uncertain.pop(handle_id, None)
            return int(found[0]["id"])
        say("it is not listed; another offer is taken, and the list is watched for it")
        return 0

    def _drop_twins(self, rented: Rented) -> None:
        """A create without an answer may show its instance after another one was rented: that one is not needed."""
        if not self._is_uncertain(rented.handle_id):
            return
        with contextlib.suppress(VastError):
            for row in end.rows_of(self.client, rented.handle_id):
                if row["id"] != rented.instance:
                    self.client.destroy(int(row["id"]))

    @contextlib.contextmanager
    def _account(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._state / "vastai.lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self.client.sleep(0.5, cancelled)
            yield

    def _await_machine(
        self,
        rented: Rented,
        offer: Mapping[str, Any],
        handle_id: str,
        until: float,
        launch_file: Path,
        say: Callable[[str], None],
    ) -> Machine:
        """Until the worker is deployed. Raises ProviderError as soon as the machine will never serve."""
        config = self.config
        bootstrap = read_secret_file(Path(config.bootstrap_command_file)).decode()
        launch = launch_file.read_bytes()
        name, wheel = self._packed() if scripts.WHEEL_VARIABLE in bootstrap else ("", b"")
        script = scripts.deploy(bootstrap, len(launch), self.client.base, wheel=name)
        known_hosts = self._known_hosts(handle_id)
        cancelled = partial(self._is_cancelled, handle_id)
        missing, silent_since, last = 0, 0.0, ""
        seen, moved = "", time.monotonic()
        reason = "its ssh server did not come up"
        try:
            while time.monotonic() < until:
                self.client.sleep(min(config.poll_interval_secs, 10) * self._pace, cancelled)
                row = self.client.show(rented.instance)
                missing = missing + 1 if row is None else 0
                if missing >= GONE_READS:
                    raise BadMachine(f"instance {rented.instance} vanished")
                if row is None:
                    continue
                if costs := offers.overpriced(row, float(offer["dph_total"]), config):
                    raise BadMachine(f"instance {rented.instance} is given back: {costs}")
                rented.price = offers.price_of(row) or rented.price
                if limit := self._limit_reached(rented):
                    raise LimitReached(f"{limit}; instance {rented.instance} is given back")
                self._drop_twins(rented)
                if why := offers.verdict(row):
                    raise BadMachine(f"instance {rented.instance} will not start: {why}")
                status = str(row.get("actual_status") or "provisioning")
                if status != last:
                    say(f"instance {rented.instance} is {status}")
                    last = status
                if (now := f"{status} {row.get('status_msg')}") != seen:
                    seen, moved = now, time.monotonic()
                if time.monotonic() - moved > STUCK_S * self._pace:
                    why = f"{seen.strip()}" if status != "running" else reason
                    raise BadMachine(f"instance {rented.instance} does not get on for {STUCK_S // 60} minutes: {why}")
                silent_since = silent_since or time.monotonic() if status == "unknown" else 0.0
                if silent_since and time.monotonic() - silent_since > UNKNOWN_S * self._pace:
                    raise BadMachine(f"instance {rented.instance} gives no sign of life")
                for host, port in offers.endpoints(row) if status == "running" else []:
                    machine = Machine(config.ssh_user, host, port, config.ssh_identity, known_hosts, handle_id)
                    try:
                        if name:
                            machine.deploy(scripts.upload(name, len(wheel)), wheel, cancelled)
                        machine.deploy(script, launch, cancelled)
                    except ProviderError as error:
                        reason = str(error)
                        continue
                    what = "the wheel and the launch file are" if name else "the launch file is"
                    say(f"instance {rented.instance}: {what} there, over {host}:{port}; the worker is started")
                    return machine
            raise BadMachine(f"instance {rented.instance} was not ready in time: {reason}")
        except BadMachine as error:
            self._exclude(offer)
            if words := self.client.logs(rented.instance).strip().splitlines():
                say(f"the machine's last words: {words[-1][:300]}")
            raise error

    def _packed(self) -> tuple[str, bytes]:
        """This program as a wheel, made once."""
        if self._wheel is None:
            self._wheel = vastai_wheel.pack()
        return self._wheel

    def _exclude(self, offer: Mapping[str, Any]) -> None:
        self._excluded |= {int(offer[key]) for key in ("machine_id", "host_id") if isinstance(offer.get(key), int)}

    # --- while it runs --------------------------------------------------------------------------------------------
    def _watch(self, rented: Rented) -> None:
        """State and costs. What cannot be read says nothing."""
        missing = 0
        session = rented.session
        assert session is not None
        while not rented.over.wait(self.config.poll_interval_secs * self._pace):
            if limit := self._limit_reached(rented):
                session.end(Failed(f"{limit}; instance {rented.instance} is given back"))
                return
            self._drop_twins(rented)
            try:
                row = self.client.show(rented.instance)
            except ProviderError:
                continue
            if row is not None:
                rented.price = offers.price_of(row) or rented.price
            missing = missing + 1 if row is None else 0
            why = f"instance {rented.instance} vanished" if missing >= GONE_READS else ""
            if row is not None and (bad := offers.verdict(row)):
                why = f"instance {rented.instance} failed: {bad}"
            if why:
                session.end(Failed(why))
                return

    def complete_bootstrap(self, handle: PluginNodeHandle) -> None:
        """Nothing: the tunnel is needed on."""

    # --- the end --------------------------------------------------------------------------------------------------
    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        """Its last words, then it is destroyed; returns when a list says so. Raises ProviderError otherwise."""
        with self._lock:
            rented = self._rented.get(handle.id)
        if rented is None:
            return
        rented.over.set()
        if rented.session is not None:
            if not fast:
                rented.session.wait(2)
            rented.session.close()
        self._destroy(rented.instance, handle.id)
        self._count(rented)
        with self._lock:
            self._rented.pop(handle.id, None)

    def _known_hosts(self, handle_id: str) -> Path:
        return self._state / f"known-hosts-{handle_id}"

    def _destroy(self, instance: int, handle_id: str) -> None:
        """Until a successful list shows it gone. Raises ProviderError."""
        looks = end.FIND_READS if self._is_uncertain(handle_id) else 1
        end.destroy(self.client, instance, handle_id, self._pace, looks)
        self._known_hosts(handle_id).unlink(missing_ok=True)

    def stop_left_behind(self, left: LeftBehind) -> bool:
        """By its label, which only this fleet's ledger knows; instances of others are never touched."""
        tunnels = processes.kill_marked(left.id)
        found = end.destroy_left_behind(self.client, left, self._pace, lambda: time.time_ns() // 1_000_000)
        processes.wait_gone(tunnels, TUNNEL_GONE_MS)
        self._known_hosts(left.id).unlink(missing_ok=True)
        return found

    def list_owned(self) -> Listing:
        """The account's instances with the fleet's label. Raises NotHere without a key."""
        if self._config is None and not self._environment.get("VASTAI_API_KEY"):
            raise NotHere("VASTAI_API_KEY is not set")
        return end.listing(self.client, self._owner.fleet)


class BadMachine(ProviderError):
    """This machine will not do; another may."""


class NoOffer(ProviderError):
    """Nothing can be rented within the limits."""


class LimitReached(ProviderError):
    """A limit of money or time: no other machine may take its place."""


def _run_of(handle_id: str) -> str:
    return handle_id.partition("-")[0]


def _hopeless(error: Exception) -> bool:
    return isinstance(error, NoOffer | LimitReached) or (
        isinstance(error, VastError) and error.kind in ("auth", "refused")
    )
