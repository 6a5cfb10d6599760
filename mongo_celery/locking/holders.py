"""
Who may hold a locked document: the transactions that are open on a server, and the end of those whose client is gone.

MongoDB does not say which transaction holds a document; what it has written is invisible until it is committed, its
lock value too. `$currentOp` names all that are open, with the client's address, its appName, and how long nothing was
heard of them. So these are candidates, and the one that has been silent the longest is the likeliest.

A transaction is *dead* when it has written, nothing was heard of it for some ten seconds, and the connection by which
it was heard last is gone. A client that was killed leaves it so, until the server ends it after
`transactionLifetimeLimitSeconds`. Ending its session sooner is always safe: a holder that lives all the same is told
NoSuchTransaction, labelled as transient, and repeats its body. (Only one that is ended in the middle of an operation
is told Interrupted, which has no label, and fails; of a silent one none is running.) One that only stands still keeps
its connection, and its transaction: `celery -A shop locks free` is for people.

What is asked of the server needs no right, nor does ending a session, as far as it is the same user's. The right
`inprog` on the cluster shows those of others, `killAnySession` ends them. On a sharded cluster the connections that
shards see are the routers' own: nothing counts as dead there, and only people end what is open.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

import pymongo
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import MongoClient, ReadPreference
from pymongo.client_session import ClientSession
from pymongo.database import Database
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import Allowed
from mongo_celery.quantities import duration, number

logger = logging.getLogger("mongo_celery.locking")

DEAD_SECONDS = 10.0
"""For how long nothing was heard of a transaction that counts as dead; a waiter looks for such after as long."""

_LOOK_SECONDS = 5.0
"""A process asks a server at most so often because of waiters."""

_ANSWER_SECONDS = 2.0
_MOMENT_SECONDS = 0.25
_NAMED_MAX = 3
_MICROS = 1e-6
_CLUSTER = {"cluster": True}
_WRITES = {"w", "W"}


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """
    A transaction that is open on a server.

    Attributes:
        id: of its session.
        user: the digest by which the server knows whose session it is.
        number: which transaction of the session.
        application: the client's appName.
        client: the address and port from which it was heard last.
        server: where it is open.
        open_seconds: since it began.
        inactive_seconds: since nothing was heard of it; 0 while an operation of it runs.
        connected: whether the connection by which it was heard is there; None where that cannot be known.
        wrote: whether it may hold documents.
        own: whether it is of the same user as who asks.
    """

    id: UUID
    user: bytes
    number: int
    application: str | None
    client: str | None
    server: str
    open_seconds: float
    inactive_seconds: float
    connected: bool | None
    wrote: bool
    own: bool

    @property
    def is_dead(self) -> bool:
        """Whether its client is gone, as far as a server can tell."""
        return self.wrote and self.connected is False and self.inactive_seconds >= DEAD_SECONDS

    @property
    def state(self) -> str:
        """`running`, `silent` or `dead`."""
        return "dead" if self.is_dead else "silent" if self.inactive_seconds else "running"

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "id": str(self.id),
            "server": self.server,
            "application": self.application,
            "client": self.client,
            "state": self.state,
            "open_seconds": round(self.open_seconds, 3),
            "inactive_seconds": round(self.inactive_seconds, 3),
            "connected": self.connected,
            "own": self.own,
        }

    def __str__(self) -> str:
        who = f"{self.application or 'a client without appName'} at {self.client or 'an unknown address'}"
        if self.connected is False:
            return f"{who}, silent for {duration(self.inactive_seconds)}, its connection is gone"
        if not self.inactive_seconds:
            return f"{who}, open for {duration(self.open_seconds)}, at work"
        return f"{who}, open for {duration(self.open_seconds)}, silent for {duration(self.inactive_seconds)}"


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a client's user may see and end, and the digest by which the server knows its sessions."""

    digest: bytes
    sees_all: bool
    ends_all: bool


_seen: WeakKeyDictionary[MongoClient[Any], tuple[float, list[OpenTransaction]]] = WeakKeyDictionary()
_looked: WeakKeyDictionary[MongoClient[Any], float] = WeakKeyDictionary()
_ended: list[float] = []
"""When this process has ended transactions of dead clients; a list, since threads may add to one without a lock."""


# -- looking ---------------------------------------------------------------------------------------


def open_transactions(client: MongoClient[Any]) -> list[OpenTransaction]:
    """
    All transactions that a client's user may see, the one of which nothing was heard for the longest first.

    Raises:
        PyMongoError: the server does not answer, or refuses.
    """
    standing = _standing_of(client)
    is_router = client.is_mongos
    stage = {"idleSessions": True, "idleConnections": True, "allUsers": standing.sees_all}
    needed = {"$or": [{"connectionId": {"$exists": True}}, {"transaction.parameters.txnNumber": {"$exists": True}}]}
    found = list(_admin(client).aggregate([{"$currentOp": stage}, {"$match": needed}]))
    connections = {each["connectionId"] for each in found if each["type"] == "op" and "connectionId" in each}
    transactions: dict[tuple[UUID, bytes], OpenTransaction] = {}
    for each in found:
        parameters = each.get("transaction", {}).get("parameters", {})
        if parameters.get("autocommit") is False and "lsid" in each:
            read = _read(each, standing, None if is_router else connections)
            known = transactions.setdefault((read.id, read.user), read)  # shards have one each
            if known.open_seconds < read.open_seconds:
                transactions[read.id, read.user] = read
    return sorted(transactions.values(), key=lambda each: (-each.inactive_seconds, -each.open_seconds))


