"""
A change for user code.

This module needs no client, Celery or clock. `raw` is the change event as the server sent it. The attributes have
PyMongo's names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, Self, overload

import bson
from bson import ObjectId, Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo.asynchronous.collection import AsyncCollection

from mongo_celery.bridge.fenced import AsyncFencedCollection, FencedCollection
from mongo_celery.bridge.fenced.fence import HAND_MADE, HAND_MADE_TOKEN, Fence, Origin
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.opening import find_collection
from mongo_celery.mongo.steps import AnyCollection, Session
from mongo_celery.mongo.verdicts import storable

if TYPE_CHECKING:
    from datetime import datetime

    from pymongo.collection import Collection

    from mongo_celery.outbox import Outbox

FLAGS = "_mongoCelery"
"""Name of the field in which the pipeline returns the results of `match` expressions."""

_KEY_CHARS = 80
_NAMESPACES = 4096
_NAMESPACE_CHARS = 330  # a database's name has at most 63 bytes, a collection's 255
_LENIENT: CodecOptions[Any] = CodecOptions(
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)

_UNREADABLE = "an event that cannot be read"


OriginsOf = Callable[[AnyCollection], Callable[[Any], Origin | None]]
"""Given a target collection, return a function from a document's `_id` to the change that it is written for."""


class ChangeView(Protocol):
    """A handler's view of the fields that this package keeps in documents."""

    def get_field(self, event: Mapping[str, Any], name: str) -> Any:
        """Return a field of an event, without the document fields that the handler does not see."""

    def find_outboxes(self, namespace: str) -> Sequence[Outbox]:
        """Return the app's outboxes that keep their entries in the documents of a collection."""


