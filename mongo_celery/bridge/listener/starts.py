"""
The starts of a term's subscriptions.

A start is pinned where there is none: in the lease, before the first read, so that a crash before the first
commit loses nothing. `oldest` reads the first entry of `local.oplog.rs`, whatever it is: on a young set that is
the no-op of the set's initiation, from which everything ever written follows, also a write that races the
bridge's first start.

Each handler begins where its own `start_from` says, else the bridge's. Never at the position of others, which may be
days back. It is judged when a listener first leads with the handler, so `now` is that moment for one that is added
later. Only while the bridge has no position a handler without a start of its own begins at the pinned one: a crash may
have cut the first start short, and what came since then is owed.

A start that the bridge's option gave long ago may be no place to begin at any more: a handler that is added would lose
a history that was never its own. Then it begins with the oldest entry. A start of its own is taken at its word, and
judged as lost history (`history`).
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
        is_first: whether it is the time that was pinned by `start_from`, and no place was ever stored.
        lost: what is recorded of its lost history, if it is lost there.
        owed_from: where it was pinned, if it begins with what exists and that was not asked for yet. Else None.
    """

    time: Timestamp
    watermark: Mark | None
    fingerprint: str | None
    is_first: bool = False
    lost: Mapping[str, Any] | None = None
    owed_from: Timestamp | None = None

    @property
    def place(self) -> tuple[Timestamp, str]:
        """The place from which it must be read: comparable, by cluster time and then by token."""
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
    The start of each subscription, pinned where it has none.

    Args:
        documents: of the subscriptions, by name, as the take-over has found them.

    Raises:
        LeaseLostError: the term ended meanwhile.
        ConfigurationError: a start is a resume token of another cluster.
        AccessError: `oldest` was asked for and the oplog may not be read.
    """
    fresh = [handler for handler in handlers if "startAtOperationTime" not in documents[handler.name]]
    if fresh:
        _Pinning(store, client, renewal, options).pin(fresh, documents)
    # Read again in any case: a later term may have put another layout in force, and removed the partitions of this one,
    # before the take-over made them anew.
    return read_starts(store, list(documents), renewal.term.number)


def read_starts(store: Store, names: Sequence[str], version: int) -> dict[str, Start]:
    """
    The starts of some subscriptions, as they are stored now.

    Raises:
        LeaseLostError: a later term has taken one of them, or it is gone.
    """
    documents = store.subscriptions.affirm(names, version)
    if not documents.keys() >= set(names):
        raise LeaseLostError
    return {name: _start(documents[name], version) for name in names}


def _start(document: Mapping[str, Any], version: int) -> Start:
    start, token, time_ = (document.get(each) for each in ("startAtOperationTime", "resumeToken", "clusterTime"))
    if start is None or document["term"] != version:
        raise LeaseLostError  # somebody else has taken the epoch meanwhile
    if token is None or (time_ is not None and time_ < start):  # before its start nothing is owed
        found = Start(start, None, document.get("fingerprint"), is_first=token is None and time_ is None)
    else:
        found = Start(start, Mark(token, token_data(token), time_), document.get("fingerprint"))
    is_owed = document.get("snapshot") == OWED
    return replace(
        found, lost=parse_lost_history(document), owed_from=(document.get("snapshotFrom") or start) if is_owed else None
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """The beginning of a handler: at a time, or behind the token of a position with that time, and in words why."""

    time: Timestamp
    position: Mapping[str, Any] | None
    why: str


class _Pinning:
    """Pins what has no start yet, in one term. Each option means one place for all that have it."""

    def __init__(
        self, store: Store, client: MongoClient[dict[str, Any]], renewal: Renewal, options: BridgeOptions
    ) -> None:
        self._store = store
        self._client = client
        self._renewal = renewal
        self._options = options
        self._times: dict[str, Timestamp] = {}

    def pin(self, fresh: Sequence[Handler], documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Pin the bridge's start, where there is none, and that of these handlers."""
        lease = self._renewal.term.document
        pinned = lease.get("startAtOperationTime") or self._pin_bridge()
        stored = self._store.subscriptions.read_all()
        has_position = any(each.get("fingerprint") or each.get("gaps") for each in stored)  # of a stream that was read
        is_added = has_position or len(fresh) < len(documents)
        self._warn_of_unserved(sorted(handler.name for handler in fresh), stored, documents)
        # All are found before one is pinned: what is refused leaves nothing behind.
        places = {handler.name: self._place(handler, pinned, has_position=has_position) for handler in fresh}
        for handler in fresh:
            place = places[handler.name]
            if is_added and handler.start_from is None:
                place = self._within_history(place)
            self._store.subscriptions.pin(
                handler.name,
                self._renewal.term.number,
                place.time,
                place.position,
                with_snapshot=handler.begins_with_snapshot(self._options),
            )
            if is_added or handler.start_from is not None:
                logger.warning(
                    "handler %s is new: it begins %s, at %s",
                    handler.name,
                    place.why,
                    place.time.as_datetime().isoformat(),
                    extra={"event": "subscription_added"},
                )

    @staticmethod
    def _warn_of_unserved(fresh: Sequence[str], stored: Sequence[Mapping[str, Any]], served: Iterable[str]) -> None:
        """Log new handlers beside positions without a handler: a function may have another name since the last term."""
        begun = {parse_name(each) for each in stored if "startAtOperationTime" in each}
        unserved = sorted(begun - {*served})
        if unserved:
            logger.warning(
                "no handler serves the positions of %s, and %s is new. If you renamed a function, write name=%r in its "
                "decorator: it keeps the position. Deploy that, then run `%s`",
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

    def _place(self, handler: Handler, pinned: Timestamp, *, has_position: bool) -> _Place:
        start_from = handler.start(self._options)
        if handler.start_from is None and not has_position:
            return _Place(pinned, find_given_position(pinned, start_from), "where the bridge began")
        whose = "the bridge's" if handler.start_from is None else "its"
        start = self._find_time(start_from)
        return _Place(
            start, find_given_position(start, start_from), f"as {whose} start_from says ({_describe_start(start_from)})"
        )

    def _within_history(self, place: _Place) -> _Place:
        oldest = _find_oldest(self._client, place.time)
        if oldest is None:
            return place
        why = f"with the oldest entry of the oplog, which no longer holds the place where it would begin {place.why}"
        return _Place(oldest, None, why)

    def _find_time(self, start_from: StartFrom) -> Timestamp:
        key = repr(start_from)
        if key not in self._times:
            self._times[key] = start_time(self._client, start_from)
        return self._times[key]


def _describe_start(start_from: StartFrom) -> str:
    return start_from if isinstance(start_from, str) else "as given"


def _find_oldest(client: MongoClient[dict[str, Any]], place: Timestamp) -> Timestamp | None:
    """The oldest entry of the oplog, where it begins behind a place. None where it holds that, or cannot be seen."""
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            oplog = read_oplog(client)
    except (DeploymentError, PyMongoError):
        return None
    return None if oplog.holds(place) else oplog.first


def find_given_position(pinned: Timestamp, start_from: object) -> Mapping[str, Any] | None:
    """
    The position that `start_from` gives as a resume token, for a bridge or a handler that has none yet.

    Only while the start that is pinned is that of the token: a later option changes nothing, as for other starts. The
    token may come from any stream, so this one is opened at its cluster time, and what is not behind it is left out.
    """
    if not isinstance(start_from, Mapping) or time_of_token(start_from, None) != pinned:
        return None
    return {"resumeToken": dict(start_from), "clusterTime": pinned}


def open_position(starts: Mapping[str, Start], fingerprint: str) -> Position:
    """
    Return where the stream is opened: at the smallest position of all subscriptions.

    After its token when the token came from a stream with the same fingerprint, else at its cluster time.
    """
    smallest = min(starts.values(), key=lambda start: start.place)
    mark = smallest.watermark
    return Position(mark.token if mark is not None and smallest.fingerprint == fingerprint else None, smallest.place[0])


def start_time(client: MongoClient[dict[str, Any]], start_from: StartFrom) -> Timestamp:
    """
    The cluster time that an option `start_from` means at this moment.

    Raises:
        ConfigurationError: a resume token that no stream of this cluster can have given yet.
        AccessError: `oldest` was asked for and the oplog may not be read.
    """
    if isinstance(start_from, Mapping):
        return _time_of_given(start_from, operation_time(client))
    if isinstance(start_from, Timestamp):
        return start_from
    if isinstance(start_from, datetime):
        return Timestamp(start_from, 0)
    if start_from in ("now", SNAPSHOT):  # what exists is read behind that
        now = operation_time(client)
        return Timestamp(now.time, now.inc + 1)
    return read_oplog(client).first


def _time_of_given(token: Mapping[str, Any], now: Timestamp) -> Timestamp:
    """A stream that is opened ahead of the cluster's time would wait for it, and pass over everything until then."""
    time_ = time_of_token(token, None)
    if time_ is None or time_.time > now.time:
        raise ConfigurationError(
            f"start_from={dict(token)!r} lies ahead of the cluster's time: the token is from another cluster. "
            "Give one of this cluster, or 'oldest', 'now' or a time.",
        )
    return time_
