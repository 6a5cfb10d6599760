"""
The facts of a bridge, from a few majority reads of its state.

Stored positions are facts. The listener's own knowledge (its buffer, and whether it has read everything) comes from its
report in the lease, which is valid only while its lease is live.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import describe
from mongo_celery.bridge.existing import is_unread
from mongo_celery.bridge.identity import Identity, build_identity
from mongo_celery.bridge.operations.acts import reached
from mongo_celery.bridge.operations.bridge_snapshot import DeadLetterGroup
from mongo_celery.bridge.operations.times import to_time
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.snapshots import Snapshot
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.bridge.worker.limits import time_limit
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.oplog import Oplog, operation_time, oplog_fill, oplog_or_none

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_READ_SECONDS = 10.0
_FIRST_MAX = 10
"""Limit of partitions whose first stored change is read for a snapshot, because an event may be large."""
_GROUPED = 1000
_ERROR_CHARS = 200

Place = tuple[str, int]
"""A handler and a partition index."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A handler of this process: its group, the committing task, Celery's time limit in seconds, delay and limits."""

    group: str | None = None
    commit: str = "chain"
    time_limit: float | None = None
    longest_delay: float = 0.0
    max_running: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """
    One reading of a bridge's state.

    Attributes:
        registered: the handlers of this process's app, by name.
        lease: the lease with the server's verdict `live`, or None before the first start.
        subscriptions: all stored handlers, registered or not.
        images: the partitions of the partitionings in force.
        dead_letters: number of dead letters by handler.
        now: the cluster's latest operation time.
        oplog: the times of its oldest and latest entry. None if unreadable.
        oplog_rolls: True if its oldest entries are being removed.
        stored: numbers of stored changes by partition, as far as counted.
        first: token and key of each partition's first stored change, as far as read.
        missing: partitions whose stored changes are lost.
        identity: the identity of the bridge in this process. None if a source cannot work.
    """

    options: BridgeOptions
    registered: Mapping[str, Registered]
    lease: Mapping[str, Any] | None
    subscriptions: Sequence[Mapping[str, Any]]
    images: Sequence[Image]
    dead_letters: Mapping[str, int]
    now: Timestamp
    oplog: Oplog | None
    oplog_rolls: bool = False
    stored: Mapping[Place, int] = field(default_factory=dict)
    first: Mapping[Place, tuple[str, str]] = field(default_factory=dict)
    missing: frozenset[Place] = frozenset()
    snapshots: Sequence[Snapshot] = ()
    dead_letter_groups: tuple[DeadLetterGroup, ...] = ()
    oversized: str | None = None
    identity: Identity | None = None

    @property
    def is_led(self) -> bool:
        """Return True if a listener holds the lease."""
        lease = self.lease or {}
        return bool(lease.get("live")) and lease.get("listenerId") is not None

    def is_handler_led(self, name: str) -> bool:
        """Return True if a listener leads with this handler, or with unknown handlers."""
        identity = (self.lease or {}).get("identity")
        return self.is_led and (identity is None or name in identity["handlers"])

    @property
    def report(self) -> Mapping[str, Any]:
        """The leading term's report. An acquisition clears the previous one."""
        return (self.is_led and (self.lease or {}).get("report")) or {}

    def find_reported(self, name: str, handler: str) -> Mapping[str, Any] | None:
        """Return a handler's row in a list of the report."""
        return next((each for each in self.report.get(name, ()) if each["subscription"] == handler), None)


def read_facts(wiring: Wiring, counting: float) -> Facts:
    """
    Read a bridge. The reads do not show one moment, but follow each other within milliseconds.

    Args:
        counting: time limit in seconds for counting stored changes, and again for the newest dead letters.

    Raises:
        ServerUnavailableError: MongoDB did not answer.
        DeploymentError: MongoDB cannot serve a bridge, or a right is missing.
    """
    with (
        reached(wiring) as store,
        pymongo.timeout(_READ_SECONDS),
    ):  # limits all reads, even if the primary fails between two
        return _read_all(wiring, store, counting)