class Unread:
    """
    The event of a `Change`, decoded at first use. If decoding fails, each use raises the error.

    It is made for each change, and `functools.cache` takes 3 us more.

    Args:
        read: returns the event.
    """

    __slots__ = ("_event", "_read")

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read
        self._event: Mapping[str, Any] | None = None

    def __call__(self) -> Mapping[str, Any]:
        """Return the event."""
        if self._event is None:
            self._event = self._read()
        return self._event


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Change:
    """
    One change event, given to a handler.

    Documents come without the fields that this package keeps in them (entries of an outbox, stamps, locks, markers),
    because a copy of the document must not have them. With `bookkeeping=True` they are included. `raw` has all fields.

    Attributes:
        partition: index of the partition that keeps this change's order.
        seq: number of this change within its partition, from 1, without gaps.
        fencing_token: grows with every claim of the partition. A resource that has seen a larger one should refuse this
            one. It is -1 in a change from `build`.
        session: the open transaction's session in a handler with `transactional=True`: a `ClientSession`, or an
            `AsyncClientSession` in an `async def` handler. Otherwise None.
        replayed: True for a replayed dead letter. Newer changes of its document may have been handled meanwhile.
            `fenced` refuses to overwrite their data. Check this attribute before other effects.
    """

    _event: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    partition: int = 0
    seq: int = 1
    fencing_token: int = 1
    session: Any = None
    replayed: bool = False
    _fence: Callable[[Change], Fence] | None = field(default=None)
    _named: Callable[[str], Collection[dict[str, Any]]] | None = field(default=None)
    _view: ChangeView | None = field(default=None)
    _shown: dict[str, Any] = field(default_factory=dict)

    @property
    def raw(self) -> Mapping[str, Any]:
        """The event as the server sent it. For a handler it is decoded when one of its fields is first read."""
        return self._event() if callable(self._event) else self._event

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Change):
            return NotImplemented
        mine, theirs = ((each.partition, each.seq, each.fencing_token, each.replayed) for each in (self, other))
        return mine == theirs and self.session is other.session and self.raw == other.raw

    __hash__ = None  # type: ignore[assignment]

    @property
    def operation_type(self) -> str:
        """
        `insert`, `update`, `replace`, `delete`, `drop`, `rename`, `dropDatabase`, `invalidate` ... For a row of a
        snapshot it is `snapshot`.
        """
        return str(self.raw["operationType"])

    @property
    def ns(self) -> Mapping[str, str]:
        """The namespace as `{"db": ..., "coll": ...}`. Empty for `invalidate`."""
        return self.raw.get("ns") or {}

    @property
    def namespace(self) -> str:
        """The namespace as `"db.collection"`, `"db"` or the empty string."""
        return read_namespace(self.raw)

    @property
    def document_key(self) -> Mapping[str, Any]:
        """`_id` (and the shard key) of the document. Empty for events without a document."""
        return self.raw.get("documentKey") or {}

    @property
    def full_document(self) -> dict[str, Any] | None:
        """
        The document, without the fields of this package. For an update, MongoDB looks it up when the event is read: it
        may be newer than the change, and is None if the document was deleted meanwhile.
        """
        found: dict[str, Any] | None = self._get("fullDocument")
        return found

    @property
    def full_document_before_change(self) -> dict[str, Any] | None:
        """The document before the change, if the collection records pre-images."""
        found: dict[str, Any] | None = self._get("fullDocumentBeforeChange")
        return found

    @property
    def update_description(self) -> Mapping[str, Any] | None:
        """`updatedFields`, `removedFields` and `truncatedArrays` of an update."""
        found: Mapping[str, Any] | None = self._get("updateDescription")
        return found

    @property
    def to(self) -> Mapping[str, str]:
        """The new namespace of a `rename`. Empty for other events."""
        return self.raw.get("to") or {}

    @property
    def operation_description(self) -> Mapping[str, Any] | None:
        """The effect of `create`, `createIndexes`, `modify` ..., with the bridge's option `show_expanded_events`."""
        return self.raw.get("operationDescription")

    @property
    def collection_uuid(self) -> Any:
        """The UUID of the collection (BSON's `Binary`), with `show_expanded_events`."""
        return self.raw.get("collectionUUID")

    @property
    def cluster_time(self) -> Timestamp | None:
        """Time of the oplog entry, shared by a whole transaction. For a snapshot row, its place in the stream."""
        return self.raw.get("clusterTime")

    @property
    def wall_time(self) -> datetime | None:
        """The server's wall clock at the change (MongoDB 6.0 and later)."""
        return self.raw.get("wallTime")

    @property
    def resume_token(self) -> Mapping[str, Any]:
        """MongoDB's resume token of this change. A snapshot row has a token of the bridge."""
        token: Mapping[str, Any] = self.raw["_id"]
        return token

    def __getitem__(self, name: str) -> Any:
        if self._view is None:
            return self.raw[name]
        if name not in self._shown:
            self._shown[name] = self._view.get_field(self.raw, name)
        return self._shown[name]

    def _get(self, name: str) -> Any:
        return self[name] if name in self.raw else None

    def __repr__(self) -> str:
        return f"<Change {describe_change(self)} seq={self.seq}>"

    @property
    def fence(self) -> Fence:
        """
        The fence of this execution. Use it with a store that has no fenced view, such as an SQL table.

        In the transaction of the effect, compare it with the newest fence in the store, then store it: see
        examples/fenced_sql. The fence of a replay is older than all later changes of its partition. So a stamp for each
        partition always refuses it. A stamp for each row refuses it only if the row is newer.

        Raises:
            HandlerUsageError: the change comes from `build`, without a fence.
        """
        if self._fence is None:
            raise HandlerUsageError(HAND_MADE)
        return self._fence(self)

    @overload
    def fenced(self, collection: Collection[dict[str, Any]] | str) -> FencedCollection: ...

    @overload
    def fenced(self, collection: AsyncCollection[dict[str, Any]]) -> AsyncFencedCollection: ...

    def fenced(self, collection: AnyCollection | str) -> FencedCollection | AsyncFencedCollection:
        """
        Return a view of a collection whose writes carry this change's fencing token.

        The collection decides about the methods of the view: for one of an `AsyncMongoClient` they are coroutines.

        A write raises `StaleFencingTokenError` if a newer execution of the partition has already
        written to the document. It raises `OutdatedChangeError` if another partition has written there for a later
        change of the same document. In a handler with `transactional=True` each write is part of its transaction.
        Documents that the newer execution has not touched are not protected.

        Args:
            collection: a PyMongo collection of either kind of client, `"db.collection"` of `bridge.client`, or
                `"collection"` of the URL's database.

        Raises:
            HandlerUsageError: the change comes from `build`, without a fence.
            ConfigurationError: the collection belongs to an `AsyncMongoClient`, and no event loop runs here.
        """
        return self.fence_collection(collection)

    def fence_collection(
        self, collection: AnyCollection | str, origins: OriginsOf | None = None
    ) -> FencedCollection | AsyncFencedCollection:
        """Return the view of `fenced`. For several changes, `origins` finds the change of each write."""
        fence, view = self.fence, self._view
        if isinstance(collection, str):
            assert self._named is not None, "it comes with the fence"
            collection = self._named(collection)
        outboxes = tuple if view is None else partial(view.find_outboxes, collection.full_name)
        origin_of = None if origins is None else origins(collection)
        if isinstance(collection, AsyncCollection):
            _demand_loop(collection)
            return AsyncFencedCollection(collection, fence, outboxes=outboxes, origin_of=origin_of)
        return FencedCollection(collection, fence, outboxes=outboxes, origin_of=origin_of)

    def with_session(self, session: Session) -> Change:
        """Return the same change, bound to a transaction's session."""
        return replace(self, session=session)

    def with_view(self, view: ChangeView) -> Change:
        """Return the same change, as another handler sees it."""
        return replace(self, _view=view, _shown={})

    @classmethod
    def build(
        cls,
        operation_type: str,
        *,
        ns: str,
        document_key: Mapping[str, Any] | None = None,
        full_document: Mapping[str, Any] | None = None,
        fencing_token: int | None = None,
        fence: Fence | None = None,
        client: Any = None,
        **raw: Any,
    ) -> Change:
        """
        Make a change for a unit test.

        Do not deliver existing documents with it: use `changes snapshot start`. A live change gets its fence from a
        claim. A manually made fence does not protect newer data, so without `fence` the change refuses `fence` and
        `fenced()`.

        Args:
            operation_type: as in MongoDB's events.
            ns: `"db.collection"`. Empty for `invalidate`, which has none.
            document_key: by default the `_id` of `full_document`.
            full_document: the document, if the event carries one.
            fencing_token: the fencing token for a handler that compares tokens itself. By default -1, which no `Fence`
                accepts.
            fence: the fence of `fenced()`. The change takes its partition and fencing token from it.
            client: a MongoClient for `fenced("db.collection")`. With a collection, `fenced` needs none.
            raw: further fields of the event, such as `updateDescription=...`.

        Raises:
            HandlerUsageError: you gave both a fence and a token.
        """
        if fence is not None and fencing_token is not None:
            raise HandlerUsageError("A fence contains a token. Give either fence or fencing_token, not both.")
        database, _, collection = ns.partition(".")
        if document_key is None and full_document is not None and "_id" in full_document:
            document_key = {"_id": full_document["_id"]}
        event: dict[str, Any] = {
            "_id": {"_data": ObjectId().binary.hex()},
            "operationType": operation_type,
            "clusterTime": Timestamp(1, 1),
        }
        if ns:
            event["ns"] = {"db": database, "coll": collection} if collection else {"db": database}
        if document_key is not None:
            event["documentKey"] = dict(document_key)
        if full_document is not None:
            event["fullDocument"] = dict(full_document)
        event.update(raw)
        if fence is not None:
            return cls(
                event,
                partition=fence.index,
                fencing_token=fence.token,
                _fence=partial(_as_given, fence),
                _named=partial(_find_collection, client),
            )
        return cls(event, fencing_token=HAND_MADE_TOKEN if fencing_token is None else fencing_token)


