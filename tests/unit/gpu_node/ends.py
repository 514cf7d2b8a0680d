"""Both ends of the bus in this process, on real sockets: gpu-node is the broker, clients dial (S2 8)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.actors import Inbox
from common.bus import KeyPair, mint_keypair
from common.messages.inference import InferenceRequest
from tools.single_gpu_inference_client import reply_inbox
from worker.gpu_node.bridges import SERVICE_NAME
from worker.gpu_node.ends import LOOPBACK, End, broker_end, dial_end, free_ports, plane_endpoints
from worker.gpu_node.events import ProcessSpec
from worker.gpu_node.service import GpuNode, make_inbox

ECHO = ProcessSpec((sys.executable, str(Path(__file__).with_name("echo_worker.py"))))


class Cluster:
    """`pump` turns every end once."""

    def __init__(self, clients: int = 2, spec: ProcessSpec = ECHO) -> None:
        self.keys = mint_keypair()
        self.client_keys = [mint_keypair() for _ in range(clients)]
        self.base = free_ports()
        self.ends: list[End] = []
        end = broker_end(
            make_inbox(),
            keys=self.keys,
            base=self.base,
            admitted=[keys.public for keys in self.client_keys],
            logical_id="gpu-node",
        )
        self.ends.append(end)
        self.node = GpuNode(end, spec)

    def client(self, index: int = 0, keys: KeyPair | None = None, inbox: Inbox | None = None) -> End:
        end = dial_end(
            inbox or reply_inbox(),
            broker_key=self.keys.public,
            endpoints=plane_endpoints(LOOPBACK, self.base),
            keys=keys or self.client_keys[index],
            logical_id=f"client {index}",
        )
        self.ends.append(end)
        return end

    def pump(self) -> None:
        for end in self.ends:
            end.host.loop.turn(1)
            end.host.pump()
        self.node._hear()

    def until(self, fact: Callable[[], object], limit_s: float = 60) -> None:
        started = time.monotonic()
        while not fact():
            assert time.monotonic() - started < limit_s, f"not true within {limit_s} s"
            self.pump()

    def ready(self) -> None:
        self.until(lambda: self.node.ready)

    def joined(self, end: End) -> bytes:
        """The bridge's address, once the client is a member and the name resolves there."""
        self.until(lambda: end.state(self.keys.public) == "alive" and end.resolve(SERVICE_NAME))
        entry = end.resolve(SERVICE_NAME)
        assert entry is not None and entry.node == self.keys.public
        return entry.address

    def ask(self, end: End, request_id: int, prompt: str, *, reply_to: bytes = b"", **fields: Any) -> None:
        request = InferenceRequest(
            request_id=request_id, prompt=prompt, reply_to=reply_to or end.inbox_addr, **{"temperature": 0.0, **fields}
        )
        end.send(self.keys.public, self.joined(end), request)

    def heard(self, end: End, count: int = 1, limit_s: float = 60) -> list[Any]:
        """`count` messages of the client's inbox, in order."""
        heard: list[Any] = []

        def enough() -> bool:
            heard.extend(message for _, message in end.inbox.drain())
            return len(heard) >= count

        self.until(enough, limit_s)
        return heard

    def close(self) -> None:
        self.node.end.host.node.system.stop(self.node.inference_addr)
        for _ in range(20):
            self.pump()
        for end in reversed(self.ends):
            end.host.close()
        for child in self.node._children.values():
            child.close()
