"""The Docker engine behind provider `docker`: how it is reached, and its refusals as sentences that say what to do.

The SDK is synchronous; every call has a timeout except the streams, which live on threads and connections of their own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import docker
import docker.errors
import requests.exceptions

from services.provisioner.plugin import ProviderError

CALL_LIMIT_S = 20  # create, start and remove on a busy disk take seconds; an engine that needs longer is stuck
PULL_LIMIT_S = 900  # between two lines of progress, not for the whole image
GONE_WAIT_S = 10  # removal of a large container's layers

_TOOLKIT = (
    "install the NVIDIA container toolkit on the engine's machine and run "
    '`nvidia-ctk runtime configure --runtime=docker`, or set [docker] gpus = "none"'
)


class EngineGone(ProviderError):
    """The engine does not answer: nothing is known about its containers."""


class Missing(ProviderError):
    """The engine answered: there is no such thing."""


class Engine:
    """One engine, found as the docker command finds it: DOCKER_HOST, else the CLI's context, else the local socket."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._api: Any = None

    def api(self) -> Any:
        """The shared client for short calls (docker.APIClient). Raises EngineGone."""
        if self._api is None:
            self._api = self._connect(CALL_LIMIT_S, None)
        return self._api

    def stream(self) -> Any:
        """A client of one's own for blocking streams: they would use up the shared one's connections."""
        return self._connect(None, self.api()._version)

    def _connect(self, timeout: int | None, version: str | None) -> Any:
        with self.sentences("reach the Docker engine"):
            client = docker.from_env(environment=self._environment, timeout=timeout or PULL_LIMIT_S, version=version)
            if timeout is None:
                client.api.timeout = None
            return client.api

    @contextlib.contextmanager
    def sentences(self, what: str) -> Iterator[None]:
        """Errors of the SDK as ProviderError, EngineGone or Missing. what: completes "cannot ..."."""
        try:
            yield
        except (docker.errors.NotFound, docker.errors.ImageNotFound) as error:
            raise Missing(f"cannot {what}: {explain(error)}") from None
        except docker.errors.APIError as error:
            raise ProviderError(f"cannot {what}: {refusal(explain(error))}") from None
        except (requests.exceptions.RequestException, docker.errors.DockerException, OSError) as error:
            raise EngineGone(f"cannot {what}: {self._unreachable(error)}") from None

    def _unreachable(self, error: Exception) -> str:
        text = str(error)
        where = self._environment.get("DOCKER_HOST") or "the local socket"
        if "PermissionError" in text or "Permission denied" in text:
            return f"this user may not use {where}; add it to the group docker or set DOCKER_HOST"
        if "FileNotFoundError" in text or "Connection refused" in text or "ConnectionRefusedError" in text:
            return f"no engine answers at {where}; start Docker or set DOCKER_HOST"
        return f"{where} does not answer ({type(error).__name__}); check that Docker runs"

    def engine_id(self) -> str:
        """Which engine this is; container ids of another one mean nothing here."""
        with self.sentences("ask the Docker engine who it is"):
            return str(self.api().info().get("ID", ""))

    def ensure_image(self, image: str, pull: str, say: Callable[[str], None]) -> dict[str, Any]:
        """The image's inspect data, pulled by [docker] pull = missing | always | never. Raises ProviderError."""
        found = self._image(image)
        if pull == "never" or (pull == "missing" and found is not None):
            if found is None:
                raise ProviderError(
                    f'image {image} is not on the engine and [docker] pull is "never"; build it with '
                    f"`docker build -f compose/Dockerfile.worker -t {image} .`"
                )
            return found
        say(f"pulling image {image}")
        try:
            with self.sentences(f"pull image {image}"):
                for line in self.stream().pull(image, stream=True, decode=True):
                    if "error" in line:
                        raise ProviderError(f"cannot pull image {image}: {line['error']}")
        except EngineGone:
            raise
        except ProviderError as error:
            raise ProviderError(
                f"{error}; build it with `docker build -f compose/Dockerfile.worker -t {image} .`, name another in "
                "[image] node, or check its registry"
            ) from None
        found = self._image(image)
        if found is None:
            raise ProviderError(f"image {image} was pulled and is not there; check the engine's disk")
        return found

    def has_image(self, image: str) -> bool:
        """Whether the engine holds it already. Raises EngineGone."""
        return self._image(image) is not None

    def _image(self, image: str) -> dict[str, Any] | None:
        try:
            with self.sentences(f"look at image {image}"):
                return dict(self.api().inspect_image(image))
        except Missing:
            return None

    def find(self, label: str) -> list[dict[str, Any]]:
        """All containers, running or not, that bear the label `name=value`."""
        with self.sentences("list the containers"):
            return list(self.api().containers(all=True, filters={"label": [label]}))

    def inspect(self, container: str) -> dict[str, Any]:
        """Raises Missing if it is gone."""
        with self.sentences(f"look at container {container[:12]}"):
            return dict(self.api().inspect_container(container))

    def remove(self, container: str) -> None:
        """Kill and remove; returns when a look says that it is gone. A container that is gone already is fine."""
        with contextlib.suppress(Missing), self.sentences(f"remove container {container[:12]}"):
            try:
                self.api().remove_container(container, v=True, force=True)
            except docker.errors.APIError as error:
                # 409: a removal is in progress already, for example by a stop that runs beside this one.
                if error.status_code != 409:
                    raise
        until = time.monotonic() + GONE_WAIT_S
        while time.monotonic() < until:
            try:
                self.inspect(container)
            except Missing:
                return
            time.sleep(0.1)
        raise ProviderError(f"container {container[:12]} cannot be removed; look at it with docker inspect")


