"""Traces through the outbox and the dispatcher: which messages carry which context, on the real servers."""

from __future__ import annotations

from typing import Any

import pytest
from bson import ObjectId
from celery import chain, group
from kombu import Connection, Exchange, Queue
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from pymongo.database import Database

from mongo_celery import Event
from mongo_celery.outbox.pending import FIELD
from tests.rig.outbox import Document, Rig, pending


def request() -> Any:
    return trace.get_tracer("test").start_as_current_span("request")


def parent(headers: Document) -> tuple[int, int]:
    _, found, span, _ = headers["traceparent"].split("-")
    return int(found, 16), int(span, 16)


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def ids(span: Any) -> tuple[int, int]:
    context = span.get_span_context()
    return context.trace_id, context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def test_a_message_is_in_the_trace_of_its_write_whoever_publishes_it(rig: Rig, spans: InMemorySpanExporter) -> None:
    """At once, by another write to the document, or by the sweep with a trace of its own."""
    quick, slow = rig.outbox("quick"), rig.outbox("slow", at_once=False)
    with request() as first:
        quick.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
        slow.insert_one({"_id": 1}, tasks=[rig.add.s(2, 2)])
    with request() as second:
        slow.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(3, 3)])
    with request():
        assert slow.sweep(older_than=0.001).dispatched == 2

    sent = named(spans, "send add")
    assert [parent_of(span) for span in sent] == [ids(first), ids(first), ids(second)]
    assert {span.kind for span in sent} == {SpanKind.PRODUCER}
    assert [parent(message.headers) for message in rig.drain()] == [ids(span) for span in sent]
    assert [len(span.links) for span in sent] == [0, 1, 1], "the sweep's trace is linked"


@pytest.mark.usefixtures("spans")
def test_all_messages_of_a_canvas_carry_it_and_the_users_headers_stand(rig: Rig) -> None:
    outbox = rig.outbox()
    own = rig.add.s(5, 5).set(headers={"mine": "1", "traceparent": "own"})
    with request() as span:
        outbox.insert_one(
            {"_id": 1}, tasks=[chain(rig.add.s(1, 1), rig.add.s(2)), group(rig.add.s(3, 3), rig.add.s(4, 4)), own]
        )
    first, third, fourth, fifth = rig.drain()

    later = first.body[2]["chain"][0]["options"]["headers"]
    carried = [parent(each) for each in (first.headers, third.headers, fourth.headers, later)]
    assert {found for found, _ in carried} == {ids(span)[0]}
    assert (fifth.headers["mine"], fifth.headers["traceparent"]) == ("1", "own")


def test_an_entry_without_a_trace_is_published_in_nobodys(
    rig: Rig, database: Database[Document], spans: InMemorySpanExporter
) -> None:
    """Written without tracing, or with a trace that is none: not in the trace of who happens to publish it."""
    outbox = rig.outbox(at_once=False)
    for number, stored in enumerate([None, 5, {"traceparent": "\x00"}, {"traceparent": ["x"]}]):
        outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
        assert "trace" not in pending(database, number)["events"][0]
        if stored is not None:
            database["orders"].update_one({"_id": number}, {"$set": {f"{FIELD}.events.0.trace": stored}})
    with request():
        assert outbox.sweep(older_than=0.001).dispatched == 4

    assert [parent_of(span) for span in named(spans, "send add")] == [None] * 4
    assert len(rig.drain()) == 4


def test_an_event_carries_its_write_in_the_body_and_its_sending_in_the_headers(
    rig: Rig, redis_url: str, spans: InMemorySpanExporter
) -> None:
    """CloudEvents tells where it comes from; the message, who sent it."""
    exchange = Exchange("mongo_celery.events", type="topic", durable=True)
    with Connection(redis_url) as connection:
        queue = Queue(f"traced.{ObjectId()}", exchange, routing_key="order.*")(connection.default_channel)
        queue.declare()
        with request() as span:
            rig.outbox().insert_one({"_id": 1}, events=[Event("order.paid", {"n": 1})])
        message = queue.get()
        queue.delete()

    assert message is not None
    (sent,) = named(spans, "send mongo_celery.events")
    assert parent(message.payload) == parent_of(sent) == ids(span)
    assert parent(message.headers) == ids(sent)


@pytest.mark.usefixtures("instrumented")
def test_with_the_instrumentation_of_celery_a_message_has_one_producer(rig: Rig, spans: InMemorySpanExporter) -> None:
    """Its span stands inside ours, and its headers are what travels."""
    with request() as span:
        rig.outbox().insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    (message,) = rig.drain()

    (ours,), (theirs,) = named(spans, "send add"), named(spans, "apply_async/add")
    assert (ours.kind, theirs.kind) == (SpanKind.INTERNAL, SpanKind.PRODUCER)
    assert (parent_of(ours), parent_of(theirs)) == (ids(span), ids(ours))
    assert parent(message.headers) == ids(theirs)
