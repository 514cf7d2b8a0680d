"""Every limit and timer of S2 7, unit in the name, reason beside it."""

from __future__ import annotations

# --- provisioning (S2 7.1) --------------------------------------------------------------------------------------
PROVISION_ATTEMPTS_MAX = 3  # S2 7.1: each on another offer
RUNNING_POLLS_MAX = 60  # S2 7.1: wait_for_running
RUNNING_POLL_MS = 10_000  # with 60 polls ten minutes: an image of some GB and a slow host
DESTROY_RETRY_MS = 3500  # the API takes one destroy every 3 s (providers.md A2)
DESTROY_LIMIT_MS = 120_000  # S2 7.4, closed: retried until confirmed; after this the ledger has it
CONVERGE_LOG_LINES = 40  # S2 7.2
ANSWER_LOG_LINES = 60  # S2 7.3

# --- cluster join (S2 7.2) --------------------------------------------------------------------------------------
CONVERGE_LIMIT_MS = 120_000
RESOLVE_LIMIT_MS = 60_000
LOCAL_CONVERGE_LIMIT_MS = 30_000  # no image, no tunnel: the original's figures for its localhost mode
LOCAL_RESOLVE_LIMIT_MS = 30_000
LINK_LOST_LIMIT_MS = 15_000  # localhost: the node is the broker, and SWIM's clock stands while the link is down
ORPHAN_LIMIT_MS = 600_000  # a rented node without its client: a tunnel is back within seconds, a dead laptop never
NODE_KEY_LIMIT_MS = 600_000  # how long a rented gpu-node waits for its key over ssh: as long as its worker may load

# --- inference (S2 7.3) -----------------------------------------------------------------------------------------
WORKER_READY_LIMIT_MS = 600_000
ANSWER_LIMIT_MS = 300_000
NOT_READY_RESEND_MS = 2000
PENDING_REPLIES_MAX = 64  # as the prompt gateway's queue: beyond it a caller would wait for hours
WORKER_LINE_BYTES_MAX = 2 * 1024 * 1024  # an answer fits; a line that never ends must not fill memory
WORKER_LOG_LINE_CHARS_MAX = 2000
UNSENT_BYTES_MAX = 64 * 1024 * 1024  # pending requests of a worker that reads only between two prompts
KILL_TIMEOUT_MS = 5000  # between asking a worker to end and killing it: the original's figure
LEAVE_MS = 1200  # SWIM's own second, and a little
CLIENT_LEAVE_MS = 300  # one round of gossip: a person waits for the prompt to come back
