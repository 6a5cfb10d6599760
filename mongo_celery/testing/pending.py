"""What waits in an outbox, undispatched: in documents, or in the collection of an `OutboxCollection`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mongo_celery.mongo.identity import NO_ID
from mongo_celery.outbox.canvas import leaves
from mongo_celery.outbox.collection import key_text
from mongo_celery.outbox.entries import Entry, bound_event, decode_canvas
from mongo_celery.outbox.registry import AnyOutbox

__tracebackhide__ = True  # for pytest: what fails is the test's line, and the handler's
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """
    One task or event that was stored, and that nobody has dispatched yet.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 8}, tasks=[send_receipt.s(8)])
            entry: PendingEntry = pending_entries(outbox)[0]
        assert (entry.name, entry.args, entry.place) == ("shop.send_receipt", (8,), 8)

    Attributes:
        name: of the task, or the routing key.
        args: of the task, as they are stored: a later step of a chain gets the result in front.
        kwargs: of the task.
        id: of the task or event, the same in each delivery.
        place: `_id` of the document that it waits in; with an `OutboxCollection` its key as text, or None.
        kind: `"task"` or `"event"`.
        body: of an event.
    """

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    place: Any = None
    kind: str = "task"
    body: Any = None

    def fits(self, name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, place: object) -> bool:
        """Whether it is of this name, with these arguments, at this place; None and `NO_ID` for any."""
        return (
            self.name == name
            and (args is None or tuple(args) == self.args)
            and (kwargs is None or dict(kwargs) == self.kwargs)
            and (place is NO_ID or place == self.place)
        )

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        shown = ", ".join(given) if self.kind == "task" else repr(self.body)
        return f"{self.name}({shown}) at {self.place!r}"


def pending_entries(outbox: AnyOutbox) -> list[PendingEntry]:
    """
    What waits in an outbox, document by document in the order of their `_id`s.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 12}, tasks=[send_receipt.s(12)])
            assert [str(entry) for entry in pending_entries(outbox)] == ["shop.send_receipt(12) at 12"]

    Of a chain, group or chord it is each task that is in it, links included.

    Args:
        outbox: an `Outbox` or an `OutboxCollection`, of whatever app.

    Raises:
        ValueError: somebody else has written to a field of the outbox, and what is there cannot be read.
    """
    backing = outbox.backing
    found = backing.latest.find({backing.field.name: {"$exists": True}}).sort("_id", 1)
    entries: list[PendingEntry] = []
    for document in found:
        place = None if backing.is_own and not isinstance(document["_id"], str) else document["_id"]
        try:
            for stored in document[backing.field.name]["events"]:
                entries += _parts(outbox, Entry.from_document(stored), document["_id"], place)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{outbox.name}: what waits in document {document['_id']!r} cannot be read; did something other than "
                f"the outbox write to {backing.field.name}?"
            ) from error
    return entries


def assert_pending(
    outbox: AnyOutbox,
    name: str,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    place: Any = NO_ID,
    times: int = 1,
) -> None:
    """
    Demand that a task or event waits so many times in an outbox, stored and not dispatched.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 13}, tasks=[send_receipt.s(13)])
            assert_pending(outbox, "shop.send_receipt", [13], place=13)

    A dispatcher empties the outbox behind its writer's back: write inside `undispatched`, or with `at_once=False`.

    Args:
        outbox: an `Outbox` or an `OutboxCollection`.
        name: of the task, or the routing key of the event.
        args: of the task; by default any.
        kwargs: of the task; by default any.
        place: `_id` of the document, or the key of an `OutboxCollection`; by default any.
        times: how often; 0 for never.

    Raises:
        AssertionError: it does not; with what waits instead.
        OutboxRefusedError: the place can be no key of an `OutboxCollection`.
    """
    if place is not NO_ID and outbox.backing.is_own:
        place = key_text(place)
    waiting = pending_entries(outbox)
    count = sum(each.fits(name, args, kwargs, place) for each in waiting)
    if count != times:
        others = ", ".join(map(str, waiting[:_SHOWN])) or "nothing"
        raise AssertionError(f"{name} waits {count} times in {outbox.name}, not {times}; what waits: {others}.")


@contextlib.contextmanager
def undispatched(*outboxes: AnyOutbox) -> Iterator[None]:
    """
    Inside, this process dispatches nothing of what is written to these outboxes, as with `at_once=False`.

    ::

        with undispatched(outbox):
            outbox.insert_one({"_id": 14}, tasks=[send_receipt.s(14)])
            assert outbox.status().pending == 1

    What it has in hand is given up first. A sweep still dispatches, `outbox.sweep(older_than=0)`, here and afterwards;
    so do other processes, a bridge that watches the collection, and a delete by the outbox, for its document.

    Args:
        outboxes: those that are held back.
    """
    kept = [outbox.backing.at_once for outbox in outboxes]
    for outbox in outboxes:
        outbox.backing.at_once = False
        outbox.backing.close()  # else its dispatcher would look for what others have written
    try:
        yield
    finally:
        for outbox, at_once in zip(outboxes, kept, strict=True):
            outbox.backing.close()
            outbox.backing.at_once = at_once


def _parts(outbox: AnyOutbox, entry: Entry, document_id: object, place: object) -> Iterator[PendingEntry]:
    """The tasks of an entry, or its event, as a relay would make them."""
    if entry.kind == "event":
        event = bound_event(entry, document_id) if entry.bind else entry
        body = json.loads(event.payload).get("data")
        yield PendingEntry(event.name, id=event.id, place=place, kind="event", body=body)
        return
    for leaf in leaves(decode_canvas(outbox.app, entry, document_id)):
        yield PendingEntry(
            leaf["task"], tuple(leaf["args"]), dict(leaf["kwargs"]), leaf["options"].get("task_id", ""), place
        )