def sees_all(client: MongoClient[Any]) -> bool:
    """Whether a client's user sees the transactions of others, too."""
    return _standing_of(client).sees_all


def _read(found: Mapping[str, Any], standing: _Standing, connections: Iterable[Any] | None) -> OpenTransaction:
    transaction, user = found["transaction"], bytes(found["lsid"].get("uid", b""))
    active = bool(found.get("active"))
    return OpenTransaction(
        id=found["lsid"]["id"],
        user=user,
        number=int(transaction["parameters"]["txnNumber"]),
        application=found.get("appName"),
        client=found.get("client"),
        server=str(found.get("host", "")),
        open_seconds=transaction.get("timeOpenMicros", 0) * _MICROS,
        inactive_seconds=0.0 if active else transaction.get("timeInactiveMicros", 0) * _MICROS,
        connected=None if connections is None else active or found.get("connectionId") in connections,
        wrote=bool(_WRITES & set(found.get("locks", {}).values())),
        own=user == standing.digest,
    )


def candidates(session: ClientSession) -> tuple[OpenTransaction, ...]:
    """
    The open transactions that may hold what a session was refused; none where they cannot be asked for now.

    It never fails, and takes no longer than a moment: who was refused is to be told so in any case.
    """
    own = session.session_id["id"]
    return tuple(each for each in _seen_by(session.client) if each.wrote and Binary.from_uuid(each.id) != own)


def _seen_by(client: MongoClient[Any]) -> list[OpenTransaction]:
    """What is open, as it was a moment ago: somebody may be refused hundreds of times a second."""
    at, found = _seen.get(client, (-math.inf, []))
    if time.monotonic() - at < _MOMENT_SECONDS:
        return found
    try:
        with pymongo.timeout(_ANSWER_SECONDS):
            found = open_transactions(client)
    except PyMongoError as error:
        logger.debug("who holds a locked document could not be asked: %s", short(error))
        return []
    _seen[client] = time.monotonic(), found
    return found


def in_words(found: Sequence[OpenTransaction]) -> str:
    """A sentence on candidates, with a blank behind it; nothing where there are none."""
    if not found:
        return ""
    more = len(found) - _NAMED_MAX
    named = "; ".join(map(str, found[:_NAMED_MAX])) + (f"; and {number(more, 'other', 'others')}" if more > 0 else "")
    return f"Open transactions that may hold it: {named}. "


# -- ending ----------------------------------------------------------------------------------------


def end(client: MongoClient[Any], chosen: Sequence[OpenTransaction]) -> list[OpenTransaction]:
    """
    End the sessions of transactions; what these hold is free afterwards.

    Args:
        client: of a user whose own they are, or that may end those of others.
        chosen: as they were read a moment ago; a transaction that a session has begun since is ended with it.

    Returns:
        Those of a user whose sessions this one may not end: they are as they were.

    Raises:
        PyMongoError: the server does not answer, or refuses.
    """
    standing = _standing_of(client)
    own = [each for each in chosen if each.own]
    foreign = [each for each in chosen if not each.own]
    admin = _admin(client)
    if own:
        admin.command("killSessions", [{"id": Binary.from_uuid(each.id)} for each in own])
    if foreign and not standing.ends_all:
        return foreign
    if foreign:
        patterns = [{"lsid": {"id": Binary.from_uuid(each.id), "uid": each.user}} for each in foreign]
        admin.command("killAllSessionsByPattern", patterns)
    return []


def free_dead(client: MongoClient[Any]) -> None:
    """
    End the transactions of dead clients, as somebody who has waited in vain; at most once in a few seconds.

    It never fails: whoever waits goes on waiting.
    """
    now = time.monotonic()
    if now - _looked.get(client, -math.inf) < _LOOK_SECONDS:
        return
    _looked[client] = now
    try:
        with pymongo.timeout(_ANSWER_SECONDS):
            dead = [each for each in open_transactions(client) if each.is_dead]
            left = end(client, dead) if dead else []
    except PyMongoError as error:
        logger.debug("who holds a locked document could not be asked: %s", short(error))
        return
    for each in dead:
        if each in left:
            logger.warning(
                "a transaction of a client that is gone keeps locks; to end it needs the right killAnySession: %s",
                each,
                extra={"event": "dead_holder_kept"},
            )
        else:
            _ended.append(now)
            logger.warning(
                "ended a transaction that kept locks, since its client is gone: %s",
                each,
                extra={"event": "dead_holder_ended"},
            )


# -- inside ----------------------------------------------------------------------------------------


def ended_count() -> int:
    """How many transactions of dead clients waiters of this process have ended."""
    return len(_ended)


def _standing_of(client: MongoClient[Any]) -> _Standing:
    answer = _admin(client).command("connectionStatus", showPrivileges=True)["authInfo"]
    users = answer["authenticatedUsers"]
    user = f"{users[0]['user']}@{users[0]['db']}" if users else ""
    rights = Allowed(answer["authenticatedUserPrivileges"] if users else None)
    digest = hashlib.sha256(user.encode()).digest()  # as the server makes it, of nobody too
    return _Standing(digest, rights.may("inprog", _CLUSTER), rights.may("killAnySession", _CLUSTER))


def _admin(client: MongoClient[Any]) -> Database[dict[str, Any]]:
    """The primary's, as `$currentOp` needs it, whatever the client's owner has set."""
    return client.get_database(
        "admin",
        codec_options=CodecOptions[dict[str, Any]](uuid_representation=UuidRepresentation.STANDARD),
        read_preference=ReadPreference.PRIMARY,
        read_concern=ReadConcern("local"),
    )
