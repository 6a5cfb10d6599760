"""
Read a chunk of existing documents, and check their collection.

A chunk is bounded by rows and bytes. First the index alone lists the next `_id`s. Then the range up to the last one is
read in the form of events, filtered by the conditions of handler and snapshot. So even a chunk without wanted documents
has an end, and the snapshot ends only when nothing is left to scan. A range with too many bytes ends earlier. Documents
may be from different times: each is from some time after L and before H.

The snapshot ends at the largest `_id` that exists at the first recorded chunk.

The order is that of the collection's index on `_id`, with all types mixed. Comparisons are expressions with literals,
because those of a query compare within one type, and treat a document as operators.

If a user's condition fails on one document, this must not stop the others. A failed range is read again with half
as many documents. A single document that fails is refused, and its handler's failure policy applies.

The leading thread uses nothing here except the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import bson
import pymongo
from bson import Timestamp, json_util
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.existing import (
    AS,
    DocumentId,
    event_bytes,
    extract_time,
    make_token,
    move_event,
    place_after_time,
)
from mongo_celery.bridge.raw_event import EVENT_TYPES, RawEvent
from mongo_celery.bridge.stream.filter import EXPANDED_OPERATIONS, MOVES
from mongo_celery.bridge.stream.items import ChangeEvent, ReadError
from mongo_celery.bridge.window import Mark, PendingChange
from mongo_celery.mongo.opening import ANSWER_SECONDS, with_majority
from mongo_celery.mongo.verdicts import Code, Verdict, brief, error_code, is_transient, is_unanswered, judge_error

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.state.snapshots import Snapshot
    from mongo_celery.bridge.stream.source import Source
    from mongo_celery.bridge.wiring import Wiring

ROWS, LEAST_ROWS, MOST_ROWS = 2000, 100, 16_000
"""
Documents in the first chunk, and the limits for later ones. A later chunk takes about a second, so that no change waits
long.
"""

READ_SECONDS = 10.0
"""Time limit for reading a chunk, in seconds."""

_CHECK_SECONDS = 3.0
_OF_THE_SERVER = frozenset({"admin", "config", "local"})
_BOUND = "_id"
_OF_NO_DOCUMENT = frozenset({
    Verdict.TRANSIENT, Verdict.LOGIN, Verdict.ACCESS, Verdict.TOPOLOGY, Verdict.HISTORY_LOST, Verdict.TOKEN_NOT_FOUND,
})  # fmt: skip

Shape = Sequence[Mapping[str, Any]]


class KeyChange(NamedTuple):
    """The last change of a key since a chunk began: its token, and whether it has a document."""

    data: str
    has_document: bool
    is_looked_up: bool


@dataclass(slots=True, eq=False)
class Chunk:
    """
    A chunk in progress. The reading thread writes it up to `high`, the leading one afterwards.

    Attributes:
        subscription: the subscription that gets the documents. Repartitioning replaces it.
        rows: largest number of documents.
        sent_at: monotonic time when the chunk was begun.
        begun: number of the chunk. 0 until it has begun.
        after: number of the chunk before it. 0 for the first.
        low: L, a cluster time before the reading. None until known.
        high: H, the cluster time of a write after the reading. None until it is read.
        place: the place after which the documents are appended. Empty until H is known.
        items: the events to append, in order, by key.
        count: number of scanned documents.
        end: the last scanned `_id`. None if no document was left.
        until: the largest `_id` of the snapshot. None if the collection was empty.
        changes: the subscription's changes since the chunk began, by key.
        objection: a sentence why the chunk must not be appended: a change's key is unreadable, or the collection was
            moved. Empty if it may be.
        again: `_id`s to read again, because a change without its document came in between.
        rounds: number of times that documents were read again.
        ends: the last token of each partition that is not known to be committed or stored.
        passed_at: time of the last write to move the stream.
        error: reason why it was dropped.
    """

    snapshot: Snapshot
    subscription: Subscription
    rows: int
    sent_at: float
    begun: int = 0
    after: int = 0
    low: Timestamp | None = None
    high: Timestamp | None = None
    place: str = ""
    items: dict[bytes, PendingChange] = field(default_factory=dict)
    count: int = 0
    end: DocumentId | None = None
    until: DocumentId | None = None
    changes: dict[bytes, KeyChange] = field(default_factory=dict)
    objection: str = ""
    again: list[DocumentId] = field(default_factory=list)
    rounds: int = 0
    ends: dict[int, str] = field(default_factory=dict)
    passed_at: float = 0.0
    error: Exception | None = None

    def note(self, change: PendingChange, event: ChangeEvent) -> None:
        """Keep the last change of a key. A change with an unreadable key may have any key."""
        try:
            document = event.document
            if document["operationType"] in MOVES | EXPANDED_OPERATIONS:
                return  # not a change of a document
            ns = document["ns"]
            if f"{ns['db']}.{ns['coll']}" != self.snapshot.source:
                return
            key, operation = read_key(document), document["operationType"]
            if self.high is not None and key not in self.items:
                return  # keep few in a long backlog
            given = document.get("fullDocument") is not None
            has_document = change.refusal is None and (given or operation == "delete")
            self.changes[key] = KeyChange(change.data, has_document, given and operation == "update")
        except Exception:  # noqa: BLE001 - an event of whatever form
            self.objection = "the key of a concurrent change cannot be read"

    def note_move(self, event: Mapping[str, Any]) -> None:
        """Check if this event may have replaced the collection."""
        if event["operationType"] not in MOVES:
            return
        database, _, collection = self.snapshot.source.partition(".")
        names = [event[field] for field in ("ns", "to") if field in event]
        if not names or any(each["db"] == database and each.get("coll", collection) == collection for each in names):
            self.objection = f"{self.snapshot.source} was dropped or renamed while it was read"

    def settle(self, looks_up: bool) -> list[PendingChange]:
        """
        Return the events to append. `again` has the ranges to read again.

        It omits a document whose key changed after L. If the handler gets all changes, it also omits one with an
        earlier update that was looked up meanwhile.
        """
        assert self.low is not None, "it was read"
        low, takes_all = place_after_time(self.low), self.subscription.plan.handler.filter.takes_every_change
        time = extract_time(self.place)
        kept: list[PendingChange] = []
        self.again = []
        for key, item in self.items.items():
            seen = self.changes.get(key)
            if seen is None or (seen.data < low and not (looks_up and takes_all and seen.is_looked_up)):
                data = self.place + item.data[len(self.place) :]
                item.mark = Mark({"_data": data}, data, time)
                item.raw = move_event(item.raw, data)
                kept.append(item)
            elif not seen.has_document:
                found = DocumentId.of(key)
                assert found is not None, "it has an `_id`"
                self.again.append(found)
        self.items = {}
        return kept


def read_key(event: Mapping[str, Any]) -> bytes:
    """Return the `_id` of an event's document, byte for byte."""
    if isinstance(event, RawEvent) and event.plain is not None and event.object_id is not None:
        return event.plain.key
    key = event["documentKey"]
    return bytes(key.raw) if len(key) == 1 else bson.encode({_BOUND: key[_BOUND]}, codec_options=EVENT_TYPES)


