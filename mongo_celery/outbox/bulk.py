"""
PyMongo's bulk write with entries: each request keeps its place and carries its own tasks and events.

All requests between two deletes are one bulk write of PyMongo's; a delete has to deliver first, and stands by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pymongo import DeleteMany, DeleteOne, InsertOne, UpdateMany
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, InvalidOperation, WriteError
from pymongo.results import BulkWriteResult

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID, id_key, parse_filter_id
from mongo_celery.mongo.writes import COUNTS, BulkRequest, as_bulk_error
from mongo_celery.outbox.deletes import Deletes
from mongo_celery.outbox.document_write import Written
from mongo_celery.outbox.entries import Entry, listed
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.plain_values import PlainValues
from mongo_celery.outbox.writes import Added, Writer


@dataclass(frozen=True, slots=True)
class Write:
    """
    One request of a bulk write with its tasks and events.

    Args:
        request: PyMongo's `InsertOne`, `UpdateOne`, `UpdateMany`, `ReplaceOne`; deletes carry nothing.
        tasks: signatures, chains, groups, chords, or callables of the `_id` that make one.
        events: events.
    """

    request: Any
    tasks: Sequence[Any] = ()
    events: Sequence[Event] = ()

    @classmethod
    def of(cls, given: Any, tasks: Sequence[Any], events: Sequence[Any]) -> Write:
        """A write from what the user passed, with what every request but a delete gets in addition."""
        write = given if isinstance(given, cls) else cls(*given) if isinstance(given, tuple) else cls(given)
        if isinstance(write.request, (DeleteOne, DeleteMany)):
            return write
        return cls(write.request, [*listed(write.tasks), *tasks], [*listed(write.events), *events])


@dataclass(frozen=True, slots=True)
class _BulkStep:
    """A request that is ready to be sent, its entries, and its document's `_id` or `NO_ID`."""

    place: int
    request: Any
    entries: Sequence[Entry]
    document_id: Any


class BulkWrites:
    """
    Bulk writes to one collection.

    Args:
        writer: to it.
        values: makes requests that carry entries.
        deletes: in it.
    """

    def __init__(self, writer: Writer, values: PlainValues, deletes: Deletes) -> None:
        self._writer = writer
        self._values = values
        self._deletes = deletes
        self.written: list[Written] = []
        """What has something pending now, as far as it is known; filled also where the write fails."""

    def run(
        self, writes: Sequence[Write], *, ordered: bool, session: ClientSession | None, **options: Any
    ) -> BulkWriteResult:
        """
        Carry out a bulk write.

        How full the documents are is looked at before the write; writers at the same time can pass the limit a little.

        Args:
            writes: what to do.
            ordered: as PyMongo's.
            session: of the user.
            options: further options of PyMongo's `bulk_write`.

        Raises:
            OutboxRefusedError: nothing was written, unless the message says so; then `details` has what PyMongo's
                BulkWriteError would have.
            BulkWriteError: as PyMongo's.
        """
        if not writes:
            raise InvalidOperation("No operations to execute")  # PyMongo's own words
        requests = list(self._prepared(writes))
        self._refuse_full(requests, session, options)
        self._deliver_first(requests, session, options)
        tally: dict[str, Any] = {
            "writeErrors": [],
            "writeConcernErrors": [],
            **dict.fromkeys(COUNTS, 0),
            "upserted": [],
        }
        failed = None
        for part in _parts(requests):
            try:
                if _is_delete(part[0].request):
                    done = self._delete(part[0], session, options)
                else:
                    done = self._write(part, ordered, session, options)
                _add(tally, done, part[0].place)
            except OutboxRefusedError as error:
                raise _after_others(error, part[0].place, tally) from (failed or error)
            except BulkWriteError as error:
                failed = failed or error
                _add(tally, error.details or {}, part[0].place)
                if ordered:
                    break
        if failed is not None:
            labels = (failed.details or {}).get("errorLabels")
            raise BulkWriteError({**tally, "errorLabels": labels} if labels else tally) from failed
        return BulkWriteResult(tally, acknowledged=True)

    def _prepared(self, writes: Sequence[Write]) -> Iterator[_BulkStep]:
        for place, write in enumerate(writes):
            entries, document_id = self._values.entries_of_request(write.request, write.tasks, write.events)
            if entries:
                self._writer.refuse_more_than_ever(entries)
            request = self._values.with_entries(write.request, entries, document_id)
            yield _BulkStep(place, request, entries, document_id)

    def _deliver_first(
        self, requests: Sequence[_BulkStep], session: ClientSession | None, shared: Mapping[str, Any]
    ) -> None:
        """Deliver what deletes would take with them, as far as it is certain before the first write which they mean."""
        for each in requests:
            if not _is_delete(each.request):
                continue
            facts = BulkRequest.of(each.request)
            is_sure = "collation" not in facts.options and parse_filter_id(facts.filter) is not NO_ID
            if is_sure or isinstance(each.request, DeleteMany):
                self._deletes.deliver_all(facts.filter, session, **_found_by(facts, shared))

    def _refuse_full(
        self, requests: Sequence[_BulkStep], session: ClientSession | None, shared: Mapping[str, Any]
    ) -> None:
        added = list[Added]()
        for each in requests:
            if not each.entries or isinstance(each.request, InsertOne):
                continue
            facts = BulkRequest.of(each.request)
            if isinstance(each.request, UpdateMany):
                self._writer.refuse_full_among(facts.filter, len(each.entries), session, **_found_by(facts, shared))
            elif each.document_id is not NO_ID:
                added.append(Added(len(each.entries), each.document_id))
            else:
                found_by = {**_found_by(facts, shared), "sort": facts.sort}
                added.append(Added(len(each.entries), filter=facts.filter, found_by=found_by))
        self._writer.refuse_full_documents(added, session)

    def _write(
        self, part: Sequence[_BulkStep], ordered: bool, session: ClientSession | None, options: Any
    ) -> dict[str, Any]:
        requests = [each.request for each in part]
        try:
            result = self._writer.collection.bulk_write(requests, ordered=ordered, session=session, **options)
        except BulkWriteError as error:
            self._note(part, _not_written(error, len(part), ordered=ordered))
            raise
        self._note(part, set())
        return dict(result.bulk_api_result)

    def _note(self, part: Sequence[_BulkStep], missing: set[int]) -> None:
        """Note the documents that are to be dispatched."""
        known: dict[Hashable, Any] = {}
        for place, each in enumerate(part):
            if each.entries and place not in missing:
                codec = self._writer.collection.codec_options
                known[None if each.document_id is NO_ID else id_key(each.document_id, codec)] = each.document_id
        self.written += [Written(each, matched=True) for each in known.values()]

    def _delete(self, each: _BulkStep, session: ClientSession | None, shared: Mapping[str, Any]) -> dict[str, Any]:
        facts = BulkRequest.of(each.request)
        delete = self._deletes.many if isinstance(each.request, DeleteMany) else self._deletes.one
        try:
            return {"nRemoved": delete(facts.filter, session, **_found_by(facts, shared)).deleted_count}
        except WriteError as error:
            raise as_bulk_error(error, 0) from error


