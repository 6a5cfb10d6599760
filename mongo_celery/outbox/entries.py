"""What waits in a document: one entry a task or event, written together with the document's change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

from celery import Celery, Task
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
    parse_signature,
    put_id,
    representation,
)
from mongo_celery.outbox.events import CONTENT_TYPE, Event, as_told, cloud_event, with_document
from mongo_celery.outbox.stored_id import STORED_ID, as_argument, mentions_stored_id, placeholder, put_in
from mongo_celery.tracing import stored_trace, trace_to_store

FIELD = "pendingEvents"
"""The field of a document that holds its entries; the name comes from the technique's source."""

_REPRESENTATION_CHARS = 200
_SENDS = ("delay", "apply_async", "apply")
"""Methods of tasks and signatures that are no functions of the `_id`."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """
    One pending task or event. It is not frozen: each write makes some, and a frozen one takes three times as long.

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
        app: name of the app that wrote it; empty where it has none.
        bind: what stands for the document's `_id` in the payload, whose ids are then derived from it; empty where the
            `_id` was known, or is not asked for.
        keeps: ids of the payload that are not derived, since the user has given them and did not say that the write
            goes to many documents.
        signature: of the outbox, over all of this that is published; see `signing`.
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
    bind: str = ""
    keeps: Sequence[str] = ()
    signature: bytes = b""

    def to_document(self) -> dict[str, Any]:
        """As it is stored; `attempts` is there from the beginning, so that counting never makes a document grow."""
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
        if self.app:
            document["app"] = self.app
        if self.trace:
            document["trace"] = dict(self.trace)
        if self.bind:
            document["bind"] = self.bind
        if self.keeps:
            document["keeps"] = list(self.keeps)
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Entry:
        """
        Read one back.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: somebody else has written to the field.
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
            bind=str(document.get("bind", "")),
            keeps=tuple(map(str, document.get("keeps", ()))),
            signature=bytes(signature) if isinstance(signature, bytes) else b"",
        )


@dataclass(frozen=True, slots=True)
class Home:
    """
    Which document entries are written to, as far as the writer knows.

    Attributes:
        id: its `_id`, or `NO_ID`.
        many: whether the same entries go to many documents; None where only who writes them knows.
    """

    id: Any = NO_ID
    many: bool | None = False

    def resolve(self, given: Any) -> Any:
        """
        What the user gave, or what his callable makes of the `_id`.

        Raises:
            OutboxRefusedError: the `_id` is not known.
        """
        if not asks_for_id(given):
            return given
        if self.id is NO_ID:
            raise OutboxRefusedError(
                "a task or event that is made of the document's _id needs to know it, and this write does not say it: "
                "put STORED_ID among its arguments instead, or pass id=."
            )
        return given(self.id)


def asks_for_id(given: object) -> bool:
    """Whether a task or event is a callable of the `_id`, and not a signature or task, which can be called, too."""
    return callable(given) and not isinstance(given, (Signature, Mapping, Task, type))


def task_entries(app: Celery, task: object, now: datetime, home: Home = Home()) -> list[Entry]:
    """
    Return an entry for each message of a signature or canvas, or of what a callable makes of the `_id`.

    Raises:
        OutboxRefusedError: as of `Home.resolve`, `canvas.freeze_messages` and `canvas.encode_message`.
    """
    signature = parse_signature(app, home.resolve(task))
    keeps = set() if home.id is not NO_ID or home.many else find_ids(signature)
    first_id = str(uuid4())
    found = []
    for place, message in enumerate(freeze_messages(app, signature, now, first_id)):
        id = str(uuid4()) if place else first_id  # noqa: A001
        found.append(_message_entry(app, message, now, home, id, keeps))
    return found


def _message_entry(app: Celery, message: Signature, now: datetime, home: Home, id: str, keeps: set[str]) -> Entry:  # noqa: A002
    bind, shown, asks = "", show_arguments(message), has_stored_id(message)
    if home.id is not NO_ID:
        message = put_id(message, as_argument(home.id)) if asks else message
    elif asks or home.many or (home.many is None and not find_ids(message) <= keeps):
        bind = placeholder(id)
        message = put_id(message, bind) if asks else message
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
        app=app.main or "",
        bind=bind,
        keeps=tuple(sorted(keeps)) if bind else (),
    )


def show_arguments(canvas: Any) -> str:
    """Return what people see instead of a canvas's arguments."""
    return representation(canvas, _REPRESENTATION_CHARS)


