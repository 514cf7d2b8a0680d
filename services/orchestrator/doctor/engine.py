"""Checks of the Docker engine and of its swarm, as the providers of these names need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.config_model import Config, ProviderKind
from services.orchestrator.doctor.findings import Finding, fail, ok, skip, warn

BUILD = "docker build -f compose/Dockerfile.worker -t {image} ."
CDI = "cdi:"
NO_GPUS = 'set [docker] gpus = "none"'
START = "start Docker and try `docker info`; without Docker use [provider] kind = process"


def docker(config: Config | None, environ: Mapping[str, str]) -> Sequence[Finding]:
    """Whether the engine answers, has the image, and can hand out GPUs."""
    needed = config is not None and config.provider in (ProviderKind.DOCKER, ProviderKind.SWARM)
    try:
        info, image = _ask(environ, config.image if config is not None and needed else "")
    except Exception as error:  # the SDK is missing, or the engine is: both are one sentence
        return [fail(str(error), START) if needed else skip(f"not needed here ({error})")]
    says = f"engine {info.get('ServerVersion', '?')} on {info.get('Name', '?')}"
    if not needed or config is None:
        return [ok(f"{says}; this configuration does not need it")]
    found = [ok(says)]
    if image:
        found.append(ok(f"image {config.image}"))
    elif config.docker_pull == "never":
        found.append(fail(f"no image {config.image} on the engine", BUILD.format(image=config.image)))
    else:
        found.append(
            warn(f"no image {config.image} on the engine; it will be pulled", BUILD.format(image=config.image))
        )
    if config.provider is ProviderKind.DOCKER:
        found += gpus(config.docker_gpus, info)
    return found


def gpus(wanted: str, info: Mapping[str, Any]) -> Sequence[Finding]:
    """What the engine's info says against [docker] gpus."""
    if wanted == "none":
        return []
    if wanted.startswith(CDI):
        # Engines list what their specifications hold since API 1.50; the folders of these are configured everywhere.
        listed = info.get("DiscoveredDevices")
        if listed is None:
            says = f"[docker] gpus = {wanted}: this engine lists no CDI devices, so nobody knows whether it has them"
            return [warn(says, "see `nvidia-ctk cdi list` on the engine's machine")]
        there = {device.get("ID") for device in listed if device.get("Source") == "cdi"}
        missing = [name for name in wanted.removeprefix(CDI).split(",") if name not in there]
        if missing:
            says = f"[docker] gpus = {wanted}, but the engine knows no CDI device {', '.join(missing)}"
            return [fail(says, f"see `nvidia-ctk cdi list` on the engine's machine, or {NO_GPUS}")]
    elif "nvidia" not in (info.get("Runtimes") or {}):
        says = f"[docker] gpus = {wanted}, but the engine has no NVIDIA runtime"
        return [fail(says, f"{NO_GPUS}, or install the NVIDIA container toolkit on the engine's machine")]
    return []


def swarm(config: Config | None, environ: Mapping[str, str]) -> Finding:
    """Whether the engine is a manager of a swarm."""
    needed = config is not None and config.provider is ProviderKind.SWARM
    if not needed:
        return skip("only provider swarm needs it")
    try:
        info, _ = _ask(environ, "")
    except Exception as error:
        return fail(str(error), START)
    state = info.get("Swarm") or {}
    if state.get("LocalNodeState") != "active":
        return fail("this engine is in no swarm", "docker swarm init --advertise-addr <this machine's address>")
    if not state.get("ControlAvailable"):
        return fail("this engine is a worker of the swarm", "run this on a manager (docker node promote <this node>)")
    return ok(f"manager of a swarm with {state.get('Nodes', '?')} nodes")


def _ask(environ: Mapping[str, str], image: str) -> tuple[dict[str, Any], bool]:
    """The engine's info, and whether it has the image. Raises with a sentence."""
    from services.provisioner.docker_engine import Engine  # the SDK costs a tenth of a second

    engine = Engine(environ)
    with engine.sentences("ask the Docker engine"):
        info = dict(engine.api().info())
    return info, bool(image) and engine.has_image(image)