@dataclass(frozen=True, slots=True)
class CollectionFacts:
    """
    The facts of a collection.

    Attributes:
        uuid: identifies the collection of its name. None for a view and for time series.
        objection: reason why it cannot have a snapshot, as the rest of a sentence. None if it can.
    """

    uuid: bytes | None
    objection: str | None = None


def read_facts(client: MongoClient[Any], source: str) -> CollectionFacts | None:
    """
    Return the current facts of a collection. None if it does not exist.

    Raises:
        PyMongoError: MongoDB did not answer, or the right to list collections is missing.
    """
    database, _, name = source.partition(".")
    with pymongo.timeout(_CHECK_SECONDS):
        command = {"listCollections": 1, "filter": {"name": name}}
        types: CodecOptions[Any] = CodecOptions()  # by the client's options a UUID might have another type
        answer: Any = client[database].command(command, codec_options=types)
    found = answer["cursor"]["firstBatch"]
    if not found:
        return None
    kind, options, uuid = found[0]["type"], found[0].get("options", {}), found[0].get("info", {}).get("uuid")
    objection = None
    if kind == "view":
        objection = "it is a view. Use the collections that it reads"
    elif kind == "timeseries":
        objection = "it is a time series, and MongoDB reports no changes of it"
    elif options.get("capped"):
        objection = "it is a capped collection, and MongoDB does not report the documents that it removes"
    return CollectionFacts(None if uuid is None else bytes(uuid), objection)


def estimate(client: MongoClient[Any], source: str) -> int | None:
    """Return the number of documents from the collection's metadata. None without an answer."""
    database, _, name = source.partition(".")
    try:
        with pymongo.timeout(_CHECK_SECONDS):
            return int(with_majority(client[database][name]).estimated_document_count())
    except PyMongoError:
        return None


def list_conditions(match: object, snapshot: Snapshot) -> list[Mapping[str, Any]]:
    """Return the conditions on events: the handler's `match` and the snapshot's."""
    own = json_util.loads(snapshot.match) if snapshot.match is not None else None
    return [each for each in (match, own) if isinstance(each, Mapping)]


