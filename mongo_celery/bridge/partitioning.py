"""
The partition of a change: the key, and its stable hash.

The key must be the same at every reading of a change, in every process and Python version. Otherwise a change that is
read twice could count as done in another partition. So a key uses only data that the oplog fixes: namespace and
document key, or document fields of inserts, replaces and images with mode `required`. Registration refuses a key from
an `updateLookup`.

The hash is BLAKE2b over the key's BSON, which is the same everywhere. Golden vectors are in
`tests/unit/test_partitioning.py`. A missing or null key hashes like any other value, so these changes of a subscription
share one partition. Numbers that MongoDB considers equal (1, 1.0, Int64 1) hash alike, since `_id: 1` and `_id: 1.0`
are the same document.

By document key every event has a hash, even if it cannot be decoded. A user's rule may fail: `listener/admission.py`
handles that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import bson
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from mongo_celery.bridge.change import decode_event, token_data, wrap_event
from mongo_celery.bridge.existing import as_inserted
from mongo_celery.bridge.fenced.fence import Origin
from mongo_celery.bridge.options import PartitionKey
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.identity import canonical

HASH_NAME = "blake2b-64"
_NAMESPACES = 4096
_PLACE_BYTES = 48
"""Bytes of a token: its time and its place in a transaction. For an existing document, all of it."""
_ANY_ID = bson.ObjectId(bytes(12))
_ENDS = b"\0\0"  # ends of the array and its document
_WITH_DOCUMENT = {"insert", "replace"}
_KEYS: CodecOptions[Any] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
"""Encodes a function's UUID as the binary value that documents contain."""


@dataclass(frozen=True, slots=True)
class Partitioner:
    """
    The partition rule of one subscription: its name and its key function.

    Attributes:
        name: stored with the partitioning. Another name means another partitioning.
        key: returns an event's BSON key.
    """

    name: str
    key: Callable[[Mapping[str, Any]], Any]

    @property
    def layout_key(self) -> str:
        """Hash and name of the rule, as the partitioning stores them."""
        return f"{HASH_NAME}:{self.name}"

    @property
    def is_by_document(self) -> bool:
        """Return True if all changes of a document are in one partition."""
        return self.key is document_key

    def hash(self, event: Mapping[str, Any]) -> int:
        """
        Return the stable hash of an event's key, from 0 to 2^64 - 1. Modulo the partition count, it is the index.

        Raises:
            Exception: from a user's function, or because BSON cannot encode its value. Never by document key.
        """
        if self.is_by_document:
            return document_hash(event)
        return partition_hash(self.key(event))