def bridge_gateway(environment: Mapping[str, str]) -> str:
    """The address of this machine on the engine's default network: what containers can always dial."""
    engine = Engine(environment)
    with engine.sentences("look at the engine's network bridge"):
        network = engine.api().inspect_network("bridge")
    return gateway_of(network)


def gateway_of(network: Mapping[str, Any]) -> str:
    """Of a network's inspect data. An engine that has never been restarted names only the subnet."""
    for entry in (network.get("IPAM") or {}).get("Config") or []:
        with contextlib.suppress(ValueError, KeyError, StopIteration, TypeError):
            address = entry.get("Gateway") or str(next(ipaddress.ip_network(entry["Subnet"]).hosts()))
            if ipaddress.ip_address(address).version == 4:
                return str(address)
    raise ProviderError(
        "the engine's network bridge has no gateway address; set [relay] bind_addr and advertise_addr to an address of "
        "this machine that containers can dial"
    )


def explain(error: Any) -> str:
    """What the engine said, in one line."""
    text = getattr(error, "explanation", None) or str(error)
    return " ".join(str(text).split()).rstrip(".")


def refusal(text: str) -> str:
    """The engine's words, with what to do for the well-known ones (field-complaints.md C8)."""
    if "could not select device driver" in text or ("nvidia-container-cli" in text and "initialization error" in text):
        return f"the engine knows no GPU driver; {_TOOLKIT} ({text})"
    if "--runtime=nvidia" in text or ("nvidia-container-runtime" in text and "mode" in text):
        what = 'the engine\'s GPU runtime works in CDI mode; set [docker] gpus = "cdi:nvidia.com/gpu=all"'
        return f"{what} ({text})"
    if "CDI device" in text or ("cdi" in text.lower() and "unresolvable" in text):
        what = 'the engine knows no such CDI device; see `nvidia-ctk cdi list`, or set [docker] gpus = "none"'
        return f"{what} ({text})"
    if "nvidia" in text.lower() and ("unknown device" in text or "device error" in text or "no such device" in text):
        return f"the engine has no such GPU; see `nvidia-smi -L` and set [docker] gpus ({text})"
    if "bind source path does not exist" in text:
        return f"the model file is not on the engine's machine; with a remote engine put it there too ({text})"
    if re.search(r"executable file not found|no such file or directory", text) and "exec" in text:
        return f"the image has no program mvp-worker-node; build it from compose/Dockerfile.worker ({text})"
    return text
