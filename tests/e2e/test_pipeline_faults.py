"""Every part of a planned run killed, frozen and fed damaged bytes, in every phase (issue 4, "Faults").

A cell is part x harm x phase. A few run always; all of them with SMQ_FAULT_MATRIX=1 (about half an hour). The random
token, stage and edge come from SMQ_FAULT_SEED, which every cell prints. Whatever the cell: exactly one terminal event
for the request (on record, where its connection died with the gateway), S1's exit status, and nothing left. What has to
become of the run was written down before the code was tried:

- killed: a stage's agent or engine, or the gateway, ends it at once; a cut edge is connected anew, the relay restarted;
- frozen for longer than design.md 6 row 22 allows: it ends, with a message that names who does not answer; an edge
  whose direct way carries nothing goes on over the bus;
- frozen for a moment, or fed a damaged byte: the text is what it always is.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.pipeline_stack import PARAGRAPH, ConnectionHarm, ProcessHarm, stage_pid
from tests.e2e.stack import LONG, READY_S, Asker, Stack, wait_for

STAGES = 2
SEED = int(os.environ.get("SMQ_FAULT_SEED") or time.time_ns() % 1_000_000)
WHOLE = os.environ.get("SMQ_FAULT_MATRIX") == "1"

PARTS = ("agent", "engine", "edge", "gateway", "relay")
HARMS = ("kill", "freeze", "flicker", "corrupt")
PHASES = ("loading", "idle", "prefill", "decode")
FLICKER_S = 2.5
DEAD_S = 60 + 45  # row 22's limit, what SWIM needs to see it, a loaded machine
LIMITS_S = {"kill": 120.0, "freeze": DEAD_S, "flicker": 120.0, "corrupt": 120.0}
LOADING_FREEZE_S = 120 + 45  # row 14: silence while weights load
TOKENS = 40
MANY_TOKENS = 2000  # of an answer that is under way when it is harmed, however late the harm comes
TRIES = 3
PREFILL = PARAGRAPH * 30 + "Who is this text about?"
IDLE_ASK = ("What is the capital of France?", 24)
RELAY = '[relay]\nmode = "default"\n[pipeline]\nedges = "relay"\n'
SAMPLE = {
    "agent-kill-decode",
    "agent-flicker-loading",
    "agent-corrupt-decode",
    "engine-kill-prefill",
    "engine-flicker-decode",
    "edge-kill-decode",
    "edge-corrupt-prefill",
    "edge-corrupt-loading",
    "gateway-kill-decode",
    "relay-kill-decode",
}


@dataclass(frozen=True)
class Cell:
    """What is harmed, how and when; stage and edge are drawn."""

    part: str
    harm: str
    phase: str
    stage: int
    edge: int
    token: int

    @property
    def name(self) -> str:
        return f"{self.part}-{self.harm}-{self.phase}"

    @property
    def heals(self) -> bool:
        """Whether the run has to go on as if nothing had been."""
        return self.harm in ("flicker", "corrupt") or self.part == "edge" or (self.part, self.harm) == ("relay", "kill")

    @property
    def may_finish(self) -> bool:
        """Tokens go past the agent of any stage but the last, whose engine's tokens are decoded through it: the answer
        may be whole long before the frozen agent is lost."""
        return (self.part, self.harm) == ("agent", "freeze") and self.stage < STAGES - 1

    @property
    def says(self) -> list[str]:
        """What is found in the message of a run that fails."""
        node = f"node {self.stage + 2} stage {self.stage}"
        match self.part, self.harm:
            case "agent", "kill":
                return [node, "SIGKILL"]
            case "agent", "freeze":
                return [node, "dead in SWIM"]
            case "engine", "kill":
                return [node, "SIGKILL"]
            case "engine", "freeze":
                return [node, "no progress"]
            case "gateway", "freeze" if self.phase == "loading":
                return ["gateway", " answer"]  # by a stage whose edge leads there, or by the orchestrator
            case "gateway", _:
                return ["gateway", "SIGKILL" if self.harm == "kill" else "did not answer"]
            case _, "freeze" if self.phase == "loading":
                return ["node ", "stage ", " answer"]  # an edge over it, or a worker without a lease
            case _:
                return ["node ", "stage ", "no lease", "does not answer"]


def cells() -> Iterator[Cell]:
    """All that can be: what an agent and its engine say goes over a socket pair that nobody else can reach."""
    for part, harm, phase in itertools.product(PARTS, HARMS, PHASES):
        draw = random.Random(f"{SEED} {part} {harm} {phase}")
        cell = Cell(
            part, harm, phase, draw.randrange(STAGES), draw.randrange(1, STAGES + 2), draw.randrange(1, TOKENS // 2)
        )
        if (part, harm) != ("engine", "corrupt") and (WHOLE or cell.name in SAMPLE):
            yield cell


Harm = ProcessHarm | ConnectionHarm


@contextmanager
def prepared(stack: Stack, cell: Cell) -> Iterator[Any]:
    """Gives the function that finds what is to be harmed, once it is there; connections are taken before they are."""
    connections = None
    run_dir = stack.run_dir
    edges = {1: "edge2.sock", STAGES + 1: "edge-gateway.sock"} | {n: f"edge{n + 1}.sock" for n in range(2, STAGES + 1)}
    planes = ("control", "prompt", "edge", "stream")
    if cell.part == "edge":
        connections = ConnectionHarm([run_dir / edges[cell.edge]])
    elif cell.harm == "corrupt" and cell.part == "gateway":
        connections = ConnectionHarm([run_dir / edges[1], run_dir / edges[STAGES + 1]])
    elif cell.harm == "corrupt":
        # The services are connected when their sockets are taken: what is harmed is the workers' way to the bus.
        stack.wait_record("services", "ready")
        door = "relay" if cell.part == "relay" else "router"
        connections = ConnectionHarm([run_dir / f"{door}-{plane}.sock" for plane in planes])

    def find() -> Harm:
        if connections is not None:
            return connections
        if cell.part in ("agent", "engine"):
            return ProcessHarm(stage_pid(stack, cell.part, cell.stage))
        return ProcessHarm(stack.pid({"gateway": "prompt_gateway"}.get(cell.part, cell.part)))

    try:
        yield find
    finally:
        if connections is not None:
            connections.close()


def reach(stack: Stack, cell: Cell) -> Asker | None:
    """Until the run is in the cell's phase; the request that is under way then."""
    if cell.phase == "loading":
        sent = {"agent": cell.stage, "engine": cell.stage}.get(cell.part, 0)
        wait_for("a stage that loads", lambda: sent in _provisioned(stack), READY_S)
        return None
    addr = stack.addr()
    match cell.phase:
        case "idle":
            return None
        case "prefill":
            asker = Asker(addr, PREFILL, max_tokens=8 if cell.heals else MANY_TOKENS)
            wait_for("the prefill", lambda: stack.archive.prompts("pipeline_token_in"), 60)
            time.sleep(0.02 * cell.token)
        case _:
            asker = Asker(addr, LONG, max_tokens=TOKENS if cell.heals else MANY_TOKENS)
            wait_for("tokens", lambda: len(stack.archive.prompts("pipeline_token_out")) >= cell.token, 60)
    return asker


