"""Every limit and timer of the system, unit in the name, reason beside it (design.md 3, 6; anchors.md C7)."""

from __future__ import annotations

# --- the wire ---------------------------------------------------------------------------------------------------
ENVELOPE_BYTES_MAX = 4 * 1024 * 1024  # the fuse of one frame; prompts are bounded at 1 MiB, stream batches at 64 KiB
STREAM_BATCH_BYTES_MAX = 64 * 1024  # keeps one batch below a socket buffer, so that control is never far behind
STREAM_BATCH_MS = 50  # a person cannot see it, and each batch wakes three processes on the cores that models run on

# --- link (common/link.py) --------------------------------------------------------------------------------------
HELLO_RESEND_MS = 250  # a Hello may meet a broker that is not up yet
LINK_PING_MS = 1000  # application ping: libzmq answers its own heartbeats even when the broker hangs
LINK_SILENT_MS = 3000  # three pings without any frame: the connection is rebuilt
LINK_REBUILD_MS_MIN = 250  # after a ZAP refusal libzmq never retries (anchors.md A5-3)
LINK_REBUILD_MS_MAX = 5000
LINK_DOWN_FAILS_SENDS_MS = 5000  # S1 6.11, 10.12: a send fails when the link has been down so long

ADMIT_RESEND_MS = 500  # the relay may be restarting
RELAY_UNCONFIRMED_MS = 60_000  # a router that restarted hears from its provisioner within seconds
RELAY_NODES_MAX = 1024  # of one operator at one relay: a person's runs, and a bound for what a hostile one costs
RELAY_SAVE_LIMIT_MS = 10_000  # a few kilobytes with an fsync; a router repeats what is not acknowledged
RESYNC_MS = 1000  # a watcher that missed a Delta; it may be cut off for long, and each try is held 5 s anyway
BUS_COUNTS_FIRST_MS = 1000  # so that a run of a few seconds has counts at all
BUS_COUNTS_MS = 10_000  # a metrics scrape is rarely more often, and a day of it is 3 MB of archive
BROKER_SILENT_MS = 10_000  # a bound node that pings no more for so long is unbound; its routes are SWIM's business

# --- sessions (common/session.py) -------------------------------------------------------------------------------
SESSION_WINDOW_MESSAGES = 256  # measured: nothing lost behind a 3 s stall with this window (anchors.md A8)
SESSION_WINDOW_BYTES = 1024 * 1024
SESSION_QUEUE_MESSAGES_MAX = 4096  # beyond window and queue a send fails instead of growing without end
SESSION_QUEUE_BYTES_MAX = 16 * 1024 * 1024
SESSION_EARLY_BYTES_MAX = 2 * SESSION_WINDOW_BYTES + ENVELOPE_BYTES_MAX  # held out of order: no honest peer sends more
SESSION_IDLE_MS = 15 * 60_000  # far beyond every retransmission: then a session costs more than it can be worth
HELD_MESSAGES_MAX = 4096  # sends without a route yet; beyond it a send fails as if a queue were full
RETRANSMIT_MS_MIN = 500
RETRANSMIT_MS_MAX = 5000
ACK_DELAY_MS = 100  # far below a repetition; each ack by itself wakes three processes, so a stream of messages gets few
ACK_EVERY_MESSAGES = 64  # a quarter of the window, so that a fast sender never stalls on a delayed ack
OWN_RETRY_MS = 1000  # a node's own Register and Watch after a failure: the way may be gone for long
UNROUTABLE_HOLD_MS = 5000  # a route may be on its way (design.md 3)

# --- actors -----------------------------------------------------------------------------------------------------
MAILBOX_MESSAGES_MAX = 10_000  # a core that falls so far behind is broken; the sender is told
HANDLER_MS_MAX = 50  # S1 9.14: no core and no effect blocks the pump longer

# --- services and the run ---------------------------------------------------------------------------------------
SERVICE_READY_MS = 60_000
SERVICE_RESTARTS_MAX = 3  # within SERVICE_RESTART_WINDOW_MS, then fatal
SERVICE_RESTART_WINDOW_MS = 60_000
OWNER_GONE_EXIT_MS = 15_000  # the orchestrator died: every service is gone within this
CONFIG_RESEND_MS = 500
CONFIG_RESOLVE_MS = 30_000  # reading a few files; a hung network file system must not hang the launch
STDIN_LINE_BYTES_MAX = 4096  # stop words are short
PROVIDER_START_MS = 120_000
PROVIDER_START_BY_HAND_MS = 3_600_000  # somebody walks to three machines
PROVIDER_START_SLOW_MS = 900_000  # a rented machine boots; an image of gigabytes is pulled
READINESS_SILENCE_MS = 60_000
ACK_RESEND_MS = 250  # S1 9.6; the original's figure
ACK_LIMIT_MS = 60_000
RUNTIME_READY_RESEND_MS_MIN = 100
RUNTIME_READY_RESEND_MS_MAX = 2000
STAGE_PROVISION_RESEND_MS = 1000
STAGE_SILENCE_MS = 120_000  # weights: extended by each progress report
LEASE_MS = 5000  # the orchestrator's main loop renews it; a hung loop does not
LEASE_TTL_MS = 60_000
LEASE_TTL_RENTED_MS = 300_000  # a tunnel over somebody's home line may be down for minutes (design.md 6 row 14)
WORKER_SILENT_MS_SERVING = 60_000  # design.md 6 row 22
WORKER_SILENT_MS_STARTUP = 30_000
DEAD_WORKER_FAULT_MS = 5000  # row 22: the active request is faulted after this
STDERR_TAIL_LINES = 50
WORKER_RESTARTS_MAX = 3  # [runtime] on_worker_loss = "restart": a worker that dies again and again is broken, not lost
WORKER_RESTARTS_WINDOW_MS = 600_000  # above three starts with their back-off; a loss an hour is no crash loop
WORKER_RESTART_BACKOFF_MS = (
    200,
    2000,
    10_000,
)  # the first at once, but both of two that die together; then room to heal
WORKER_LOSS_NAMED_MS = 1500  # an edge broke: the provider names a dead worker within this, else only edges are renewed

