"""vast.ai's six calls (S2 6.3) as `Landlord`, on the provider's client (services/provisioner/vastai_api.py): it keeps
the distances between calls, repeats reads, never the paid call, and takes nothing that it does not understand for
"nothing there". Blocking: runs on job threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.provisioner.vastai_api import VastClient, VastError
from tools.single_gpu_inference_rent import CreateFailed, Instance, NoOffer, Offer, RentError

ONSTART = "exec /usr/local/bin/gpu-node 2>&1"
MIN_RELIABILITY, MIN_CUDA, MIN_DOWN_MBPS = 0.99, 12.0, 100  # the original's filter (rust-swactor.md 8.4)
EXCLUDED_COUNTRY = "CN"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to rent."""

    image: str
    gpu_name: str = ""
    max_dph: float = 0.5
    disk_gb: int = 20


class VastAi:
    """One account."""

    def __init__(self, client: VastClient, wanted: Wanted) -> None:
        self._client, self._wanted = client, wanted

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
        try:
            rows = self._client.search(query, lambda: False)
        except VastError as error:
            raise RentError(str(error)) from None
        offers = [offer for row in rows if (offer := _offer(row)) and offer.id not in excluded]
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
            return self._client.create(offer.id, body)
        except VastError as error:
            uncertain = error.kind == "unknown" and not error.contract
            raise CreateFailed(str(error), contract=error.contract or 0, uncertain=uncertain) from None

    def instance(self, contract: int) -> Instance | None:
        """GET /api/v0/instances/{id}/."""
        try:
            row = self._client.show(contract)
        except VastError as error:
            if error.kind == "gone":
                return None
            raise RentError(str(error)) from None
        return None if row is None else _instance(row)

    def logs(self, contract: int, lines: int) -> str:
        """PUT /api/v0/instances/request_logs/{id}/, then GET what it names."""
        text = self._client.logs(contract, lines)
        if not text:
            raise RentError("vast.ai has none")
        return text

    def destroy(self, contract: int) -> None:
        """DELETE /api/v0/instances/{id}/."""
        try:
            self._client.destroy(contract)
        except VastError as error:
            raise RentError(str(error)) from None

    def labelled(self, label: str) -> set[int]:
        """GET /api/v1/instances/, all pages."""
        try:
            rows = self._client.list_all()
        except VastError as error:
            raise RentError(str(error)) from None
        return {contract for row in rows if row.get("label") == label and (contract := _whole(row.get("id")))}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _offer(row: Mapping[str, Any]) -> Offer | None:
    """None for one that cannot be taken: no id, no price, no place or one that the original left out."""
    id, dph, place = _whole(row.get("id")), _number(row.get("dph_total")), str(row.get("geolocation") or "")
    if not id or dph <= 0 or not place or place.strip().endswith(EXCLUDED_COUNTRY):
        return None
    return Offer(id, _whole(row.get("host_id")), str(row.get("gpu_name") or "GPU"), dph, place)


def _instance(row: Mapping[str, Any]) -> Instance:
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
