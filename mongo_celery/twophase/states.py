"""Transactions as values: their states, and what a stored document says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from bson import Decimal128, ObjectId
from bson.binary import Binary
from bson.int64 import Int64

from mongo_celery.errors import ConfigurationError, TransactionStateError
from mongo_celery.mongo.identity import same_bson
from mongo_celery.twophase.branches import plan_of
from mongo_celery.twophase.participants import Part, increase, stored_part
from mongo_celery.twophase.sessions import as_binary

RECEIPTS = "receipts"
"""What `protocol` says of a transaction over several clusters, from pending on; others have no such field."""

_OTHER_SPELLINGS = {"cancelled": "canceled"}
"""Of the tutorial, in some of its editions."""


class State(StrEnum):
    """
    Where a transaction stands.

    ::

        initial -> pending -> applied -> done
           |          |
           |          +-> canceling -> canceled
           +-----------------------> canceled

    In one MongoDB transaction `initial` becomes `done` at once. A transaction over several clusters may go from
    `canceling` to `applied`: its last cluster decides, and may have decided before somebody asked for the cancel.
    """

    INITIAL = "initial"
    PENDING = "pending"
    APPLIED = "applied"
    DONE = "done"
    CANCELING = "canceling"
    CANCELED = "canceled"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self in {State.DONE, State.CANCELED}


FINAL = {"done": State.DONE, "canceled": State.CANCELED, "cancelled": State.CANCELED}
"""The states that are final, as they may be spelled in what is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """
    A transaction as its document had it when it was read.

    Attributes:
        id: its `_id`.
        state: where it stands.
        application: whose it is; None before anybody has claimed it, and for code that sets no marker.
        version: grows with each coordinator; None before the first of ours.
        driver: which coordinator has it, under the name that is stored.
        parts: the participants; none if it has the shape of no transaction of ours and was only listed.
        reason: why it is or was canceled.
        last_modified: the server's time of the last step, if it is a date.
        document: as stored.
        deadline: the server's time after which it cancels itself if it is not applied; None for older ones.
        key: by which receipts name it; None if it has none.
        incarnations: of the participants, as they were when it was begun; None if that was not recorded.
        refusal: why it cannot be applied whatever the participants say; None if it can.
        marked: with receipts, the clusters whose documents have markers instead.
        sessions: of its coordinator, with their clusters; none if it has named none.
    """

    id: Any
    state: State
    application: str | None
    version: int | None
    driver: Any
    parts: tuple[Part, ...]
    reason: str | None
    last_modified: datetime | None
    document: Mapping[str, Any]
    deadline: datetime | None = None
    key: ObjectId | None = None
    incarnations: tuple[Any, ...] | None = None
    refusal: str | None = None
    marked: frozenset[str] = frozenset()
    sessions: tuple[tuple[str | None, Binary], ...] = ()

    @property
    def clusters(self) -> set[str | None]:
        """Where something of it is: those of its participants, and the log's own."""
        return {None, *(part.cluster for part in self.parts)}

    @property
    def marker(self) -> Any:
        """What stands in documents while they are changed; with receipts the key, whatever the id is used for later."""
        return self.id if self.key is None else self.key

    @property
    def is_late(self) -> bool:
        """Whether the deadline had passed at its last step, by the clock of the log."""
        return self.deadline is not None and self.last_modified is not None and self.last_modified >= self.deadline

    @property
    def guard(self) -> dict[str, Any]:
        """Matches only while this coordinator has the transaction, in this state."""
        version = None if self.version is None else Int64(self.version)
        return {"_id": {"$eq": self.id}, "state": str(self.state), "version": version}


def read_transaction(document: Mapping[str, Any], accounts: str, known: tuple[Part, ...] | None = None) -> Transaction:
    """
    Understand a stored transaction, of ours or of anybody's code that follows MongoDB's tutorial.

    Args:
        document: as stored.
        accounts: namespace of the documents that a transfer names.
        known: its participants, for whoever has just stored them.

    Raises:
        TransactionStateError: its state or shape is unknown; nothing may be done to it.
        ConfigurationError: it is not final, and a transfer between other accounts.
    """
    identity = document.get("_id")
    state = document.get("state")
    if isinstance(state, str):
        state = _OTHER_SPELLINGS.get(state, state)
    if not isinstance(state, str) or state not in set(State):
        raise TransactionStateError(
            f"transaction {identity!r} has the unknown state {state!r}; it belongs to other code, or was damaged.",
            id=identity,
            state=state,
        )
    try:
        parts, refusal = _parts(document, accounts) if known is None else (known, None)
        version = _version(document.get("version"))
        key = _key(document, State(state), parts)
        incarnations = _incarnations(document.get("incarnations"), len(parts))
        marked = frozenset() if key is None else _marked(document.get("marked", []))
    except Exception as error:
        # Whatever other code has written there: one document must not stop those who look at many.
        raise TransactionStateError(
            f"transaction {identity!r} has the shape of no transaction: it needs participants, or source, destination "
            f"and value, and if any a version that is an integer ({error}).",
            id=identity,
            state=state,
        ) from error
    if not State(state).is_final:
        refuse_other_accounts(document, accounts)
    modified, deadline = document.get("lastModified"), document.get("deadline")
    return Transaction(
        id=identity,
        state=State(state),
        application=document.get("application"),
        version=version,
        driver=document.get("driver"),
        parts=parts,
        reason=document.get("reason"),
        last_modified=modified if isinstance(modified, datetime) else None,
        document=document,
        deadline=deadline if isinstance(deadline, datetime) else None,
        key=key,
        incarnations=incarnations,
        refusal=refusal,
        marked=marked,
        sessions=tuple(_sessions(document.get("sessions"))),
    )


