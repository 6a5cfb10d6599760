"""How much a run measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mongo_celery.bench.modes import MODES

EXTRAS = ("latency", "memory", "take_over")
"""What is measured beside changes per second."""

CHOICES = (*MODES, *EXTRAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    The sizes of a run.

    Attributes:
        only: modes and extras; all when empty.
        rounds: how often each mode is measured.
        changes: of one measurement of `raw_chain`; faster modes get a multiple.
        warm_up: changes before that, which are not counted.
        samples: single writes for a latency.
        backlog: changes before a listener whose memory is measured.
        lease_ttl: of the bridge whose listener is ended, in seconds.
        takeovers: how often it is ended, by each signal.
    """

    only: Sequence[str] = ()
    rounds: int = 5
    changes: int = 2000
    warm_up: int = 200
    samples: int = 200
    backlog: int = 200_000
    lease_ttl: float = 10.0
    takeovers: int = 2

    def wants(self, name: str) -> bool:
        """Whether a mode or an extra is to be measured."""
        return not self.only or name in self.only


FULL = Plan()
QUICK = Plan(rounds=1, changes=600, warm_up=100, samples=40, backlog=40_000, lease_ttl=3.0, takeovers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """
    The sizes of the suites beside the bridge's.

    Attributes:
        rounds: how often each figure is measured.
        writes: of each kind in a round.
        entries: of one sweep.
        documents: of the collection in which 100 are pending; 0 leaves it out.
        kills: how often each recovery is measured.
        sweep_after: of the outbox whose writer is killed, in seconds.
        claim_ttl: of the same.
        transfers: of one process in a round.
        actors: how many processes transfer at once.
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
    actors: int = 4
    lock_lifetime: int = 5


FULL_SIZES = Sizes()
QUICK_SIZES = Sizes(
    rounds=1, writes=60, entries=500, documents=50_000, kills=1, sweep_after=1.0, claim_ttl=2.0, transfers=60,
    lock_lifetime=2,
)  # fmt: skip