def _read_all(wiring: Wiring, store: Store, counting: float) -> Facts:
    options, client, tasks = wiring.options, wiring.client, wiring.app.tasks
    lease = store.leases.read()
    subscriptions = store.subscriptions.read_all()
    layouts = layouts_in_force(subscriptions)
    images = store.partitions.of({name: layout.term for name, layout in layouts.items()})
    oplog = oplog_or_none(client)
    dead_letters = store.dead_letters.count()
    marked = {(each.subscription, each.index): each for each in images if each.stored}
    first, missing = _read_first(wiring, marked)
    return Facts(
        options=options,
        registered={
            each.name: Registered(
                each.group,
                "inline" if each.commits_inline(options) else "chain",
                time_limit(tasks.get(each.task_name)),
                each.longest_delay,
                each.max_running,
                each.per_second or None,
            )
            for each in wiring.handlers
        },
        lease=lease,
        subscriptions=subscriptions,
        images=images,
        dead_letters=dead_letters,
        now=operation_time(client),
        oplog=oplog,
        oplog_rolls=oplog is not None and oplog.removes(oplog_fill(client)),
        stored=_count_stored(store, marked, counting),
        first=first,
        missing=missing,
        snapshots=store.snapshots.read(),
        identity=_identity(wiring),
        **(_read_dead_letters(store, counting) if dead_letters else {}),
    )


def _identity(wiring: Wiring) -> Identity | None:
    try:
        return build_identity(wiring)
    except ConfigurationError:  # `check` names the invalid source
        return None


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End the reads in the block after these seconds, without an error."""
    try:
        with pymongo.timeout(seconds):
            yield
    except PyMongoError as error:
        if not error.timeout:
            raise


def _read_dead_letters(store: Store, seconds: float) -> dict[str, Any]:
    """Group the newest dead letters by handler and error. Return none if the time was too short."""
    groups: dict[tuple[str, str], DeadLetterGroup] = {}
    oversized = None
    with _limit(seconds):
        for each in store.dead_letters.list_errors(_GROUPED):
            error = " ".join(str(each.get("error") or "no error is recorded").split())[:_ERROR_CHARS]
            where = str(each.get("handler")), error
            newest = str(each["_id"]).split("/", 2)[-1]  # by which commands find it
            if where not in groups:  # the newest come first
                at = to_time(each.get("at"))
                groups[where] = DeadLetterGroup(handler=where[0], error=error, count=0, newest_at=at, newest_id=newest)
            groups[where] = replace(groups[where], count=groups[where].count + 1)
            oversized = oversized or (error if is_unread(newest) else None)
    found = tuple(sorted(groups.values(), key=lambda each: -each.count))
    return {"dead_letter_groups": found, "oversized": oversized}


def _count_stored(store: Store, marked: Mapping[Place, Image], seconds: float) -> dict[Place, int]:
    """Count stored changes. Omit partitions for which the time was too short."""
    counts: dict[Place, int] = {}
    with _limit(seconds):
        for place, image in marked.items():
            counts[place] = store.backlog.count(image.id, image.data, (image.stored or {})["to"])
    return counts


def _read_first(wiring: Wiring, marked: Mapping[Place, Image]) -> tuple[dict[Place, tuple[str, str]], frozenset[Place]]:
    """Read the first stored change of some partitions, waiting and oldest ones first. Find partitions without one."""
    found, missing = {}, set()

    def urgency(place: Place) -> tuple[bool, datetime]:
        image = marked[place]
        return visible_state(image) not in ("retrying", "waiting"), (image.stored or {})["since"]

    for place in sorted(marked, key=urgency)[:_FIRST_MAX]:
        image = marked[place]
        changes = wiring.store.backlog.read(image.id, image.data, (image.stored or {})["to"], 1)
        for change in changes:
            found[place] = change.data, describe(change.raw)
        if not changes and _is_bare(wiring, image.id):
            missing.add(place)
    return found, frozenset(missing)


def _is_bare(wiring: Wiring, partition_id: str) -> bool:
    """
    Return True if a partition has no stored changes although its mark promises some.

    The session has already read the mark, so an outdated primary cannot cause a wrong answer. The partition is read
    again, because committed changes may have been removed meanwhile.
    """
    store = wiring.store
    with store.open_session() as session:
        seen = set()
        for _ in range(2):
            images = store.partitions.look([partition_id], session)
            after, to = (images[0].data, (images[0].stored or {}).get("to", "")) if images else ("", "")
            if to <= after or store.backlog.outline(partition_id, after, to, 1, session):
                return False
            seen.add((after, to))
    return len(seen) == 1