def event_entry(app: Celery, event: object, now: datetime, *, source: str, home: Home) -> Entry:
    """
    An entry for an event, or for what a callable makes of the `_id`.

    Raises:
        OutboxRefusedError: it is no `Event`, or cannot be encoded, or as of `Home.resolve`.
    """
    event = home.resolve(event)
    if not isinstance(event, Event):
        raise OutboxRefusedError(f"{type(event).__name__} is no event; pass mongo_celery.Event(routing_key, body).")
    id = str(uuid4())  # noqa: A001
    trace = trace_to_store()
    is_known = home.id is not NO_ID
    bind = "" if is_known or (home.many is False and not mentions_stored_id(event.body)) else placeholder(id)
    if mentions_stored_id(event.body):
        event = replace(event, body=put_in(event.body, STORED_ID, as_told(home.id) if is_known else bind))
    nameless = home.id is NO_ID or home.id is None or isinstance(home.id, Mapping)
    subject = None if nameless else str(home.id)
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
        app=app.main or "",
        bind=bind,
    )


def list_given(given: Any) -> list[Any]:
    """
    What a user gave as tasks or as events, to be gone through more than once.

    Raises:
        OutboxRefusedError: it is one task or event, or nothing that can be gone through; or one of them would send its
            task instead of making a signature.
    """
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise OutboxRefusedError("tasks and events are lists: tasks=[send_receipt.s(order_id)].")
    found = list(given)
    for each in found:
        _refuse_sender(each)
    return found


def _refuse_sender(given: Any) -> None:
    function = given.func if isinstance(given, partial) else given
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, (Task, Signature)) and name in _SENDS:
        task = owner.name if isinstance(owner, Task) else owner.task
        raise OutboxRefusedError(
            f"{task}.{name} sends the task immediately, whatever happens to the write. Pass a signature, "
            f"{task}.s(...), or {task}.s itself to have the document's _id as its argument.",
            task=task,
        )


def without_payload(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored entry without its arguments, which may hold what is secret."""
    return {name: value for name, value in stored.items() if name != "payload"}


class EntryMaker:
    """
    Makes entries of what users give, and signs them.

    Args:
        app: the Celery app.
        source: gives the events' source.
        sign: gives an entry with its signature.
    """

    def __init__(self, app: Celery, source: Callable[[], str], sign: Callable[[Entry], Entry]) -> None:
        self._app = app
        self._source = source
        self._sign = sign

    def now(self) -> datetime:
        """The writer's clock."""
        return datetime.now(UTC)

    def entries(self, tasks: Sequence[Any], events: Sequence[Any], home: Home) -> list[Entry]:
        """
        Return entries of tasks and events, in this order.

        Raises:
            OutboxRefusedError: as of `task_entries` and `event_entry`, and for what is no list.
            DeploymentError, PyMongoError: the process has not read the signing key yet, and cannot.
        """
        now, events = self.now(), list_given(events)
        found = [entry for task in list_given(tasks) for entry in task_entries(self._app, task, now, home)]
        if events:
            source = self._source()
            found += [event_entry(self._app, event, now, source=source, home=home) for event in events]
        return [self._sign(entry) for entry in found]


def bound_event(entry: Entry, document_id: object) -> Entry:
    """An event that was stored before its document was known, made that of one document: its id, subject and body."""
    event_id, payload = with_document(str(entry.payload), entry.bind, document_id)
    return replace(entry, id=event_id, payload=payload, bind="")


def decode_canvas(app: Celery, entry: Entry, document_id: object) -> Any:
    """
    Return the signature or canvas of a task's entry, of one document where the entry is bound late.

    Raises:
        Exception: whatever a serializer raises, also for a content type that the app does not accept.
    """
    accepted = prepare_accept_content(app.conf.accept_content)
    data = loads(entry.payload, entry.content_type, entry.content_encoding, accept=accepted, force=True)
    if entry.bind:
        data = bind_message(data, entry.bind, document_id, entry.keeps)
    return Signature.from_dict(data, app=app)


def read_entries(
    stored: Iterable[Mapping[str, Any]], is_trusted: Callable[[Entry], bool]
) -> Sequence[Entry | Mapping[str, Any]]:
    """Return stored entries; one that cannot be read or is not trusted stays as it is, and is set aside."""
    found: list[Entry | Mapping[str, Any]] = []
    for document in stored:
        try:
            entry = Entry.from_document(document)
        except (KeyError, TypeError, ValueError, OverflowError):
            found.append(document if isinstance(document, Mapping) else {"value": document})
        else:
            found.append(entry if is_trusted(entry) else document)
    return found
