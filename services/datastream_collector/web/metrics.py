"""Metrics as Prometheus text, counted from the records as they come (GET /metrics).

Counters begin when this process does: after a restart they count what the collector's ring still replays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.records import CHANNEL_BOOTSTRAP, CHANNEL_ENVELOPES, CHANNEL_PROMPT
from services.datastream_collector.reader import Entry
from services.datastream_collector.streams import CHANNEL_GAP
from services.datastream_collector.web.prompts import OUTCOMES, at_ms, new_tokens
from services.datastream_collector.web.run_view import CHANNELS_MAX, RunView
from services.datastream_collector.web.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
OPEN_PROMPTS_MAX = 1024
BROKERS_MAX = 64  # far above router and relay, four planes and a dozen verdicts
STATES = (
    *("starting", "started", "reported in", "acknowledged", "loading", "weights loaded", "ready"),
    *("stopped", "failed"),
)


class Metrics:
    """Counts entries; `render` adds what the newest run looks like now."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, of no use to anybody
        self.registry = registry = CollectorRegistry()
        self.prompts = Counter("smq_prompts", "Prompts by outcome", ["outcome"], registry=registry)
        self.first = Histogram(
            "smq_prompt_first_token_seconds",
            "From a prompt's acceptance to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self.token = Histogram(
            "smq_token_seconds", "Between a prompt's tokens after the first", buckets=SECONDS, registry=registry
        )
        self.tokens = Counter("smq_tokens", "Tokens, generated and of prompts", ["kind"], registry=registry)
        self.restarts = Counter(
            "smq_worker_restarts", "Starts of a worker after its first", ["node_id"], registry=registry
        )
        self.service_restarts = Counter("smq_service_restarts", "Restarts of a service", ["service"], registry=registry)
        self.frames = Counter(
            "smq_stream_frames", "Frames by stream and channel", ["stream", "channel"], registry=registry
        )
        self.bytes = Counter("smq_stream_bytes", "Payload bytes by stream", ["stream"], registry=registry)
        self.lost = Counter(
            "smq_stream_lost_frames", "Frames that producers lost", ["stream", "reason"], registry=registry
        )
        self.missed = Gauge("smq_subscriber_missed_frames", "Frames that this process missed", registry=registry)
        self._passed: dict[str, dict[str, dict[str, int]]] = {}
        """Broker → plane → verdict → envelopes since that broker's start."""
        registry.register(_Bus(self._passed))
        self._begun: dict[tuple[int, int], list[int]] = {}
        self._started: set[tuple[int, str]] = set()
        self._channels: set[tuple[str, str]] = set()
        for outcome in OUTCOMES.values():
            self.prompts.labels(outcome)
        for kind in ("generated", "prompt"):
            self.tokens.labels(kind)

    def watch(self, store: Store) -> None:
        """Gauges of the newest run of this store."""
        self.registry.register(_NewestRun(store))

    def add(self, entry: Entry) -> None:
        """The next frame."""
        key = (entry.stream, entry.channel)
        if key not in self._channels:
            key = key if len(self._channels) < CHANNELS_MAX else (entry.stream[:100], "(more)")
            self._channels.add(key)
        self.frames.labels(*key).inc()
        self.bytes.labels(key[0]).inc(len(entry.text))
        match entry.channel:
            case channel if channel == CHANNEL_PROMPT:
                self._prompt(entry)
            case channel if channel == CHANNEL_BOOTSTRAP:
                self._bootstrap(entry)
            case channel if channel == CHANNEL_ENVELOPES:
                self._envelopes(entry)
            case channel if channel == CHANNEL_GAP:
                lost = entry.content.get("lost")
                if isinstance(lost, int) and lost > 0:
                    reason = str(entry.content.get("reason"))[:50]
                    self.lost.labels(str(entry.content.get("stream"))[:100], reason).inc(lost)

    def _envelopes(self, entry: Entry) -> None:
        passed = entry.body("passed")
        broker = str(entry.content.get("broker"))[:20]
        if broker in self._passed or len(self._passed) < BROKERS_MAX:
            self._passed[broker] = {
                str(plane)[:20]: {
                    str(verdict)[:40]: count
                    for verdict, count in list(counts.items())[:BROKERS_MAX]
                    if isinstance(count, int) and not isinstance(count, bool) and count >= 0
                }
                for plane, counts in list(passed.items())[:BROKERS_MAX]
                if isinstance(counts, dict)
            }

    def _bootstrap(self, entry: Entry) -> None:
        content = entry.content
        phase, status = content.get("phase"), content.get("status")
        if phase == "provider_start" and status == "started":
            key = (entry.run, str(content.get("node_id"))[:20])
            counter = self.restarts.labels(key[1])
            if key in self._started:
                counter.inc()
            self._started.add(key)
        elif phase == "service_restart":
            self.service_restarts.labels(str(entry.detail.get("service"))[:50]).inc()

    def _prompt(self, entry: Entry) -> None:
        content, detail = entry.content, entry.detail
        prompt_id, phase, status = detail.get("prompt_id"), content.get("phase"), content.get("status")
        if not isinstance(prompt_id, int) or status == "dropped":
            return
        key, at = (entry.run, prompt_id), at_ms(entry)
        if phase == "prompt_work":
            self._begun[key] = [at, 0]
            if len(self._begun) > OPEN_PROMPTS_MAX:
                self._begun.pop(next(iter(self._begun)))
        elif phase == "prompt_complete" and status in OUTCOMES:
            self._begun.pop(key, None)
            self.prompts.labels(OUTCOMES[str(status)]).inc()
            for kind, name in (("prompt", "prompt_tokens"), ("generated", "tokens_generated")):
                if isinstance(count := detail.get(name), int) and count > 0:
                    self.tokens.labels(kind).inc(count)
        elif (tokens := new_tokens(detail)) and (times := self._begun.get(key)):
            self._tokens(times, tokens, at)

    def _tokens(self, times: list[int], tokens: int, at: int) -> None:
        """times: [accepted, last token], ms."""
        begun, last = times
        if not last:
            self.first.observe(max(0, at - begun) / 1000)
            tokens -= 1
            last = at
        for _ in range(min(tokens, 1000)):
            self.token.observe(max(0, at - last) / 1000 / tokens)
        times[1] = at

    def render(self) -> bytes:
        """The text."""
        return generate_latest(self.registry)


