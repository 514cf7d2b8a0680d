"""Checks of the Docker engine and of its swarm, as the providers of these names need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.config_model import Config, ProviderKind
from services.orchestrator.doctor.findings import Finding, fail, ok, skip, warn

BUILD = "docker build -f compose/Dockerfile.worker -t {image} ."
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
    if config.provider is ProviderKind.DOCKER and config.docker_gpus != "none" and not _has_gpus(info):
        found.append(
            fail(
                f"[docker] gpus = {config.docker_gpus}, but the engine knows no GPU",
                'set [docker] gpus = "none", or install the NVIDIA container toolkit on the engine\'s machine',
            )
        )
    return found


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


def _has_gpus(info: Mapping[str, Any]) -> bool:
    return "nvidia" in (info.get("Runtimes") or {}) or bool(info.get("CDISpecDirs"))