def _provisioned(stack: Stack) -> list[int]:
    sends = [record for record in stack.archive.lifecycle() if record.step == ("stage_provision_send", "sent")]
    return [record.detail["stage_index"] for record in sends]


@pytest.fixture(scope="module")
def right() -> dict[str, str]:
    """What an undisturbed pipeline answers."""
    with Stack(args=("--pipeline-stages", str(STAGES))) as stack:
        texts = {
            "decode": stack.ask(LONG, max_tokens=TOKENS).final_text,
            "prefill": stack.ask(PREFILL, max_tokens=8).final_text,
            "idle": stack.ask(IDLE_ASK[0], max_tokens=IDLE_ASK[1]).final_text,
        }
        stack.say("stop\n")
        stack.assert_stopped("stdin")
    return texts


@pytest.mark.spec("S1 10.10", "S1 9.10", "S1 9.15", "S1 3.1", "S1 10.8", "S1 9.16")
@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell.name)
def test_a_fault(cell: Cell, right: dict[str, str]) -> None:
    """One cell; again, where an edge was connected before the test could take its socket."""
    print(f"SMQ_FAULT_SEED={SEED}: {cell}")
    assert any(play(cell, right) for _ in range(TRIES)), "nothing went through the test's hands"


def play(cell: Cell, right: dict[str, str]) -> bool:
    """Whether what was to be harmed was there."""
    config = RELAY if cell.part == "relay" else ""
    with Stack(args=("--pipeline-stages", str(STAGES)), config=config) as stack, prepared(stack, cell) as find:
        if cell.part == "edge" and cell.phase == "loading":
            harm = find()
            if cell.harm in ("freeze", "corrupt"):
                getattr(harm, cell.harm)()  # already its handshake
        if cell.phase != "loading":
            stack.addr()
            harm = find()  # it takes a moment, in which an answer may end
        asker = reach(stack, cell)
        if cell.phase == "loading":
            harm = find()
        started = time.monotonic()
        match cell.harm:
            case "flicker":
                harm.freeze()
                time.sleep(FLICKER_S)
                harm.thaw()
            case _:
                getattr(harm, cell.harm)()
        if cell.heals:
            assert_heals(stack, cell, asker, right)
            is_frozen_edge = (cell.part, cell.harm) == ("edge", "freeze")
            if is_frozen_edge and cell.phase == "loading":
                return "relay" in ways(stack)  # nothing ever goes through a connection that was frozen before
            if isinstance(harm, ConnectionHarm) and not harm.passed:
                return False
            if is_frozen_edge and asker is not None:
                assert "relay" in ways(stack), "the choice is a record"
            if cell.harm == "corrupt":
                assert isinstance(harm, ConnectionHarm) and harm.flipped
        else:
            assert_fails(stack, cell, asker)
        print(f"{cell.name}: {time.monotonic() - started:.1f} s")
        return True


