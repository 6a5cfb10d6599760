"""How much a run measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mongo_celery.bench.modes import MODES

EXTRAS = ("latency", "memory", "take_over")
"""What is measured beside changes per second."""

CHOICES = (*MODES, *EXTRAS)

_URGENT = ("raw_chain", "bridge_chain", "bridge_inline", "bridge_runs", "bridge_bulk", "listener_alone", "raw_stream")


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
        load_seconds: how long a mode is written to for its latency under load; 0 for not at all.
        backlog: changes before a listener whose memory is measured.
        lease_ttl: of the bridge whose listener is ended, in seconds.
        takeovers: how often it is ended, by each signal.
        window_seconds: for how long handlers of a user's own workload are counted.
        seconds_max: within which a step must end to be begun, as far as that is known; None for no such bound.
        rough: whether one round of little has to do, with a worker that is warmed up by the same listener.
    """

    only: Sequence[str] = ()
    rounds: int = 5
    changes: int = 500
    warm_up: int = 100
    samples: int = 200
    load_seconds: float = 10.0
    backlog: int = 200_000
    lease_ttl: float = 10.0
    takeovers: int = 2
    window_seconds: float = 6.0
    seconds_max: float | None = None
    rough: bool = False

    def wants(self, name: str) -> bool:
        """Whether a mode or an extra is to be measured."""
        return not self.only or name in self.only

    @property
    def order(self) -> tuple[str, ...]:
        """The wanted modes in the order of a round; where time may run out, what says most comes first."""
        names = MODES if self.seconds_max is None else dict.fromkeys((*_URGENT, *MODES))
        return tuple(name for name in names if self.wants(name))


FULL = BenchSizes()
QUICK = BenchSizes(
    rounds=1,
    changes=150,
    warm_up=30,
    samples=20,
    load_seconds=0.0,
    backlog=40_000,
    lease_ttl=3.0,
    takeovers=1,
    window_seconds=1.5,
    seconds_max=50.0,
    rough=True,
)
