"""Archives for the dashboard's tests, written as the collector writes them: runs that went well, badly and long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.records import (
    CHANNEL_BOOTSTRAP,
    CHANNEL_EVENTS,
    CHANNEL_PROMPT,
    CHANNEL_STAGE_ROUTE,
    CHANNEL_SWIM,
    bootstrap_record,
    event_record,
    log_channel,
    log_record,
    prompt_record,
)
from services.datastream_collector.archive import FrameArchive
from services.datastream_collector.frames import CollectedFrame

T0 = 1_796_020_000_000
HOSTILE = (
    '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
    "\x1b[31m\x1b]0;t\x07\u202e end"
)


class Writer:
    """One archive; time moves by `ms` before each record."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        self.archive = FrameArchive(str(path), max_bytes)
        self.positions: dict[str, int] = {}
        self.now = T0

    def run(self) -> None:
        self.positions.clear()

    def put(self, channel: str, payload: bytes, *, stream: str = "mvp-orchestrator/1", ms: int = 5) -> None:
        self.now += ms
        position = self.positions.get(stream, 0)
        self.positions[stream] = position + 1
        source = "orchestrator" if stream.startswith("mvp") else "node_cluster"
        self.archive.append(CollectedFrame(source, stream, channel, 1, position, payload, self.now))

    def phase(self, phase: str, status: str, node_id: int = 1, wait_ms: int = 5, /, **detail: Any) -> None:
        self.put(CHANNEL_BOOTSTRAP, bootstrap_record(phase, status, 1, node_id, detail), ms=wait_ms)

    def prompt(self, phase: str, status: str, prompt_id: int, ms: int = 5, **detail: Any) -> None:
        record = prompt_record(phase, status, 1, 1, prompt_id, {"prompt_id": prompt_id, **detail})
        self.put(CHANNEL_PROMPT, record, ms=ms)

    def log(self, node_id: int, stream: str, line: str, ms: int = 1) -> None:
        self.put(log_channel(node_id, stream), log_record(1, node_id, stream, line), ms=ms)

    def node(self, node_id: int, channel: str, record: dict[str, Any], ms: int = 1) -> None:
        self.put(channel, json.dumps(record).encode(), stream=f"{node_id}/1", ms=ms)

    # --- scenes -------------------------------------------------------------------------------------------------
    def start(self, boot: int, workers: int = 2, model: str = "smollm2-135m-instruct") -> None:
        facts = {"model_id": model, "provider": "process", "pipeline_stages": workers, "boot": boot, "notes": []}
        self.phase("config", "ready", **facts)
        self.phase("services", "ready", 1, 420)
        self.phase("node_provisioner", "ready", 1, 40)
        nodes = range(2, 2 + workers)
        for stage, node in enumerate(nodes):
            self.phase("provider_start", "started", node, stage_index=stage, provider="process")
            self.put(CHANNEL_EVENTS, event_record("ProvisionStart", 1, node, "process"))
        for stage, node in enumerate(nodes):
            self.phase("provider_start", "ready", node, 60, stage_index=stage, handle=f"h-{node}")
        self.phase("node_runtime_ready", "started")
        for stage, node in enumerate(nodes):
            key = f"{node}" * 16
            member = {
                "peer": key[:16],
                "logical_id": f"node {node}",
                "from": "unknown",
                "to": "alive",
                "reason": "joined",
            }
            self.put(CHANNEL_SWIM, bootstrap_record("membership_transition", "observed", 1, 1, member), ms=500)
            self.phase("node_runtime_ready", "ready", node, endpoint=key[:16], stage_index=stage)
            route = {"attempt": 1, "stage_index": stage, "route_matches_ready": True, "member_state": "alive"}
            self.put(CHANNEL_STAGE_ROUTE, bootstrap_record("stage_route_check", "observed", 1, node, route))
            self.phase("runtime_ready_ack", "sent", node, 2, attempt=1)
            self.phase("runtime_ready_ack", "ready", node, 30)
        stages = [
            {
                "node_id": node,
                "stage_index": stage,
                "layer_range": {"start": stage * 15, "end_exclusive": stage * 15 + 15},
                "inbound_edge_id": stage + 1,
                "outbound_edge_id": stage + 2,
            }
            for stage, node in enumerate(nodes)
        ]
        self.phase("stage_provision", "started", stages=stages, stage_count=workers)
        self.phase("weights_loaded", "started", expected=workers)
        for stage, node in enumerate(nodes):
            for done in range(0, 101, 20):
                self.phase(
                    "stage_provision_wait",
                    "observed",
                    node,
                    200,
                    phase="tensors",
                    done=done,
                    total=100,
                    stage_index=stage,
                )

    def machine(self, node: int, second: int) -> None:
        cpu = {"schema": "host.cpu.v1", "percent": 40 + second % 30, "worker_percent": 88.5, "cores": 8, "load1": 1.2}
        self.node(node, "host.cpu", cpu)
        memory = {
            "total_bytes": 16 << 30,
            "available_bytes": 9 << 30,
            "agent_rss_bytes": 50 << 20,
            "engine_rss_bytes": 700 << 20,
        }
        self.node(node, "host.memory", {"schema": "host.memory.v1", **memory})
        gpu = {
            "name": "NVIDIA GeForce RTX 4090",
            "utilization_gpu_percent": 37,
            "memory_used_mib": 812,
            "memory_total_mib": 24564,
        }
        self.node(node, "host.gpu", {"schema": "host.gpu.v1", "gpus": [gpu]})

    def serve(self) -> None:
        self.phase("weights_loaded", "ready", stages=2)
        self.phase("stage_provision", "ready")
        self.phase("prompt_rpc", "started", bind="127.0.0.1:19777")
        self.phase("prompt_rpc", "ready", addr="127.0.0.1:19777")
        self.phase("serve_prompts", "started")

    def answer(self, prompt_id: int, tokens: int, max_tokens: int = 0, end: str = "ready", ms: int = 25) -> None:
        self.prompt("prompt_work", "observed", prompt_id, 300, prompt_bytes=42, max_tokens=max_tokens)
        self.prompt("node_prompt_send", "started", prompt_id)
        for _ in range(tokens):
            self.prompt("node_prompt_event", "observed", prompt_id, ms, event="text_delta", tokens=1, text_bytes=4)
        if end == "ready":
            self.prompt(
                "prompt_complete", end, prompt_id, tokens_generated=tokens, prompt_tokens=9, finish_reason="stop"
            )
        elif end:
            self.prompt(
                "prompt_complete", end, prompt_id, error="the worker 2a2a was lost while it worked on this prompt"
            )

    def end(self, source: str = "stdin") -> None:
        self.phase("shutdown", "started", 1, 900, source=source)
        for node in (2, 3):
            self.phase("provider_stop", "ready", node, 100)
            self.put(CHANNEL_EVENTS, event_record("NodeStopped", 1, node, "process", "exited with status 0"))
        self.phase("orch_exit", "ready", 1, 20, result="ok")


