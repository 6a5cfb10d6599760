"""
The sessions of a coordinator: a transaction over several clusters names them, so that others can end what it holds.

A coordinator that is frozen in the middle of a MongoDB transaction keeps the documents and the receipt of that branch,
and the entry itself where it was on its last step, until the server ends the transaction a minute later. Whoever
cancels or takes over ends these transactions first: exactly those, by the sessions that the entry names.

That is safe: a coordinator that lives all the same is told so by an error that is repeated, and finds what was decided
meanwhile. A session may have gone on to something else since, in the same process: so only a transaction is ended
that was opened while its coordinator could still be at work, and of which no operation is running.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
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
ClientOf = Callable[[str | None], MongoClient[Any]]

_ANSWER_SECONDS = 2.0
_SHARE = 1 / 8
"""Of the time that a call has: this is not what it is for."""

_SLACK_SECONDS = 2.0
_MICROS = 1e-6


class Sessions:
    """
    One session for each cluster, as long as a call lasts. Of one thread.

    Args:
        client_of: gives the client of a cluster by its alias; None for the log's own.
    """

    def __init__(self, client_of: ClientOf) -> None:
        self._client_of = client_of
        self._made: dict[int, ClientSession] = {}
        self._stack = ExitStack()

    def of(self, client: MongoClient[Any]) -> ClientSession:
        """That of a client's cluster."""
        known = self._made.get(id(client))
        if known is None:
            known = self._made[id(client)] = self._stack.enter_context(client.start_session())
        return known

    def named(self, clusters: Iterable[str | None]) -> list[Document]:
        """As a transaction names those of some clusters. Nothing is asked of a server."""
        return [{"cluster": each, "id": self._id_of(each)} for each in sorted(clusters, key=str)]

    def _id_of(self, cluster: str | None) -> Binary:
        return Binary(self.of(self._client_of(cluster)).session_id["id"], 4)

    def end(self) -> None:
        """End them all."""
        self._stack.close()


_current: ContextVar[Sessions | None] = ContextVar("mongo_celery_transaction_sessions", default=None)


@contextmanager
def sessions_of(client_of: ClientOf) -> Iterator[None]:
    """Inside, MongoDB transactions of this thread use one session for each cluster."""
    made = Sessions(client_of)
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


def end_transactions(client: MongoClient[Any], ids: Iterable[Binary], age: float, busy: float) -> int:
    """
    End the open transactions of some sessions that are idle; how many there were. It never fails.

    Args:
        client: of the cluster.
        ids: of the sessions.
        age: seconds since their coordinator has done its last step.
        busy: for how many seconds from then on it can have been at work.
    """
    wanted = [Binary(each, 4) for each in ids]
    match = {"lsid.id": {"$in": wanted}, "transaction.parameters.autocommit": False, "active": {"$ne": True}}
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
                if age - busy <= each["transaction"].get("timeOpenMicros", 0) * _MICROS + _SLACK_SECONDS
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
