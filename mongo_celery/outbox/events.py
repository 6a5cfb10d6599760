"""Events for consumers other than Celery: JSON with the attributes of CloudEvents 1.0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from bson import Decimal128, ObjectId

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.stored_id import derive_id, make_argument, substitute

CONTENT_TYPE = "application/json"
_KEY_BYTES_MAX = 255  # AMQP's short string
_TRACE = ("traceparent", "tracestate")
"""Attributes of CloudEvents' extension for distributed tracing."""

_OWN = ("specversion", "id", "source", "type", "time", "subject", "datacontenttype", "data")


@dataclass(frozen=True, slots=True)
class Event:
    """
    A message for a topic exchange, published with its document.

    Args:
        routing_key: routing key for the topic exchange, such as `order.placed`. It is also the default of `type`.
        body: a value that JSON can hold. Dates become ISO 8601 text, ObjectIds, UUIDs and decimals become text.
        type: CloudEvents' type of the event.
        subject: CloudEvents' subject. By default the document's `_id`, if known at the write.
        attributes: further CloudEvents attributes (extensions). Their names have lower-case letters and digits.

    Raises:
        OutboxRefusedError: raised by the write, if it cannot be encoded.
    """

    routing_key: str
    body: Any = None
    type: str | None = None
    subject: str | None = None
    attributes: Mapping[str, str | int | bool] = field(default_factory=dict)


def cloud_event(
    event: Event,
    *,
    id: str,  # noqa: A002 - CloudEvents' word
    source: str,
    time: datetime,
    subject: str | None,
    trace: Mapping[str, str],
) -> str:
    """
    Return the event as JSON text: CloudEvents 1.0, structured mode.

    Args:
        event: the event to publish.
        id: the id of the event.
        source: CloudEvents' source of the event.
        time: the writing time.
        subject: used if the event has none.
        trace: the trace context of the write. An attribute of the same name in the event takes precedence.

    Raises:
        OutboxRefusedError: JSON cannot hold the body, or the formats refuse a routing key or an attribute.
    """
    key = event.routing_key
    if not isinstance(key, str) or not 0 < _count_bytes(key) <= _KEY_BYTES_MAX:
        raise OutboxRefusedError(f"The routing key {key!r} must be text of 1 to {_KEY_BYTES_MAX} bytes.")
    for name in event.attributes:
        if not (isinstance(name, str) and name.isascii() and name.isalnum() and name.lower() == name) or name in _OWN:
            raise OutboxRefusedError(
                f"The attribute {name!r} must consist of lower-case letters and digits, and must not be one of {_OWN}."
            )
    subject = event.subject or subject
    document = {
        "specversion": "1.0",
        "id": id,
        "source": source,
        "type": event.type or key,
        "time": time.isoformat().replace("+00:00", "Z"),
        **({"subject": subject} if subject else {}),
        **{name: trace[name] for name in _TRACE if name in trace},
        **event.attributes,
        "datacontenttype": CONTENT_TYPE,
        "data": event.body,
    }
    try:
        return json.dumps(document, default=_plain, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise OutboxRefusedError(f"The event {key!r} cannot be encoded as JSON: {short(error)}.") from error


def _count_bytes(text: str) -> int:
    """Return the size of a text in UTF-8. 0 if it has none, because of half a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def with_document(payload: str, bind: str, document_id: object) -> tuple[str, str]:
    """
    Bind an event's text, which was stored before its document was known, to one document.

    Args:
        payload: as in `cloud_event`.
        bind: the placeholder of the document's `_id` in its body.
        document_id: the `_id`. Also the subject of an event without one.

    Returns:
        The event's id for this document, and its text.
    """
    event = json.loads(payload)
    event_id = derive_id(event["id"], document_id)
    event |= {"id": event_id, "data": substitute(event["data"], bind, to_json(document_id))}
    if not (document_id is None or isinstance(document_id, Mapping)):
        event.setdefault("subject", str(document_id))
    return event_id, json.dumps(event, separators=(",", ":"))


def to_json(document_id: object) -> Any:
    """
    Return an `_id` in the JSON form that replaces `STORED_ID` in an event's body. Bytes become
    hexadecimal digits.
    """
    return json.loads(json.dumps(make_argument(document_id), default=_plain_or_text))


def _plain_or_text(value: object) -> str:
    """Return any `_id` in JSON form. If it is bound late, no caller could get a refusal."""
    try:
        return value.hex() if isinstance(value, bytes) else _plain(value)
    except TypeError:
        return str(value)


def _plain(value: object) -> str:
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, (ObjectId, UUID, Decimal, Decimal128)):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")