def _demand_loop(collection: AsyncCollection[Any]) -> None:
    """Refuse a view in a plain handler: it would write nothing, because nothing would await its methods."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            f"{collection.full_name} belongs to an AsyncMongoClient, whose methods return coroutines, but no event "
            "loop runs here. Write the handler as async def, or pass a collection of a MongoClient."
        ) from None


def _as_given(fence: Fence, _change: Change) -> Fence:
    return fence


def _find_collection(client: Any, namespace: str) -> Collection[dict[str, Any]]:
    if client is None:
        raise HandlerUsageError(
            f"This change has no client for {namespace!r}. Use Change.build(..., client=...), or pass a collection."
        )
    return find_collection(client, namespace)


def decode_event(event: bytes | memoryview) -> dict[str, Any]:
    """Decode an event to plain values, even if it has invalid UTF-8 or times outside Python's datetime range."""
    return bson.decode(event, _LENIENT)


def wrap_event(raw: bytes | memoryview) -> RawEvent:
    """
    Wrap an event. Only the fields that are read are decoded, by `EVENT_TYPES`.

    Raises:
        BSONError: it is not a BSON document. Raised now or when a field is read.
    """
    return RawEvent(raw)


def read_token(raw: bytes) -> Mapping[str, Any]:
    """Return the resume token from an event's bytes, which no handler can change. The rest is not decoded."""
    token = RawEvent(raw).token
    if token is None:
        raise KeyError("_id")
    return token


