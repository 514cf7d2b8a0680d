"""Before mvp-chat spends money: what would be rented, what it costs now and at most, and a yes from a person."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from common.addresses import Role
from common.config import resolve
from common.config_errors import ConfigError, Information
from common.config_model import Config, ProviderKind
from common.config_slices import ProvisionerSlice, VastAiSlice
from services.config_resolver.slices import slice_for
from services.provisioner import vastai_offers as offers
from services.provisioner.plugin import ProviderError
from services.provisioner.vastai_api import VastClient
from tools.chat_run import RunError
from tools.chat_text import harmless

SHOWN_OFFERS = 3


def agree(
    argv: Sequence[str],
    *,
    yes: bool,
    source: TextIO,
    log: TextIO,
    environ: Mapping[str, str] = os.environ,
    pace: float = 1.0,
) -> bool:
    """Whether this run rents machines; asks first, unless yes. argv: the orchestrator's arguments.

    Raises RunError: a wrong configuration, a no, nobody to ask, no price. pace: as VastClient.
    """
    try:
        config = resolve(list(argv), environ, Path.cwd(), executable=Path(sys.argv[0]))
    except (ConfigError, Information) as error:
        raise RunError(str(error)) from None
    if config.provider is not ProviderKind.VASTAI or config.vastai is None:
        return False
    if not config.vastai.provisioning.confirm_lease:
        raise RunError("nothing is rented: set [vastai] confirm_lease = true to allow renting at all")
    if not yes and not source.isatty():
        raise RunError("renting machines on vast.ai costs money: add --yes to do it without being asked")
    part = slice_for(config, Role.PROVISIONER, Path("/nonexistent"))
    assert isinstance(part, ProvisionerSlice) and part.vastai is not None
    try:
        client = VastClient(config.vastai.api_key.reveal(), environ, pace)
        found = offers.choose(client.search(offers.filters(part.vastai), lambda: False), part.vastai, set())
    except ProviderError as error:
        raise RunError(f"{error}; nothing was rented") from None
    if not found:
        raise RunError("vast.ai has no machine within the limits of [vastai] now; relax them or try later")
    log.write(plan(config, part.vastai, found))
    if not yes:
        log.write("Rent it? [y/N]: ")
        log.flush()
        if source.readline().strip().lower() not in ("y", "yes"):
            raise RunError("nothing was rented")
    log.flush()
    return True


def plan(config: Config, limits: VastAiSlice, found: Sequence[Mapping[str, Any]]) -> str:
    """What would be rented, as lines. found: offers, cheapest first."""
    lines = [f"to be rented on vast.ai: 1 machine with {limits.disk_gb} GB of disk for {config.model_id}"]
    for offer in found[:SHOWN_OFFERS]:
        lines.append(f"  {_offer(offer)}")
    if len(found) > SHOWN_OFFERS:
        lines.append(f"  and {len(found) - SHOWN_OFFERS} more within the limits, from the cheapest up")
    lines.append(f"  {_bound(limits, float(found[0]['dph_total']))}; traffic is extra")
    return harmless("\n".join(lines)) + "\n"


def _offer(offer: Mapping[str, Any]) -> str:
    memory = offer.get("gpu_ram")
    facts = [
        f"${float(offer['dph_total']):.3f} an hour",
        str(offer.get("gpu_name") or "unknown GPU"),
        f"{memory / 1024:.0f} GB" if isinstance(memory, int | float) else "",
        str(offer.get("geolocation") or ""),
    ]
    return ", ".join(filter(None, facts))


def _bound(limits: VastAiSlice, cheapest: float) -> str:
    hourly = offers.price_limit(limits)
    most = []
    if limits.max_hours is not None:
        # Of three attempts the dearest may be the one that works.
        price = hourly if hourly is not None else cheapest * offers.PRICE_TOLERANCE
        most.append(limits.max_hours * price)
    if limits.max_spend is not None:
        most.append(limits.max_spend)
    if most and (hourly is not None or limits.max_spend is not None):
        return f"at most ${min(most):.2f} by the limits of [vastai]"
    if limits.max_hours is not None:
        return f"about ${min(most):.2f} in the {limits.max_hours:g} hours that [vastai] max_hours allows"
    return "no [vastai] max_hours or max_spend is set: it costs until this chat ends"