def good_and_bad(path: Path) -> None:
    """Run 1 went well; run 2 lost a worker, whose last lines are hostile; a torn line at the end."""
    writer = Writer(path)
    writer.start(11)
    for node in (2, 3):
        writer.machine(node, 1)
    writer.serve()
    for prompt in range(1, 6):
        writer.answer(prompt, 20 * prompt, end="cancelled" if prompt == 4 else "ready")
    for number in range(1500):
        writer.log(2, "stderr", f"[engine] step {number}: 64 rows in 12.1 ms")
    writer.end()
    writer.run()
    writer.start(12)
    writer.serve()
    writer.answer(1, 12, max_tokens=64, end="failed")
    for node in (2, 3):
        writer.machine(node, 2)
    for number in range(30):
        writer.log(3, "stderr", f"loading tensor blk.{number}.attn_q.weight")
    writer.log(3, "stderr", HOSTILE)
    writer.log(3, "stderr", "RuntimeError: out of memory: 812 MiB wanted, 240 MiB free")
    dead = {
        "peer": "3333333333333333",
        "logical_id": "node 3",
        "from": "alive",
        "to": "dead",
        "reason": "no answer to 3 probes",
    }
    writer.put(CHANNEL_SWIM, bootstrap_record("membership_transition", "observed", 1, 1, dead))
    error = "node 3 stage 1 faulted while serving prompts: out of memory <b>812 MiB</b>"
    writer.phase("serve_prompts", "failed", error=error, node_id=3, stage_index=1)
    writer.phase("shutdown", "started", source="failure")
    writer.phase("provider_stop", "ready", 2, 200)
    writer.put(CHANNEL_EVENTS, event_record("NodeStopped", 1, 3, "process", "exited with status 1"))
    writer.phase(
        "orch_exit", "failed", error="node 3 stage 1 faulted while serving prompts: out of memory <b>812 MiB</b>"
    )
    with path.open("ab") as file:
        file.write(b'{"arrival_seq":9999,"sour')


def huge(path: Path, size: int) -> None:
    """An archive of `size` bytes of log lines and prompts around one run."""
    writer = Writer(path)
    writer.start(13)
    writer.serve()
    prompt = 0
    while path.stat().st_size < size:
        prompt += 1
        writer.answer(prompt, 10)
        for number in range(400):
            writer.log(2, "stderr", f"[engine] prompt {prompt} step {number}: " + "x" * 160)
    writer.end()