def read_namespace(event: Mapping[str, Any]) -> str:
    """Return `"db.collection"`, `"db"` or an empty string. `invalidate` and unreadable events have no namespace."""
    ns = event.get("ns")
    if not isinstance(ns, Mapping):
        return ""
    return ".".join(str(ns[name]) for name in ("db", "coll") if ns.get(name))


@lru_cache(maxsize=_NAMESPACES)
def _read_name(namespace: bytes) -> str:
    return storable(read_namespace({"ns": RawEvent(namespace)})[:_NAMESPACE_CHARS])


def token_data(token: Mapping[str, Any]) -> str:
    """Return the comparable part of a resume token. Whole tokens may also contain `_typeBits`."""
    return str(token["_data"])


def describe(event: Mapping[str, Any] | bytes) -> str:
    """
    Return namespace, operation and key of an event, truncated. Document contents are never included.

    The text can be logged and stored, even if the event is not valid BSON.
    """
    try:
        found = RawEvent(event) if isinstance(event, bytes) else event
        if isinstance(found, RawEvent) and found.plain is not None and found.object_id is not None:
            namespace, object_id = found.object_id  # most changes are of a document with an ObjectId
            name, operation = _read_name(namespace), found.plain.operation.decode()
            return f"{name} {operation} ObjectId('{object_id.hex()}')"
        key = found.get("documentKey")
        text = _shorten_value(key["_id"]) if isinstance(key, Mapping) and "_id" in key else "-"
        operation = str(found.get("operationType"))[:_KEY_CHARS]
        return storable(f"{read_namespace(found)[:_NAMESPACE_CHARS]} {operation} {text}")
    except Exception:  # noqa: BLE001 - a description that fails must not fail the handler
        return _UNREADABLE


def describe_change(change: Change) -> str:
    """Describe a change, like `describe`, even if it cannot be decoded."""
    try:
        return describe(change.raw)
    except Exception:  # noqa: BLE001 - a decoder's
        return _UNREADABLE


def _shorten_value(value: Any) -> str:
    """Return the beginning of a value's Python representation."""
    if isinstance(value, RawBSONDocument):
        if len(value.raw) > _KEY_CHARS**2:
            return f"(a document of {len(value.raw)} bytes)"
        value = decode_event(value.raw)
    if isinstance(value, str | bytes) and len(value) > _KEY_CHARS:
        value = value[: _KEY_CHARS + 1]  # do not format a long value only to cut it
    text = repr(value)
    return text[:_KEY_CHARS] + "..." if len(text) > _KEY_CHARS else text


