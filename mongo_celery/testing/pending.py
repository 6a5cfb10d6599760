"""Pending entries of an outbox, in documents or in the collection of an `OutboxCollection`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mongo_celery.mongo.identity import NO_ID
from mongo_celery.outbox.canvas import leaves
from mongo_celery.outbox.collection import key_text
from mongo_celery.outbox.entries import Entry, bind_event, decode_canvas
from mongo_celery.outbox.pending import FIELD
from mongo_celery.outbox.registry import BaseOutbox
from mongo_celery.testing.messages import TaskCall

__tracebackhide__ = True  # for pytest: show the line of the test or the handler
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class PendingEntry(TaskCall):
    """
    A stored task or event that is not yet dispatched.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 8}, tasks=[send_receipt.s(8)])
            entry: PendingEntry = pending_entries(outbox)[0]
        assert (entry.name, entry.args, entry.place) == ("shop.send_receipt", (8,), 8)

    Attributes:
        name: name of the task, or the routing key.
        args: arguments of the task, as stored. A later step of a chain also gets the result, as its first argument.
        kwargs: keyword arguments of the task.
        id: id of the task or event, the same in each delivery.
        place: `_id` of the document that contains it. With an `OutboxCollection`, its key as text, or None.
        kind: `"task"` or `"event"`.
        body: body of an event.
    """

    place: Any = None
    kind: str = "task"
    body: Any = None

    def __str__(self) -> str:
        shown = TaskCall.__str__(self) if self.kind == "task" else f"{self.name}({self.body!r})"
        return f"{shown} at {self.place!r}"


def pending_entries(outbox: BaseOutbox) -> list[PendingEntry]:
    """
    Return the pending entries of an outbox, in the order of their documents' `_id`s.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 12}, tasks=[send_receipt.s(12)])
            assert [str(entry) for entry in pending_entries(outbox)] == ["shop.send_receipt(12) at 12"]

    A chain, group or chord gives one entry for each of its tasks, links included.

    Args:
        outbox: an `Outbox` or an `OutboxCollection`, of any app.

    Raises:
        ValueError: another writer has changed a field of the outbox, so it cannot be read.
    """
    runtime = outbox.runtime
    found = runtime.latest.find({FIELD: {"$exists": True}}).sort("_id", 1)
    entries: list[PendingEntry] = []
    for document in found:
        place = None if runtime.is_own and not isinstance(document["_id"], str) else document["_id"]
        try:
            for stored in document[FIELD]["events"]:
                entries += _parts(outbox, Entry.from_document(stored), document["_id"], place)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{outbox.name}: an entry in document {document['_id']!r} cannot be read. Check that only the "
                f"outbox writes to {FIELD}."
            ) from error
    return entries


def assert_pending(
    outbox: BaseOutbox,
    name: str,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    place: Any = NO_ID,
    times: int = 1,
) -> None:
    """
    Assert the number of pending entries of a task or event in an outbox.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 13}, tasks=[send_receipt.s(13)])
            assert_pending(outbox, "shop.send_receipt", [13], place=13)

    A dispatcher empties the outbox in the background. To prevent that, write inside `undispatched`, or with
    `at_once=False`.

    Args:
        outbox: an `Outbox` or an `OutboxCollection`.
        name: name of the task, or the routing key of the event.
        args: arguments of the task. By default any.
        kwargs: keyword arguments of the task. By default any.
        place: `_id` of the document, or the key of an `OutboxCollection`. By default any.
        times: the expected number. 0 for none.

    Raises:
        AssertionError: the number differs. The message lists the pending entries.
        OutboxRefusedError: an `OutboxCollection` cannot have this key.
    """
    if place is not NO_ID and outbox.runtime.is_own:
        place = key_text(place)
    waiting = pending_entries(outbox)
    count = sum(each.fits(name, args, kwargs) and place in (NO_ID, each.place) for each in waiting)
    if count != times:
        others = ", ".join(map(str, waiting[:_SHOWN])) or "nothing"
        raise AssertionError(
            f"{name} is pending {count} times in {outbox.name}, not {times}. Pending entries: {others}."
        )


@contextlib.contextmanager
def undispatched(*outboxes: BaseOutbox) -> Iterator[None]:
    """
    Keep this process from dispatching entries of these outboxes in the block, like `at_once=False`.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 14}, tasks=[send_receipt.s(14)])
            assert outbox.status().pending == 1

    The dispatcher first releases its entries. `outbox.sweep(older_than=0)` still dispatches, in the block and after it.
    Other processes, a bridge that watches the collection, and a delete by the outbox (for its document) still dispatch
    too.

    Args:
        outboxes: the outboxes to stop.
    """
    kept = [outbox.runtime.at_once for outbox in outboxes]
    for outbox in outboxes:
        outbox.runtime.at_once = False
        outbox.runtime.close()  # otherwise its dispatcher looks for entries of other writers
    try:
        yield
    finally:
        for outbox, at_once in zip(outboxes, kept, strict=True):
            outbox.runtime.close()
            outbox.runtime.at_once = at_once


def _parts(outbox: BaseOutbox, entry: Entry, document_id: object, place: object) -> Iterator[PendingEntry]:
    """Yield an entry's tasks or its event, as a relay would publish them."""
    if entry.kind == "event":
        event = bind_event(entry, document_id) if entry.bind else entry
        body = json.loads(event.payload).get("data")
        yield PendingEntry(event.name, id=event.id, place=place, kind="event", body=body)
        return
    for leaf in leaves(decode_canvas(outbox.app, entry, document_id)):
        yield PendingEntry(
            leaf["task"], tuple(leaf["args"]), dict(leaf["kwargs"]), leaf["options"].get("task_id", ""), place
        )
