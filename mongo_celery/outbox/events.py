"""Events for consumers that are not Celery: JSON with the attributes of CloudEvents 1.0."""

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
from mongo_celery.outbox.stored_id import as_argument, derived_id, put_in

CONTENT_TYPE = "application/json"
_KEY_BYTES_MAX = 255  # AMQP's short string
_TRACE = ("traceparent", "tracestate")
"""Attributes of CloudEvents' extension for distributed tracing."""

_OWN = ("specversion", "id", "source", "type", "time", "subject", "datacontenttype", "data")


@dataclass(frozen=True, slots=True)
class Event:
    """
    A message for a topic exchange, published with the document that it tells of.

    Args:
        routing_key: of the topic exchange, such as `order.placed`; also the event's `type` unless one is given.
        body: what JSON can hold; dates become ISO 8601 text, ObjectIds, UUIDs and decimals become text.
        type: CloudEvents' type of the event.
        subject: CloudEvents' subject; by default the document's `_id` where it is known at writing.
        attributes: further CloudEvents attributes (extensions), names of lower-case letters and digits.

    Raises:
        OutboxRefusedError: when it is written, if it cannot be encoded.
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
    The event as JSON text: CloudEvents 1.0, structured mode.

    Args:
        event: what to tell.
        id: of the event.
        source: where it comes from.
        time: when it was written.
        subject: where the event has none.
        trace: the trace context in which it was written; an attribute of the same name in the event stands.

    Raises:
        OutboxRefusedError: a body that JSON cannot hold, or a routing key or attribute that the formats refuse.
    """
    key = event.routing_key
    if not isinstance(key, str) or not key or len(key.encode()) > _KEY_BYTES_MAX:
        raise OutboxRefusedError(f"routing key {key!r} must be text of 1 to {_KEY_BYTES_MAX} bytes.")
    for name in event.attributes:
        if not (isinstance(name, str) and name.isascii() and name.isalnum() and name.lower() == name) or name in _OWN:
            raise OutboxRefusedError(f"attribute {name!r} must be lower-case letters and digits, and none of {_OWN}.")
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
        raise OutboxRefusedError(f"event {key!r} cannot be encoded as JSON: {short(error)}.") from error


def with_document(payload: str, bind: str, document_id: object) -> tuple[str, str]:
    """
    The text of an event that was stored before its document was known, made that of one document.

    Args:
        payload: as of `cloud_event`.
        bind: what stands for the document's `_id` in its body.
        document_id: the `_id`; also the subject of an event that has none.

    Returns:
        The event's id for this document, and its text.
    """
    event = json.loads(payload)
    event_id = derived_id(event["id"], document_id)
    event |= {"id": event_id, "data": put_in(event["data"], bind, as_told(document_id))}
    if not (document_id is None or isinstance(document_id, Mapping)):
        event.setdefault("subject", str(document_id))
    return event_id, json.dumps(event, separators=(",", ":"))


def as_told(document_id: object) -> Any:
    """An `_id` as an event's body has it in place of `STORED_ID`: as JSON holds it; bytes are hexadecimal digits."""
    return json.loads(json.dumps(as_argument(document_id), default=_plain_or_text))


def _plain_or_text(value: object) -> str:
    """An `_id` as JSON holds it, whatever it is: where it is bound late, nobody is there to be told of a refusal."""
    try:
        return value.hex() if isinstance(value, bytes) else _plain(value)
    except TypeError:
        return str(value)


def _plain(value: object) -> str:
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, (ObjectId, UUID, Decimal, Decimal128)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
