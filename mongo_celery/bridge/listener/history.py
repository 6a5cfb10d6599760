"""
Going on after lost history, once somebody has decided to.

Only subscriptions that stand before the oldest entry of the oplog are moved; what the others have not read
yet can still be read, and they go on where they are. Where the oplog may not be read, the one that stands
first is moved, since it is certain that its place is lost; if that was not all, the next failure moves the
next one.

No start is ever lowered: neither by the oldest entry, if a handler's own start was pinned behind it, nor for
a handler whose place is in the oplog.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.starts import Start, open_position, read_starts, start_time
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.stream.reader import Position
from mongo_celery.errors import DeploymentError, HistoryLostError, LeaseLostError
from mongo_celery.mongo.oplog import read_oplog

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.watermarks import Watermarks
    from mongo_celery.bridge.options import BridgeOptions
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_REPIN_LIMIT = 3


@dataclass(frozen=True, slots=True)
class _Lost:
    names: list[str]
    note: str


class LostHistory:
    """
    Moves what has lost its history, for one term.

    Args:
        client: of the watched data; its oplog is asked how far it reaches back.
        decision: `halt`, `oldest` or `now`.
        fingerprint: of the stream that is read.
    """

    def __init__(
        self,
        store: Store,
        client: MongoClient[dict[str, Any]],
        renewal: Renewal,
        options: BridgeOptions,
        *,
        decision: str,
        fingerprint: str,
    ) -> None:
        self._store = store
        self._client = client
        self._renewal = renewal
        self._options = options
        self._decision = decision
        self._fingerprint = fingerprint
        self._repins = 0

    def go_on(
        self,
        error: HistoryLostError,
        subscriptions: Mapping[str, Subscription],
        watermarks: Watermarks,
    ) -> Position:
        """
        Move the subscriptions whose place is lost, and say so.

        Returns:
            Where to read on: at the smallest place of all.

        Raises:
            HistoryLostError: nobody has decided to go on, or moving on by that decision cannot help.
            LeaseLostError: the term has ended.
            AccessError: the oldest entry is asked for and may not be read.
        """
        policy = self._policy(subscriptions)
        if policy == "halt":
            raise error
        watermarks.store(subscriptions.values(), 0.0)  # what is done is not judged by an older place
        version = self._renewal.term.version
        before = read_starts(self._store, list(subscriptions), version)
        oldest = self._oldest(required=policy == "oldest")
        start = oldest if oldest is not None and policy == "oldest" else start_time(self._client, policy)
        lost = _lost(before, oldest)
        if all(before[name].watermark is None and before[name].place[0] >= start for name in lost.names):
            raise error
        for name in lost.names:
            self._store.subscriptions.move_start(name, version, max(start, before[name].place[0]))
        after = read_starts(self._store, list(subscriptions), version)
        for name in lost.names:
            _move(subscriptions[name], after[name].time, watermarks)
        self._note(error, lost, start, policy, after)
        return open_position(after, self._fingerprint)

    def _policy(self, subscriptions: Mapping[str, Subscription]) -> str:
        """A start at the oldest entry that rolled away before it was read is chosen again, a few times."""
        unread = all(subscription.window.watermark is None for subscription in subscriptions.values())
        if unread and self._options.start_from == "oldest" and self._repins < _REPIN_LIMIT:
            self._repins += 1
            return "oldest"
        return self._decision

    def _oldest(self, *, required: bool) -> Timestamp | None:
        try:
            return read_oplog(self._client).first
        except DeploymentError:  # no right to read it, or a mongos, which has none
            if required:
                raise
            return None

    def _note(
        self, error: HistoryLostError, lost: _Lost, start: Timestamp, policy: str, starts: Mapping[str, Start]
    ) -> None:
        names = sorted(lost.names)
        logger.error(
            "history was lost; going on from %s (%s), as on_history_lost says, with handlers %s%s; others go on where "
            "they stand: %s",
            start.as_datetime().isoformat(),
            policy,
            names,
            lost.note,
            error,
            extra={"event": "history_lost", "subscriptions": names},
        )
        smallest = min(starts.values(), key=lambda each: each.place)
        token = smallest.watermark.token if smallest.watermark is not None else None
        gap = {"until": start, "policy": policy, "subscriptions": names, "error": str(error)}
        if not self._store.leases.record_gap(self._renewal.term, gap, token, smallest.place[0]):
            raise LeaseLostError


def _lost(starts: Mapping[str, Start], oldest: Timestamp | None) -> _Lost:
    smallest = min(start.place for start in starts.values())
    first = [name for name, start in starts.items() if start.place == smallest]
    if oldest is None:
        return _Lost(first, " (the oplog cannot be read here, so these are the ones with the smallest position)")
    # Where none stands before it, the server has refused the token at which the stream was opened.
    return _Lost([name for name, start in starts.items() if start.place[0] < oldest] or first, "")


def _move(subscription: Subscription, start: Timestamp, watermarks: Watermarks) -> None:
    """What is buffered stays and is handled; nothing between it and the new start is owed."""
    subscription.plan = replace(subscription.plan, start=start, watermark=None)
    subscription.stored = None
    watermarks.floors[subscription.name] = start
