"""Which machine is rented, and how an instance's state is read: pure rules (providers.md A2; rust-swactor.md 8.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.config_slices import VastAiSlice

OFFERS_MAX = 64
CUDA_MIN, COMPUTE_CAP_MIN = 12.4, 700
PRICE_TOLERANCE = 1.05  # between the offer and the contract; more is a drift that was not agreed to
LABEL_PREFIX = "smq"
FATAL_STATUS = frozenset({"exited", "offline", "stopped", "frozen"})
FATAL_WORDS = ("error", "failed", "manifest unknown", "unresolvable", "denied")


def label(fleet: str, handle_id: str) -> str:
    """About 60 characters, which are known to survive."""
    return f"{LABEL_PREFIX}-{fleet}-{handle_id}"


def handle_of(label_text: str, fleet: str) -> str:
    """The handle id in a label of this fleet, "" for every other label."""
    prefix = f"{LABEL_PREFIX}-{fleet}-"
    return label_text.removeprefix(prefix) if fleet and label_text.startswith(prefix) else ""


def is_of(label_text: str, handle_id: str) -> bool:
    """Whether a label is that of this handle, whose random part no other label has: of the provisioner's (with a fleet
    in front), or of single-gpu-inference, whose handles are the labels themselves."""
    return bool(handle_id) and (
        label_text == handle_id or (label_text.startswith(f"{LABEL_PREFIX}-") and label_text.endswith(f"-{handle_id}"))
    )


def filters(wanted: VastAiSlice) -> dict[str, Any]:
    """The body of the search; numbers as numbers, or they are compared as texts."""
    asked: dict[str, Any] = {
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "external": {"eq": False},
        "num_gpus": {"eq": 1},
        "cuda_max_good": {"gte": CUDA_MIN},
        "compute_cap": {"gte": COMPUTE_CAP_MIN},
        "direct_port_count": {"gte": 1},
        "reliability": {"gte": wanted.min_reliability},
        "inet_down": {"gte": wanted.min_down_mbps},
        "disk_space": {"gte": wanted.disk_gb},
        "allocated_storage": wanted.disk_gb,
        "order": [["dph_total", "asc"]],
        "limit": OFFERS_MAX,
        "type": "on-demand",
    }
    if wanted.require_verified:
        asked["verified"] = {"eq": True}
    if wanted.gpu_name:
        asked["gpu_name"] = {"eq": wanted.gpu_name.replace("_", " ")}
    if wanted.min_gpu_ram_mb:
        asked["gpu_ram"] = {"gte": wanted.min_gpu_ram_mb}
    if wanted.min_up_mbps is not None:
        asked["inet_up"] = {"gte": wanted.min_up_mbps}
    if (most := price_limit(wanted)) is not None:
        asked["dph_total"] = {"lte": most}
    return asked


def price_limit(wanted: VastAiSlice) -> float | None:
    """The most that an hour may cost. With a spending limit an offer must last for at least six minutes of it."""
    limits = [wanted.max_dph_total] if wanted.max_dph_total is not None else []
    if wanted.max_spend is not None:
        limits.append(wanted.max_spend * 10)
    return min(limits) if limits else None


def choose(offers: list[dict[str, Any]], wanted: VastAiSlice, excluded: set[int]) -> list[dict[str, Any]]:
    """What may be rented, cheapest first: the search's filters once more, because fields drift and may be null.

    excluded: machine and host ids that failed already.
    """
    most = price_limit(wanted)
    hosts = set(wanted.excluded_hosts) | excluded

    def usable(offer: Mapping[str, Any]) -> bool:
        price = offer.get("dph_total")
        return (
            isinstance(offer.get("id"), int)
            and isinstance(price, int | float)
            and price > 0
            and (most is None or price <= most)
            and offer.get("host_id") not in hosts
            and offer.get("machine_id") not in hosts
            and offer.get("rentable") is not False
            and offer.get("rented") is not True
            and offer.get("verification") != "deverified"
            and (not wanted.require_verified or offer.get("verification") == "verified")
        )

    return sorted((offer for offer in offers if usable(offer)), key=lambda offer: (offer["dph_total"], offer["id"]))


def price_of(row: Mapping[str, Any]) -> float | None:
    """Dollars an hour, None if the row does not say."""
    price = row.get("dph_total")
    return float(price) if isinstance(price, int | float) and price > 0 else None


def overpriced(row: Mapping[str, Any], offered: float, wanted: VastAiSlice) -> str:
    """Why the contract's price is not accepted, "" if it is."""
    price = price_of(row)
    if price is None:
        return ""
    most = min(price_limit(wanted) or offered * PRICE_TOLERANCE, offered * PRICE_TOLERANCE)
    return f"it costs ${price:.3f} an hour, offered were ${offered:.3f}" if price > most + 1e-9 else ""


def verdict(row: Mapping[str, Any]) -> str:
    """Why an instance will never serve (or no longer does), "" while it may."""
    status, message = str(row.get("actual_status") or ""), " ".join(str(row.get("status_msg") or "").split())
    if status in FATAL_STATUS:
        return f"its state is {status}" + (f" ({message[:200]})" if message else "")
    if row.get("intended_status") == "stopped":
        return "it was stopped by vast.ai or by somebody with the account"
    if status != "running" and any(word in message.lower() for word in FATAL_WORDS):
        return message[:300]
    return ""


def endpoints(row: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Where its sshd may answer, most likely first: direct, proxy, and the proxy's port off by one (A3)."""
    found: list[tuple[str, int]] = []
    host = str(row.get("public_ipaddr") or "").strip()
    ports = row.get("ports")
    mapped = ports.get("22/tcp") if isinstance(ports, dict) else None
    if host and isinstance(mapped, list) and mapped and isinstance(mapped[0], dict):
        port = str(mapped[0].get("HostPort", ""))
        if port.isdecimal():
            found.append((host, int(port)))
    proxy, proxy_port = str(row.get("ssh_host") or "").strip(), row.get("ssh_port")
    if proxy and isinstance(proxy_port, int):
        found += [(proxy, proxy_port), (proxy, proxy_port + 1)]
    return found


def spent(hours: float, cost: float, wanted: VastAiSlice) -> str:
    """Which limit is reached by a machine after so many hours, or by a run of that cost in dollars; "" if none."""
    if wanted.max_hours is not None and hours >= wanted.max_hours:
        return f"the limit [vastai] max_hours = {wanted.max_hours:g} is reached"
    if wanted.max_spend is not None and cost >= wanted.max_spend:
        return f"the limit [vastai] max_spend = {wanted.max_spend:g} dollars is reached"
    return ""


def longest_hours(price: float, wanted: VastAiSlice) -> float | None:
    """After how many hours a machine of this price has reached one of the limits by itself; None without limits."""
    limits = [wanted.max_hours] if wanted.max_hours is not None else []
    if wanted.max_spend is not None:
        limits.append(wanted.max_spend / price)
    return min(limits) if limits else None
