"""
The starts of a term's subscriptions.

A missing start is pinned in the lease before the first read, so that a crash before the first commit loses nothing.
`oldest` reads the first entry of `local.oplog.rs`. On a young set that is the no-op of the set's initiation. All later
writes follow it, even one that races the bridge's first start.

Each handler begins at its own `start_from`, otherwise at the bridge's, but never at other handlers' positions, which
may be days old. The option is evaluated when a listener first leads with the handler, so for a later handler `now` is
that moment. Only while the bridge has no position, a handler without its own start begins at the pinned one: a crash
may have interrupted the first start, and later changes must be delivered.

An old pinned start of the bridge may no longer be readable, and a new handler would lose history that it never had.
Then the handler begins with the oldest entry. A handler's own start is always used, and judged as lost history
(`history`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.options import BridgeOptions, StartFrom
from mongo_celery.bridge.state.subscriptions import OWED, parse_lost_history, parse_name
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.window import Mark
from mongo_celery.command_line import ANY_APP
from mongo_celery.errors import ConfigurationError, DeploymentError, LeaseLostError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.oplog import operation_time, read_oplog, time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")


@dataclass(frozen=True, slots=True)
class Start:
    """
    The position of a subscription.

    Attributes:
        is_first: True if it is the pinned time of `start_from`, and no place was ever stored.
        lost: the record of an oplog gap at this position, if there is one.
        owed_from: the pinned start, if the handler begins with existing documents that are not requested yet, or None.
    """

    time: Timestamp
    watermark: Mark | None
    fingerprint: str | None
    is_first: bool = False
    lost: Mapping[str, Any] | None = None
    owed_from: Timestamp | None = None

    @property
    def place(self) -> tuple[Timestamp, str]:
        """The place from which it must be read, which sorts by cluster time and then by token."""
        if self.watermark is None:
            return self.time, ""
        return self.watermark.cluster_time or self.time, self.watermark.data


def find_starts(
    store: Store,
    client: MongoClient[dict[str, Any]],
    renewal: Renewal,
    options: BridgeOptions,
    handlers: Iterable[Handler],
    documents: Mapping[str, Mapping[str, Any]],
) -> dict[str, Start]:
    """
    Return the start of each subscription. Pin missing ones.

    Args:
        documents: the documents of the subscriptions, by name, from the take-over.

    Raises:
        LeaseLostError: the term ended meanwhile.
        ConfigurationError: a start is a resume token of another cluster.
        AccessError: `oldest` was requested, and the right to read the oplog is missing.
    """
    fresh = [handler for handler in handlers if "startAtOperationTime" not in documents[handler.name]]
    if fresh:
        _Pinning(store, client, renewal, options).pin(fresh, documents)
    # Always read again: before the take-over made this term's partitions, a later term may have removed them and put
    # another partitioning in force.
    return read_starts(store, list(documents), renewal.term.number)


def read_starts(store: Store, names: Sequence[str], version: int) -> dict[str, Start]:
    """
    Return the currently stored starts of some subscriptions.

    Raises:
        LeaseLostError: a later term has taken one of them, or it no longer exists.
    """
    documents = store.subscriptions.affirm(names, version)
    if not documents.keys() >= set(names):
        raise LeaseLostError
    return {name: _start(documents[name], version) for name in names}


def _start(document: Mapping[str, Any], version: int) -> Start:
    start, token, time_ = (document.get(each) for each in ("startAtOperationTime", "resumeToken", "clusterTime"))
    if start is None or document["term"] != version:
        raise LeaseLostError  # another listener has taken the lease meanwhile
    if token is None or (time_ is not None and time_ < start):  # before its start nothing is owed
        found = Start(start, None, document.get("fingerprint"), is_first=token is None and time_ is None)
    else:
        found = Start(start, Mark(token, token_data(token), time_), document.get("fingerprint"))
    is_owed = document.get("snapshot") == OWED
    return replace(
        found, lost=parse_lost_history(document), owed_from=(document.get("snapshotFrom") or start) if is_owed else None
    )


class _Pinning:
    """Stores the missing start positions of one term. Handlers with the same `start_from` get the same position."""

    def __init__(
        self, store: Store, client: MongoClient[dict[str, Any]], renewal: Renewal, options: BridgeOptions
    ) -> None:
        self._store = store
        self._client = client
        self._renewal = renewal
        self._options = options
        self._times: dict[str, Timestamp] = {}

    def pin(self, fresh: Sequence[Handler], documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Pin the bridge's start, if missing, and the starts of these handlers."""
        lease = self._renewal.term.document
        pinned = lease.get("startAtOperationTime") or self._pin_bridge()
        stored = self._store.subscriptions.read_all()
        has_position = any(each.get("fingerprint") or each.get("gaps") for each in stored)  # of a stream that was read
        is_added = has_position or len(fresh) < len(documents)
        self._warn_of_unserved(sorted(handler.name for handler in fresh), stored, documents)
        # Find all before pinning any, so that a refusal leaves nothing behind.
        asked = {
            each.name: pinned
            if each.start_from is None and not has_position
            else self._find_time(each.start(self._options))
            for each in fresh
        }
        for handler in fresh:
            start, start_from = asked[handler.name], handler.start(self._options)
            oldest = _find_oldest(self._client, start) if is_added and handler.start_from is None else None
            self._store.subscriptions.pin(
                handler.name,
                self._renewal.term.number,
                oldest or start,
                find_given_position(oldest or start, start_from),
                with_snapshot=handler.begins_with_snapshot(self._options),
            )
            if is_added or handler.start_from is not None:
                logger.warning(
                    "handler %s is new and begins at %s (start_from: %s%s)",
                    handler.name,
                    (oldest or start).as_datetime().isoformat(),
                    _describe_start(start_from),
                    ". The oplog no longer reaches that, so it begins at the oplog's oldest entry" if oldest else "",
                    extra={"event": "subscription_added"},
                )

    @staticmethod
    def _warn_of_unserved(fresh: Sequence[str], stored: Sequence[Mapping[str, Any]], served: Iterable[str]) -> None:
        """Log new handlers if positions have no handler: a function may have been renamed since the last term."""
        begun = {parse_name(each) for each in stored if "startAtOperationTime" in each}
        unserved = sorted(begun - {*served})
        if unserved:
            logger.warning(
                "the bridge has stored positions for %s but no handler of that name, and %s is new. If you renamed a "
                "function, write name=%r in its decorator to keep the position. Deploy that, then run `%s`",
                ", ".join(unserved),
                ", ".join(fresh),
                unserved[0],
                ANY_APP.changes("remove", fresh[0]),
                extra={"event": "position_unserved", "stored": unserved, "new": [*fresh]},
            )

    def _pin_bridge(self) -> Timestamp:
        start_from = self._options.start_from
        pinned = self._store.leases.pin_start(self._renewal.term, self._find_time(start_from))
        if pinned is None:
            raise LeaseLostError
        age = max(0, int(time.time()) - pinned.time)
        logger.warning(
            "bridge %s starts for the first time, at %s (%s, %d s ago)",
            self._options.name,
            pinned.as_datetime().isoformat(),
            _describe_start(start_from),
            age,
            extra={"event": "start_pinned", "age_seconds": age},
        )
        return pinned

    def _find_time(self, start_from: StartFrom) -> Timestamp:
        key = repr(start_from)
        if key not in self._times:
            self._times[key] = start_time(self._client, start_from)
        return self._times[key]