def build_shape(source: str, time: Timestamp, conditions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stages that turn documents into events without token, type and time."""
    event = {"fullDocument": "$$ROOT", **_name_document(source)}  # in the order of the stream's events
    if not conditions:
        return [{"$replaceWith": event}]
    judged = {"operationType": AS, "clusterTime": time, **event}
    wanted = [{"$match": {"$expr": condition}} for condition in conditions]
    return [{"$replaceWith": judged}, *wanted, {"$unset": ["_id", "operationType", "clusterTime"]}]


def _name_document(source: str) -> dict[str, Any]:
    """Return the fields that identify a document in its event, as expressions."""
    database, _, collection = source.partition(".")
    ns = {"db": {"$literal": database}, "coll": {"$literal": collection}}
    return {"ns": ns, "documentKey": {_BOUND: "$_id"}}


def is_passing(error: Exception) -> bool:
    """Return True if a later or smaller attempt may succeed."""
    return error_code(error) == Code.MaxTimeMSExpired or is_transient(error) or is_unanswered(error)


def concerns_a_document(error: Exception) -> bool:
    """Return True if an error may concern one of the documents, or the condition on it."""
    is_answer = isinstance(error, OperationFailure) and not is_passing(error)
    return is_answer and error_code(error) != Code.InvalidOptions and judge_error(error) not in _OF_NO_DOCUMENT


def find_collections(wiring: Wiring, source: Source) -> Iterator[str]:
    """
    Return the namespaces of a source's existing collections. A collection may be created later.

    Raises:
        PyMongoError: a database did not answer within `ANSWER_SECONDS`, or the right to list collections is missing.
    """
    if source.collection is not None:
        yield str(source)
        return
    client = wiring.client
    with pymongo.timeout(ANSWER_SECONDS):
        databases = [source.database] if source.database is not None else client.list_database_names()
    for database in databases:
        if database in _OF_THE_SERVER or database == wiring.options.database:
            continue
        with pymongo.timeout(ANSWER_SECONDS):  # for each database, because there may be thousands
            found = list(client[database].list_collections(filter={"type": "collection"}))
        for each in found:
            if not each["name"].startswith("system.") and source.covers(database, each["name"]):
                yield f"{database}.{each['name']}"


class SnapshotFailedError(Exception):
    """A failure that a repetition cannot fix, such as an invalid condition of the snapshot."""


class ChunkFailedError(Exception):
    """A failure that a later or smaller attempt may avoid."""


class ChunkReader:
    """
    Reads chunks for one term in one thread.

    Args:
        client: the client of the watched data.
        room: largest number of bytes in a chunk, except for a single larger document.
        version: number of the term.
    """

    def __init__(self, client: MongoClient[Any], room: int, version: int) -> None:
        self._client = client
        self._room = room
        self._version = version
        self._number = 0

    def read(self, chunk: Chunk) -> None:
        """
        Read the documents after the scanned range, or those to read again. All are from L or later.

        This sets `items`, and the first time also `count`, `end` and `until`.

        Raises:
            PyMongoError: the chunk must not be used.
            SnapshotFailedError: the chunk must not be used, because of the snapshot itself.
        """
        with pymongo.timeout(READ_SECONDS):
            if chunk.again:
                for part in chunk.again:
                    self._read_range(chunk, {"$expr": {"$eq": ["$_id", part.make_document("$literal")]}}, 1)
                return
            known = chunk.snapshot.until
            chunk.until = known if known is not None else self._largest(chunk)
            chunk.end, ids = None, self._list_ids(chunk)
            while ids and not self._read_rows(chunk, ids):
                ids = ids[: len(ids) // 2]

    def _read_rows(self, chunk: Chunk, ids: list[bytes]) -> bool:
        """Read the range that ends with the last of these keys. Return False if the range is too large to read."""
        end = DocumentId.of(ids[-1])
        assert end is not None, "it has an `_id`"
        read = self._read_range(chunk, _behind(chunk.snapshot.last, end), len(ids))
        if read is None:
            return False
        chunk.end, chunk.count = end, len(ids)
        if not read:
            key = list(chunk.items)[-1]
            chunk.end = DocumentId.of(key)
            chunk.count = ids.index(key) + 1 if key in ids else len(chunk.items)
        return True

    def _read_range(self, chunk: Chunk, bounds: Mapping[str, Any], rows: int) -> bool | None:
        """Read the events of a range. Return False if only a part has room, None if the whole range fails."""
        assert chunk.low is not None, "a chunk is read when L is known"
        conditions = list_conditions(chunk.subscription.plan.handler.filter.match, chunk.snapshot)
        shape = build_shape(chunk.snapshot.source, chunk.low, conditions)
        try:
            found, is_whole = self._range(chunk, bounds, shape, rows)
        except OperationFailure as error:
            if not concerns_a_document(error):
                raise
            if rows > 1:
                return None
            self._blame(chunk, bounds, error)
            self._refuse(chunk, bounds, error)
            return True
        size = 0
        for each in found:
            key, change = self._item(chunk, bytes(each.raw))
            size += change.weight
            if size > self._room and chunk.items and not chunk.again:
                return False
            chunk.items[key] = change
        return is_whole

    def _largest(self, chunk: Chunk) -> DocumentId | None:
        """Return the largest `_id` of the collection."""
        found = self._find(chunk, {"filter": {}, "sort": {_BOUND: -1}, "limit": 1})
        return DocumentId.of(bytes(found[0].raw)) if found else None

    def _list_ids(self, chunk: Chunk) -> list[bytes]:
        """Return the keys of the next documents in order, as many as are left and fit into an answer."""
        return [bytes(each.raw) for each in self._find(chunk, {"limit": chunk.rows})]

    def _find(self, chunk: Chunk, bounds: Mapping[str, Any]) -> list[RawBSONDocument]:
        """Return the next `_id`s that are still to be read, from the index alone."""
        command = {
            "find": chunk.snapshot.source.partition(".")[2],
            "filter": _behind(chunk.snapshot.last, chunk.until),
            "projection": {_BOUND: 1},
            "sort": {_BOUND: 1},
            "batchSize": chunk.rows + 1,
            "singleBatch": True,
            **bounds,
        }
        return list(self._answer(chunk, command)["cursor"]["firstBatch"])

    def _range(
        self, chunk: Chunk, bounds: Mapping[str, Any], shape: Shape, rows: int
    ) -> tuple[list[RawBSONDocument], bool]:
        """Return the first events of a range that fit into one answer, and whether these are all."""
        database, _, collection = chunk.snapshot.source.partition(".")
        command = {
            "aggregate": collection,
            "pipeline": [{"$match": bounds}, {"$sort": {_BOUND: 1}}, *shape],
            "cursor": {"batchSize": 2 * rows + 1},  # some may have been inserted since the range was set
        }
        cursor = self._answer(chunk, command)["cursor"]
        if cursor["id"]:
            self._client[database].command({"killCursors": collection, "cursors": [bson.Int64(cursor["id"])]})
        return list(cursor["firstBatch"]), not cursor["id"]

    def _answer(self, chunk: Chunk, command: dict[str, Any]) -> Any:
        database = chunk.snapshot.source.partition(".")[0]
        concern = {"level": "majority", "afterClusterTime": chunk.low}
        whole = {**command, "hint": {_BOUND: 1}, "readConcern": concern, "maxTimeMS": int(READ_SECONDS * 1000)}
        types: CodecOptions[Any] = EVENT_TYPES
        answer: Any = self._client[database].command(whole, codec_options=types)
        return answer

    def _blame(self, chunk: Chunk, bounds: Mapping[str, Any], error: Exception) -> None:
        """Raise if the snapshot's own condition fails. Then no document is the cause, and no handler is affected."""
        if chunk.snapshot.match is None or chunk.low is None:
            return
        match = chunk.subscription.plan.handler.filter.match
        others = [match] if isinstance(match, Mapping) else []
        try:
            self._range(chunk, bounds, build_shape(chunk.snapshot.source, chunk.low, others), 1)
        except OperationFailure as without:
            if concerns_a_document(without):
                return
            raise
        raise SnapshotFailedError(f"MongoDB refuses the condition {chunk.snapshot.match}: {brief(error)}") from error

    def _refuse(self, chunk: Chunk, bounds: Mapping[str, Any], error: Exception) -> None:
        """Return the key of the one document that cannot become an event, and the reason."""
        found, _ = self._range(chunk, bounds, [{"$replaceWith": _name_document(chunk.snapshot.source)}], 1)
        read_error = ReadError(f"MongoDB could not make a change of this document: {brief(error)}")
        chunk.items.update(self._item(chunk, bytes(each.raw), read_error) for each in found)

    def _item(self, chunk: Chunk, shaped: bytes, read_error: ReadError | None = None) -> tuple[bytes, PendingChange]:
        """Return a document's key and its change, at L. It gets its place when it is appended."""
        assert chunk.low is not None, "it was read"
        self._number += 1
        data = make_token(chunk.low, self._version, self._number)
        raw = event_bytes(shaped, data)
        event = ChangeEvent(Mark({"_data": data}, data, chunk.low), wrap_event(raw), raw, read_error)
        return read_key(event.document), chunk.subscription.admission.admit_existing(event)


def _behind(last: DocumentId | None, end: DocumentId | None = None) -> dict[str, Any]:
    """Return the filter for `_id`s after one and up to another."""
    bounds = []
    if last is not None:
        bounds.append({"$gt": ["$_id", last.make_document("$literal")]})
    if end is not None:
        bounds.append({"$lte": ["$_id", end.make_document("$literal")]})
    return {"$expr": bounds[0] if len(bounds) == 1 else {"$and": bounds}} if bounds else {}