class ChangeFailed(Exception):  # noqa: N818 - what a handler says, not an error of its own: see its cause
    """
    One change of a list has failed, and all changes before it are finished. `Changes.failed_at` makes this exception.

    Attributes:
        place: place of the failed change in the list, from 0.
        changes: the list. It is empty in a pickled copy.
    """

    def __init__(self, message: str, place: int, changes: Sequence[Change] = ()) -> None:
        super().__init__(message, place)
        self.place = place
        self.changes = changes

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args  # no documents: a result backend may store it

    @property
    def error(self) -> Exception | None:
        """The error of the change: the exception after `from`, or the one being handled. None if there is none."""
        found = self.__context__ if self.__cause__ is None and not self.__suppress_context__ else self.__cause__
        return found if isinstance(found, Exception) else None


class Changes(tuple[Change, ...]):
    """
    Changes of one partition, in order, for a handler of `on_changes`: at least one.

    They were claimed together, so they share one partition, one session and one fencing token.
    """

    __slots__ = ()

    def __new__(cls, changes: Iterable[Change]) -> Self:
        """Make the changes of one execution. A unit test may pass its handler a plain list instead."""
        made = super().__new__(cls, changes)
        if not made:
            raise HandlerUsageError("Changes() needs at least one change.")
        return made

    @property
    def session(self) -> Any:
        """The open transaction's session in a handler with `transactional=True`, as in `Change`. Otherwise None."""
        return self[0].session

    def with_session(self, session: Session) -> Changes:
        """Return the same changes, bound to a transaction's session."""
        return Changes(change.with_session(session) for change in self)

    @overload
    def fenced(self, collection: Collection[dict[str, Any]] | str) -> FencedCollection: ...

    @overload
    def fenced(self, collection: AsyncCollection[dict[str, Any]]) -> AsyncFencedCollection: ...

    def fenced(self, collection: AnyCollection | str) -> FencedCollection | AsyncFencedCollection:
        """
        Return a view of a collection whose writes carry the fencing token of these changes, as `Change.fenced`.

        Args:
            collection: as for `Change.fenced`.

        Raises:
            HandlerUsageError: a change was made by `build` without a fence, or the changes have several fences.
        """
        if len({(change.partition, change.fencing_token) for change in self}) > 1:
            raise HandlerUsageError(
                "These changes have several fences, but a list has only one. In a unit test, build all changes with "
                "the same fence.",
            )
        return self[0].fence_collection(collection, None if self[0].fence.origin is None else self._origins)

    def _origins(self, collection: AnyCollection) -> Callable[[Any], Origin | None]:
        """Return the last change of each document, by its `_id`. Other `_id`s need a list of one document."""
        codec = collection.codec_options
        found = {id_key(change.document_key.get("_id"), codec): change.fence.origin for change in self}
        is_one = len({origin.document for origin in found.values() if origin is not None}) == 1
        last = self[-1].fence.origin if is_one else None
        return lambda document_id: found.get(id_key(document_id, codec), last)

    def failed_at(self, failed: int | Change) -> ChangeFailed:
        """
        Return the exception to raise, `from` the error, if one change failed and all before it are finished.

        Retries and the failure policy then apply to this change alone. Changes before it are done, and changes after it
        are given again. If the handler raises any other exception, it gets smaller lists until the failing change is
        alone.

        Args:
            failed: the failed change, or its place in this list, from 0.

        Raises:
            HandlerUsageError: the list has no such change.
        """
        if isinstance(failed, Change):
            place = next((at for at, change in enumerate(self) if change is failed), -1)
        else:
            place = failed if isinstance(failed, int) and not isinstance(failed, bool) else -1
        if not 0 <= place < len(self):
            raise HandlerUsageError(f"failed_at() needs a change of this list, or its index from 0 to {len(self) - 1}.")
        return ChangeFailed(f"the handler reported that {describe_change(self[place])} has failed", place, self)
