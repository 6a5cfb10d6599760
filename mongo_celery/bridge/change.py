"""
A change as user code sees it, and where a change belongs.

Pure: no client, no Celery, no clock. `raw` is the change event as the server sent it; the attributes
carry PyMongo's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import bson
from bson import ObjectId, Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo.errors import ConfigurationError as ClientConfigurationError

from mongo_celery.bridge.fenced import FencedCollection
from mongo_celery.bridge.fenced.fence import HAND_MADE, HAND_MADE_TOKEN, Fence, Origin
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.errors import HandlerUsageError
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.verdicts import storable

if TYPE_CHECKING:
    from datetime import datetime

    from pymongo.client_session import ClientSession
    from pymongo.collection import Collection

    from mongo_celery.outbox import Outbox

FLAGS = "_mongoCelery"
"""Name of the field under which the pipeline carries the verdicts of `match` expressions."""

_KEY_CHARS = 80
_NAMESPACES = 4096
_NAMESPACE_CHARS = 330  # a database's name has at most 63 bytes, a collection's 255
_LENIENT: CodecOptions[Any] = CodecOptions(
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)

_UNREAD: Mapping[str, Any] = {}
_UNREADABLE = "an event that cannot be read"


OriginsOf = Callable[["Collection[dict[str, Any]]"], Callable[[Any], Origin | None]]
"""Of a target, what gives the change that a write to a document is for, by its `_id`."""


class ChangeView(Protocol):
    """A handler's view of the fields that this package keeps in documents."""

    def get_field(self, event: Mapping[str, Any], name: str) -> Any:
        """Return a field of an event; where it holds fields of a document, without those the handler does not see."""

    def find_outboxes(self, namespace: str) -> Sequence[Outbox]:
        """Return the app's outboxes that keep their entries in the documents of a collection."""


