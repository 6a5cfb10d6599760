"""Entries: one for each pending task or event in a document, written together with the document's change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.canvas import Signature
from kombu.serialization import loads, prepare_accept_content

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.outbox.canvas import (
    bind_message,
    encode_message,
    find_ids,
    freeze_messages,
    has_stored_id,
    is_elsewhere,
    parse_signature,
    show_arguments,
    substitute_id,
)
from mongo_celery.outbox.events import CONTENT_TYPE, Event, cloud_event, to_json, with_document
from mongo_celery.outbox.stored_id import STORED_ID, make_argument, mentions_stored_id, placeholder, substitute
from mongo_celery.tracing import stored_trace, trace_to_store


@dataclass(slots=True, kw_only=True)
class Entry:
    """
    One pending task or event. It is not frozen, because a frozen one takes three times as long to make.

    Attributes:
        id: id of the entry, for its removal. It is also the id of a single task or an event.
        kind: `task` or `event`.
        at: writing time by the writer's clock, for people. It determines no order.
        name: the name of the task, or the routing key.
        argsrepr: the text that people see instead of the arguments.
        content_type: the content type of the payload.
        content_encoding: the content encoding of the payload.
        payload: the frozen signature in its task's own serializer, or the event's JSON.
        attempts: the number of publishing failures that the entry itself has caused.
        trace: the trace context of its write. Empty if there was none.
        app: name of the writing app. Empty if it has none. See `origin`.
        broker: address of that app's broker. Empty if unknown.
        bind: placeholder of the document's `_id` in the payload, whose ids are then derived from it. Empty if the `_id`
            was known, or is not used.
        elsewhere: True if the task was sent by name and its sender did not know it. So no process has to know it.
        signature: the outbox's signature over all published parts. See `signing`.
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
    app: str = ""
    broker: str = ""
    bind: str = ""
    elsewhere: bool = False
    signature: bytes = b""

    def to_document(self) -> dict[str, Any]:
        """Return the stored form. It always has `attempts`, so that counting never makes a document grow."""
        document: dict[str, Any] = {
            "id": self.id,
            "kind": self.kind,
            "at": self.at,
            "name": self.name,
            "argsrepr": self.argsrepr,
            "contentType": self.content_type,
            "contentEncoding": self.content_encoding,
            "payload": self.payload,
            "attempts": self.attempts,
            "signature": self.signature,
        }
        texts = {"app": self.app, "broker": self.broker, "bind": self.bind}
        document |= {name: value for name, value in texts.items() if value}
        if self.elsewhere:
            document["elsewhere"] = True
        if self.trace:
            document["trace"] = dict(self.trace)
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Entry:
        """
        Read a stored entry.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: another program has written to the field.
        """
        id, signature = document["id"], document.get("signature")  # noqa: A001
        return cls(
            id=id,
            kind=document["kind"],
            at=document["at"],
            name=document["name"],
            argsrepr=document.get("argsrepr", ""),
            content_type=document["contentType"],
            content_encoding=document["contentEncoding"],
            payload=document["payload"],
            attempts=int(document.get("attempts", 0)),
            trace=stored_trace(document.get("trace")),
            app=str(document.get("app", "")),
            broker=str(document.get("broker", "")),
            bind=str(document.get("bind", "")),
            elsewhere=document.get("elsewhere") is True,
            signature=bytes(signature) if isinstance(signature, bytes) else b"",
        )


def make_task_entries(app: Celery, task: object, now: datetime, document_id: Any = NO_ID) -> list[Entry]:
    """
    Return an entry for each message of a signature or canvas.

    Args:
        app: the Celery app.
        task: the signature or canvas.
        now: the time of the write.
        document_id: `_id` of the document. With `NO_ID`, dispatch derives the ids of the messages from it, because many
            documents may contain the same entry.

    Raises:
        OutboxRefusedError: the `_id` is unknown, and the task has an id. Or as in `canvas.freeze_messages` and
            `canvas.encode_message`.
    """
    signature = parse_signature(app, task)
    if document_id is NO_ID and find_ids(signature):
        raise OutboxRefusedError(
            f"{signature.task} has a fixed task id, but this write may go to several documents. Pass the _id of "
            "one document in the filter or as id=, or remove the task id.",
            task=signature.task,
        )
    first_id = str(uuid4())
    found = []
    for place, message in enumerate(freeze_messages(app, signature, now, first_id)):
        found.append(_message_entry(app, message, now, document_id, str(uuid4()) if place else first_id))
    return found


