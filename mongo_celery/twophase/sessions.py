"""
The sessions of a coordinator: a transaction over several clusters names them, so that others can end what it holds.

A coordinator that is frozen in the middle of a MongoDB transaction keeps the documents and the receipt of that branch,
and the entry itself where it was on its last step, until the server ends the transaction a minute later. Whoever
cancels or takes over ends these transactions first: exactly those, by the sessions that the entry names.

That is safe: a coordinator that lives all the same is told so by an error that is repeated, and finds what was decided
meanwhile. Its sessions serve nobody but coordinators, so that nothing else of its process is ended: they have a pool of
their own, and never go back to the driver's. One that has gone on to another transaction is mostly left alone, since
only what was opened while the coordinator could still be at work is ended, and of which no operation is running.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol
from uuid import UUID

import pymongo
from bson.binary import Binary
from bson.codec_options import CodecOptions
from pymongo import MongoClient, ReadPreference
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.redaction import short

logger = logging.getLogger("mongo_celery.twophase")

Document = dict[str, Any]

_ANSWER_SECONDS = 2.0
_SHARE = 1 / 8
"""Of the time that a call has: this is not what it is for."""

_SLACK_SECONDS = 2.0
_MICROS = 1e-6

_KEPT_MAX = 1000
"""Sessions of a client that wait for the next call."""

_KEPT_SECONDS = 600.0
"""A server forgets a session that was not used for half an hour, or what it is set to; then a new one is made."""


class KnownClusters(Protocol):
    """The clusters that this process can reach."""

    def client(self, cluster: str | None) -> MongoClient[Any]:
        """The client of one that is known; None is the log's own."""

    def knows(self, cluster: str | None) -> bool:
        """Whether it is."""


class SessionPool:
    """Sessions that wait for the next call, by client. Any thread may take and give; of one process."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[tuple[ClientSession, float]]] = {}

    def take(self, client: MongoClient[Any]) -> ClientSession:
        """The one that was used last, or a new one."""
        try:
            session, since = self._kept[id(client)].pop()
        except LookupError:
            return client.start_session()
        if time.monotonic() - since > _KEPT_SECONDS:  # then all others are as old: their server forgets them
            self._kept[id(client)].clear()
            return client.start_session()
        return session

    def give(self, session: ClientSession) -> None:
        """Keep one. It is never ended: that would hand it to whatever this process does next."""
        if session.in_transaction:  # whoever had it was interrupted
            with suppress(PyMongoError), pymongo.timeout(_ANSWER_SECONDS):
                session.abort_transaction()
            return
        kept = self._kept.setdefault(id(session.client), deque(maxlen=_KEPT_MAX))
        kept.append((session, time.monotonic()))


class Sessions:
    """
    One session for each cluster, as long as a call lasts. Of one thread.

    Args:
        clusters: those that are known here.
        pool: where sessions come from, and go.
    """

    def __init__(self, clusters: KnownClusters, pool: SessionPool) -> None:
        self._clusters = clusters
        self._pool = pool
        self._made: dict[int, ClientSession] = {}

    def of(self, client: MongoClient[Any]) -> ClientSession:
        """That of a client's cluster."""
        known = self._made.get(id(client))
        if known is None:
            known = self._made[id(client)] = self._pool.take(client)
        return known

    def named(self, clusters: Iterable[str | None]) -> list[Document]:
        """As a transaction names those of some clusters, as far as they are known. Nothing is asked of a server."""
        known = sorted(filter(self._clusters.knows, clusters), key=str)
        return [{"cluster": each, "id": self._id_of(each)} for each in known]

    def _id_of(self, cluster: str | None) -> Binary:
        return Binary(self.of(self._clusters.client(cluster)).session_id["id"], 4)

    def end(self) -> None:
        """Leave them all to the next call."""
        for session in self._made.values():
            self._pool.give(session)


_current: ContextVar[Sessions | None] = ContextVar("mongo_celery_transaction_sessions", default=None)


@contextmanager
def sessions_of(clusters: KnownClusters, pool: SessionPool) -> Iterator[None]:
    """Inside, MongoDB transactions of this thread use one session for each cluster."""
    made = Sessions(clusters, pool)
    token = _current.set(made)
    try:
        yield
    finally:
        _current.reset(token)
        made.end()


def session_of(client: MongoClient[Any]) -> ClientSession | None:
    """The session that is to be used for a cluster now; None for one of its own."""
    made = _current.get()
    return None if made is None else made.of(client)


def named_sessions(clusters: Iterable[str | None]) -> list[Document]:
    """As a transaction names those of this call."""
    made = _current.get()
    return [] if made is None else made.named(clusters)


def end_transactions(client: MongoClient[Any], ages: Mapping[Binary, float], busy: float) -> int:
    """
    End the open transactions of some sessions that are idle; how many there were. It never fails.

    Args:
        client: of the cluster.
        ages: by the ids of the sessions, seconds since their coordinator has done its last step.
        busy: for how many seconds from then on it can have been at work.
    """
    wanted = {Binary(each, 4): age for each, age in ages.items()}
    match = {"lsid.id": {"$in": list(wanted)}, "transaction.parameters.autocommit": False, "active": {"$ne": True}}
    fields = {"lsid.id": 1, "transaction.timeOpenMicros": 1}
    admin = client.get_database(
        "admin",
        codec_options=CodecOptions[Document](),
        read_preference=ReadPreference.PRIMARY,
        read_concern=ReadConcern("local"),
    )
    try:
        with pymongo.timeout(min(_ANSWER_SECONDS, busy * _SHARE)):
            found = list(
                admin.aggregate([{"$currentOp": {"idleSessions": True}}, {"$match": match}, {"$project": fields}])
            )
            own = [
                {"id": each["lsid"]["id"]}
                for each in found
                if wanted[Binary(each["lsid"]["id"], 4)] - busy
                <= each["transaction"].get("timeOpenMicros", 0) * _MICROS + _SLACK_SECONDS
            ]
            if own:
                admin.command("killSessions", own)
    except PyMongoError as error:
        logger.debug("what a coordinator keeps open could not be ended: %s", short(error))
        return 0
    return len(own)


def as_binary(value: object) -> Binary | None:
    """The id of a session as it is stored; None for what is none."""
    if isinstance(value, UUID):
        return Binary.from_uuid(value)
    return value if isinstance(value, Binary) else None
