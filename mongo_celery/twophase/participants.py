"""
Participants of a transaction: what is done to one document, how it is undone, and under which condition.

In the transaction's document their updates are kept as Extended JSON text: every server stores field names with
`$` and dots in it, every type survives, and a person can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import Decimal128, json_util
from bson.binary import UuidRepresentation
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery.errors import ConfigurationError

MARKERS = "pendingTransactions"
FENCE = "transactionFence"
_OWN = {"_id", MARKERS, FENCE}

EXTENDED_JSON = json_util.CANONICAL_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)
"""Text in which every type and field name survives."""

Client = MongoClient[Any] | Callable[[], MongoClient[Any]]


@dataclass(frozen=True, slots=True)
class Participant:
    """
    One document that a transaction changes.

    Args:
        collection: a PyMongo collection, or `"db.collection"` in the transactions' cluster.
        id: `_id` of the document.
        apply: update operators; neither a pipeline nor a replacement.
        revert: update operators that undo them; may be left out where `apply` is `$inc` alone.
        require: a filter that the document must match for `apply`; if it does not, the transaction is canceled.
        revert_require: a filter that it must match for `revert`; while it does not, the transaction stays canceling.

    Raises:
        ConfigurationError: when the transaction begins, if one of these cannot work.
    """

    collection: Collection[Any] | str
    id: Any
    apply: Mapping[str, Any]
    revert: Mapping[str, Any] | None = None
    require: Mapping[str, Any] = field(default_factory=dict)
    revert_require: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """A participant as the transaction keeps it; `cluster` is an alias, None for the transactions' own."""

    cluster: str | None
    namespace: str
    id: Any
    apply: Mapping[str, Any]
    revert: Mapping[str, Any]
    require: Mapping[str, Any]
    revert_require: Mapping[str, Any]

    def __str__(self) -> str:
        where = self.namespace if self.cluster is None else f"{self.cluster}:{self.namespace}"
        return f"{where} {self.id!r}"

    def to_document(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "cluster": self.cluster,
            "collection": self.namespace,
            "id": self.id,
            **{name: _text(getattr(self, name)) for name in ("apply", "revert", "require")},
            **({"revertRequire": _text(self.revert_require)} if self.revert_require else {}),
        }


def stored_part(document: Mapping[str, Any]) -> Part:
    """
    Read one back.

    Raises:
        KeyError, TypeError, ValueError: it is no participant.
    """
    return Part(
        document["cluster"],
        document["collection"],
        document["id"],
        _value(document["apply"]),
        _value(document["revert"]),
        _value(document["require"]),
        _value(document.get("revertRequire", "{}")),
    )


def part_of(participant: object, alias: Callable[[MongoClient[Any]], str | None]) -> Part:
    """
    Check a participant.

    Args:
        participant: as given to `begin`.
        alias: names the cluster of a client.

    Raises:
        ConfigurationError: what is wrong with it, and the cure.
    """
    if not isinstance(participant, Participant):
        raise ConfigurationError(f"{type(participant).__name__} is no Participant(collection, id, apply=...).")
    collection = participant.collection
    if isinstance(collection, Collection):
        cluster, namespace = alias(collection.database.client), collection.full_name
    elif isinstance(collection, str) and all(collection.partition(".")):
        cluster, namespace = None, collection
    else:
        raise ConfigurationError(f"collection={collection!r} must be a PyMongo collection or 'db.collection'.")
    apply = _operators("apply", participant.apply)
    revert = _negated(apply) if participant.revert is None else _operators("revert", participant.revert)
    for name in ("require", "revert_require"):
        if not isinstance(getattr(participant, name), Mapping):
            raise ConfigurationError(f"{name} must be a filter, such as {{'stock': {{'$gte': 1}}}}.")
    return Part(cluster, namespace, participant.id, apply, revert, participant.require, participant.revert_require)


def increase(value: Any, sign: int = 1) -> dict[str, Any]:
    """The update that adds to a balance."""
    return {"$inc": {"balance": value if sign > 0 else _minus(value)}}


def _operators(name: str, update: object) -> Mapping[str, Any]:
    if isinstance(update, Sequence) and not isinstance(update, str):
        raise ConfigurationError(f"{name} is a pipeline; use update operators, which can be combined with the marker.")
    if not isinstance(update, Mapping) or not update:
        raise ConfigurationError(f"{name}={update!r} must be update operators, such as {{'$inc': {{'stock': -1}}}}.")
    for operator, change in update.items():
        if not str(operator).startswith("$") or not isinstance(change, Mapping) or not change:
            raise ConfigurationError(f"{name}: {operator!r} is no update operator with fields.")
        renamed = map(str, change.values()) if operator == "$rename" else ()
        for path in (*change, *renamed):
            if str(path).split(".", 1)[0] in _OWN:
                raise ConfigurationError(f"{name} must leave {path!r} alone; the transaction needs it.")
    return update


def _negated(apply: Mapping[str, Any]) -> dict[str, Any]:
    if set(apply) != {"$inc"}:
        raise ConfigurationError(
            "revert is missing: only what $inc has added can be taken back without being told how."
        )
    return {"$inc": {path: _minus(value) for path, value in apply["$inc"].items()}}


def _minus(value: Any) -> Any:
    return Decimal128(-value.to_decimal()) if isinstance(value, Decimal128) else type(value)(-value)


def _text(value: Mapping[str, Any]) -> str:
    return json_util.dumps(value, json_options=EXTENDED_JSON)


def _value(text: str) -> dict[str, Any]:
    value = json_util.loads(text, json_options=EXTENDED_JSON)
    if not isinstance(value, dict):
        raise TypeError(f"{text} is no document")
    return value