def assert_heals(stack: Stack, cell: Cell, asker: Asker | None, right: dict[str, str]) -> None:
    """The request that was under way and the next one are answered as ever, and the run ends well."""
    if asker is not None:
        wait_for("the end", lambda: asker.lines and asker.lines[-1]["type"] != "text_delta", LIMITS_S[cell.harm])
        last = asker.lines[-1]
        assert last["type"] == "done" and last["final_text"] == right[cell.phase], last
        assert "".join(line["text"] for line in asker.lines[:-1]) == last["final_text"]
    stack.addr()
    assert stack.ask(IDLE_ASK[0], max_tokens=IDLE_ASK[1]).final_text == right["idle"]
    stack.say("stop\n")
    stack.assert_stopped("stdin")
    assert asker is None or len(asker.terminals()) == 1


def ways(stack: Stack) -> set[str]:
    """Which candidates edges have taken so far."""
    found = [r for r in stack.archive.records() if r.step in (("edge", "ready"), ("token_endpoints", "ready"))]
    return {str(record.detail.get("path")) for record in found}


def assert_fails(stack: Stack, cell: Cell, asker: Asker | None) -> None:
    """Status 1 and one sentence within the limit; one fault for the request."""
    limit_s = LIMITS_S[cell.harm]
    if cell.phase == "loading" and cell.harm == "freeze":
        limit_s = LOADING_FREEZE_S
    error = stack.assert_failed(limit_s)
    assert all(word in error for word in cell.says), (error, cell.says)
    if cell.phase == "loading":
        assert stack.archive.find("prompt_rpc", "ready") is None
        return
    ended = stack.archive.prompts("prompt_complete")
    if asker is None:
        assert not ended, ended
        return
    terminals = [line["type"] for line in asker.terminals()]
    # A gateway that is gone cannot tell its client; then the orchestrator has it on record (design.md 2).
    if cell.may_finish and terminals == ["done"]:
        assert [record.status for record in ended] == ["ready"], ended
        return
    assert terminals == ([] if cell.part == "gateway" else ["fault"]), asker.lines[-3:]
    assert [record.status for record in ended] == ["failed"], ended
