"""What waits in a document: one entry a task or event, written together with the document's change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import uuid4

from celery import Celery

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox.canvas import encoded, frozen, representation
from mongo_celery.outbox.events import CONTENT_TYPE, Event, cloud_event
from mongo_celery.tracing import stored_trace, trace_to_store

FIELD = "pendingEvents"
"""The field of a document that holds its entries; the name comes from the technique's source."""

_REPRESENTATION_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """
    One pending task or event.

    Attributes:
        id: by which it is removed; also the id of a single task, and of an event.
        kind: `task` or `event`.
        at: when it was written, by the writer's clock; for people, and for the order of nothing.
        name: of the task, or the routing key.
        argsrepr: what people see instead of the arguments.
        content_type: of the payload.
        content_encoding: of the payload.
        payload: the frozen signature in its task's own serializer, or the event's JSON.
        attempts: how often its publishing has failed through its own fault.
        trace: the trace context in which it was written; empty where there was none.
    """

    id: str
    kind: str
    at: datetime
    name: str
    argsrepr: str
    content_type: str
    content_encoding: str
    payload: str | bytes
    attempts: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """As it is stored; `attempts` is there from the beginning, so that counting never makes a document grow."""
        document = {
            "id": self.id,
            "kind": self.kind,
            "at": self.at,
            "name": self.name,
            "argsrepr": self.argsrepr,
            "contentType": self.content_type,
            "contentEncoding": self.content_encoding,
            "payload": self.payload,
            "attempts": self.attempts,
        }
        return {**document, "trace": dict(self.trace)} if self.trace else document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Entry:
        """
        Read one back.

        Raises:
            KeyError: somebody else has written to the field.
        """
        return cls(
            id=document["id"],
            kind=document["kind"],
            at=document["at"],
            name=document["name"],
            argsrepr=document.get("argsrepr", ""),
            content_type=document["contentType"],
            content_encoding=document["contentEncoding"],
            payload=document["payload"],
            attempts=int(document.get("attempts", 0)),
            trace=stored_trace(document.get("trace")),
        )


def task_entry(app: Celery, signature: object, now: datetime) -> Entry:
    """
    An entry for a signature or canvas.

    Raises:
        OutboxRefusedError: as of `canvas.frozen` and `canvas.encoded`.
    """
    id = str(uuid4())  # noqa: A001
    canvas = frozen(app, signature, now, id)
    content_type, content_encoding, payload = encoded(app, canvas)
    return Entry(
        id=id,
        kind="task",
        at=now,
        name=str(canvas.task),
        argsrepr=representation(canvas, _REPRESENTATION_CHARS),
        content_type=content_type,
        content_encoding=content_encoding,
        payload=payload,
        trace=trace_to_store(),
    )


def event_entry(event: object, now: datetime, *, source: str, subject: str | None) -> Entry:
    """
    An entry for an event.

    Raises:
        OutboxRefusedError: it is no `Event`, or cannot be encoded.
    """
    if not isinstance(event, Event):
        raise OutboxRefusedError(f"{type(event).__name__} is no event; pass mongo_celery.Event(routing_key, body).")
    id = str(uuid4())  # noqa: A001
    trace = trace_to_store()
    return Entry(
        id=id,
        kind="event",
        at=now,
        name=event.routing_key,
        argsrepr="",
        content_type=CONTENT_TYPE,
        content_encoding="utf-8",
        payload=cloud_event(event, id=id, source=source, time=now, subject=subject, trace=trace),
        trace=trace,
    )


def entries_of(stored: Iterable[Mapping[str, Any]]) -> Sequence[Entry | Mapping[str, Any]]:
    """Stored entries; one that cannot be read stays as it is, for whoever meets it to set aside."""
    found: list[Entry | Mapping[str, Any]] = []
    for document in stored:
        try:
            found.append(Entry.from_document(document))
        except (KeyError, TypeError, ValueError):
            found.append(document if isinstance(document, Mapping) else {"value": document})
    return found