@dataclass(frozen=True, slots=True, repr=False)
class Change:
    """
    One change event, given to a handler.

    Documents lack the fields that this package keeps in them (entries of an outbox, stamps, locks, markers), unless the
    handler has `bookkeeping=True`: copied elsewhere they would count for the copy. `raw` has all of them.

    Attributes:
        raw: the event as the server sent it. A handler's is decoded when one of its fields is first read.
        partition: index of the partition that keeps this change's order.
        seq: number of this change within its partition, from 1, without gaps.
        fencing_token: grows with every claim of the partition; a resource that has seen a
            larger one should refuse this one; -1 in one that was built by hand.
        session: the open transaction's session in a handler with `transactional=True`, else None.
        replayed: whether this is a replayed dead letter: newer changes of its document may have been handled
            meanwhile. `fenced` refuses to write over what they have written; other effects have to mind it themselves.
    """

    raw: Mapping[str, Any]
    partition: int = 0
    seq: int = 1
    fencing_token: int = 1
    session: ClientSession | None = None
    replayed: bool = False
    _fence: Callable[[Change], Fence] | None = field(default=None, compare=False)
    _named: Callable[[str], Collection[dict[str, Any]]] | None = field(default=None, compare=False)
    _read: Callable[[], Mapping[str, Any]] | None = field(default=None, compare=False)
    _view: ChangeView | None = field(default=None, compare=False)
    _shown: dict[str, Any] | None = field(default=None, compare=False)

    @classmethod
    def unread(cls, read: Callable[[], Mapping[str, Any]], **fields: Any) -> Change:
        """
        A change that is decoded on first use. An error of the decoder is raised there, each time.

        Args:
            read: gives the event.
            fields: all others.
        """
        change = cls(_UNREAD, _read=read, **fields)
        object.__delattr__(change, "raw")
        return change

    if not TYPE_CHECKING:  # a checker would take every name for one that is there

        def __getattr__(self, name: str) -> Any:
            """Decode the event. Python calls this only for a missing attribute: the event before its first use."""
            read = self._read if name == "raw" else None
            if read is None:
                raise AttributeError(f"'Change' object has no attribute {name!r}")
            raw = read()
            object.__setattr__(self, "raw", raw)
            return raw

    @property
    def operation_type(self) -> str:
        """
        `insert`, `update`, `replace`, `delete`, `drop`, `rename`, `dropDatabase`, `invalidate` ...; `snapshot` of a
        document that exists, which a snapshot gives.
        """
        return str(self.raw["operationType"])

    @property
    def ns(self) -> Mapping[str, str]:
        """The namespace as `{"db": ..., "coll": ...}`; empty for `invalidate`."""
        return self.raw.get("ns") or {}

    @property
    def namespace(self) -> str:
        """The namespace as `"db.collection"`, `"db"` or the empty string."""
        return read_namespace(self.raw)

    @property
    def document_key(self) -> Mapping[str, Any]:
        """`_id` (and the shard key) of the document; empty for events without a document."""
        return self.raw.get("documentKey") or {}

    @property
    def full_document(self) -> dict[str, Any] | None:
        """
        The document, without fields that this package keeps. For an update it is looked up when the event is read: it
        may be newer than the change, and is None when the document has been deleted since.
        """
        found: dict[str, Any] | None = self._get("fullDocument")
        return found

    @property
    def full_document_before_change(self) -> dict[str, Any] | None:
        """The document before the change, where the collection records pre-images."""
        found: dict[str, Any] | None = self._get("fullDocumentBeforeChange")
        return found

    @property
    def update_description(self) -> Mapping[str, Any] | None:
        """`updatedFields`, `removedFields` and `truncatedArrays` of an update."""
        found: Mapping[str, Any] | None = self._get("updateDescription")
        return found

    @property
    def to(self) -> Mapping[str, str]:
        """The new namespace of a `rename`; empty for other events."""
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
        """Time of the oplog entry, which changes of one transaction share; T of an existing document."""
        return self.raw.get("clusterTime")

    @property
    def wall_time(self) -> datetime | None:
        """The server's wall clock at the change (MongoDB 6.0 and later)."""
        return self.raw.get("wallTime")

    @property
    def resume_token(self) -> Mapping[str, Any]:
        """MongoDB's bookmark of this change; of an existing document the bridge's own, which opens no stream."""
        token: Mapping[str, Any] = self.raw["_id"]
        return token

    def __getitem__(self, name: str) -> Any:
        if self._view is None:
            return self.raw[name]
        if self._shown is None:
            object.__setattr__(self, "_shown", {})
        shown: Any = self._shown
        if name not in shown:
            shown[name] = self._view.get_field(self.raw, name)
        return shown[name]

    def _get(self, name: str) -> Any:
        return self[name] if name in self.raw else None

    def __repr__(self) -> str:
        return f"<Change {describe_change(self)} seq={self.seq}>"

    @property
    def fence(self) -> Fence:
        """
        The right of this execution to write, for a store that no fenced view reaches, such as an SQL table.

        Such a store compares it with the newest one it has seen, and takes it down, in the transaction of the effect;
        see examples/fenced_sql. That of a replay is older than all that its partition has handled since: one stamp for
        a partition refuses it, one for each row only where that row is newer.

        Raises:
            HandlerUsageError: the change was built by hand, without a fence.
        """
        if self._fence is None:
            raise HandlerUsageError(HAND_MADE)
        return self._fence(self)

    def fenced(self, collection: Collection[dict[str, Any]] | str) -> FencedCollection:
        """
        A view of a collection whose writes carry this change's fencing token.

        A write raises `StaleFencingTokenError` where a newer execution of the partition has already
        written to the document, and `OutdatedChangeError` where another partition has written there for a later change
        of the same document. In a handler with `transactional=True` each write is part of its transaction. Not
        promised: protection of documents that the newer execution has not touched.

        Args:
            collection: a PyMongo collection, or one of the bridge's cluster by `"db.collection"`, or `"collection"` of
                the URL's database.

        Raises:
            HandlerUsageError: the change was built by hand, without a fence.
        """
        return self.fence_collection(collection)

    def fence_collection(
        self, collection: Collection[dict[str, Any]] | str, origins: OriginsOf | None = None
    ) -> FencedCollection:
        """As `fenced`; `origins` gives the changes that writes are for, where these are several."""
        fence, view = self.fence, self._view
        if isinstance(collection, str):
            assert self._named is not None, "it comes with the fence"
            collection = self._named(collection)
        return FencedCollection(
            collection,
            fence,
            outboxes=tuple if view is None else partial(view.find_outboxes, collection.full_name),
            origin_of=None if origins is None else origins(collection),
        )

    def with_session(self, session: ClientSession) -> Change:
        """The same change, bound to a transaction's session."""
        return self._with(session=session)

    def with_view(self, view: ChangeView) -> Change:
        """The same change, as another handler sees it."""
        return self._with(_view=view)

    def _with(self, **given: Any) -> Change:
        given["_shown"] = None
        if self._read is None:
            return replace(self, **given)
        others = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in {"raw", "_read"}}
        return Change.unread(self._read, **{**others, **given})

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

        It is no way to deliver documents that exist: `changes snapshot start` does that. The fence of a live change
        comes from a claim, and one that you make manually keeps nothing from being written over newer data. So without
        `fence` the change refuses `fence` and `fenced()`.

        Args:
            operation_type: as in MongoDB's events.
            ns: `"db.collection"`; empty for `invalidate`, which has none.
            document_key: by default the `_id` of `full_document`.
            full_document: the document, if the event carries one.
            fencing_token: for a handler that compares tokens itself; by default -1, which no `Fence` takes.
            fence: what `fenced()` will carry; partition and fencing token of the change are the fence's.
            client: a MongoClient for `fenced("db.collection")`; given a collection it needs none.
            raw: further fields of the event, such as `updateDescription=...`.

        Raises:
            HandlerUsageError: both a fence and a token.
        """
        if fence is not None and fencing_token is not None:
            raise HandlerUsageError("A fence has a token: leave out fencing_token, or give it without fence.")
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


def _as_given(fence: Fence, _change: Change) -> Fence:
    return fence


def _find_collection(client: Any, namespace: str) -> Collection[dict[str, Any]]:
    if client is None:
        raise HandlerUsageError(f"To write to {namespace!r} by its name, pass Change.build(..., client=...) as well.")
    database, dot, name = namespace.partition(".")
    try:
        named: Collection[dict[str, Any]] = client[database][name] if dot else client.get_default_database()[namespace]
    except ClientConfigurationError:
        raise HandlerUsageError(
            f"{namespace!r} names no database, nor does the client's URL; write 'db.{namespace}'.",
        ) from None
    return named


def decode_event(event: bytes | memoryview) -> dict[str, Any]:
    """Decode an event to plain values, even with invalid UTF-8 or times outside of Python's datetime."""
    return bson.decode(event, _LENIENT)


