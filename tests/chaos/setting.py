"""
What all parts of a run agree on: names, times, subscriptions and their keys. Pure.

The servers of a run are its own, so that names are fixed; and with them, which partition a key belongs to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mongo_celery.bridge.partitioning import partition_hash

BRIDGE = "chaos"
DATA = "chaos_data"
STATE = "chaos_state"
FACTS = "chaos_facts"
SINK = "sink"
APP = "tests.chaos.project"

PARTITIONS = 8
LEASE_TTL = 2.0
CLAIM_TTL = 3.0
DISPATCH_GRACE = 3.0
OPTIONS: Mapping[str, Any] = {
    "name": BRIDGE,
    "database": STATE,
    "autodiscover": False,
    "partitions": PARTITIONS,
    "lease_ttl": LEASE_TTL,
    "claim_ttl": CLAIM_TTL,
    "dispatch_grace": DISPATCH_GRACE,
    "commit_grace": 1.0,
    "transaction_seconds": 4.0,
    "max_crashes": 3,
    "spill_after": 2.0,
    "buffer_bytes": 256 << 10,
}

LISTENERS, WORKERS, POOL = 2, 2, 4
MESSAGE_BYTES_MAX = 1 << 20
"""What the broker takes of one message, until a run is healed."""

LISTENER, WORKER = "chaos-listener", "chaos-worker"
"""What processes call themselves to MongoDB, for failpoints; the clients that record facts have another name."""

HOT = "hot"
STANDING_PARTITIONS = (0, 1)
"""Where poison stands that is to halt or park; the other partitions of a subscription stay sound."""


@dataclass(frozen=True, slots=True)
class Flow:
    """
    One subscription with the collection of its name, and what is written there.

    Attributes:
        keys: how many keys, beside the hot one.
        hot: share of the writes that go to the hot key.
        owned: whether the partition is chosen by the field `owner`, by a function that fails without it.
        batch: most changes of a list, where its handler gets lists; else None.
    """

    name: str
    keys: int
    rate: float
    hot: float = 0.0
    seconds: float = 0.0
    policy: str = "halt"
    transactional: bool = False
    group: str | None = None
    owned: bool = False
    commit: str = "chain"
    batch: int | None = None
    max_running: int | None = None
    delay: float | None = None

    @property
    def parks(self) -> bool:
        """Whether its keys are parked: a change that was passed over comes behind later ones of its partition."""
        return self.policy == "park_key"


FLOWS: Mapping[str, Flow] = {
    flow.name: flow
    for flow in (
        Flow("quick", keys=32, rate=12.0, hot=0.1),
        Flow("slow", keys=16, rate=3.0, seconds=0.3, group="slow", commit="inline", max_running=2),
        Flow("letters", keys=16, rate=4.0, policy="dead_letter", owned=True, delay=1.0),
        Flow("together", keys=12, rate=2.0, policy="dead_letter", transactional=True),
        Flow("parking", keys=16, rate=3.0, hot=0.3, policy="park_key"),
        Flow("listed", keys=16, rate=4.0, hot=0.2, policy="dead_letter", commit="inline", batch=20),
    )
}


def keys_of(flow: Flow) -> list[str]:
    return [f"{flow.name}-{number}" for number in range(flow.keys)]


def partition_of(subscription: str, key: str) -> int:
    """The partition of a key; one without an owner belongs where its document key puts it."""
    owned = FLOWS[subscription].owned and not key.startswith(OWNERLESS)
    return partition_hash(key if owned else [DATA, subscription, key]) % PARTITIONS


POISON, HARMLESS = "poison-", "odd-"
OWNERLESS = f"{POISON}no-partition"
BROKEN_TEXT = "\ufffd" * 4
"""How bytes that are no UTF-8 are read, in a key that the writer writes with such bytes."""


def order_of(subscription: str, key: str, partition: int) -> int:
    """
    A number for everything whose effects are in one order: a partition, or a key.

    Where keys are parked, others pass; and of a bulk write the order is that of each document.
    """
    flow = FLOWS[subscription]
    return zlib.crc32(key.encode()) if flow.parks or flow.batch is not None else partition


def keys_in(subscription: str, partition: int, prefix: str) -> Iterator[str]:
    number = 0
    while True:
        key = f"{prefix}-{number}"
        if partition_of(subscription, key) == partition:
            yield key
        number += 1


def is_poison(key: str) -> bool:
    return key.startswith(POISON)
