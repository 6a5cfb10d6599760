"""
The kinds of faults, and how long each may keep a partition from going on. Pure.

The bounds are what docs/guarantees.md promises for the times in `setting`; where it names none, what follows from
them: a lost message is sent again after the grace, a dead claim lapses first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tests.chaos.setting import CLAIM_TTL, DISPATCH_GRACE, LEASE_TTL

_SWEEP = 1.0
_LOST_MESSAGE = DISPATCH_GRACE + 2 * _SWEEP
_DEAD_CLAIM = CLAIM_TTL + DISPATCH_GRACE + _SWEEP
_TAKE_OVER = LEASE_TTL + 2.0
_HANG = 8.0  # until a client has given up a server that is frozen
_ELECTION = 5.0


@dataclass(frozen=True, slots=True)
class Kind:
    """
    One kind of fault.

    Attributes:
        on: what it befalls; two faults on one thing never overlap. A snapshot befalls nobody.
        bound: seconds until everything goes on: from its end, or from its beginning where there is a successor.
        lasts: least and most seconds that it lasts.
        members: of how many members the set has to be, at least.
        alone: whether it needs a set of one member.
        elects: whether it makes the set elect a primary.
    """

    name: str
    on: str
    bound: float
    lasts: tuple[float, float] = (0.0, 0.0)
    members: int = 1
    alone: bool = False
    elects: bool = False

    @property
    def has_successor(self) -> bool:
        """Whether nothing waits for its end: another process takes over, or a primary that is elected."""
        return self.on in {"listener", "worker", "snapshot"} or self.elects


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind("kill listener", "listener", _TAKE_OVER),
            Kind("freeze listener", "listener", _TAKE_OVER, (3.0, 6.0)),
            Kind("end listener", "listener", 1.5),
            Kind("kill worker", "worker", _DEAD_CLAIM),
            Kind("freeze worker", "worker", _DEAD_CLAIM, (4.0, 8.0)),
            Kind("end worker", "worker", _LOST_MESSAGE),
            Kind("kill pool process", "worker", _DEAD_CLAIM),
            Kind("freeze pool process", "worker", _DEAD_CLAIM, (4.0, 8.0)),
            Kind("kill redis", "redis", _LOST_MESSAGE, (0.5, 3.0)),
            Kind("freeze redis", "redis", _LOST_MESSAGE, (1.0, 4.0)),
            Kind("flush redis", "redis", _LOST_MESSAGE),
            Kind("delete queues", "redis", _LOST_MESSAGE),
            Kind("cut redis clients", "redis", _LOST_MESSAGE),
            Kind("repeat messages", "redis", 1.0, (1.0, 3.0)),
            Kind("freeze mongod", "mongod", _HANG, (1.0, 5.0)),
            Kind("state commands fail", "mongod", _ELECTION, (2.0, 5.0)),
            Kind("state connections close", "mongod", _ELECTION, (2.0, 5.0)),
            Kind("state commands are slow", "mongod", _ELECTION, (2.0, 5.0)),
            Kind("kill cursors", "mongod", 2.0),
            Kind("network is slow", "network", _ELECTION, (2.0, 5.0), alone=True),
            Kind("network resets", "network", _ELECTION, alone=True),
            Kind("network is lost", "network", _HANG, (1.0, 4.0), alone=True),
            Kind("step down", "mongod", _ELECTION, elects=True),
            Kind("member recovers", "mongod", _ELECTION, (2.0, 4.0), alone=True),
            Kind("kill primary", "mongod", _ELECTION, (2.0, 4.0), members=3, elects=True),
            Kind("take back writes", "mongod", _HANG, members=3, elects=True),
            Kind("snapshot", "snapshot", _SWEEP, (2.0, 6.0)),
            Kind("take back a lease", "mongod", _HANG + _TAKE_OVER, members=3, elects=True),
        )
    }
)
"""What a plan can have."""

STALL = Kind("machine stalls", "machine", _DEAD_CLAIM)
"""Not planned: a machine that is busy with other things does it."""
