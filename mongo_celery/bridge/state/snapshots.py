"""
Snapshots: the existing documents that a handler gets, their progress and their owner.

There is one document per snapshot, with a new `_id` for each start, so that earlier ones do not affect it::

    start          failed <--- running ---> done | source gone
                     |           ^  |
                     +-- resume -+--+---> stopped --- resume

1. `term` names the only term that may act on it. A take-over raises it before it takes over any partition. Otherwise a
   deposed listener could see "committed" when its successor's changes have passed its documents.
2. `begun` numbers the chunks. A begin compares the number that was read and sets the next one, so a late begin starts
   nothing. Its own place in the oplog is L, and the chunk is read after it.
3. `lastId` is the end of the scanned range that is committed or stored, with everything before it. It is absent until
   the first chunk, because null may be a document's `_id`. It is set once per chunk (`moved`), and never by an ended
   term. Each chunk names the one before it. So chunks are recorded in order, and none after one that was dropped.
4. `untilId` is the largest `_id` in the first recorded chunk's write, and never changes. Later inserts after it are in
   the stream. Otherwise fast inserts could keep the snapshot from ending.
5. `passed` counts the writes after the reading of a chunk, because an update without a change would write no oplog
entry.

| field | |
|---|---|
| `source` | namespace of the collection |
| `uuid` | identifies the collection of that name |
| `match` | a condition on events as extended JSON. Absent for none |
| `rate` | most documents per second. Absent for no limit |
| `done`, `estimated` | documents scanned, and documents at the start |
| `state`, `sentence` | as above, and the reason of a failure |
| `since`, `startedAt`, `movedAt` | times when it was requested, first begun, and last moved |
| `by` | the person or program that requested it |
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import bson
from bson import Timestamp
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo.errors import DuplicateKeyError

from mongo_celery.bridge.existing import DocumentId, join_documents
from mongo_celery.bridge.state.state_collection import StateCollection, ids_under

_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)

RUNNING, DONE, GONE, STOPPED, FAILED = "running", "done", "source gone", "stopped", "failed"
"""States of a snapshot."""

_ENDED_KEPT = 20
_LASTING = [RUNNING, STOPPED, FAILED, GONE]
"""States that may resume. An ended term must not move such a snapshot, even if it was stopped at the take-over."""

_ID_BYTES = 6
_FIELDS = dict.fromkeys((
    "handler", "term", "source", "uuid", "match", "rate", "begun", "moved", "done", "estimated", "state",
    "sentence", "since", "startedAt", "movedAt", "by",
), 1)  # fmt: skip


_ATTRIBUTES = {"handler": "subscription", "startedAt": "started_at", "movedAt": "moved_at"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """
    A stored snapshot.

    Attributes:
        id: `_id` of the snapshot.
        subscription: the handler that gets the documents.
        last: the end of the scanned range. None before the first chunk.
        until: the end of the range to scan. None before the first chunk.
    """

    id: str
    subscription: str = ""
    source: str = ""
    term: int = 0
    uuid: bytes | None = None
    match: str | None = None
    rate: float | None = None
    begun: int = 0
    moved: int = 0
    done: int = 0
    estimated: int | None = None
    state: str = RUNNING
    sentence: str | None = None
    since: datetime | None = None
    started_at: datetime | None = None
    moved_at: datetime | None = None
    by: str = ""
    last: DocumentId | None = None
    until: DocumentId | None = None


class Snapshots(StateCollection):
    """The snapshots of one bridge."""

    # -- commands ------------------------------------------------------------------------------------

    def make_id(self, subscription: str, name: str | None = None) -> str:
        """Return a new `_id`. The same name always gives the same `_id`."""
        return f"{self._bridge}/{subscription}/{name or secrets.token_hex(_ID_BYTES)}"

    def insert(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Request snapshots by `_id`. An existing one does not change. Repeating it is harmless."""
        numbers = {name: Int64(0) for name in ("term", "begun", "moved", "passed", "done")}
        for record in records:
            given = {name: value for name, value in record.items() if value is not None and name != "_id"}
            whose = {"bridge": self._bridge, "handler": record["_id"].split("/")[1]}
            change = {"$setOnInsert": {**whose, **numbers, **given, "state": RUNNING}, "$currentDate": {"since": True}}
            with suppress(DuplicateKeyError):
                self._table.update({"_id": record["_id"], "since": {"$exists": False}}, change, upsert=True)

    def remove_ended(self, subscription: str) -> None:
        """Remove the records of a handler's finished and stopped snapshots, except the last 20."""
        ended = {"_id": ids_under(f"{self._bridge}/{subscription}"), "state": {"$in": [DONE, STOPPED]}}
        with self._table.limit():
            newest_first = self._table.collection.find(ended, {"_id": 1}).sort([("since", -1), ("_id", -1)])
            old = [each["_id"] for each in newest_first.skip(_ENDED_KEPT)]
        if old:
            self._table.delete_all({**ended, "_id": {"$in": old}})

    def stop(self, snapshot_id: str) -> bool:
        """
        Stop a snapshot before its next chunk. After that, a failed snapshot is no longer a finding.

        Rows in progress are delivered, unless their term ends first: then they wait until it is resumed.

        Returns:
            False if it is already done or stopped.
        """
        guard = {"_id": snapshot_id, "state": {"$in": [RUNNING, FAILED, GONE]}}
        return self._table.update(guard, {"$set": {"state": STOPPED}})

    def resume(self, snapshot_id: str) -> bool:
        """Let a stopped or failed snapshot continue from its place. Return False in any other state."""
        guard = {"_id": snapshot_id, "state": {"$in": [STOPPED, FAILED]}}
        return self._table.update(guard, {"$set": {"state": RUNNING}, "$unset": {"sentence": ""}})

    # -- terms ---------------------------------------------------------------------------------------

    def take_over(self, term: int) -> int:
        """
        Raise the term of all running or resumable snapshots to this one.

        Returns:
            The largest term of any of them. One above `term` belongs to a later term.
        """
        lasting = {**self._mine(), "state": {"$in": _LASTING}}
        with self._table.limit():
            self._table.collection.update_many(
                {**lasting, "term": {"$lt": Int64(term)}}, {"$set": {"term": Int64(term)}}
            )
            found = self._table.collection.find_one(lasting, {"term": 1}, sort=[("term", -1)])
        return int(found["term"]) if found else 0

    def prepare(self, snapshot: Snapshot, term: int, *, uuid: bytes, estimated: int | None) -> bool:
        """Record the identity of a snapshot's collection before its first chunk. Return False if the term is over."""
        change: dict[str, Any] = {"uuid": uuid} | ({"estimated": estimated} if estimated is not None else {})
        guard = {"_id": snapshot.id, "term": term, "uuid": None}
        return self._table.update(guard, {"$set": change, "$currentDate": {"startedAt": True}})

    def begin(self, snapshot: Snapshot, term: int) -> Timestamp | None:
        """
        Begin the next chunk.

        Returns:
            L, the cluster time of this write. None if it was refused: it belongs to another term, is not running, or
            has begun more chunks than were seen.
        """
        guard = {"_id": snapshot.id, "term": term, "state": RUNNING, "begun": snapshot.begun}
        return self._table.update_timed(guard, {"$set": {"begun": Int64(snapshot.begun + 1)}})

    def mark_read_end(self, snapshot_id: str, term: int, begun: int) -> Timestamp | None:
        """Write a mark after reading a chunk. Return its cluster time, or None if it was refused."""
        return self._table.update_timed(_chunk(snapshot_id, term, begun), {"$inc": {"passed": Int64(1)}})

    def move(
        self,
        snapshot_id: str,
        term: int,
        begun: int,
        after: int,
        last: DocumentId,
        count: int,
        until: DocumentId | None = None,
    ) -> bool:
        """
        Record the end of a chunk that is completely committed or stored. Repeating it is harmless.

        Args:
            after: number of the recorded chunk before it. 0 for the first.
            last: the end of the scanned range.
            count: number of scanned documents.
            until: the end of the range to scan, if it is not yet recorded. Otherwise None.

        Returns:
            False if it is not this term's chunk, or if another chunk or end of the range was recorded meanwhile.
        """
        ends = {"lastId": last} | ({"untilId": until} if until is not None else {})
        named = [bytes(end.make_document(name).raw) for name, end in ends.items()]
        fields = RawBSONDocument(join_documents(*named, bson.encode({"moved": Int64(begun)})))
        mine: dict[str, Any] = {"_id": snapshot_id, "term": term}
        guard = {**mine, "moved": Int64(after)} | ({"untilId": {"$exists": False}} if until is not None else {})
        change = {"$set": fields, "$inc": {"done": Int64(count)}, "$currentDate": {"movedAt": True}}
        if self._table.update_unretried(guard, change):
            return True
        return bool(self._table.find({**mine, "moved": Int64(begun)}, {"_id": 1}))  # else an earlier answer was lost

    def finish(self, snapshot_id: str, term: int, begun: int, after: int) -> bool:
        """End a snapshot after an empty chunk. Return False if it belongs to another term."""
        guard = {**_chunk(snapshot_id, term, begun), "moved": Int64(after), "state": RUNNING}
        return self._table.update(guard, {"$set": {"state": DONE}, "$currentDate": {"movedAt": True}})

    def fail(self, snapshot_id: str, term: int, sentence: str, state: str = FAILED) -> bool:
        """Stop a snapshot until a person resumes it. Return False if it belongs to another term or is not running."""
        guard = {"_id": snapshot_id, "term": term, "state": RUNNING}
        return self._table.update(guard, {"$set": {"state": state, "sentence": sentence}})

    # -- reading -----------------------------------------------------------------------------------

    def read(self, *, running: bool = False) -> list[Snapshot]:
        """Return the running snapshots or all, in the order of their requests, without `last` and `until`."""
        query = {**self._mine(), "state": RUNNING} if running else self._mine()
        found = [_snapshot(document) for document in self._table.find(query, _FIELDS)]
        return sorted(found, key=lambda each: (str(each.since), each.id))

    def read_one(self, snapshot_id: str) -> Snapshot | None:
        """Return one snapshot in its current state, with `last` and `until` byte for byte."""
        raw = self._table.collection.with_options(codec_options=_RAW)
        with self._table.limit():
            document = self._table.collection.find_one({"_id": snapshot_id}, _FIELDS)
            last: Any = raw.find_one({"_id": snapshot_id}, {"_id": 0, "lastId": 1})
            until: Any = raw.find_one({"_id": snapshot_id}, {"_id": 0, "untilId": 1})
        if document is None or last is None or until is None:
            return None
        return _snapshot(document, DocumentId.of(bytes(last.raw)), DocumentId.of(bytes(until.raw)))

    def _mine(self) -> dict[str, Any]:
        return {"_id": ids_under(self._bridge)}


def _chunk(snapshot_id: str, term: int, begun: int) -> dict[str, Any]:
    return {"_id": snapshot_id, "term": term, "begun": begun}


def _snapshot(document: Mapping[str, Any], last: DocumentId | None = None, until: DocumentId | None = None) -> Snapshot:
    found = {_ATTRIBUTES.get(name, name): document[name] for name in _FIELDS if name in document}
    return Snapshot(id=document["_id"], last=last, until=until, **found)
