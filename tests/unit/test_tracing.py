"""Traces: what is carried, stored and restored, and that nothing else ever comes of them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any, NoReturn

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mongo_celery import Event, tracing
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.outbox.entries import Entry, make_event_entry, make_task_entries
from mongo_celery.tracing import (
    STORED_BYTES_MAX,
    committing,
    continue_trace,
    processing,
    sending,
    sending_for,
    stored_trace,
    trace_headers,
    trace_to_store,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = int("0af7651916cd43dd8448eb211c80319c", 16)
FORGED: list[object] = [
    None,
    5,
    [PARENT],
    {"a": 1},
    "",
    "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
    "x" * 100_000,
    "\ud800",
    "00-\x00",
]
WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from datetime import UTC, datetime
from celery import Celery
from mongo_celery import tracing
from mongo_celery.outbox.entries import make_task_entries
with tracing.continue_trace({"traceparent": "x"}), tracing.processing("a", lambda: 1 / 0):
    assert tracing.trace_headers() == tracing.trace_to_store() == {}
try:
    with tracing.sending("a", lambda: 1 / 0), tracing.sending_for({}, "a", lambda: 1 / 0, is_task=True):
        raise KeyError("mine")
except KeyError:
    (entry,) = make_task_entries(Celery(), Celery().signature("a"), datetime.now(UTC))
    assert "trace" not in entry.to_document()
    print("passed")
"""
IMPORTED = """
import sys
import mongo_celery.bridge.bridge, mongo_celery.bridge.listener.listener, mongo_celery.outbox.outbox
import mongo_celery.cli.changes
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""

ALONE = """
from celery.app.task import Context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from mongo_celery import tracing

computed = []
attributes = lambda: computed.append(1) or {}
with tracing.sending("a", attributes), tracing.processing("a", attributes), tracing.committing("a", attributes):
    assert not trace.get_current_span().get_span_context().is_valid
assert computed == []

parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
carried = Context({"id": "1", "task": "note", "traceparent": parent})
with tracing.continue_trace(carried), tracing.processing("a", attributes):
    assert tracing.trace_headers() == {"traceparent": parent}

provider, kept = TracerProvider(), InMemorySpanExporter()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
with tracing.processing("a", attributes):
    pass
assert [span.name for span in kept.get_finished_spans()] == ["process a"]
print("passed")
"""


def python(code: str) -> str:
    """What another interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def entry() -> Entry:
    app = Celery("traced", broker="memory://", set_as_current=False)
    (entry,) = make_task_entries(app, app.signature("note", args=(1,)), NOW)
    return entry


def request(**headers: Any) -> Context:
    """What a worker makes of a message with these headers."""
    return Context({"id": "1", "task": "note", **headers})


def current() -> Any:
    return trace.get_current_span().get_span_context()


