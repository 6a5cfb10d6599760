"""How much a benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """
    The sizes of a run.

    Attributes:
        rounds: how often each figure is measured.
        writes: of each kind in a round.
        entries: of one sweep.
        documents: of the collection in which 100 are pending; 0 leaves it out.
        kills: how often each recovery, and each take-over, is measured.
        sweep_after: of the outbox whose writer is killed, in seconds.
        claim_ttl: of the same.
        transfers: of one process in a round.
        processes: how many transfer at once.
        scanned: oplog entries of a neighbour that a stream passes.
        beside: changes of the partitions beside one that stands.
        standing: changes of the one that stands.
        backlog: changes that flow, and are not to be stored.
        stored: changes of 1 kB whose storing is measured; of 10 kB a third.
        spilled: changes that are stored when a listener takes over.
        existing: documents of a snapshot, and as many live inserts beside it.
        snapshots: how many such snapshots are measured.
        live: live changes whose latency is measured alone; beside a snapshot as many as there is time for.
        parts: events with which each part is measured.
        owed: lengths of the backlogs that a listener finds.
        reached: changes of one round of the handlers on one stream, counted by handler.
        lease_ttl: of the bridge whose leader ends, in seconds.
        lock_lifetime: seconds that the server grants a transaction whose holder is killed; 0 leaves it out.
    """

    rounds: int = 5
    writes: int = 300
    entries: int = 5000
    documents: int = 1_000_000
    kills: int = 3
    sweep_after: float = 5.0
    claim_ttl: float = 10.0
    transfers: int = 300
    processes: int = 4
    scanned: int = 200_000
    beside: int = 5000
    standing: int = 10_000
    backlog: int = 20_000
    stored: int = 9000
    spilled: int = 100_000
    existing: int = 1_000_000
    snapshots: int = 1
    live: int = 100
    parts: int = 4000
    owed: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    reached: int = 20_000
    lease_ttl: float = 10.0
    lock_lifetime: int = 5


FULL = Sizes()
QUICK = Sizes(
    rounds=1, writes=60, entries=500, documents=50_000, kills=1, sweep_after=1.0, claim_ttl=2.0, transfers=60,
    scanned=20_000, beside=1500, standing=3000, backlog=5000, stored=3000, spilled=10_000, existing=20_000, live=20,
    parts=1000, owed=(5000, 20_000), reached=6000, lease_ttl=3.0, lock_lifetime=2,
)  # fmt: skip