def _is_delete(request: Any) -> bool:
    return isinstance(request, (DeleteOne, DeleteMany))


def _parts(requests: Sequence[_BulkStep]) -> Iterator[list[_BulkStep]]:
    """What is sent at once: each delete by itself, and all that stands between two."""
    for is_delete, run in groupby(requests, lambda each: _is_delete(each.request)):
        steps = list(run)
        yield from [[each] for each in steps] if is_delete else [steps]


def _found_by(facts: BulkRequest, shared: Mapping[str, Any]) -> dict[str, Any]:
    """What says beside the filter which documents a request means, also by the options of the whole bulk write."""
    options = {**shared, **facts.options}
    return {name: options[name] for name in ("collation", "hint", "let") if options.get(name) is not None}


def _after_others(error: OutboxRefusedError, place: int, tally: Mapping[str, Any]) -> OutboxRefusedError:
    """A delete's refusal, and what became of the requests before it."""
    if not place:
        return error
    failed = len(tally["writeErrors"])
    before = (
        f"{failed} of the {place} requests before it failed, the others"
        if failed
        else f"The {place} requests before it"
    )
    facts = {**vars(error), "details": dict(tally)}
    return OutboxRefusedError(f"{error} {before} were carried out.", **facts)


def _not_written(error: BulkWriteError, count: int, *, ordered: bool) -> set[int]:
    """The places of requests that were not carried out, or of which nobody knows."""
    details = error.details or {}
    failed = {each["index"] for each in details.get("writeErrors", [])}
    if details.get("writeConcernErrors") or not failed:
        return set(range(count))  # acknowledged by no majority: the sweep takes what is there
    return set(range(min(failed), count)) if ordered else failed


def _add(tally: dict[str, Any], done: Mapping[str, Any], first: int) -> None:
    """Add the numbers of a part of the requests, whose places begin at `first`."""
    for name in COUNTS:
        tally[name] += done.get(name, 0)
    for name in ("upserted", "writeErrors", "writeConcernErrors"):
        found = [{**each, "index": each["index"] + first} if "index" in each else each for each in done.get(name, [])]
        if found:
            tally[name] = [*tally.get(name, []), *found]