def _describe_start(start_from: StartFrom) -> str:
    return start_from if isinstance(start_from, str) else "as given"


def _find_oldest(client: MongoClient[dict[str, Any]], place: Timestamp) -> Timestamp | None:
    """Return the time of the oldest oplog entry if the oplog no longer reaches a place, otherwise None."""
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            oplog = read_oplog(client)
    except (DeploymentError, PyMongoError):
        return None
    return None if oplog.holds(place) else oplog.first


def find_given_position(pinned: Timestamp, start_from: object) -> Mapping[str, Any] | None:
    """
    Return the position of a resume token in `start_from`, for a bridge or handler without a position.

    It applies only while the pinned start is the token's time: a later option changes nothing, as for other starts. The
    token may come from any stream. So the stream is opened at the token's cluster time, and changes before the token
    are skipped.
    """
    if not isinstance(start_from, Mapping) or time_of_token(start_from, None) != pinned:
        return None
    return {"resumeToken": dict(start_from), "clusterTime": pinned}


def open_position(starts: Mapping[str, Start], fingerprint: str) -> Position:
    """
    Return the position for opening the stream: the smallest of all subscriptions.

    Use its token if it came from a stream with the same fingerprint, otherwise its cluster time.
    """
    smallest = min(starts.values(), key=lambda start: start.place)
    mark = smallest.watermark
    return Position(mark.token if mark is not None and smallest.fingerprint == fingerprint else None, smallest.place[0])


def start_time(client: MongoClient[dict[str, Any]], start_from: StartFrom) -> Timestamp:
    """
    Return the current cluster time of an option `start_from`.

    Raises:
        ConfigurationError: it is a resume token that no stream of this cluster can have returned yet.
        AccessError: `oldest` was requested, and the right to read the oplog is missing.
    """
    if isinstance(start_from, Mapping):
        return _time_of_given(start_from, operation_time(client))
    if isinstance(start_from, Timestamp):
        return start_from
    if isinstance(start_from, datetime):
        return Timestamp(start_from, 0)
    if start_from in ("now", SNAPSHOT):  # existing documents are read after it
        now = operation_time(client)
        return Timestamp(now.time, now.inc + 1)
    return read_oplog(client).first


def _time_of_given(token: Mapping[str, Any], now: Timestamp) -> Timestamp:
    """Return the time of a given token. A stream ahead of the cluster's time would wait, and skip everything before."""
    time_ = time_of_token(token, None)
    if time_ is None or time_.time > now.time:
        raise ConfigurationError(
            f"start_from={dict(token)!r} is later than the cluster's time, so the token is from another cluster. Give "
            "a token of this cluster, 'oldest', 'now' or a time.",
        )
    return time_
