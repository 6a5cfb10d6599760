"""How much a run measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mongo_celery.bench.modes import MODES

EXTRAS = ("latency", "memory", "take_over")
"""What is measured beside changes per second."""

CHOICES = (*MODES, *EXTRAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSizes:
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


FULL = BenchSizes()
QUICK = BenchSizes(rounds=1, changes=600, warm_up=100, samples=40, backlog=40_000, lease_ttl=3.0, takeovers=1)
