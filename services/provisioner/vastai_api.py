"""The REST interface of vast.ai, as far as the provider needs it (reference/providers.md A2).

Reads are repeated, the paid create never is. What cannot be read is unknown, and unknown is never "none".
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from services.provisioner.plugin import ProviderError

BASE_URL = "https://console.vast.ai"
CALL_LIMIT_S = 30
ROWS_PER_PAGE = 25
PAGES_MAX = 400
READ_TRIES = 6
RATE_WAIT_S_MIN, RATE_WAIT_S_MAX = 2.0, 30.0
SLICE_S = 0.2  # between two looks whether the wait was cancelled
# Seconds between two calls of a kind, as documented (A2, threshold), with a margin.
INTERVAL_S = {
    "search": 6.0,
    "create": 4.6,
    "show": 2.1,
    "list": 1.1,
    "destroy": 3.1,
    "ssh": 1.1,
    "logs": 1.1,
    "user": 1.1,
}


class VastError(ProviderError):
    """The answer was an error. kind: auth, rate, gone, refused or unknown (nobody knows whether it was carried out).

    contract: an instance that exists although its creation failed.
    """

    def __init__(self, text: str, kind: str, contract: int | None = None) -> None:
        super().__init__(text)
        self.kind, self.contract = kind, contract


class Cancelled(ProviderError):
    """The wait was given up because the run ends."""


class VastClient:
    """One per provider; thread-safe. key: never in a URL, an error or a log. pace: scales INTERVAL_S, 0 in tests."""

    def __init__(self, key: str, environment: Mapping[str, str], pace: float = 1.0) -> None:
        self._base = environment.get("VASTAI_BASE_URL", BASE_URL).rstrip("/")
        headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
        self._http = httpx.Client(base_url=self._base, headers=headers, timeout=CALL_LIMIT_S, follow_redirects=False)
        self._key, self._pace = key, pace
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}

    @property
    def base(self) -> str:
        """Where it talks to."""
        return self._base

    # --- calls ----------------------------------------------------------------------------------------------------
    def user(self) -> dict[str, Any]:
        """Whose key it is."""
        return dict(self._read("user", "GET", "/api/v0/users/current/"))

    def ssh_keys(self) -> list[dict[str, Any]]:
        """The public keys of the account."""
        found = self._read("ssh", "GET", "/api/v0/ssh/", shape=list)
        return [row for row in found if isinstance(row, dict)]

    def add_ssh_key(self, public_key: str) -> None:
        """Register a key; new instances know it."""
        self._once("ssh", "POST", "/api/v0/ssh/", {"ssh_key": public_key})

    def search(self, filters: Mapping[str, Any], cancelled: Callable[[], bool]) -> list[dict[str, Any]]:
        """Offers; raises VastError for anything that is no list of offers."""
        found = self._read("search", "POST", "/api/v0/bundles/", dict(filters), cancelled=cancelled).get("offers")
        if not isinstance(found, list):
            raise VastError("vast.ai answered the search without a list of offers", "unknown")
        return [offer for offer in found if isinstance(offer, dict)]

    def create(self, offer: int, body: Mapping[str, Any]) -> int:
        """Rent. Called once, whatever comes back: kind "unknown" means that it may have been carried out."""
        found = self._once("create", "PUT", f"/api/v0/asks/{offer}/", dict(body))
        contract = found.get("new_contract")
        if not isinstance(contract, int):
            raise VastError("vast.ai answered the rental without a contract", "unknown")
        return contract

    def show(self, instance: int) -> dict[str, Any] | None:
        """The row, None only if vast.ai says that there is none."""
        found = self._read("show", "GET", f"/api/v0/instances/{instance}/")
        if "instances" not in found:
            raise VastError(f"vast.ai answered for instance {instance} without a row", "unknown")
        row = found["instances"]
        if row is not None and not isinstance(row, dict):
            raise VastError(f"vast.ai answered for instance {instance} with something else", "unknown")
        return row

    def list_all(self) -> list[dict[str, Any]]:
        """Every instance of the account, over all pages. Raises VastError unless each page was read."""
        rows: list[dict[str, Any]] = []
        token: str | None = None
        for _ in range(PAGES_MAX):
            query = {"limit": str(ROWS_PER_PAGE), "select_filters": "{}", "order_by": '[{"col":"id","dir":"asc"}]'}
            if token:
                query["after_token"] = token
            page = self._read("list", "GET", "/api/v1/instances/", query=query)
            found = page.get("instances")
            if page.get("success") is not True or not isinstance(found, list):
                raise VastError("vast.ai did not list the instances", "unknown")
            rows += [row for row in found if isinstance(row, dict)]
            token = page.get("next_token")
            if not token:
                return rows
        raise VastError("vast.ai lists instances without end", "unknown")

    def destroy(self, instance: int) -> None:
        """Ask for the end; an instance that is gone already is fine. Only a list proves that it is gone."""
        try:
            self._once("destroy", "DELETE", f"/api/v0/instances/{instance}/", {})
        except VastError as error:
            if error.kind != "gone":
                raise

    def logs(self, instance: int, lines: int = 50) -> str:
        """The end of the container's log, "" if it cannot be had: only for an error's explanation."""
        try:
            found = self._once("logs", "PUT", f"/api/v0/instances/request_logs/{instance}/", {"tail": str(lines)})
            url = str(found.get("result_url", ""))
            for _ in range(10 if url else 0):
                # Without the key: it is somebody else's storage.
                answer = httpx.get(url, timeout=CALL_LIMIT_S)
                if answer.status_code == 200:
                    return answer.text
                time.sleep(0.5 * self._pace)
        except (VastError, httpx.HTTPError):
            pass
        return ""

    # --- one call -------------------------------------------------------------------------------------------------
    def _read(
        self,
        kind: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        shape: type = dict,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Repeated when it was refused for its frequency or not answered. shape: what the JSON has to be."""
        wait_s = RATE_WAIT_S_MIN
        for left in reversed(range(READ_TRIES)):
            try:
                return self._once(kind, method, path, body, query=query, shape=shape)
            except VastError as error:
                if error.kind not in ("rate", "unknown") or not left:
                    raise
            self.sleep(wait_s * self._pace, cancelled)
            wait_s = min(2 * wait_s, RATE_WAIT_S_MAX)
        raise AssertionError("unreachable")

    def sleep(self, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Raises Cancelled as soon as that is so."""
        until = time.monotonic() + seconds
        while True:
            if cancelled():
                raise Cancelled("the start was cancelled")
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, SLICE_S))

    def _once(
        self,
        kind: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        shape: type = dict,
    ) -> Any:
        self._keep_distance(kind)
        what = f"vast.ai ({method} {path.split('?')[0]})"
        try:
            answer = self._http.request(method, path, json=body, params=query)
        except httpx.ConnectError:
            # Not even connected: certainly not carried out.
            raise VastError(f"{what} cannot be reached; check the network", "rate") from None
        except httpx.HTTPError as error:
            raise VastError(f"{what} did not answer ({type(error).__name__})", "unknown") from None
        try:
            found = json.loads(answer.content)
        except (ValueError, RecursionError):
            found = None
        _judge(what, answer.status_code, found, answer.text)
        if not isinstance(found, shape):
            raise VastError(f"{what} answered with something that cannot be read", "unknown")
        return found

    def _keep_distance(self, kind: str) -> None:
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next.get(kind, 0.0))
            self._next[kind] = at + INTERVAL_S[kind] * self._pace
        time.sleep(max(0.0, at - now))


def _judge(what: str, status: int, found: Any, text: str) -> None:
    """Raise VastError for everything that is no success (A2, A3)."""
    body = found if isinstance(found, dict) else {}
    error, said = str(body.get("error") or ""), str(body.get("msg") or body.get("detail") or "")
    failed = body.get("success") is False or bool(error)
    if status < 300 and not failed:
        return
    contract = body.get("new_contract")
    words = " ".join((said or error or text[:200]).split())
    if error == "auth_error" or status in (401, 403):
        kind, words = "auth", f"it refused the key ({words}); check VASTAI_API_KEY"
    elif error == "search_quota_exceeded":
        kind, words = "refused", "its daily quota of searches is used up until 00:00 UTC"
    elif status == 429 or "too frequent" in words or error == "rate_limit_exceeded":
        kind = "rate"
    elif error in ("no_such_ask", "no_such_instance", "not_found") or "no_such_ask" in words or status == 404:
        kind = "gone"
    elif error == "deprecated_endpoint":
        kind = "unknown"
    elif status == 410:
        kind = "gone"
    elif status >= 500 or status in (301, 302, 307, 308, 408):
        kind = "unknown"
    else:
        kind = "refused"
    text = f"{what}: {words or f'status {status}'}"
    raise VastError(text, kind, contract if isinstance(contract, int) else None)
