"""vast.ai's six calls (S2 6.3), as `Landlord`. Blocking: runs on job threads. An answer that is not understood is an
error, never "nothing there". The paid call is not repeated unless it was refused for its frequency.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tools.single_gpu_inference_rent import CreateFailed, Instance, NoOffer, Offer, RentError

BASE_URL = "https://console.vast.ai"
CALL_S = 30.0
BUSY_TRIES_MAX = 3
BUSY_PAUSE_S = 5.0  # above every interval that the API asks for (providers.md A2)
LOG_TRIES_MAX, LOG_PAUSE_S = 6, 2.5  # the log is uploaded after it was asked for; the original waited 5 s once
ONSTART = "exec /usr/local/bin/gpu-node 2>&1"
MIN_RELIABILITY, MIN_CUDA, MIN_DOWN_MBPS = 0.99, 12.0, 100  # the original's filter (rust-swactor.md 8.4)
EXCLUDED_COUNTRY = "CN"
GONE = ("no_such_instance", "not_found")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to rent."""

    image: str
    gpu_name: str = ""
    max_dph: float = 0.5
    disk_gb: int = 20


class VastAi:
    """One account. Nothing here ever puts the key into a text."""

    def __init__(
        self,
        api_key: str,
        wanted: Wanted,
        *,
        base_url: str = BASE_URL,
        transport: httpx.BaseTransport | None = None,
        pause_s: float = BUSY_PAUSE_S,
    ) -> None:
        self._wanted, self._key, self._pause_s = wanted, api_key, pause_s
        self._api = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=CALL_S,
            transport=transport,
        )
        # The log lies elsewhere: that server must not see the key.
        self._plain = httpx.Client(timeout=CALL_S, transport=transport)

    # --- Landlord ---------------------------------------------------------------------------------------------
    def find_offer(self, excluded: frozenset[int]) -> Offer:
        """POST /api/v0/bundles/."""
        wanted = self._wanted
        query: dict[str, Any] = {
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "num_gpus": {"eq": 1},
            "reliability2": {"gte": MIN_RELIABILITY},
            "cuda_max_good": {"gte": MIN_CUDA},
            "direct_port_count": {"gte": 1},
            "inet_down": {"gte": MIN_DOWN_MBPS},
            "disk_space": {"gte": wanted.disk_gb},
            "dph_total": {"lte": wanted.max_dph},
            "order": [["dph_total", "asc"]],
            "allocated_storage": wanted.disk_gb,
            "type": "on-demand",
        }
        if wanted.gpu_name:
            query["gpu_name"] = {"eq": wanted.gpu_name.replace("_", " ")}
        found = self._json("POST", "/api/v0/bundles/", query).get("offers")
        if not isinstance(found, list):
            raise RentError("vast.ai answered a search without a list of offers")
        offers = [offer for row in found if (offer := _offer(row)) and offer.id not in excluded]
        fitting = sorted((offer for offer in offers if offer.dph <= wanted.max_dph), key=lambda offer: offer.dph)
        if not fitting:
            what = f"no {wanted.gpu_name or 'GPU'} is for rent at ${wanted.max_dph:g} an hour or less"
            raise NoOffer(f"{what}; raise --max-dph or choose another --gpu")
        return fitting[0]

    def create(self, offer: Offer, label: str, env: dict[str, str]) -> int:
        """PUT /api/v0/asks/{id}/."""
        body = {
            "client_id": "me",
            "image": self._wanted.image,
            "disk": self._wanted.disk_gb,
            "label": label,
            "runtype": "ssh_direc ssh_proxy",
            "env": env,
            "onstart": ONSTART,
            "cancel_unavail": True,
        }
        try:
            response = self._send("PUT", f"/api/v0/asks/{offer.id}/", body)
        except RentError as error:
            raise CreateFailed(str(error), uncertain=True) from None
        answer = _object(response)
        contract = _whole(answer.get("new_contract"))
        if response.is_success and answer.get("success") is not False and contract:
            return contract
        uncertain = response.is_success or response.status_code >= 500
        raise CreateFailed(self._refusal(response), contract=contract, uncertain=uncertain and not contract)

    def instance(self, contract: int) -> Instance | None:
        """GET /api/v0/instances/{id}/."""
        response = self._send("GET", f"/api/v0/instances/{contract}/")
        if _is_gone(response):
            return None
        answer = self._checked(response)
        if "instances" not in answer:
            raise RentError("vast.ai answered without the instance")
        row = answer["instances"]
        return None if row is None else _instance(row)

    def logs(self, contract: int, lines: int) -> str:
        """PUT /api/v0/instances/request_logs/{id}/, then GET what it names."""
        url = self._json("PUT", f"/api/v0/instances/request_logs/{contract}/", {"tail": str(lines)}).get("result_url")
        if not isinstance(url, str) or not url.startswith(("https://", "http://")):
            raise RentError("vast.ai named no place for the logs")
        for turn in range(LOG_TRIES_MAX):
            time.sleep(min(self._pause_s, LOG_PAUSE_S) if turn else 0)
            try:
                response = self._plain.get(url)
            except httpx.HTTPError as error:
                raise RentError(f"the logs could not be fetched: {type(error).__name__}") from None
            if response.is_success:
                return response.text
        raise RentError("the logs did not appear")

    def destroy(self, contract: int) -> None:
        """DELETE /api/v0/instances/{id}/."""
        response = self._send("DELETE", f"/api/v0/instances/{contract}/")
        if not _is_gone(response) and self._checked(response).get("success") is False:
            raise RentError(self._refusal(response))

    def labelled(self, label: str) -> set[int]:
        """GET /api/v1/instances/, all pages; the v0 list is dead."""
        found: set[int] = set()
        token = ""
        for _ in range(1000):
            query = {"limit": "25", **({"after_token": token} if token else {})}
            answer = self._checked(self._send("GET", "/api/v1/instances/", query=query))
            rows = answer.get("instances")
            if not isinstance(rows, list):
                raise RentError("vast.ai answered without a list of instances")
            for row in rows:
                if isinstance(row, dict) and row.get("label") == label and (contract := _whole(row.get("id"))):
                    found.add(contract)
            token = answer.get("next_token") or ""
            if not token:
                return found
        raise RentError("the list of instances does not end")

    # --- HTTP -------------------------------------------------------------------------------------------------
    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._checked(self._send(method, path, body))

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """One call; again only while it is refused for its frequency: then nothing was done."""
        for turn in range(BUSY_TRIES_MAX):
            time.sleep(self._pause_s if turn else 0)
            try:
                response = self._api.request(method, path, json=body, params=query)
            except httpx.HTTPError as error:
                raise RentError(f"vast.ai did not answer ({type(error).__name__})") from None
            if response.status_code != 429:
                return response
        return response

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        if not response.is_success:
            raise RentError(self._refusal(response))
        answer = _object(response)
        if not answer:
            raise RentError("vast.ai answered something that is no JSON object")
        return answer

    def _refusal(self, response: httpx.Response) -> str:
        answer = _object(response)
        if answer.get("error") == "auth_error" or response.status_code == 401:
            return "vast.ai refuses the API key; check VASTAI_API_KEY"
        said = answer.get("msg") or answer.get("error") or response.reason_phrase
        text = " ".join(str(said).split())[:300].replace(self._key, "***")
        return f"vast.ai answered {response.status_code}: {text}"


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _is_gone(response: httpx.Response) -> bool:
    return response.status_code == 404 and _object(response).get("error") in GONE


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _offer(row: Any) -> Offer | None:
    """None for one that cannot be taken: no id, no price, no place or one that the original left out."""
    if not isinstance(row, dict):
        return None
    id, dph, place = _whole(row.get("id")), _number(row.get("dph_total")), str(row.get("geolocation") or "")
    if not id or dph <= 0 or not place or place.strip().endswith(EXCLUDED_COUNTRY):
        return None
    return Offer(id, _whole(row.get("host_id")), str(row.get("gpu_name") or "GPU"), dph, place)


def _instance(row: Any) -> Instance:
    if not isinstance(row, dict):
        raise RentError("vast.ai answered an instance that is no object")
    ssh: list[tuple[str, int]] = []
    ports = row.get("ports")
    direct = ports.get("22/tcp") if isinstance(ports, dict) else None
    host = str(row.get("public_ipaddr") or "").strip()
    if host and isinstance(direct, list) and direct and isinstance(direct[0], dict):
        port = str(direct[0].get("HostPort") or "")
        ssh += [(host, int(port))] if port.isdigit() else []
    proxy, port_number = str(row.get("ssh_host") or "").strip(), _whole(row.get("ssh_port"))
    if proxy and port_number:
        ssh += [(proxy, port_number), (proxy, port_number + 1)]
    return Instance(
        status=str(row.get("actual_status") or "provisioning"),
        intended=str(row.get("intended_status") or "running"),
        message=" ".join(str(row.get("status_msg") or "").split())[:300],
        ssh=tuple(ssh),
        dph=_number(row.get("dph_total")),
    )