def refuse_other_accounts(document: Mapping[str, Any], accounts: str) -> None:
    """
    Refuse a transfer between accounts that are not those of this application.

    The `_id`s of a transfer mean something in its own accounts alone.

    Raises:
        ConfigurationError: it says which they are.
    """
    stored = _accounts(document, accounts)
    if stored != accounts:
        raise ConfigurationError(
            f"transaction {document.get('_id')!r} is a transfer between documents in {stored}, and this application's "
            f"accounts are {accounts}: leave it to an application that has TwoPhaseCommit(..., accounts=...) with that "
            "collection, or give this one the same."
        )


def _accounts(document: Mapping[str, Any], accounts: str) -> str:
    """Which collection has the documents of a transfer; of what is none, or does not say so, this application's."""
    stored = None if "changes" in document or "participants" in document else document.get("accounts")
    if stored is None:
        return accounts
    if not isinstance(stored, str) or not all(stored.partition(".")):
        raise TypeError(f"accounts {stored!r} is no 'db.collection'")
    return stored


def _sessions(stored: object) -> Iterator[tuple[str | None, Binary]]:
    """Nothing rests on them: what is no session is passed by."""
    for each in stored if isinstance(stored, list) else ():
        if isinstance(each, dict):
            cluster, identity = each.get("cluster"), as_binary(each.get("id"))
            if identity is not None and (cluster is None or isinstance(cluster, str)):
                yield cluster, identity


def _marked(stored: object) -> frozenset[str]:
    if not isinstance(stored, list) or not all(isinstance(each, str) for each in stored):
        raise TypeError(f"marked {stored!r} are no clusters")
    return frozenset(stored)


def _version(stored: object) -> int | None:
    # A coordinator's guard has it as an integer: what is none would never match, and be passed over for ever.
    if isinstance(stored, float) and stored.is_integer():
        return int(stored)  # mongosh writes doubles, and the server takes them for equal
    if stored is None or (isinstance(stored, int) and not isinstance(stored, bool)):
        return None if stored is None else int(stored)
    raise TypeError(f"version {stored!r} is no integer")


def _key(document: Mapping[str, Any], state: State, parts: tuple[Part, ...]) -> ObjectId | None:
    protocol = document.get("protocol")
    if protocol is None or state is State.INITIAL:
        return None
    if protocol != RECEIPTS:
        raise TypeError(f"protocol {protocol!r} is of a newer version")
    key = document["key"]
    if not isinstance(key, ObjectId):
        raise TypeError(f"key {key!r} is no ObjectId")
    if document.get("own") != plan_of(parts).own:
        raise TypeError(f"own {document.get('own')!r} is not the place of its own branch")
    return key


def _incarnations(stored: object, count: int) -> tuple[Any, ...] | None:
    if stored is None:
        return None
    if not isinstance(stored, list) or len(stored) != count:
        raise TypeError(f"incarnations {stored!r} are not one for each participant")
    return tuple(stored)


def _parts(document: Mapping[str, Any], accounts: str) -> tuple[tuple[Part, ...], str | None]:
    """The participants, and why they may not be changed, if that is known already."""
    for name in ("changes", "participants"):
        if name in document:
            return tuple(stored_part(each) for each in document[name]), None
    value, require = document["value"], document.get("require")
    refusal = None
    if _is_zero(value):
        refusal = "its value is 0: there is nothing to transfer"
    else:
        value = amount(value)
    namespace = _accounts(document, accounts)
    parts = transfer_parts(namespace, document["source"], document["destination"], value, require)
    if same_bson(parts[0].id, parts[1].id):
        raise ValueError("source and destination are the same")
    return parts, refusal


def _is_zero(value: object) -> bool:
    number = value.to_decimal() if isinstance(value, Decimal128) else value
    return isinstance(number, (int, float, Decimal)) and not isinstance(number, bool) and number == 0


def transfer_parts(accounts: str, source: Any, destination: Any, value: Any, require: Any) -> tuple[Part, Part]:
    """
    The two sides of a transfer: the source pays first, and only if its rule holds.

    Taking the money back from the destination needs it to be there still: what a transfer that is being canceled
    has brought may have been spent.
    """
    rule = {"balance": {"$gte": value}}
    taken, given = increase(value, -1), increase(value)
    return (
        Part(None, accounts, source, taken, given, rule if require is None else dict(require), {}),
        Part(None, accounts, destination, given, taken, {}, rule),
    )


def amount(value: object) -> Any:
    """
    A value that can be transferred, as BSON has it.

    Raises:
        ConfigurationError: it is no number, or not more than zero.
    """
    if isinstance(value, Decimal):
        value = Decimal128(value)
    number = value.to_decimal() if isinstance(value, Decimal128) else value
    if isinstance(number, bool) or not isinstance(number, (int, float, Decimal)):
        raise ConfigurationError(f"value={value!r} must be a number.")
    if not math.isfinite(number) or number <= 0:
        raise ConfigurationError(f"value={value!r} must be a finite number of more than 0.")
    return value