def wrap_event(raw: bytes | memoryview) -> RawEvent:
    """
    Wrap an event. Only the fields that are read are decoded, by `EVENT_TYPES`.

    Raises:
        BSONError: it is no BSON document, now or when a field is read.
    """
    return RawEvent(raw)


def read_token(raw: bytes) -> Mapping[str, Any]:
    """Return the resume token from an event's bytes, which no handler could touch. The rest is not decoded."""
    token = RawEvent(raw).token
    if token is None:
        raise KeyError("_id")
    return token


def read_namespace(event: Mapping[str, Any]) -> str:
    """`"db.collection"`, `"db"` or the empty string of an event. `invalidate` and unreadable ones have none."""
    ns = event.get("ns")
    if not isinstance(ns, Mapping):
        return ""
    return ".".join(str(ns[name]) for name in ("db", "coll") if ns.get(name))


@lru_cache(maxsize=_NAMESPACES)
def _read_name(namespace: bytes) -> str:
    return storable(read_namespace({"ns": RawEvent(namespace)})[:_NAMESPACE_CHARS])


def token_data(token: Mapping[str, Any]) -> str:
    """The comparable part of a resume token. Whole tokens never compare: some `_id` types add `_typeBits`."""
    return str(token["_data"])


def describe(event: Mapping[str, Any] | bytes) -> str:
    """
    Namespace, operation and key of an event, bounded; never the contents of a document.

    Whatever the event holds, also where it is no valid BSON, there is an answer that can be logged and stored.
    """
    try:
        found = RawEvent(event) if isinstance(event, bytes) else event
        summary = found.summary if isinstance(found, RawEvent) else None
        if summary is not None:  # most are changes of a document with an ObjectId
            return f"{_read_name(summary[0])} {summary[1][:_KEY_CHARS]} ObjectId('{summary[2].hex()}')"
        key = found.get("documentKey")
        text = _brief(key["_id"]) if isinstance(key, Mapping) and "_id" in key else "-"
        operation = str(found.get("operationType"))[:_KEY_CHARS]
        return storable(f"{read_namespace(found)[:_NAMESPACE_CHARS]} {operation} {text}")
    except Exception:  # noqa: BLE001 - a description must not cost what it describes
        return _UNREADABLE


def describe_change(change: Change) -> str:
    """Return the description of a change, as `describe`, even if the change cannot be decoded."""
    try:
        return describe(change.raw)
    except Exception:  # noqa: BLE001 - a decoder's
        return _UNREADABLE


