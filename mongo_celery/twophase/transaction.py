"""Transactions as values: states, and the content of stored documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

import bson
from bson import Decimal128
from bson.int64 import Int64

from mongo_celery.errors import ConfigurationError, TransactionStateError
from mongo_celery.mongo.identity import same_bson
from mongo_celery.twophase.participants import Part, increase, read_part, read_value
from mongo_celery.twophase.values import Codec, to_text

_OTHER_SPELLINGS = {"cancelled": "canceled"}
"""Spelling in some editions of the tutorial."""

_GIVEN = ("source", "destination", "value", "accounts", "require", "participants")
"""The fields that callers of `begin` or `transfer` pass."""


class State(StrEnum):
    """
    The state of a transaction.

    ::

        initial -> pending -> applied -> done
           |          |
           |          +-> canceling -> canceled
           +-----------------------> canceled

    Within one cluster, one MongoDB transaction takes it from `initial` to `done`.
    """

    INITIAL = "initial"
    PENDING = "pending"
    APPLIED = "applied"
    DONE = "done"
    CANCELING = "canceling"
    CANCELED = "canceled"

    @property
    def is_final(self) -> bool:
        """Return True if the state is final."""
        return self in {State.DONE, State.CANCELED}


UNFINISHED = (State.PENDING, State.APPLIED, State.CANCELING)
"""The states in which participants may contain half of a transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """
    A transaction as it was read from its document.

    Attributes:
        id: `_id` of the transaction.
        state: state of the transaction.
        application: the owner. None before an application has claimed it, and for code without a marker.
        version: grows with each coordinator. None before the first one.
        coordinator: id of the current coordinator.
        parts: the participants.
        reason: why it is or was canceled.
        last_modified: the server's time of the last step, if it is a date.
        document: the document, as stored.
        deadline: the server's time after which it is canceled unless applied. None for the tutorial's code.
        incarnations: the incarnations of the participants at `pending`. None if not recorded.
    """

    id: Any
    state: State
    application: str | None
    version: int | None
    coordinator: Any
    parts: tuple[Part, ...]
    reason: str | None
    last_modified: datetime | None
    document: Mapping[str, Any]
    deadline: datetime | None = None
    incarnations: tuple[Any, ...] | None = None

    @property
    def is_late(self) -> bool:
        """Return True if the deadline had passed at its last step, by the clock of the log's server."""
        return self.deadline is not None and self.last_modified is not None and self.last_modified >= self.deadline

    @property
    def guard(self) -> dict[str, Any]:
        """The filter that matches only while the transaction has this state and version."""
        version = None if self.version is None else Int64(self.version)
        return {"_id": {"$eq": self.id}, "state": str(self.state), "version": version}


def read_transaction(document: Mapping[str, Any], accounts: str) -> Transaction:
    """
    Read a stored transaction of this package, or of any code based on MongoDB's tutorial.

    Args:
        document: the document, as stored.
        accounts: namespace of the documents in a transfer, unless it names another one.

    Raises:
        TransactionStateError: its state or shape is unknown. Leave it alone.
    """
    identity = document.get("_id")
    state = document.get("state")
    if isinstance(state, str):
        state = _OTHER_SPELLINGS.get(state, state)
    if not isinstance(state, str) or state not in set(State):
        raise TransactionStateError(
            f"Transaction {identity!r} has the unknown state {state!r}. It belongs to other code, or is damaged.",
            id=identity,
            state=state,
        )
    try:
        parts = _read_parts(document, accounts)
        version = _read_version(document.get("version"))
        incarnations = _read_incarnations(document.get("incarnations"), len(parts))
    except Exception as error:
        # Other code may have written anything here. One document must not prevent listing others.
        raise TransactionStateError(
            f"Transaction {identity!r} is damaged. It needs participants, or source, destination and value. Its "
            f"version, if any, must be an integer ({error}).",
            id=identity,
            state=state,
        ) from error
    modified, deadline = document.get("lastModified"), document.get("deadline")
    return Transaction(
        id=identity,
        state=State(state),
        application=document.get("application"),
        version=version,
        coordinator=document.get("coordinator"),
        parts=parts,
        reason=document.get("reason"),
        last_modified=modified if isinstance(modified, datetime) else None,
        document=document,
        deadline=deadline if isinstance(deadline, datetime) else None,
        incarnations=incarnations,
    )