# --- shutdown ---------------------------------------------------------------------------------------------------
STAGE_STOPPED_MS = 2000
PROCESS_STOP_GRACE_MS = 2000  # the `shutdown` line, then SIGKILL of the group
PROVIDER_STOP_LIMIT_MS = 40_000  # above the provisioner's own limit, so that its error is the one that is reported
RPC_CLOSED_MS = 1500
FLUSH_MS = 1500
SERVICE_STOP_MS = 1500
EXIT_DRAIN_MS = 1000  # what a process said last (a fault, an exit record) is acknowledged or given up
EXIT_SETTLE_MS = (SERVICE_STOP_MS - EXIT_DRAIN_MS) * 3 // 4  # between SIGTERM and its end: the drain needs the rest
LINGER_MS = 500  # 0 can abort the process (anchors.md A5-1), -1 hangs for ever

# --- prompt RPC -------------------------------------------------------------------------------------------------
PROMPT_LINE_BYTES_MAX = 1024 * 1024  # far above any context window here; a line that never ends must not fill memory
PROMPT_QUEUE_LEN_MAX = 64
CLIENT_BUFFER_BYTES_MAX = 1024 * 1024  # row 35: a slow client is cut off here
RPC_CONNECTIONS_MAX = 256
TEXT_DELTA_COALESCE_MS = 20
PROMPT_CANCEL_MS = 10_000  # a cancelled prompt that does not settle makes the worker suspect

# --- datastream -------------------------------------------------------------------------------------------------
OBSERVE_RING_RECORDS_MAX = 4096  # held at a producer until the collector is there; then the oldest go, as a Gap
COLLECTOR_RING_FRAMES_MAX = 16_384
CHANNEL_NAME_BYTES_MAX = 256
FRAME_PAYLOAD_BYTES_MAX = 1024 * 1024
LOG_LINE_BYTES_MAX = 16 * 1024  # longer lines are split, never held in memory whole
LAUNCH_FILE_BYTES_MAX = 64 * 1024


def provider_start_ms(provider: str) -> int:
    """How long a provider may take to start one worker."""
    if provider == "external":
        return PROVIDER_START_BY_HAND_MS
    return PROVIDER_START_MS if provider == "process" else PROVIDER_START_SLOW_MS


def network_profile(provider: str) -> str:
    """ "wan" where workers are far away, behind somebody's home line and a tunnel; else "lan" (anchors.md C7)."""
    return "wan" if provider == "vastai" else "lan"


def lease_ttl_ms(profile: str) -> int:
    """How long a worker goes on without its orchestrator. profile: `network_profile` of its provider."""
    return LEASE_TTL_RENTED_MS if profile == "wan" else LEASE_TTL_MS


def provider_stop_ms(provider: str) -> int:
    """How long the stop of one worker may take: above every grace; rented machines until a list shows them gone."""
    return 120_000 if provider == "vastai" else 30_000


# --- edges (common/edges/core.py) ---------------------------------------------------------------------------------
EDGE_CHUNK_BYTES = 64 * 1024  # one data frame: small beside a socket buffer, large beside its header
EDGE_UNSENT_BYTES_MAX = 64 * 1024 * 1024  # a fuse behind a full local socket: the credit window is the limit
EDGE_CREDIT_MS = 50  # each credit wakes its producer, over the bus four processes; the window is far from full by then
EDGE_CREDIT_LATE_MS = 50  # whoever waits for records tells credits in passing; the other thread sees to it after that
EDGE_DIAL_MS = 500  # per candidate: the peer is bound before it is dialled, so silence means unreachable
EDGE_OPEN_MS = 45_000  # above WORKER_SILENT_MS_STARTUP and SWIM's time to see it: who is frozen is named first
EDGE_NOT_YET_MS = 250
EDGE_RESUME_MS = 5000  # a broken connection without a welcome
EDGE_REDIAL_MS = 1500  # by itself the transport is back after a few hundred ms, or never
EDGE_SILENT_MS = 75_000  # above WORKER_SILENT_MS_SERVING and SWIM's time to see it: who is frozen is named first
EDGE_PROBE_MS = 1000  # bytes are on their way and nothing came back: ask where the consumer is
TOKEN_EDGES_PUMP_MS = (
    100  # the gateway's look at its edges' deadlines, 250 ms and more; bytes wake its loop by themselves
)
ENGINE_HEARTBEAT_MS = 1000  # of a stage that waits for work; the agent's limit is WORKER_SILENT_MS_SERVING
DECODE_WINDOW_MESSAGES = 32  # decodes on their way (design.md 4); the tokenizer's host bounds them, too
TOKENS_TOLD_MS = 100  # what the run is told of tokens: 10 Hz, as all coalesced progress (design.md 4)
PLAN_LIMIT_MS = 30_000  # the index of a local file; only a hung network file system takes longer
HUB_HEADER_MS = 300_000  # up to 10 MB of a GGUF's header over a slow line; what has come is kept for the next start
