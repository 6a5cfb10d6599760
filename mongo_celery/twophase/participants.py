"""
Participants of a transaction: the change of one document, its opposite, and their conditions.

A transaction's document stores their updates as Extended JSON text. So every server accepts field names with `$` and
dots, every type survives, and a person can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import Decimal128
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.identity import same_bson
from mongo_celery.twophase.values import Codec, from_text, plain_id, storable, to_text

MARKERS = "pendingTransactions"
PARTICIPANT_VERSION = "transactionFence"
"""The field with a participant's version."""

_OWN = {"_id", MARKERS, PARTICIPANT_VERSION}

_KNOWN = {
    *("$set", "$unset", "$inc", "$mul", "$min", "$max", "$rename", "$currentDate", "$bit"),
    *("$push", "$pull", "$pullAll", "$addToSet", "$pop"),
}


@dataclass(frozen=True, slots=True)
class Participant:
    """
    One document that a transaction changes.

    Args:
        collection: a PyMongo collection, or `"db.collection"` in the transactions' cluster.
        id: `_id` of the document.
        apply: update operators. Not a pipeline, not a replacement, and no path with the positional `$` or `$[x]`.
        revert: update operators that undo `apply`. Optional if `apply` is only `$inc`.
        require: a filter that the document must match for `apply`. Otherwise the transaction is canceled.
        revert_require: a filter that it must match for `revert`. Until then the transaction stays canceling.

    Raises:
        ConfigurationError: raised when the transaction begins, if one of these cannot work.
    """

    collection: Collection[Any] | str
    id: Any
    apply: Mapping[str, Any]
    revert: Mapping[str, Any] | None = None
    require: Mapping[str, Any] = field(default_factory=dict)
    revert_require: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """A participant in stored form. `cluster` is an alias, or None for the transactions' own cluster."""

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
        """Return the participant's stored form."""
        return {
            "cluster": self.cluster,
            "collection": self.namespace,
            "id": self.id,
            **{name: to_text(getattr(self, name)) for name in ("apply", "revert", "require")},
            **({"revertRequire": to_text(self.revert_require)} if self.revert_require else {}),
        }


def read_part(document: Mapping[str, Any]) -> Part:
    """
    Read a stored participant.

    Raises:
        Exception: the document is not a participant. The error may be of any kind.
    """
    cluster, namespace = document["cluster"], document["collection"]
    if not isinstance(namespace, str) or not all(namespace.partition(".")):
        raise TypeError(f"collection {namespace!r} is not of the form 'db.collection'")
    if cluster is not None and not isinstance(cluster, str):
        raise TypeError(f"cluster {cluster!r} is not the alias of a cluster, which must be text")
    return Part(
        cluster,
        namespace,
        document["id"],
        read_value(document["apply"]),
        read_value(document["revert"]),
        read_value(document["require"]),
        read_value(document.get("revertRequire", "{}")),
    )


def check_participant(participant: object, alias: Callable[[MongoClient[Any]], str | None], codec: Codec) -> Part:
    """
    Return the stored form of a participant.

    Args:
        participant: as passed to `begin`.
        alias: returns the alias of a client's cluster.
        codec: the codec for a participant without a collection.

    Raises:
        ConfigurationError: it cannot work. The message names the reason and the fix.
    """
    if not isinstance(participant, Participant):
        raise ConfigurationError(
            f"{type(participant).__name__} is not a participant. Give Participant(collection, id, apply=...)."
        )
    collection = participant.collection
    if isinstance(collection, Collection):
        cluster, namespace = alias(collection.database.client), collection.full_name
        codec = collection.codec_options
    elif isinstance(collection, str) and all(collection.partition(".")):
        cluster, namespace = None, collection
    else:
        raise ConfigurationError(
            f"collection={collection!r} must be a PyMongo collection or text such as 'shop.accounts'."
        )
    apply = _operators("apply", participant.apply, codec)
    revert = _negate(apply) if participant.revert is None else participant.revert
    rules = {"require": participant.require, "revert_require": participant.revert_require}
    for name, given in rules.items():
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"{name} must be a filter, such as {{'stock': {{'$gte': 1}}}}.")
    return Part(
        cluster,
        namespace,
        plain_id("id", participant.id, codec),
        apply,
        _operators("revert", revert, codec),
        **{name: storable(name, given, codec) for name, given in rules.items()},
    )


def refuse_repeated(parts: Sequence[Part]) -> None:
    """
    Refuse participants that are visibly the same document. The server may find more.

    Raises:
        ConfigurationError: two are the same.
    """
    for index, part in enumerate(parts):
        where = (part.cluster, part.namespace)
        if any((other.cluster, other.namespace) == where and same_bson(other.id, part.id) for other in parts[:index]):
            raise ConfigurationError(
                f"{part} is given twice. Give two documents, or combine both changes in one participant."
            )


def increase(value: Any, sign: int = 1) -> dict[str, Any]:
    """Return the update that adds to a balance."""
    return {"$inc": {"balance": value if sign > 0 else _minus(value)}}


def _operators(name: str, update: object, codec: Codec) -> Mapping[str, Any]:
    if isinstance(update, Sequence) and not isinstance(update, str):
        raise ConfigurationError(f"{name} is a pipeline, which is not supported. Use update operators.")
    if not isinstance(update, Mapping) or not update:
        raise ConfigurationError(f"{name}={update!r} must be update operators, such as {{'$inc': {{'stock': -1}}}}.")
    for operator, change in update.items():
        if not str(operator).startswith("$") or not isinstance(change, Mapping) or not change:
            raise ConfigurationError(f"{name}: {operator!r} is not an update operator with fields.")
        if operator not in _KNOWN:
            raise ConfigurationError(f"{name}: {operator!r} is not supported. Use one of {', '.join(sorted(_KNOWN))}.")
        renamed = map(str, change.values()) if operator == "$rename" else ()
        for path in (*change, *renamed):
            _check_path(name, str(path))
    return storable(name, update, codec)


def _check_path(name: str, path: str) -> None:
    segments = path.split(".")
    if segments[0] in _OWN:
        raise ConfigurationError(f"{name} must not change {path!r}, because the transaction needs it.")
    # The server takes the position from the array that its filter matched last, the markers.
    if any(segment == "$" or (segment.startswith("$[") and segment != "$[]") for segment in segments):
        raise ConfigurationError(
            f"{name}: {path!r} would change the element that the transaction's own filter finds. Give the number "
            "of the element ('items.1.left') and check it with require={'items.1.sku': ...}, or store the "
            "elements by key ('items.lamp.left').",
        )


def _negate(apply: Mapping[str, Any]) -> dict[str, Any]:
    if set(apply) != {"$inc"}:
        raise ConfigurationError("revert is missing. Only $inc can be reverted without it.")
    try:
        return {"$inc": {path: _minus(value) for path, value in apply["$inc"].items()}}
    except TypeError as error:
        raise ConfigurationError(f"apply={dict(apply)!r} cannot be applied. $inc needs numbers.") from error


def _minus(value: Any) -> Any:
    if isinstance(value, Decimal128):  # Python's minus would round it to the precision of the caller's context
        return Decimal128(value.to_decimal().copy_negate())
    return type(value)(-value)


def read_value(text: str) -> dict[str, Any]:
    """
    Return a filter or update from its stored text. As text, because MongoDB 4.4 stores no names with `$`.

    Raises:
        Exception: it is not the text of a document. The error may be of any kind.
    """
    value = from_text(text)
    if not isinstance(value, dict):
        raise TypeError(f"{text} is not a document")
    return value