def refuse_other_request(stored: Mapping[str, Any], fields: Mapping[str, Any], codec: Codec) -> None:
    """
    Refuse a request whose id belongs to another request.

    Args:
        stored: the transaction with this id, in any state.
        fields: the fields of the request.
        codec: the codec of the transactions' collection.

    Raises:
        TransactionStateError: the stored one differs byte for byte in a field from its caller.
    """

    def encode(name: str, document: Mapping[str, Any]) -> bytes | None:
        if name not in document:
            return None
        value = document[name]
        if name == "require" and is_text and isinstance(value, Mapping):
            value = to_text(value)
        return bson.encode({name: value}, codec_options=codec)

    is_text = isinstance(stored.get("require"), str)  # MongoDB 4.4 stores no names with `$`
    other = [name for name in _GIVEN if encode(name, stored) != encode(name, fields)]
    if other:
        raise TransactionStateError(
            f"Transaction {stored['_id']!r} already exists with another {', '.join(other)}. Nothing was changed. "
            "Give each transaction a unique id.",
            id=stored["_id"],
        )


def _read_version(stored: object) -> int | None:
    # A coordinator's guard compares it as an integer, so any other value would never match.
    if isinstance(stored, float) and stored.is_integer():
        return int(stored)  # mongosh writes doubles, and the server treats them as equal
    if stored is None or (isinstance(stored, int) and not isinstance(stored, bool)):
        return None if stored is None else int(stored)
    raise TypeError(f"version {stored!r} is not an integer")


def _read_incarnations(stored: object, count: int) -> tuple[Any, ...] | None:
    if stored is None:
        return None
    if not isinstance(stored, list) or len(stored) != count:
        raise TypeError(f"incarnations {stored!r} do not match the participants")
    return tuple(stored)


def _read_parts(document: Mapping[str, Any], accounts: str) -> tuple[Part, ...]:
    if "participants" in document:
        return tuple(read_part(each) for each in document["participants"])
    value = check_amount(document["value"], may_be_zero=True)  # the tutorial's code may transfer nothing
    namespace = document.get("accounts", accounts)
    if not isinstance(namespace, str) or not all(namespace.partition(".")):
        raise TypeError(f"accounts {namespace!r} is not of the form 'db.collection'")
    rule = document.get("require")
    if isinstance(rule, str):  # MongoDB 4.4 stores no names with `$`
        rule = read_value(rule)
    parts = transfer_parts(namespace, document["source"], document["destination"], value, rule)
    if same_bson(parts[0].id, parts[1].id):
        raise ValueError("source and destination are the same account")
    return parts


def transfer_parts(accounts: str, source: Any, destination: Any, value: Any, require: Any) -> tuple[Part, Part]:
    """
    Return both participants of a transfer. The source pays first, and only if its rule matches.

    An undo takes the money back only while the destination still has it.
    """
    rule = {"balance": {"$gte": value}}
    taken, given = increase(value, -1), increase(value)
    return (
        Part(None, accounts, source, taken, given, rule if require is None else dict(require), {}),
        Part(None, accounts, destination, given, taken, {}, rule),
    )


def check_amount(value: object, *, may_be_zero: bool = False) -> Any:
    """
    Return a transferable amount as a BSON number.

    Raises:
        ConfigurationError: it is not a number, or not above zero.
    """
    if isinstance(value, Decimal):
        value = Decimal128(value)
    number = value.to_decimal() if isinstance(value, Decimal128) else value
    if isinstance(number, bool) or not isinstance(number, (int, float, Decimal)):
        raise ConfigurationError(f"value={value!r} must be a number.")
    if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
        raise ConfigurationError(f"value={value!r} must be a finite number greater than 0.")
    return value
