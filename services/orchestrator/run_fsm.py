"""OrchestratorRun: the run-level state machine inside the orchestrator actor (S1 6.4; rust-swactor.md 4.2).

Pure: each observation returns the commands and lifecycle events it causes. In this program the direct reports are the
gates; the machine's commands and events are reported beside them. Without a prompt of its own it is a run that takes
prompts over the RPC: the gateway injects and feeds back, the machine follows, and no prompt's end is the run's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages.orchestrator import StageAssignment
from common.messages.report import RunCommandWire


@dataclass
class OrchestratorRun:
    """S1 6.4's state, without the cursors that a report queue needs. max_tokens 0: no cap."""

    run_id: int
    max_tokens: int = 0
    prompt: list[int] = field(default_factory=list)
    plan: list[StageAssignment] | None = None
    pool_ready: set[int] = field(default_factory=set)
    provisioned: bool = False
    token_in_ready: bool = False
    token_out_ready: bool = False
    ready_stages: set[int] = field(default_factory=set)
    injected_sequences: list[int] = field(default_factory=list)
    expected_token_sequence: int = 0
    terminal: str = ""
    teardown_started: bool = False
    stopped_stages: set[int] = field(default_factory=set)
    token_endpoints_stopped: bool = False
    torn_down: bool = False
    commands: list[RunCommandWire] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    """(RunRejected | RunFaulted | RunCompleted | RunOperatorStopped | RunTornDown, reason)."""

    @property
    def state(self) -> str:
        """The logical state by S1 6.4's names."""
        if self.torn_down:
            return "torn down"
        if self.teardown_started:
            return "tearing down"
        if self.terminal:
            return "terminal"
        if not self.provisioned:
            return "waiting for plan and pool"
        if self.injected_sequences or self.expected_token_sequence:
            return "generating tokens"
        if self._stages_missing():
            return "waiting for stage readiness"
        if self._has_token_edges and not (self.token_in_ready and self.token_out_ready):
            return "waiting for token endpoints"
        return "provisioned"

    @property
    def _has_token_edges(self) -> bool:
        """A run of one stage is executed directly: it has no edges."""
        return self.plan is not None and len(self.plan) > 1

    # --- observations -----------------------------------------------------------------------------------------
    def plan_available(self, stages: list[StageAssignment]) -> None:
        """The stages are known; what comes after the end is not a plan of this run any more."""
        if self.plan is None and not self.terminal:
            self.plan = stages
            self._provision()

    def pool_is_ready(self, nodes: list[int]) -> None:
        """These nodes are started."""
        self.pool_ready.update(nodes)
        self._provision()

    def _provision(self) -> None:
        if self.provisioned or self.terminal or self.plan is None:
            return
        if not all(stage.node_id in self.pool_ready for stage in self.plan):
            return
        self.provisioned = True
        for stage in self.plan:
            self._command("ProvisionStage", stage_index=stage.stage_index, node_id=stage.node_id)
        if self._has_token_edges:
            self._command("CreateTokenInEndpoint")
            self._command("CreateTokenOutEndpoint")
        self._inject_prompt()

    def stage_ready(self, stage_index: int) -> None:
        """A stage has every readiness fact; one that is not of the plan faults the run."""
        if self.plan is None or stage_index not in {stage.stage_index for stage in self.plan}:
            self.fault("UnknownStageReady")
            return
        self.ready_stages.add(stage_index)
        self._inject_prompt()

    def token_endpoint_ready(self, *, inbound: bool) -> None:
        """Token-in or token-out is connected."""
        if inbound:
            self.token_in_ready = True
        else:
            self.token_out_ready = True
        self._inject_prompt()

    def leave_out(self, stage_index: int) -> None:
        """The plan goes without this stage; its stop is nobody's to wait for."""
        self.plan = [stage for stage in self.plan or [] if stage.stage_index != stage_index]

    def stages_renewed(self) -> None:
        """A worker was replaced: stages and token endpoints have to become ready anew."""
        self.ready_stages.clear()
        self.expected_token_sequence = 0
        self.token_in_ready = self.token_out_ready = False

    def _stages_missing(self) -> bool:
        return self.plan is None or {stage.stage_index for stage in self.plan} != self.ready_stages

    def _inject_prompt(self) -> None:
        endpoints = self.token_in_ready and self.token_out_ready
        ready = self.provisioned and endpoints and not self._stages_missing()
        if ready and self.prompt and not self.injected_sequences and not self.terminal:
            self._inject(0, self.prompt)

    def _inject(self, sequence: int, tokens: list[int]) -> None:
        self.injected_sequences.append(sequence)
        self._command("InjectTokenObject", sequence=sequence, tokens=tokens)

    def token_received(self, sequence: int, token_id: int, eos: bool, count: int = 1) -> None:
        """A token came back, the last one of `count`; out of order or after the end it is ignored here (the serving
        loop treats it as fatal)."""
        if self.terminal or sequence - count + 1 != self.expected_token_sequence or not self.provisioned:
            return
        if not self.prompt:
            self.expected_token_sequence += count
            return
        if not self.injected_sequences:
            return
        self.expected_token_sequence += 1
        if eos or (self.max_tokens and len(self.injected_sequences) >= self.max_tokens):
            self._end("RunCompleted", "")
        else:
            self._inject(sequence + 1, [token_id])

    def fault(self, reason: str) -> None:
        """StageFault, EndpointFault, UnknownStageReady, or whatever else the run fails with (a lost worker)."""
        self._end("RunFaulted", reason)

    def operator_stop(self) -> None:
        """A controlled shutdown."""
        self._end("RunOperatorStopped", "")

    def _end(self, event: str, reason: str) -> None:
        if not self.terminal:
            self.terminal = event
            self.events.append((event, reason))
        self._tear_down()

    def _tear_down(self) -> None:
        if self.teardown_started:
            return
        self.teardown_started = True
        for stage in self.plan or []:
            self._command("StopRun", stage_index=stage.stage_index, node_id=stage.node_id)
        if self._has_token_edges:
            self._command("TearDownTokenEndpoints")
        else:
            self.token_endpoints_stopped = True
        self._torn_down()

    def stage_stopped(self, stage_index: int) -> None:
        """A stage released everything."""
        self.stopped_stages.add(stage_index)
        self._torn_down()

    def endpoints_stopped(self) -> None:
        """Both token endpoints are closed."""
        self.token_endpoints_stopped = True
        self._torn_down()

    def _torn_down(self) -> None:
        stopped = {stage.stage_index for stage in self.plan or []} <= self.stopped_stages
        if self.teardown_started and stopped and self.token_endpoints_stopped and not self.torn_down:
            self.torn_down = True
            self.events.append(("RunTornDown", ""))

    def _command(
        self, kind: str, *, stage_index: int = 0, node_id: int = 0, sequence: int = 0, tokens: list[int] | None = None
    ) -> None:
        self.commands.append(
            RunCommandWire(
                kind=kind,
                run_id=self.run_id,
                stage_index=stage_index,
                node_id=node_id,
                sequence=sequence,
                tokens=tokens or [],
            )
        )

    def check(self) -> None:
        """Invariants of the machine."""
        assert not self.torn_down or self.teardown_started
        assert not self.teardown_started or self.terminal
        assert sum(event == "RunTornDown" for event, _ in self.events) <= 1
        assert sum(event != "RunTornDown" for event, _ in self.events) <= 1
        assert self.injected_sequences == list(range(len(self.injected_sequences)))
