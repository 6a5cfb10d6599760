"""
Who may hold a locked document: the transactions that are open on a server.

MongoDB does not say which transaction holds a document; what it has written is invisible until it is committed, its
lock value too. Nor whether it has written at all: in a transaction reads take the same locks as writes. `$currentOp`
names all that are open, with the client's address, its appName, for how long, and for how much of that no operation
ran. So these are candidates, and the one that has been silent the longest is the likeliest.

A transaction is *lost* when no connection of its client is left: neither the one by which it was heard last, nor any
other from the same address with the same appName. It is *dead* when it is lost, and nothing was heard of it for some
ten seconds in which this process has looked (`watches`). What becomes of it is `freeing`.

What is asked of the server needs no right as far as it is the same user's; the right `inprog` on the cluster shows
what is others'. On a sharded cluster, behind a load balancer, and directly on a shard the connections that are seen are
the routers' own: nothing counts as lost there.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pymongo
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from pymongo import AsyncMongoClient, MongoClient, ReadPreference
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.locking.plans import Plan, carried_out
from mongo_celery.locking.watches import watch_of
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import Allowed
from mongo_celery.mongo.transaction.scopes import Session
from mongo_celery.quantities import duration, number

logger = logging.getLogger("mongo_celery.locking")

DEAD_SECONDS = 10.0
"""For how long nothing was heard of a transaction that counts as dead."""

ANSWER_SECONDS = 2.0
"""No question because of a lock takes longer."""

STATES = ("running", "idle", "lost", "dead")

AnyClient = MongoClient[Any] | AsyncMongoClient[Any]

UNANSWERED = (PyMongoError, BSONError)
"""What a look can fail with. An appName is anybody's, and need not be text."""

_MOMENT_SECONDS = 0.25
_UNANSWERED_SECONDS = 5.0
_REMEMBERED_SECONDS = 2.0
_NAMED_MAX = 3
_MICROS = 1e-6
_CLUSTER = {"cluster": True}
_BETWEEN_SERVERS = ("MongoDB Internal Client", "NetworkInterfaceTL")
_SHOWN = {
    **dict.fromkeys(("type", "host", "client", "connectionId", "appName", "active", "lsid"), 1),
    "driver": "$clientMetadata.driver.name",
    "router": "$clientMetadata.mongos.host",
    **dict.fromkeys((f"transaction.parameters.{name}" for name in ("autocommit", "txnNumber")), 1),
    **dict.fromkeys((f"transaction.time{name}Micros" for name in ("Open", "Active", "Inactive")), 1),
}
"""Not the commands: they are other people's, and may hold what Python has no value for."""


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
        running: whether an operation of it runs.
        open_seconds: since it began.
        idle_seconds: for how much of that no operation of it ran.
        silent_seconds: for how long at least nothing has been heard of it; 0 where this process has not looked before.
        connected: whether a connection of its client is there; None where that was not asked, or cannot be known.
        own: whether it is of the same user as who asks.
    """

    id: UUID
    user: bytes
    number: int
    application: str | None
    client: str | None
    server: str
    running: bool
    open_seconds: float
    idle_seconds: float
    silent_seconds: float
    connected: bool | None
    own: bool

    @property
    def is_dead(self) -> bool:
        """Whether its client is gone, as far as a server can tell."""
        return self.state == "dead"

    @property
    def state(self) -> str:
        """`running`, `idle`, `lost` or `dead`."""
        if self.running:
            return "running"
        if self.connected is not False:
            return "idle"
        return "dead" if self.silent_seconds >= DEAD_SECONDS else "lost"

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "id": str(self.id),
            "server": self.server,
            "application": self.application,
            "client": self.client,
            "state": self.state,
            "open_seconds": round(self.open_seconds, 3),
            "idle_seconds": round(self.idle_seconds, 3),
            "connected": self.connected,
            "own": self.own,
        }

    def __str__(self) -> str:
        who = f"{self.application or 'a client without appName'} at {self.client or 'an unknown address'}"
        parts = [who, f"open for {duration(self.open_seconds)}"]
        parts.append("at work" if self.running else f"idle for {duration(self.idle_seconds)} of that")
        if self.silent_seconds >= 1:
            parts.append(f"silent for the last {duration(self.silent_seconds)}")
        if self.connected is False:
            parts.append("no connection of its client is left")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Viewer:
    """What a client's user may see and end, and what is at the other end of its connections."""

    digest: bytes
    sees_all: bool
    ends_all: bool
    is_router: bool