def ended(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whatever OpenTelemetry is asked for fail."""

    def fail(*_arguments: Any, **_options: Any) -> NoReturn:
        raise RuntimeError("tracing is broken")

    class Broken:
        start_span = fail

    api = tracing._api()
    assert api is not None
    monkeypatch.setattr(propagate, "inject", fail)
    monkeypatch.setattr(propagate, "extract", fail)
    monkeypatch.setattr(tracing, "_api", lambda: api._replace(tracer=Broken()))
    monkeypatch.setattr(tracing, "_reported", set())


# -- without it ------------------------------------------------------------------------------------


def test_without_opentelemetry_nothing_is_stored_or_carried_and_errors_pass() -> None:
    """The extra is not needed; attributes are not even computed."""
    assert python(WITHOUT) == "passed"


def test_with_the_api_alone_nothing_is_computed_and_traces_pass_until_somebody_listens() -> None:
    """Many have it by another package: a span for each change would be nobody's."""
    assert python(ALONE) == "passed"


def test_opentelemetry_is_not_imported_before_it_is_needed() -> None:
    """Commands stay light where it is installed too."""
    assert python(IMPORTED) == "[]"


# -- what is stored --------------------------------------------------------------------------------


@pytest.mark.usefixtures("spans")
def test_an_entry_has_the_context_of_its_write_and_gives_it_back() -> None:
    """By the format of the global propagator, here W3C's."""
    with trace.get_tracer("test").start_as_current_span("request") as span:
        written = entry()

    assert written.trace["traceparent"].split("-")[1] == format(span.get_span_context().trace_id, "032x")
    assert Entry.from_document(written.to_document()) == written


@pytest.mark.usefixtures("spans")
def test_an_event_tells_its_trace_as_cloudevents_do() -> None:
    """The extension for distributed tracing; an attribute of the user's stands."""
    with trace.get_tracer("test").start_as_current_span("request"):
        parent = trace_headers()["traceparent"]
        plain = make_event_entry(Event("a", 1), NOW, source="/s", document_id=1)
        own = make_event_entry(Event("a", 1, attributes={"traceparent": PARENT}), NOW, source="/s", document_id=1)

    assert json.loads(plain.payload)["traceparent"] == plain.trace["traceparent"] == parent
    assert json.loads(own.payload)["traceparent"] == PARENT


@pytest.mark.usefixtures("spans")
def test_what_is_stored_is_bounded_and_the_trace_comes_first() -> None:
    """Much baggage does not make documents grow; some is kept."""
    with trace.get_tracer("test").start_as_current_span("request"):
        assert set(trace_to_store()) == {"traceparent"}
        token = context.attach(baggage.set_baggage("tenant", "7"))
        assert trace_to_store()["baggage"] == "tenant=7"
        context.detach(token)
        token = context.attach(baggage.set_baggage("tenant", "7" * STORED_BYTES_MAX))
        assert set(trace_to_store()) == {"traceparent"}
        context.detach(token)


# -- what is carried -------------------------------------------------------------------------------


def test_a_change_is_processed_in_the_trace_of_its_message(spans: InMemorySpanExporter) -> None:
    """Parent and child across processes, and the one message has one consumer span for each change."""
    with continue_trace(request(traceparent=PARENT)):
        for _ in range(2):
            with processing("shop/bill", lambda: {"mongo_celery.seq": 1}):
                assert current().trace_id == TRACE_ID

    assert not current().is_valid
    for span in spans.get_finished_spans():
        assert (span.name, span.kind) == ("process shop/bill", SpanKind.CONSUMER)
        assert span.parent is not None
        assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
        assert span.attributes == {"messaging.system": "celery", "mongo_celery.seq": 1}


@pytest.mark.parametrize("value", FORGED, ids=range(len(FORGED)))
def test_a_forged_context_costs_the_parent_and_nothing_else(spans: InMemorySpanExporter, value: object) -> None:
    """P11: whoever writes to the broker or the document can put anything there."""
    with continue_trace(request(traceparent=value, tracestate=value, baggage=value)):
        with processing("shop/bill", dict):
            assert baggage.get_all() == {}
        with sending_for(stored_trace({"traceparent": value}), "note", dict, is_task=True):
            pass

    assert [span.parent for span in spans.get_finished_spans()] == [None, None]


def test_baggage_of_a_message_is_not_believed() -> None:
    """A listener has none, so it was put into the message: a handler must not decide by it."""
    with continue_trace(request(traceparent=PARENT, baggage="tenant=7")):
        assert current().trace_id == TRACE_ID
        assert baggage.get_all() == {}


def test_an_entry_is_sent_in_the_trace_of_its_write_linked_to_who_sends_it(spans: InMemorySpanExporter) -> None:
    """A sweep has a trace of its own, and so has another request whose write delivers what waits before its own."""
    with trace.get_tracer("test").start_as_current_span("sweep") as sweep:
        with sending_for({"traceparent": PARENT, "baggage": "tenant=7"}, "note", dict, is_task=True):
            assert baggage.get_all() == {"tenant": "7"}
            carried = trace_headers()
        with sending_for({}, "note", dict, is_task=True):
            pass
        assert current() == sweep.get_span_context()

    sent, without, _ = spans.get_finished_spans()
    assert sent.parent is not None
    assert sent.parent.trace_id == TRACE_ID
    assert carried["traceparent"].split("-")[2] == format(sent.context.span_id, "016x")
    assert without.parent is None
    assert [link.context for span in (sent, without) for link in span.links] == [sweep.get_span_context()] * 2


# -- how it ends -----------------------------------------------------------------------------------


def test_a_failure_is_an_error_without_credentials(spans: InMemorySpanExporter) -> None:
    """Traces go to other people than logs."""
    with pytest.raises(ValueError, match="refused"), processing("shop/bill", dict):
        raise ValueError("refused by mongodb://ann:secret@db")

    span = ended(spans)
    assert span.status.status_code is StatusCode.ERROR
    (event,) = span.events
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "ValueError"
    assert "secret" not in str([event.attributes, span.status.description, span.attributes])


@pytest.mark.parametrize(
    ("decision", "events"),
    [(Ignore(), 0), (Retry("later", ValueError("cause")), 1), (Retry("later"), 0), (StaleFencingTokenError(), 1)],
    ids=["ignore", "retry with its cause", "retry", "stale"],
)
def test_a_decision_of_the_task_is_no_error(spans: InMemorySpanExporter, decision: Exception, events: int) -> None:
    """It says by which it ended; what a retry is for is shown."""
    with pytest.raises(type(decision)), processing("shop/bill", dict):
        raise decision

    span = ended(spans)
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes is not None
    assert span.attributes["mongo_celery.ended_by"] == type(decision).__name__
    assert len(span.events) == events


def test_what_somebody_left_current_inside_is_not_current_behind(spans: InMemorySpanExporter) -> None:
    """An instrumentation does so when a message cannot be published: the next one would be its child."""
    with sending("shop/bill", dict):
        left = trace.get_tracer("test").start_span("left")
        context.attach(trace.set_span_in_context(left))

    assert not current().is_valid
    assert ended(spans).name == "send shop/bill"


@pytest.mark.usefixtures("broken")
def test_an_error_of_tracing_is_said_once_and_touches_nothing(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """P14: results and exceptions are those of the block."""
    ran = []
    for _ in range(3):
        with continue_trace(request(traceparent=PARENT)), processing("a", dict), sending("a", dict):
            ran.append(trace_headers())
        with sending_for({"traceparent": PARENT}, "a", dict, is_task=True):
            ran.append(entry().to_document().get("trace", {}))
    with pytest.raises(KeyError, match="mine"), committing("a", dict):
        raise KeyError("mine")

    assert ran == [{}] * 6
    assert spans.get_finished_spans() == ()
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert vars(record)["event"] == "tracing_failed"


def test_attributes_that_cannot_be_had_cost_themselves_only(spans: InMemorySpanExporter) -> None:
    """An event may lack what they are made of."""
    event: dict[str, Any] = {}
    with processing("a", lambda: {"mongo_celery.operation_type": event["operationType"]}):
        pass

    assert ended(spans).attributes == {"messaging.system": "celery"}


@pytest.mark.usefixtures("spans")
def test_a_soft_time_limit_of_the_handler_is_not_taken_for_an_error_of_tracing() -> None:
    """It comes at any moment of the handler's time, also while a span begins; nothing stays current behind it."""

    def too_late() -> dict[str, Any]:
        raise SoftTimeLimitExceeded

    with pytest.raises(SoftTimeLimitExceeded), processing("a", too_late):
        raise AssertionError("the block was entered")
    assert not current().is_valid
