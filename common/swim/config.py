"""The parameters of SWIM, each with its reason (anchors.md C7): one set for a LAN, one for rented GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from common.limits import LINK_SILENT_MS

METADATA_BYTES_MAX = 512  # memberlist's figure: metadata travels in every rumour about its member
INCARNATION_MAX = 0xFFFF_FFFE  # MemberChanged carries u32, and refutation adds one; honest ones stay below a thousand
MEMBERS_MAX = 2048  # twice the largest simulated cluster; the whole table (300 B each) stays far below one envelope
NAMES_MAX = 4096
NAME_BYTES_MAX = 256
RELAYS_MAX = 128  # indirect probes on behalf of others at a time: memberlist's cap for its push-pulls


@dataclass(frozen=True, slots=True)
class SwimConfig:
    """All times in milliseconds of the protocol clock, which stands while the own link is down."""

    probe_interval_ms: int
    probe_timeout_ms: int
    suspicion_mult: int
    gossip_interval_ms: int
    push_pull_ms: int
    gossip_to_dead_ms: int
    indirect_probes: int = 3  # the paper's k; through one relay they help against a slow member only
    nack_percent: int = 80  # of the timeout: memberlist's full timeout comes too late for its round (anchors.md C3)
    suspicion_max_mult: int = 6
    awareness_max: int = 8
    gossip_fanout: int = 3
    retransmit_mult: int = 4
    packet_bytes: int = 1400  # one segment: a probe is never delayed by the rumours it carries
    forget_dead_ms: int = 24 * 3600 * 1000  # or the end of the run
    name_tombstone_ms: int = 3600 * 1000  # far above any push-pull period, so that no stale copy outlives it
    join_resend_ms: int = 1000  # a joiner may be there before membership is; once a second costs nothing
    leave_ms: int = 1000  # within SERVICE_STOP_MS, which the launcher grants
    dubious_ms: int = LINK_SILENT_MS + 1000  # a dead link is noticed so late; accusations of that time mean nothing

    @property
    def nack_ms(self) -> int:
        """When a helper says that it is well but the target is silent."""
        return self.probe_timeout_ms * self.nack_percent // 100

    @property
    def confirmations_wanted(self) -> int:
        """memberlist: mult - 2 independent confirmations bring a suspicion down to its minimum."""
        return self.suspicion_mult - 2


LAN = SwimConfig(
    probe_interval_ms=1000,  # 0.5 s would find a death in 2.9 s but tolerate a freeze of only 2 s (anchors.md C5)
    probe_timeout_ms=300,  # links of a few ms; above any scheduling delay of a busy machine
    suspicion_mult=4,  # minimum 4 s: a freeze of 4 s is survived, a dead worker is known after 6 s
    gossip_interval_ms=200,
    push_pull_ms=30_000,
    gossip_to_dead_ms=30_000,  # as long as a push-pull period: a member wrongly called dead hears of it
)

WAN = SwimConfig(
    probe_interval_ms=2000,
    probe_timeout_ms=800,  # intercontinental round trips and an ssh tunnel
    suspicion_mult=6,  # minimum 12 s: tunnels stall for seconds
    gossip_interval_ms=500,
    push_pull_ms=60_000,
    gossip_to_dead_ms=60_000,
)

PROFILES: dict[str, SwimConfig] = {"lan": LAN, "wan": WAN}