# -- looking ---------------------------------------------------------------------------------------


def open_transactions(client: MongoClient[Any]) -> list[OpenTransaction]:
    """
    All transactions that a client's user may see, the one of which nothing was heard for the longest first.

    Raises:
        PyMongoError: the server does not answer, or refuses.
    """
    return carried_out(look(client))


def look(client: AnyClient, *, connections: bool = True) -> Plan[list[OpenTransaction]]:
    """
    The same as a plan.

    Args:
        client: who asks.
        connections: whether to ask, too, which clients have a connection; a busy server has thousands.

    Raises:
        PyMongoError: the server does not answer, or refuses.
    """
    standing = yield from standing_of(client)
    stage = {"idleSessions": True, "idleConnections": connections, "allUsers": standing.sees_all}
    in_transaction = {"transaction.parameters.autocommit": False, "lsid": {"$exists": True}}
    wanted = {"$or": [in_transaction, {"connectionId": {"$exists": True}}]} if connections else in_transaction
    began = time.monotonic()
    cursor = yield admin_of(client).aggregate([{"$currentOp": stage}, {"$match": wanted}, {"$project": _SHOWN}])
    found = yield cursor.to_list()
    ended = time.monotonic()
    opened = [each for each in found if _is_open(each)]
    looked = [(_key(each), _micros(each, "Active"), bool(each.get("active"))) for each in opened]
    silences = watch_of(client).silences(looked, began, ended)
    clients = _Clients(found) if connections and not standing.is_router else None
    transactions: dict[tuple[UUID, bytes], OpenTransaction] = {}
    for each in opened:
        read = _read(each, standing, clients, silences[_key(each)])
        known = transactions.get((read.id, read.user))
        transactions[read.id, read.user] = read if known is None else _joined(read, known)
    order = sorted(transactions.values(), key=lambda each: (each.silent_seconds, each.idle_seconds, each.open_seconds))
    return order[::-1]


def sees_all(client: MongoClient[Any]) -> bool:
    """Whether a client's user sees the transactions of others, too."""
    return carried_out(standing_of(client)).sees_all


class _Clients:
    """The clients that have a connection, by what a server tells of them."""

    def __init__(self, found: Sequence[Mapping[str, Any]]) -> None:
        there = [each for each in found if each.get("type") == "op" and each.get("connectionId")]
        self._connections = {(each.get("host"), each["connectionId"]) for each in there}
        self._known = {self._of(each) for each in there}

    @staticmethod
    def _of(found: Mapping[str, Any]) -> tuple[Any, ...]:
        return found.get("host"), str(found.get("client")).rpartition(":")[0], found.get("appName")

    def have(self, found: Mapping[str, Any]) -> bool | None:
        """Whether that of a transaction is among them; None where its connections are those of a server."""
        driver = str(found.get("driver", ""))
        if not found.get("connectionId") or "router" in found or driver.startswith(_BETWEEN_SERVERS):
            return None
        return (found.get("host"), found["connectionId"]) in self._connections or self._of(found) in self._known


def _read(
    found: Mapping[str, Any], standing: Viewer, clients: _Clients | None, silent_seconds: float
) -> OpenTransaction:
    running = bool(found.get("active"))
    user = _user(found)
    return OpenTransaction(
        id=found["lsid"]["id"],
        user=user,
        number=int(found["transaction"]["parameters"]["txnNumber"]),
        application=found.get("appName"),
        client=found.get("client"),
        server=str(found.get("host", "")),
        running=running,
        open_seconds=_micros(found, "Open") * _MICROS,
        idle_seconds=_micros(found, "Inactive") * _MICROS,
        silent_seconds=silent_seconds,
        connected=None if clients is None else running or clients.have(found),
        own=user == standing.digest,
    )


def _joined(one: OpenTransaction, other: OpenTransaction) -> OpenTransaction:
    """A transaction that is open on several shards: silent where it is so on all of them."""
    longer = max(one, other, key=lambda each: each.open_seconds)
    silent_seconds = min(one.silent_seconds, other.silent_seconds)
    return replace(longer, running=one.running or other.running, silent_seconds=silent_seconds)


