"""
Snapshots: which existing documents a handler is given, how far that is, and whose it is now.

One document a snapshot, with a new `_id` for each start, so that what belongs to an earlier one means nothing to it::

    start          failed <--- running ---> done | source gone
                     |           ^  |
                     +-- resume -+--+---> stopped --- resume

1. `term` is the one that may act on it. A take-over raises it before any partition is taken over:
   else who is deposed sees "committed" where its successor's changes have passed its documents.
2. `begun` numbers the chunks. A begin compares the number that was seen and sets the next one, so one that lands late
   begins nothing that somebody else counts on. Its own place in the oplog is L, behind which the chunk is read.
3. `lastId` is the end of what was scanned and is committed, or stored, with all before it. It is absent until the first
   chunk: null may be somebody's `_id`. It is set once for each chunk (`moved`), and never by a term that is over.
4. `untilId` is the largest `_id` that the first recorded chunk has found, in the same write, and never set again. What
   is inserted behind it is in the stream. Else who inserts faster than the snapshot is handled would keep it from
   ending.
5. `passed` counts the writes behind the reading of a chunk: an update that changes nothing would write no entry.

| field | |
|---|---|
| `source` | namespace of the collection |
| `uuid` | which collection of that name it is |
| `match` | a condition on events as extended JSON; absent for none |
| `rate` | documents a second at most; absent for no limit |
| `done`, `estimated` | documents that were scanned, and how many there were at the start |
| `state`, `sentence` | as above; why it has failed |
| `since`, `startedAt`, `movedAt` | when it was asked for, first begun, and last moved |
| `by` | who has asked for it |
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
"""States that may resume: a term that is over must not move one, even if it is stopped at the take-over."""

_ID_BYTES = 6
_FIELDS = dict.fromkeys((
    "handler", "term", "source", "uuid", "match", "rate", "begun", "moved", "done", "estimated", "state",
    "sentence", "since", "startedAt", "movedAt", "by",
), 1)  # fmt: skip


_ATTRIBUTES = {"handler": "subscription", "startedAt": "started_at", "movedAt": "moved_at"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """
    One snapshot as it is stored.

    Attributes:
        id: its `_id`.
        subscription: whose handler is given the documents.
        last: the end of what was scanned. None before the first chunk.
        until: the end of what is to be scanned. None before the first chunk.
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

    # -- who asks for them -------------------------------------------------------------------------

    def make_id(self, subscription: str, name: str | None = None) -> str:
        """Return a new `_id`. By a name it is the same one each time."""
        return f"{self._bridge}/{subscription}/{name or secrets.token_hex(_ID_BYTES)}"

    def insert(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Ask for snapshots, by their `_id`s. One that is there already stays as it is. Repeating it is harmless."""
        numbers = {name: Int64(0) for name in ("term", "begun", "moved", "passed", "done")}
        for record in records:
            given = {name: value for name, value in record.items() if value is not None and name != "_id"}
            whose = {"bridge": self._bridge, "handler": record["_id"].split("/")[1]}
            change = {"$setOnInsert": {**whose, **numbers, **given, "state": RUNNING}, "$currentDate": {"since": True}}
            with suppress(DuplicateKeyError):
                self._table.update({"_id": record["_id"], "since": {"$exists": False}}, change, upsert=True)

    def remove_ended(self, subscription: str) -> None:
        """Remove the records of a handler's snapshots that are done or stopped, but for the last 20 of them."""
        ended = {"_id": ids_under(f"{self._bridge}/{subscription}"), "state": {"$in": [DONE, STOPPED]}}
        with self._table.limit():
            newest_first = self._table.collection.find(ended, {"_id": 1}).sort([("since", -1), ("_id", -1)])
            old = [each["_id"] for each in newest_first.skip(_ENDED_KEPT)]
        if old:
            self._table.delete_all({**ended, "_id": {"$in": old}})

    def stop(self, snapshot_id: str) -> bool:
        """
        Let no chunk begin any more. One that has failed asks for nobody any more.

        What is under way is delivered, unless its term ends before: nobody begins it again until it is resumed.

        Returns:
            False where it is done, or stopped already.
        """
        guard = {"_id": snapshot_id, "state": {"$in": [RUNNING, FAILED, GONE]}}
        return self._table.update(guard, {"$set": {"state": STOPPED}})

    def resume(self, snapshot_id: str) -> bool:
        """Let one that was stopped, or has failed, go on where it is. False where it is neither."""
        guard = {"_id": snapshot_id, "state": {"$in": [STOPPED, FAILED]}}
        return self._table.update(guard, {"$set": {"state": RUNNING}, "$unset": {"sentence": ""}})

    # -- what a term does --------------------------------------------------------------------------

    def take_over(self, term: int) -> int:
        """
        Raise the term of all that run, or may be resumed, to this one.

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
        """Record which collection it is, before its first chunk. False where it is not this term's."""
        change: dict[str, Any] = {"uuid": uuid} | ({"estimated": estimated} if estimated is not None else {})
        guard = {"_id": snapshot.id, "term": term, "uuid": None}
        return self._table.update(guard, {"$set": change, "$currentDate": {"startedAt": True}})

    def begin(self, snapshot: Snapshot, term: int) -> Timestamp | None:
        """
        Begin the next chunk.

        Returns:
            L, the cluster time of this write. None where it was refused: it is another term's, does not run any more,
            or has begun more chunks than was seen.
        """
        guard = {"_id": snapshot.id, "term": term, "state": RUNNING, "begun": snapshot.begun}
        return self._table.update_timed(guard, {"$set": {"begun": Int64(snapshot.begun + 1)}})

    def mark_read_end(self, snapshot_id: str, term: int, begun: int) -> Timestamp | None:
        """Write a mark after the reading of a chunk. Return its cluster time, or None if it was refused."""
        return self._table.update_timed(_chunk(snapshot_id, term, begun), {"$inc": {"passed": Int64(1)}})

    def move(
        self, snapshot_id: str, term: int, begun: int, last: DocumentId, count: int, until: DocumentId | None = None
    ) -> bool:
        """
        Record the end of a chunk of which all is committed or stored. Repeating it is harmless.

        Args:
            last: the end of what was scanned.
            count: how many documents were.
            until: the end of what is to be scanned, where none was seen. None where one was.

        Returns:
            False where it is not this term's chunk, or is recorded already, or has another end of what is to be
            scanned than was seen.
        """
        ends = {"lastId": last} | ({"untilId": until} if until is not None else {})
        named = [bytes(end.make_document(name).raw) for name, end in ends.items()]
        fields = RawBSONDocument(join_documents(*named, bson.encode({"moved": Int64(begun)})))
        guard = {**_chunk(snapshot_id, term, begun), "moved": {"$ne": Int64(begun)}}
        if until is not None:
            guard["untilId"] = {"$exists": False}
        change = {"$set": fields, "$inc": {"done": Int64(count)}, "$currentDate": {"movedAt": True}}
        return self._table.update_unretried(guard, change)

    def finish(self, snapshot_id: str, term: int, begun: int, state: str, sentence: str | None = None) -> bool:
        """End it, after an empty chunk. False where that is not this term's."""
        change: dict[str, Any] = {"state": state} | ({"sentence": sentence} if sentence else {})
        guard = {**_chunk(snapshot_id, term, begun), "state": RUNNING}
        return self._table.update(guard, {"$set": change, "$currentDate": {"movedAt": True}})

    def fail(self, snapshot_id: str, term: int, sentence: str, state: str = FAILED) -> bool:
        """It cannot go on until somebody resumes it. False where it is not this term's, or does not run."""
        guard = {"_id": snapshot_id, "term": term, "state": RUNNING}
        return self._table.update(guard, {"$set": {"state": state, "sentence": sentence}})

    # -- reading -----------------------------------------------------------------------------------

    def read(self, *, running: bool = False) -> list[Snapshot]:
        """Those that run, or all, in the order in which they were asked for. Without `last` and `until`."""
        query = {**self._mine(), "state": RUNNING} if running else self._mine()
        found = [_snapshot(document) for document in self._table.find(query, _FIELDS)]
        return sorted(found, key=lambda each: (str(each.since), each.id))

    def read_one(self, snapshot_id: str) -> Snapshot | None:
        """One of them, as it is now, with `last` and `until`, byte for byte."""
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