def _message_entry(app: Celery, message: Signature, now: datetime, document_id: Any, id: str) -> Entry:  # noqa: A002
    bind, shown = placeholder(id) if document_id is NO_ID else "", show_arguments(message)
    if has_stored_id(message):
        message = substitute_id(message, bind or make_argument(document_id))
    content_type, content_encoding, payload = encode_message(app, message)
    return Entry(
        id=id,
        kind="task",
        at=now,
        name=str(message.task),
        argsrepr=shown,
        content_type=content_type,
        content_encoding=content_encoding,
        payload=payload,
        trace=trace_to_store(),
        bind=bind,
        elsewhere=is_elsewhere(message),
    )


def make_event_entry(event: object, now: datetime, *, source: str, document_id: Any) -> Entry:
    """
    Return an entry for an event.

    Raises:
        OutboxRefusedError: it is not an `Event`, or cannot be encoded.
    """
    if not isinstance(event, Event):
        raise OutboxRefusedError(f"{type(event).__name__} is not an event. Pass mongo_celery.Event(routing_key, body).")
    id = str(uuid4())  # noqa: A001
    trace = trace_to_store()
    bind = placeholder(id) if document_id is NO_ID else ""
    if mentions_stored_id(event.body):
        event = replace(event, body=substitute(event.body, STORED_ID, bind or to_json(document_id)))
    nameless = bind or document_id is None or isinstance(document_id, Mapping)
    subject = None if nameless else str(document_id)
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
        bind=bind,
    )


def list_given(given: Any) -> list[Any]:
    """
    Return the tasks or events of a user as a list.

    Raises:
        OutboxRefusedError: it is a single task or event, or cannot be iterated.
    """
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise OutboxRefusedError("tasks= and events= must be lists, such as tasks=[send_receipt.s(order_id)].")
    return list(given)


def bind_event(entry: Entry, document_id: object) -> Entry:
    """Bind an event, which was stored before its document was known, to one document: its id, subject and body."""
    event_id, payload = with_document(str(entry.payload), entry.bind, document_id)
    return replace(entry, id=event_id, payload=payload, bind="")


def decode_canvas(app: Celery, entry: Entry, document_id: object) -> Any:
    """
    Return the signature or canvas of a task's entry, for one document if the entry is bound late.

    Raises:
        Exception: a serializer's error, also for a content type that the app does not accept.
    """
    accepted = prepare_accept_content(app.conf.accept_content)
    data = loads(entry.payload, entry.content_type, entry.content_encoding, accept=accepted, force=True)
    if entry.bind:
        data = bind_message(data, entry.bind, document_id)
    return Signature.from_dict(data, app=app)


StoredEntry = Entry | Mapping[str, Any]
"""An entry as read, or the stored value of an unreadable or unsigned one."""


def entry_id(entry: StoredEntry) -> Any:
    """Return the id for removing an entry. None if another program has written it without one."""
    return entry.id if isinstance(entry, Entry) else entry.get("id")


def read_attempts(entry: StoredEntry) -> int:
    """Return the number of an entry's own failures, as far as stored."""
    found = entry.attempts if isinstance(entry, Entry) else entry.get("attempts")
    return int(found) if isinstance(found, int) and found > 0 else 0


def read_entries(stored: Iterable[Mapping[str, Any]], is_trusted: Callable[[Entry], bool]) -> Sequence[StoredEntry]:
    """Return stored entries. An unreadable or untrusted one keeps its stored form, and becomes a dead letter."""
    found: list[StoredEntry] = []
    for document in stored:
        try:
            entry = Entry.from_document(document)
        except (KeyError, TypeError, ValueError, OverflowError):
            found.append(document if isinstance(document, Mapping) else {"value": document})
        else:
            found.append(entry if is_trusted(entry) else document)
    return found