def _is_open(found: Mapping[str, Any]) -> bool:
    """Whether it is of a transaction; each write that may be repeated has a number, too."""
    return "lsid" in found and found.get("transaction", {}).get("parameters", {}).get("autocommit") is False


def _key(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return found.get("host"), found["lsid"]["id"], _user(found), found["transaction"]["parameters"]["txnNumber"]


def _user(found: Mapping[str, Any]) -> bytes:
    return bytes(found["lsid"].get("uid", b""))


def _micros(found: Mapping[str, Any], name: str) -> int:
    return int(found["transaction"].get(f"time{name}Micros", 0))


# -- naming ----------------------------------------------------------------------------------------


def candidates(session: Session) -> Plan[tuple[OpenTransaction, ...]]:
    """
    The open transactions that may hold what a session was refused; none where they cannot be asked for now.

    It never fails, and takes no longer than a moment: who was refused is to be told so in any case.
    """
    found = yield from _seen_by(session.client)
    return _of_others(found, session)


def remembered(session: Session) -> tuple[OpenTransaction, ...]:
    """The candidates that this client was told last, for who cannot ask; none where that was some seconds ago."""
    until, found = watch_of(session.client).told
    return _of_others(found, session) if time.monotonic() < until + _REMEMBERED_SECONDS else ()


def _of_others(found: Sequence[OpenTransaction], session: Session) -> tuple[OpenTransaction, ...]:
    own = session.session_id["id"]
    return tuple(each for each in found if Binary.from_uuid(each.id) != own)


def _seen_by(client: AnyClient) -> Plan[list[OpenTransaction]]:
    """What is open, as it was a moment ago: somebody may be refused hundreds of times a second."""
    watch = watch_of(client)
    until, found = watch.told
    if time.monotonic() < until:
        return found
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            found, holds = (yield from look(client, connections=False)), _MOMENT_SECONDS
    except UNANSWERED as error:
        note_unanswered(error)
        found, holds = [], _UNANSWERED_SECONDS
    watch.told = time.monotonic() + holds, found
    return found


def in_words(found: Sequence[OpenTransaction]) -> str:
    """A sentence on candidates, with a blank behind it; nothing where there are none."""
    if not found:
        return ""
    more = len(found) - _NAMED_MAX
    named = "; ".join(map(str, found[:_NAMED_MAX])) + (f"; and {number(more, 'other', 'others')}" if more > 0 else "")
    return f"Open transactions that may hold it: {named}. "


# -- what the server is asked for ------------------------------------------------------------------


_reported = threading.Event()


def note_unanswered(error: BaseException) -> None:
    """Log that it could not be asked who holds a document; loudly once in a process."""
    if _reported.is_set():
        logger.debug("again, who holds a locked document could not be asked: %s", short(error))
        return
    _reported.set()
    logger.warning(
        "who holds a locked document could not be asked, so errors name nobody, and nobody dead is ended: %s",
        short(error),
        extra={"event": "holders_unknown"},
    )


def standing_of(client: AnyClient) -> Plan[Viewer]:
    """As the server says it now."""
    admin = admin_of(client)
    status = yield admin.command("connectionStatus", showPrivileges=True)
    hello = yield admin.command("hello")
    answer = status["authInfo"]
    users = answer["authenticatedUsers"]
    user = f"{users[0]['user']}@{users[0]['db']}" if users else ""
    rights = Allowed(answer["authenticatedUserPrivileges"] if users else None)
    return Viewer(
        digest=hashlib.sha256(user.encode()).digest(),  # as the server makes it, of nobody too
        sees_all=rights.may("inprog", _CLUSTER),
        ends_all=rights.may("killAnySession", _CLUSTER),
        is_router=hello.get("msg") == "isdbgrid" or "serviceId" in hello,
    )


def admin_of(client: AnyClient) -> Any:
    """The primary's, as `$currentOp` needs it, whatever the client's owner has set; it decodes what is no text, too."""
    return client.get_database(
        "admin",
        codec_options=CodecOptions[dict[str, Any]](
            uuid_representation=UuidRepresentation.STANDARD, unicode_decode_error_handler="replace"
        ),
        read_preference=ReadPreference.PRIMARY,
        read_concern=ReadConcern("local"),
    )
