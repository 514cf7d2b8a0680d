"""The provisioner that stops itself (SIGSTOP) the first time it comes to a named point, so that it can be hurt there.

`python -P -m tests.campaign.points --bus FILE --owner-fd N` with SMQ_POINT in the environment. Everything else is the
real provisioner. Points are "<what>:before" and "<what>:after" of the calls below, and "ledger-<op>:..." of the lines.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

PACE = 0.05
"""Of the real distances between calls to vast.ai, which the fake does not need."""


def speed_up() -> None:
    """In this process, providers for vast.ai wait a twentieth of the real pauses."""
    from services.provisioner.vastai_provider import VastAiProvider

    defaults = list(VastAiProvider.__init__.__defaults__ or ())
    defaults[-1] = PACE
    VastAiProvider.__init__.__defaults__ = tuple(defaults)


def main() -> int:
    """The provisioner's exit status."""
    wanted, reached = os.environ.get("SMQ_POINT", ""), [False]

    def at(point: str) -> None:
        if point == wanted and not reached[0]:
            reached[0] = True
            # To this very thread: the others stop with it, and it does not run on until the signal finds it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def wrap(owner: Any, name: str, what: Callable[..., str]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def stopping(*args: Any, **kwargs: Any) -> Any:
            point = what(*args, **kwargs)
            at(f"{point}:before")
            try:
                return real(*args, **kwargs)
            finally:
                # Also where the answer was lost.
                at(f"{point}:after")

        setattr(owner, name, stopping)

    def named(name: str) -> Callable[..., str]:
        return lambda *_, **__: name

    import docker

    from services.provisioner import (
        docker_container,
        docker_engine,
        docker_provider,
        jobs,
        ledger,
        process_provider,
        swarm_engine,
        swarm_task,
        vastai_api,
        vastai_ssh,
    )
    from services.provisioner.__main__ import main as provisioner

    wrap(ledger.Ledger, "append", lambda _, record: f"ledger-{record.op}")
    for job in ("mint", "stop_node", "prepare", "close", "complete_bootstrap"):
        wrap(jobs.ProvisionerJobs, job, named(job))
    wrap(process_provider._Worker, "follow", named("follow"))
    wrap(docker_provider.DockerProvider, "_create", named("docker-create"))
    wrap(docker_container.Container, "follow", named("follow"))
    wrap(docker_engine.Engine, "remove", named("docker-remove"))
    wrap(docker.APIClient, "create_secret", named("swarm-secret"))
    wrap(docker.APIClient, "create_service", named("swarm-service"))
    wrap(swarm_task.Task, "follow", named("follow"))
    wrap(swarm_engine.SwarmEngine, "remove_service", named("swarm-remove"))
    wrap(swarm_engine.SwarmEngine, "remove_secret", named("swarm-unsecret"))
    for call in ("search", "create", "destroy"):
        wrap(vastai_api.VastClient, call, named(f"vast-{call}"))
    wrap(vastai_ssh.Machine, "deploy", named("deploy"))
    speed_up()
    return provisioner(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