class _Bus(Collector):
    """What brokers say has passed; their counts are totals already."""

    def __init__(self, passed: dict[str, dict[str, dict[str, int]]]) -> None:
        self._passed = passed

    def collect(self) -> Iterator[Any]:
        labels = ["broker", "plane", "verdict"]
        family = CounterMetricFamily("smq_bus_envelopes", "Envelopes by plane and verdict", labels=labels)
        for broker, planes in self._passed.items():
            for plane, counts in planes.items():
                for verdict, count in counts.items():
                    family.add_metric([broker, plane, verdict], count)
        yield family


class _NewestRun(Collector):
    """Gauges that are read off the newest run's view at each scrape."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Any]:
        view = self._store.view(None)
        if view is None:
            return
        yield _one("smq_run", "1 for the state that the newest run is in", {"state": view.state}, 1)
        queue = GaugeMetricFamily("smq_prompt_queue_length", "Prompts that wait for the active one")
        queue.add_metric([], view.prompts.queued)
        yield queue
        yield _phases(view)
        yield from _workers(view)


def _one(name: str, text: str, labels: dict[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _phases(view: RunView) -> GaugeMetricFamily:
    family = GaugeMetricFamily("smq_phase_seconds", "Duration of each phase of the newest run", labels=["phase"])
    for step in view.section("phases"):
        end = step["end_ms"] or view.last_ms
        family.add_metric([step["phase"]], max(0, end - step["begin_ms"]) / 1000)
    return family


def _workers(view: RunView) -> Iterator[GaugeMetricFamily]:
    state = GaugeMetricFamily("smq_worker_state", "1 for the state that a worker is in", labels=["node_id", "state"])
    cpu = GaugeMetricFamily("smq_worker_cpu_percent", "Agent and engine, of one core", labels=["node_id"])
    memory = GaugeMetricFamily("smq_worker_memory_bytes", "Resident memory", labels=["node_id", "process"])
    gpu = GaugeMetricFamily("smq_worker_gpu_percent", "Utilization of a GPU", labels=["node_id", "gpu"])
    gpu_memory = GaugeMetricFamily("smq_worker_gpu_memory_mib", "Used memory of a GPU", labels=["node_id", "gpu"])
    price = GaugeMetricFamily("smq_price_per_hour_dollars", "What the rented workers cost")
    total = 0.0
    for row in view.workers.rows():
        node = str(row["node_id"])
        for name in STATES:
            state.add_metric([node, name], float(row["state"] == name))
        _add(cpu, [node], row.get("cpu", {}).get("worker_percent"))
        for process in ("agent", "engine"):
            _add(memory, [node, process], row.get("memory", {}).get(f"{process}_rss_bytes"))
        for index, item in enumerate(row.get("gpus", ())):
            _add(gpu, [node, str(index)], item["utilization_gpu_percent"])
            _add(gpu_memory, [node, str(index)], item["memory_used_mib"])
        if row["state"] not in ("stopped", "failed") and isinstance(row.get("dph_total"), int | float):
            total += row["dph_total"]
    price.add_metric([], total)
    yield from (state, cpu, memory, gpu, gpu_memory, price)


def _add(family: GaugeMetricFamily, labels: list[str], value: Any) -> None:
    if value is not None:
        family.add_metric(labels, value)


def metrics_app(metrics: Metrics) -> Starlette:
    """GET /metrics, and /healthz."""

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

    async def health(request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    return Starlette(routes=[Route("/metrics", scrape), Route("/healthz", health)])