def partition_hash(key: Any) -> int:
    """Return the stable hash of a key, from 0 to 2^64 - 1."""
    digest = hashlib.blake2b(bson.encode({"": canonical(key)}, codec_options=_KEYS), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def document_hash(event: Mapping[str, Any]) -> int:
    """
    Return the stable hash of an event's document key. Every event has one.

    It uses namespace and `_id`, as MongoDB compares them. If the key cannot be decoded, it uses its raw bytes. All
    events without a key share one hash. An event has the same hash at every reading.
    """
    plain = event.object_id if isinstance(event, RawEvent) else None
    if plain is not None:
        begun = _begin_hash(plain[0])
        if begun is not None:
            digest = begun.copy()
            digest.update(plain[1] + _ENDS)
            return int.from_bytes(digest.digest(), "big")
    try:
        return partition_hash(document_key(event))
    except Exception:  # noqa: BLE001 - bytes of a user, whatever they do to a decoder
        return partition_hash(_raw_key(event))


def make_origin(raw: bytes, token: Mapping[str, Any], since: int) -> Origin:
    """Return the origin of a change. A fence needs it if one document's changes may be in several partitions."""
    place = token_data(token).encode()[:_PLACE_BYTES].ljust(_PLACE_BYTES)
    return Origin(document_hash(wrap_event(raw)) % 2**63, place, since)


@lru_cache(maxsize=_NAMESPACES)
def _begin_hash(namespace: bytes) -> hashlib.blake2b | None:
    """Return the unfinished `partition_hash` of ObjectId keys in a namespace: only the ObjectId is missing."""
    try:
        ns = RawEvent(namespace)
        encoded = bson.encode({"": canonical([ns.get("db"), ns.get("coll"), _ANY_ID])}, codec_options=_KEYS)
    except Exception:  # noqa: BLE001 - bytes of a user, whatever they do to a decoder
        return None
    return hashlib.blake2b(encoded[: -len(_ANY_ID.binary + _ENDS)], digest_size=8)


def _raw_key(event: Mapping[str, Any]) -> Binary | None:
    try:
        found = event.get("documentKey")
    except Exception:  # noqa: BLE001 - the event itself may be no BSON
        return None
    return Binary(found.raw) if isinstance(found, RawBSONDocument) else None


def partitioner(
    rule: PartitionKey | None,
    full_document: str | None,
    before_change: str | None,
    operations: Collection[str] | None = None,
) -> Partitioner:
    """
    Return the partition rule for the option `partition_by`.

    Args:
        rule: None or `"_id"` for namespace and document key; a path such as `"fullDocument.customer"` (or, short,
            `"customer"`), `"fullDocumentBeforeChange.customer"` or `"documentKey.region"`; or a function of the event
            that reads only data that the oplog fixes.
        full_document: the bridge's option.
        before_change: the bridge's option.
        operations: the operations of the handler. Inserts and replaces carry their document in the oplog.

    Raises:
        ConfigurationError: the key could change between two readings.
    """
    if rule is None or rule == "_id":
        return Partitioner("_id", document_key)
    if callable(rule):
        return Partitioner(_callable_name(rule), lambda event: rule(_decode_for_users(event)))
    if not isinstance(rule, str) or not all(rule.split(".")):
        raise ConfigurationError(
            f"partition_by={rule!r} must be '_id', a field path such as 'customer', or a function of the event."
        )
    path = rule.split(".")
    if path[0] not in {"fullDocument", "fullDocumentBeforeChange", "documentKey"}:
        path = ["fullDocument", *path]
    in_oplog = path[0] == "fullDocument" and operations and set(operations) <= _WITH_DOCUMENT
    if not in_oplog:
        _refuse_volatile(rule, path[0], full_document, before_change)
    return Partitioner(".".join(path), lambda event: _at(event, path))


def rule_named(name: str, registered: Iterable[PartitionKey | None]) -> PartitionKey:
    """
    Return the rule of a stored name: the name itself, or the registered function with this name.

    A writer to the state chooses the name, so it selects only from registered functions.

    Args:
        registered: rules that are in use in this process.

    Raises:
        ConfigurationError: no registered function has this name.
    """
    if ":" not in name:
        return name
    for rule in registered:
        if callable(rule) and _callable_name(rule) == name:
            return rule
    raise ConfigurationError(
        f"the partitions were made with partition_by={name!r}, but no handler of this app has this function."
    )


def document_key(event: Mapping[str, Any]) -> Any:
    """Return the default key: namespace and `_id`. Events without a document have the namespace alone."""
    ns = event.get("ns") or {}
    key = event.get("documentKey")
    return [ns.get("db"), ns.get("coll"), key.get("_id") if key else None]


def _refuse_volatile(rule: str, root: str, full_document: str | None, before_change: str | None) -> None:
    if root == "fullDocument" and full_document != "required":
        raise ConfigurationError(
            f"partition_by={rule!r} reads the document. With full_document={full_document!r} it may differ when the "
            "change is read again. Use '_id', operations={'insert', 'replace'}, or, on collections with images, "
            "full_document='required'.",
        )
    if root == "fullDocumentBeforeChange" and before_change != "required":
        raise ConfigurationError(
            f"partition_by={rule!r} reads the image before the change, which may be missing. Set "
            "full_document_before_change='required', or use '_id'.",
        )


def _decode_for_users(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """
    Return plain values for users' functions. The listener's own events decode only the fields that are read.

    Present an existing document as an insert, so that it gets the key of its changes.
    """
    return as_inserted(decode_event(event.raw) if isinstance(event, RawEvent) else event)


def _callable_name(rule: Callable[..., Any]) -> str:
    name = f"{rule.__module__}:{getattr(rule, '__qualname__', '')}"
    if "<lambda>" in name or "<locals>" in name or name.endswith(":"):
        raise ConfigurationError(
            f"partition_by={name!r} must be a function at module level, because its name is stored with the "
            "partitions. A lambda or a nested function has no such name.",
        )
    return name


def _at(event: Mapping[str, Any], path: list[str]) -> Any:
    value: Any = event
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value
