"""The providers this build knows. A new one: its file beside this, and one line in `_PROVIDERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config_slices import ProvisionerSlice
from services.provisioner.external_provider import ExternalProvider
from services.provisioner.plugin import Owner, ProviderError, ProvisionPlugin
from services.provisioner.process_provider import ProcessProvider


@dataclass(frozen=True, slots=True)
class ProviderInputs:
    """What a provider is made from. environment: of this process; redact: removes every secret known here;
    owner: what a provider marks as ours, "" for looking at leftovers only; state: a private folder that lasts;
    forwards: (port that a worker dials on its loopback, host:port here), for tunnels; attempted: called with the handle
    id right before each call that may rent, it writes that down."""

    config: ProvisionerSlice
    environment: Mapping[str, str]
    redact: Callable[[bytes], bytes] = bytes
    owner: Owner = field(default_factory=Owner)
    state: Path = Path()
    forwards: tuple[tuple[int, str], ...] = ()
    attempted: Callable[[str], None] = lambda _: None


def _docker(inputs: ProviderInputs) -> ProvisionPlugin:
    # Imported on use: its SDK costs a tenth of a second and 20 MB that other providers should not pay.
    from services.provisioner.docker_provider import DockerProvider

    config = inputs.config
    return DockerProvider(
        config.image, config.docker_gpus, config.docker_pull, inputs.owner, inputs.environment, inputs.redact
    )


def _swarm(inputs: ProviderInputs) -> ProvisionPlugin:
    # Imported on use, as for docker.
    from services.provisioner.swarm_provider import SwarmProvider

    config = inputs.config
    return SwarmProvider(
        config.image,
        config.docker_gpus,
        config.docker_pull,
        config.swarm_constraints,
        inputs.owner,
        inputs.environment,
        inputs.redact,
    )


def _vastai(inputs: ProviderInputs) -> ProvisionPlugin:
    # Imported on use: httpx costs a tenth of a second.
    from services.provisioner.vastai_provider import VastAiProvider

    config, forwards = inputs.config, list(inputs.forwards)
    return VastAiProvider(
        config.vastai,
        config.image,
        inputs.owner,
        forwards,
        inputs.state,
        inputs.environment,
        inputs.redact,
        inputs.attempted,
    )


_PROVIDERS: dict[str, Callable[[ProviderInputs], ProvisionPlugin]] = {
    "process": lambda inputs: ProcessProvider(
        inputs.config.worker_bin, inputs.environment, inputs.redact, fleet=inputs.owner.fleet
    ),
    "docker": _docker,
    "swarm": _swarm,
    "vastai": _vastai,
    "external": lambda _: ExternalProvider(),
}


def provider_names() -> list[str]:
    """All names, for messages."""
    return sorted(_PROVIDERS)


def make_provider(name: str, inputs: ProviderInputs) -> ProvisionPlugin:
    """The provider of that name, not prepared yet. Raises ProviderError for a name that this build does not know."""
    if name not in _PROVIDERS:
        raise ProviderError(f"provider {name} is not part of this build; it has {', '.join(provider_names())}")
    return _PROVIDERS[name](inputs)