def _brief(value: Any) -> str:
    """The beginning of a value, as Python writes it."""
    if isinstance(value, RawBSONDocument):
        if len(value.raw) > _KEY_CHARS**2:
            return f"(a document of {len(value.raw)} bytes)"
        value = decode_event(value.raw)
    if isinstance(value, str | bytes) and len(value) > _KEY_CHARS:
        value = value[: _KEY_CHARS + 1]  # a long one is not written out, only to be cut
    text = repr(value)
    return text[:_KEY_CHARS] + "..." if len(text) > _KEY_CHARS else text


class ChangeFailed(Exception):  # noqa: N818 - what a handler says, not an error of its own: see its cause
    """
    One change of a list has failed, and those before it are finished. `Changes.failed_at` makes it.

    Attributes:
        place: of the failed change in the list, from 0.
        changes: that list; empty in a copy that was stored somewhere.
    """

    def __init__(self, message: str, place: int, changes: Sequence[Change] = ()) -> None:
        super().__init__(message, place)
        self.place = place
        self.changes = changes

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args  # no documents: a result backend may keep it

    @property
    def error(self) -> Exception | None:
        """The error of the change; a missing `from` is the error that was being handled. None where none is."""
        found = self.__context__ if self.__cause__ is None and not self.__suppress_context__ else self.__cause__
        return found if isinstance(found, Exception) else None


class Changes(tuple[Change, ...]):
    """
    Changes of one partition, in order, as a handler of `on_changes` gets them: at least one.

    All of them were claimed together: they have one partition, one session and one fencing token.
    """

    __slots__ = ()

    def __new__(cls, changes: Iterable[Change]) -> Self:
        """Changes of one execution; a unit test may give a plain list to its handler instead."""
        made = super().__new__(cls, changes)
        if not made:
            raise HandlerUsageError("A handler of on_changes gets one change at least.")
        return made

    @property
    def session(self) -> ClientSession | None:
        """The open transaction's session in a handler with `transactional=True`, else None."""
        return self[0].session

    def with_session(self, session: ClientSession) -> Changes:
        """The same changes, bound to a transaction's session."""
        return Changes(change.with_session(session) for change in self)

    def fenced(self, collection: Collection[dict[str, Any]] | str) -> FencedCollection:
        """
        A view of a collection whose writes carry the fencing token of these changes, as `Change.fenced` gives it.

        Args:
            collection: a PyMongo collection, or `"db.collection"` on the bridge's cluster.

        Raises:
            HandlerUsageError: a change was built by hand, without a fence, or they have several.
        """
        if len({(change.partition, change.fencing_token) for change in self}) > 1:
            raise HandlerUsageError(
                "The changes of a list are of one partition and one execution, and these have several fences: in a "
                "unit test build all of them with the same one.",
            )
        return self[0].fence_collection(collection, None if self[0].fence.origin is None else self._origins)

    def _origins(self, collection: Collection[dict[str, Any]]) -> Callable[[Any], Origin | None]:
        """The last change of each document, by its `_id`; of any other `_id` only if all are of one document."""
        codec = collection.codec_options
        found = {id_key(change.document_key.get("_id"), codec): change.fence.origin for change in self}
        is_one = len({origin.document for origin in found.values() if origin is not None}) == 1
        last = self[-1].fence.origin if is_one else None
        return lambda document_id: found.get(id_key(document_id, codec), last)

    def failed_at(self, failed: int | Change) -> ChangeFailed:
        """
        Return the exception to raise, `from` the error, if one change failed and all before it are finished.

        Then retries and the failure policy concern that change alone, those before it are done, and those behind it
        are given again. Whoever raises anything else is given smaller lists until the change that fails is alone; so
        is who says it of another list than the one that was given.

        Args:
            failed: its place in this list, from 0, or the change itself.

        Raises:
            HandlerUsageError: the list has no such change.
        """
        if isinstance(failed, Change):
            place = next((at for at, change in enumerate(self) if change is failed), -1)
        else:
            place = failed if isinstance(failed, int) and not isinstance(failed, bool) else -1
        if not 0 <= place < len(self):
            raise HandlerUsageError(f"failed_at() takes a change of the list or its place, from 0 to {len(self) - 1}.")
        return ChangeFailed(f"its handler says that {describe_change(self[place])} has failed", place, self)
