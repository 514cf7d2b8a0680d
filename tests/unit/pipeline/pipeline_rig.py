"""A gateway actor in pipeline mode: stages, tokenizer and token-out play by hand or at once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from common.edge_records import Record, RecordDecoder, decode_tokens, encode_record, encode_tokens
from common.effects import Effect
from common.limits import TEXT_DELTA_COALESCE_MS
from common.messages.edge import BeginSequence, SequenceBegun
from common.messages.node_agent import (
    CancelRequest,
    DecodeTokens,
    EncodePrompt,
    ObjectSpec,
    RingSpec,
    StageInboundEdgeWire,
    StageOutboundEdgeWire,
)
from common.messages.orchestrator import EndpointWire
from common.messages.prompt import PromptEncoded, RequestCancelled, TokensDecoded
from common.messages.serve import HoldServing, OpenPromptRpc, OpenTokenIn, OpenTokenOut, RestoreServing
from services.prompt_gateway.token_edges import EdgeUp, ListenTokenOut, TokenOutBound, TokenRecord, WriteTokenIn
from tests.unit.prompt_gateway.rig import ORCHESTRATOR, WORKER_NODE, Rig

STAGES = [bytes([65 + index]) * 32 for index in range(3)]
TOKEN_IN, TOKEN_OUT = 1, len(STAGES) + 1
EOS = 2
ORCHESTRATOR_ACTOR = b"f" * 32
SPEC, RING = ObjectSpec(max_extent=4096, alignment=4, dtype="u32"), RingSpec(data_capacity=8192, alignment=8)
OPEN = OpenPromptRpc(
    run_id=1,
    node_id=1,
    mode="pipeline",
    encode_actor=STAGES[0],
    decode_actor=STAGES[-1],
    nodes=[WORKER_NODE],
    eos_tokens=[EOS],
    stage_actors=STAGES,
    orchestrator=ORCHESTRATOR_ACTOR,
    max_context=40,
)


class PipelineRig(Rig):
    """auto: which of "encode", "begin", "token", "decode", "cancel" answer by themselves.

    The model says token 10 + its count for each object, EOS after `length` of them; each decodes to "<token> ". A token
    takes `token_ms`, by default so long that each is decoded by itself.
    """

    def __init__(
        self, auto: str = "encode begin token decode cancel", length: int = 5, token_ms: int = TEXT_DELTA_COALESCE_MS
    ) -> None:
        self.auto, self.length, self.token_ms = set(auto.split()), length, token_ms
        self.decoder = RecordDecoder(4096, 4)
        self.injected: list[Record] = []
        self.out_sequence = 0
        self.received: list[Any] = []
        self.generated = 0
        self.times_foretold = 0
        self.todo: dict[str, deque[Any]] = {name: deque() for name in ("encode", "begin", "token", "decode", "cancel")}
        self.sent_to_stages: list[tuple[bytes, Any]] = []
        super().__init__()

    # --- the shell --------------------------------------------------------------------------------------------
    def settle(self) -> None:
        while True:
            for dst, msg in self.h.sent():
                if dst == ORCHESTRATOR:
                    self.to_orchestrator.append(msg)
                elif dst == ORCHESTRATOR_ACTOR:
                    self.received.append(msg)
                elif dst in STAGES:
                    self.sent_to_stages.append((dst, msg))
                    self.take(dst, msg)
            effects = self.h.effects()
            for effect in effects:
                self.perform(effect)
            if not effects and not self.play():
                return

    def perform(self, effect: Effect) -> None:
        match effect:
            case ListenTokenOut():
                self.other.append(effect)
                self.h.tell(TokenOutBound(["ipc:///gw"]))
            case WriteTokenIn(_, data):
                for record in self.decoder.feed(data):
                    self.injected.append(record)
                    self.todo["token"].append(record)
            case _:
                super().perform(effect)

    def take(self, dst: bytes, msg: Any) -> None:
        match msg:
            case EncodePrompt():
                self.todo["encode"].append(msg)
            case BeginSequence():
                self.todo["begin"].append((dst, msg))
            case DecodeTokens():
                self.todo["decode"].append(msg)
            case CancelRequest():
                self.todo["cancel"].append((dst, msg))

    def play(self) -> bool:
        """One automatic answer; False: there is none."""
        for name in sorted(self.auto):
            if self.todo[name]:
                self.answer(name)
                return True
        return False

    def step(self, name: str) -> None:
        """One answer by hand."""
        self.answer(name)
        self.settle()

    def answer(self, name: str) -> None:
        item = self.todo[name].popleft()
        match name:
            case "encode":
                tokens = list(range(20, 20 + len(item.prompt)))
                self.h.tell(PromptEncoded(request_id=item.request_id, tokens=tokens), dst=item.reply_to)
            case "begin":
                dst, begin = item
                begun = SequenceBegun(request_id=begin.request_id, stage_index=STAGES.index(dst))
                self.h.tell(begun, src=dst, dst=begin.reply_to)
            case "token":
                self.h.now_ms += self.token_ms
                self.token(item)
            case "decode":
                texts = [f"{token} " for token in item.tokens]
                lengths = [len(text) for text in texts]
                decoded = TokensDecoded(request_id=item.request_id, text="".join(texts), lengths=lengths)
                self.h.tell(decoded, dst=item.reply_to)
            case "cancel":
                dst, cancel = item
                self.h.tell(RequestCancelled(request_id=cancel.request_id), src=dst)

    def token(self, record: Record) -> None:
        """The pipeline's answer to a token-in record."""
        if not record.payload:
            self.token_out(Record(record.object_id, self.out_sequence, b""))
            return
        self.generated = 1 if record.begin else self.generated + 1
        eos = self.generated > self.length
        token = EOS if eos else 9 + self.generated
        self.token_out(Record(record.object_id, self.out_sequence, encode_tokens([token]), end=eos))

    def token_out(self, record: Record) -> None:
        """Where it is the token that the gateway has foretold, the answer must be what it foretold."""
        self.out_sequence += 1
        told = self.gateway.foretell()
        expected = None
        if told is not None and replace(record, payload=bytes(len(record.payload))) == told.received:
            self.times_foretold += 1
            expected = WriteTokenIn(told.token_in, encode_record(replace(told.fed_back, payload=record.payload)))
        self.h.tell(TokenRecord(TOKEN_OUT, record))
        effects = self.h.effects()
        written = [effect for effect in effects if isinstance(effect, WriteTokenIn)]
        assert expected is None or written == [expected], "foretold, not done"
        for effect in effects:
            self.perform(effect)

    def fed_back(self) -> list[int]:
        return [token for record in self.injected if not record.begin for token in decode_tokens(record.payload)]

    # --- a worker is replaced ---------------------------------------------------------------------------------
    def hold(self) -> None:
        """The orchestrator knows of the loss; what was on the edges is gone."""
        self.todo["token"].clear()
        self.tell(HoldServing(error="node 3 exited"), src=ORCHESTRATOR)

    def restore(self, msg: OpenPromptRpc) -> None:
        """New edges, whose sequences begin anew."""
        self.decoder, self.out_sequence = RecordDecoder(4096, 4), 0
        self.open_edges()
        self.tell(RestoreServing(run=msg), src=ORCHESTRATOR)

    # --- the run ----------------------------------------------------------------------------------------------
    def open(self, msg: OpenPromptRpc = OPEN) -> PipelineRig:
        self.open_edges()
        super().open(msg)
        return self

    def open_edges(self) -> None:
        edge = StageInboundEdgeWire(edge_id=TOKEN_OUT, kind="TokenOut", object_spec=SPEC, ring_spec=RING)
        self.tell(OpenTokenOut(run_id=1, run=b"r" * 16, token_out=edge), src=ORCHESTRATOR)
        wire = StageOutboundEdgeWire(
            edge_id=TOKEN_IN,
            kind="TokenIn",
            object_spec=SPEC,
            ring_spec=RING,
            consumer_node_id=2,
            consumer_endpoint=EndpointWire(node_key=b"k" * 32),
        )
        self.tell(OpenTokenIn(run_id=1, token_in=wire), src=ORCHESTRATOR)
        self.tell(EdgeUp(TOKEN_IN, "ipc:///stage0"))
        self.tell(EdgeUp(TOKEN_OUT, ""))
