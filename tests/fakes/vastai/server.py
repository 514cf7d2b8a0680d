"""A vast.ai that misbehaves as the real one (providers.md A2, A3), and whose instances are real sshds.

`python -m tests.fakes.vastai.server` prints VASTAI_BASE_URL and a key. Faults: `fake.fault(op, kind, times)`,
op search, create, show, list, destroy, ssh, user or logs. How an instance behaves is its offer's `behaviour`.
INJECTIONS names for each failure of providers.md A2 how it is made here.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import threading
import time
import urllib.parse
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.fakes.vastai.machine import FakeMachine

PAGE = 25
TOO_FREQUENT = "API requests too frequent: endpoint threshold=2.0"
REFUSALS: dict[str, tuple[int, Any]] = {
    "429 text": (429, TOO_FREQUENT),
    "429 detail": (429, {"detail": TOO_FREQUENT}),
    "429 json": (429, {"success": False, "error": "rate_limit_exceeded", "msg": "slow down"}),
    "500": (500, "<html>Internal Server Error</html>"),
    "502": (502, ""),
    "empty": (200, ""),
    "truncated": (200, '{"success": true, "instances": [{"id"'),
    "failed": (200, {"success": False, "error": "something", "msg": "went wrong"}),
    "gone 404": (404, {"success": False, "error": "invalid_args", "msg": "error 404/3603: no_such_ask Instance type"}),
    "gone 410": (410, {"success": False, "error": "no_such_ask", "msg": "error 410/3907: no longer available"}),
    "400": (400, {"success": False, "error": "invalid_request", "msg": "team keys may not"}),
}


INJECTIONS: dict[str, str] = {
    "offer gone": "fault create: gone 404, gone 410",
    "list lags behind create": "list_lag",
    "create times out after creating": "fault create: hang up after, slow after",
    "create error with new_contract": "fault create: contract",
    "same offer sold twice": "fault create: sold twice",
    "stuck loading": "behaviour stuck",
    "created + OCI/CDI": "behaviour oci",
    "exited": "behaviour exited",
    "offline": "behaviour offline",
    "unknown": "behaviour unknown",
    "stopped (outbid)": "behaviour outbid",
    "429 text": "fault any: 429 text",
    "429 detail": "fault any: 429 detail",
    "429 json": "fault any: 429 json",
    "5xx": "fault any: 500, 502",
    "401 as 404": "another key",
    "result_url 404, then 200": "every log",
    "result_url never": "logs_come = False",
    "ssh port off by one": "behaviour proxy",
    "ssh host wrong": "behaviour wrong proxy",
    "direct address blocked": "behaviour blocked",
    "ports null": "behaviour proxy",
    "price drift": "behaviour drift",
    "pages": "foreign(26)",
    "410 on the v0 list": "every GET /api/v0/instances/",
    "slow": "fault any: slow",
    "truncated JSON": "fault any: truncated",
    "newline in addresses": "every running row",
}


@dataclass
class Instance:
    """A row, and behind it a machine when it runs."""

    id: int
    offer: dict[str, Any]
    label: str
    body: dict[str, Any]
    behaviour: str
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    since: float = field(default_factory=time.time)
    reads: int = 0
    hidden: int = 0
    stays: int = 0
    machine: FakeMachine | None = None


class FakeVast:
    """The account and the market. Thread-safe."""

    def __init__(self, key: str = "fake-vast-api-key-0123456789", real: bool = True) -> None:
        self.key, self.real = key, real
        self.programs: dict[str, str] = {}
        """What the image holds: path in it → path here. login: the variables that its logins see."""
        self.login: dict[str, str] = {}
        self.boot_reads = 2
        """How often an instance is looked at before it runs."""
        self.slow_s = 1.0
        self.logs_come = True
        self.gate: Callable[[str, str], None] = lambda op, when: None
        """Called before and after each operation is carried out, for tests that want to be there."""
        self.destroyed: list[int] = []
        self.lock = threading.RLock()
        self.offers: list[dict[str, Any]] = []
        self.instances: dict[int, Instance] = {}
        self.keys: list[str] = []
        self.requests: list[tuple[str, str, str]] = []
        self.created: list[int] = []
        self.faults: dict[str, deque[str]] = defaultdict(deque)
        self.list_lag = 0
        self._ids = itertools.count(1000)
        self._log_reads: dict[str, int] = defaultdict(int)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                fake.serve(self, self.rfile.read(length))

            do_GET = do_POST = do_PUT = do_DELETE = _any

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    # --- for tests ------------------------------------------------------------------------------------------------
    def offer(self, price: float = 0.3, behaviour: str = "good", **more: Any) -> int:
        """Put one on the market; its id."""
        number = next(self._ids)
        row = {
            "id": number, "machine_id": number * 10, "host_id": number * 100, "num_gpus": 1, "gpu_name": "RTX 4090",
            "gpu_ram": 24564, "compute_cap": 890, "cuda_max_good": 12.6, "inet_down": 800.0, "inet_up": 400.0,
            "disk_space": 200.0, "direct_port_count": 20, "reliability": 0.99, "verification": "verified",
            "rentable": True, "rented": False, "external": False, "dph_total": price, "geolocation": "Norway, NO",
        }  # fmt: skip
        self.offers.append(row | more | {"_behaviour": behaviour})
        return number

    def fault(self, op: str, kind: str, times: int = 1) -> None:
        """The next calls of this operation fail so."""
        self.faults[op].extend([kind] * times)

    def foreign(self, count: int = 1, label: str = "somebody-elses") -> list[int]:
        """Instances of the account that are not ours."""
        made = []
        for _ in range(count):
            instance = Instance(next(self._ids), {"dph_total": 1.0}, label, {}, "stuck")
            self.instances[instance.id] = instance
            made.append(instance.id)
        return made

    def close(self) -> None:
        """No machine and no server is left."""
        self._http.shutdown()
        self._http.server_close()
        with self.lock:
            for instance in self.instances.values():
                if instance.machine is not None:
                    instance.machine.destroy()
            self.instances.clear()

    # --- requests -------------------------------------------------------------------------------------------------
    def serve(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """One request: recorded, delayed or spoilt as ordered, answered."""
        url = urllib.parse.urlsplit(request.path)
        with self.lock:
            self.requests.append((request.command, request.path, body.decode(errors="replace")))
        try:
            content = json.loads(body) if body else {}
        except ValueError:
            content = {}
        status, answer = self._route(request, url, content)
        if status == 0:
            request.close_connection = True
            return
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        try:
            request.send_response(status)
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data)
        except OSError:
            pass

    def _route(self, request: BaseHTTPRequestHandler, url: urllib.parse.SplitResult, body: Any) -> tuple[int, Any]:
        parts, method = url.path.strip("/").split("/"), request.command
        if parts[0] == "result":
            with self.lock:
                self._log_reads[url.path] += 1
            if self._log_reads[url.path] < 2 or not self.logs_come:
                return 404, "not yet"
            instance = self.instances.get(int(parts[1].partition(".")[0]))
            machine = instance.machine if instance is not None else None
            return 200, (machine.log if machine is not None else "") or "last words\n"
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given != self.key:
            # An instance's own key may destroy that instance, and nothing else.
            own = next((one for one in self.instances.values() if one.key == given), None)
            if own is None or method != "DELETE" or parts[2:4] != ["instances", str(own.id)]:
                return 404, {"success": False, "error": "auth_error", "msg": "Invalid user key"}
        match method, parts[1:]:
            case "GET", ["v0", "users", "current"]:
                return self._spoilt("user") or (200, {"id": 1, "email": "someone@example.org", "credit": 10.0})
            case "GET", ["v0", "ssh"]:
                rows = [{"id": number, "key": key, "deleted_at": None} for number, key in enumerate(self.keys)]
                return self._spoilt("ssh") or (200, rows)
            case "POST", ["v0", "ssh"]:
                if spoilt := self._spoilt("ssh add"):
                    return spoilt
                self.keys.append(str(body["ssh_key"]))
                return 200, {"success": True, "key": {"public_key": body["ssh_key"]}}
            case "POST", ["v0", "bundles"]:
                return self._spoilt("search") or self._search(body)
            case "PUT", ["v0", "asks", number]:
                self.gate("create", "asked")
                return self._create(int(number), body)
            case "GET", ["v0", "instances"]:
                return 410, {"success": False, "error": "deprecated_endpoint", "msg": "use v1"}
            case "GET", ["v1", "instances"]:
                return self._spoilt("list") or self._list(dict(urllib.parse.parse_qsl(url.query)))
            case "PUT", ["v0", "instances", "request_logs", number]:
                return self._spoilt("logs") or (200, {"success": True, "result_url": f"{self.url}/result/{number}.log"})
            case "GET", ["v0", "instances", number]:
                return self._spoilt("show") or self._show(int(number))
            case "DELETE", ["v0", "instances", number]:
                self.gate("destroy", "asked")
                return self._spoilt("destroy") or self._destroy(int(number))
            case "PUT", ["v0", "instances", number]:
                return self._change(int(number), body)
            case _:
                return 404, {"success": False, "error": "not_found", "msg": f"{method} {url.path}"}

    def _spoilt(self, op: str) -> tuple[int, Any] | None:
        with self.lock:
            kind = self.faults[op].popleft() if self.faults[op] else ""
        if not kind:
            return None
        if kind == "hang up":
            return 0, ""
        if kind == "slow":
            time.sleep(self.slow_s)
            return None
        return REFUSALS[kind]

    def _search(self, body: dict[str, Any]) -> tuple[int, Any]:
        def like(given: Any, value: Any) -> Any:
            # The vendor's client sends numbers as texts.
            return type(value)(given) if isinstance(given, str) and isinstance(value, int | float) else given

        operators: dict[str, Callable[[Any, Any], bool]] = {
            "eq": lambda a, b: a == like(b, a),
            "neq": lambda a, b: a != like(b, a),
            "gt": lambda a, b: a > like(b, a),
            "lt": lambda a, b: a < like(b, a),
            "gte": lambda a, b: a >= like(b, a),
            "lte": lambda a, b: a <= like(b, a),
            "in": lambda a, b: a in b,
            "notin": lambda a, b: a not in b,
        }
        rows = []
        with self.lock:
            for row in self.offers:
                wanted = [(key, rule) for key, rule in body.items() if isinstance(rule, dict) and key in row]
                if all(operators[op](row[key], value) for key, rule in wanted for op, value in rule.items()):
                    rows.append({key: value for key, value in row.items() if not key.startswith("_")})
        return 200, {"offers": rows[: int(body.get("limit", 64))]}

    def _create(self, number: int, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            kind = self.faults["create"].popleft() if self.faults["create"] else ""
            if kind and kind not in ("hang up after", "slow after", "contract", "sold twice"):
                return (0, "") if kind == "hang up" else REFUSALS[kind]
            offer = next((row for row in self.offers if row["id"] == number and not row["rented"]), None)
            if offer is None:
                return REFUSALS["gone 404"]
            offer["rented"] = True
            # Sold to somebody else in the same moment: both are told yes, the second never starts, and nobody says so.
            behaviour = "stuck" if kind == "sold twice" else offer["_behaviour"]
            made = Instance(next(self._ids), offer, str(body.get("label")), body, behaviour, hidden=self.list_lag)
            self.instances[made.id] = made
            self.created.append(made.id)
        self.gate("create", "done")
        if kind == "slow after":
            time.sleep(self.slow_s)
        if kind in ("hang up after", "slow after"):
            return 0, ""
        if kind == "contract":
            return 400, {"success": False, "error": "invalid_price", "msg": "bid too low", "new_contract": made.id}
        return 200, {"success": True, "new_contract": made.id}

    def _list(self, query: dict[str, str]) -> tuple[int, Any]:
        with self.lock:
            rows = []
            for instance in list(self.instances.values()):
                if instance.hidden > 0:
                    instance.hidden -= 1
                else:
                    rows.append(self._row(instance))
        begin = int(query.get("after_token", "0"))
        page = rows[begin : begin + min(PAGE, int(query.get("limit", PAGE)))]
        more = str(begin + PAGE) if begin + PAGE < len(rows) else None
        found = {"success": True, "instances": page, "next_token": more, "total_instances": len(rows)}
        return 200, found | {"instances_found": len(rows), "label_counts": {}}

    def _show(self, number: int) -> tuple[int, Any]:
        with self.lock:
            instance = self.instances.get(number)
            if instance is None:
                return 200, {"instances": None}
            instance.reads += 1
            return 200, {"instances": self._row(instance)}

    def _destroy(self, number: int) -> tuple[int, Any]:
        with self.lock:
            instance = self.instances.get(number)
            if instance is None:
                return 404, {"success": False, "error": "no_such_instance", "msg": "gone"}
            if instance.stays:
                instance.stays -= 1
                return 200, {"success": True}
            del self.instances[number]
            self.destroyed.append(number)
        if instance.machine is not None:
            instance.machine.destroy()
        return 200, {"success": True}

    def _change(self, number: int, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            instance = self.instances.get(number)
            if instance is None:
                return 404, {"success": False, "error": "no_such_instance", "msg": "gone"}
            instance.label = str(body.get("label", instance.label))
            if body.get("state") == "stopped":
                instance.behaviour = "outbid"
        return 200, {"success": True}

    # --- instances ------------------------------------------------------------------------------------------------
    def _row(self, instance: Instance) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": instance.id, "label": instance.label, "machine_id": instance.offer.get("machine_id"),
            "actual_status": None, "intended_status": "running", "cur_state": "running", "next_state": "running",
            "status_msg": "", "ssh_host": None, "ssh_port": None, "public_ipaddr": None, "ports": None,
            "dph_total": instance.offer["dph_total"], "start_date": instance.since, "end_date": instance.since + 1e7,
            "extra_env": [[name, str(value)] for name, value in (instance.body.get("env") or {}).items()],
            "image_uuid": instance.body.get("image"), "image_runtype": instance.body.get("runtype"), "image_args": [],
            "onstart": instance.body.get("onstart"), "gpu_name": instance.offer.get("gpu_name"), "num_gpus": 1,
            "host_id": instance.offer.get("host_id"), "disk_space": instance.body.get("disk"), "is_bid": False,
        }  # fmt: skip
        kind, reads = instance.behaviour, instance.reads
        if reads < 1:
            return row
        match kind:
            case "stuck":
                return row | {"actual_status": "loading", "status_msg": "Pulling fs layer"}
            case "oci":
                words = (
                    "Error response from daemon: OCI runtime create failed: failed to inject CDI devices: unresolvable"
                )
                return row | {"actual_status": "created", "status_msg": words}
            case "exited" | "offline" | "unknown":
                return row | {"actual_status": kind}
            case "outbid":
                state = {"actual_status": "stopped", "intended_status": "stopped"}
                return row | state | {"cur_state": "stopped", "next_state": "stopped"}
            case "drift":
                row["dph_total"] = instance.offer["dph_total"] * 2
        if reads < self.boot_reads:
            return row | {"actual_status": "loading", "status_msg": "Pulling fs layer"}
        if not self.real:
            return row | {"actual_status": "running"}
        if instance.machine is None:
            own = {"CONTAINER_ID": str(instance.id), "CONTAINER_API_KEY": instance.key}
            own = {**(instance.body.get("env") or {}), **own}
            onstart = str(instance.body.get("onstart") or "")
            for path, here in self.programs.items():
                onstart = onstart.replace(path, here)
            instance.machine = FakeMachine(instance.id, self.keys, onstart, own, self.login)
            instance.machine.wait_up()
        port = instance.machine.port
        row |= {"actual_status": "running", "status_msg": "success, running", "public_ipaddr": "127.0.0.1\n"}
        if kind == "proxy":
            # Direct ports are missing, and the proxy's port is off by one.
            return row | {"ssh_host": "127.0.0.1", "ssh_port": port - 1}
        ports = {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(port)}]}
        if kind == "blocked":
            # The direct port leads nowhere; the proxy works.
            return row | {"ports": {"22/tcp": [{"HostPort": "9"}]}, "ssh_host": "127.0.0.1\n", "ssh_port": port}
        if kind == "wrong proxy":
            return row | {"ports": ports, "ssh_host": "ssh0.invalid", "ssh_port": 1}
        return row | {"ports": ports}


def main() -> int:
    """By hand: a market of three machines until Ctrl-C."""
    fake = FakeVast()
    for price in (0.2, 0.3, 0.4):
        fake.offer(price)
    sys.stdout.write(f"VASTAI_BASE_URL={fake.url} VASTAI_API_KEY={fake.key}\n")
    sys.stdout.flush()
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        fake.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
