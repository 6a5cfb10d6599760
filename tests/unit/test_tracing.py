"""Traces: what is carried, stored and restored, and that nothing else ever comes of them."""

from __future__ import annotations

import logging
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any, NoReturn

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore, Retry
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from mongo_celery import tracing
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.outbox.entries import Entry, make_task_entries
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
FORGED: list[object] = [
    None,
    [PARENT],
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


def entry() -> Entry:
    app = Celery("traced", broker="memory://", set_as_current=False)
    (entry,) = make_task_entries(app, app.signature("note", args=(1,)), NOW)
    return entry


def request(**headers: Any) -> Context:
    return Context({"id": "1", "task": "note", **headers})


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_opentelemetry_nothing_is_stored_or_carried_and_errors_pass() -> None:
    """The extra is not needed; attributes are not even computed."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.stdout == "passed\n", done.stderr


@pytest.mark.usefixtures("spans")
def test_what_is_stored_is_bounded_and_the_trace_comes_first() -> None:
    """Much baggage does not make documents grow; some is kept."""
    for tenant, kept in (("7", {"traceparent", "baggage"}), ("7" * STORED_BYTES_MAX, {"traceparent"})):
        with trace.get_tracer("test").start_as_current_span("request"):
            token = context.attach(baggage.set_baggage("tenant", tenant))
            assert set(trace_to_store()) == kept
            context.detach(token)


@pytest.mark.parametrize("value", FORGED, ids=range(len(FORGED)))
def test_a_forged_context_costs_the_parent_and_nothing_else(spans: InMemorySpanExporter, value: object) -> None:
    """P11: whoever writes to the broker or the document can put anything there."""
    with continue_trace(request(traceparent=value, tracestate=value, baggage="tenant=7")):
        with processing("shop/bill", dict):
            assert baggage.get_all() == {}
        with sending_for(stored_trace({"traceparent": value}), "note", dict, is_task=True):
            pass

    assert [span.parent for span in spans.get_finished_spans()] == [None, None]


@pytest.mark.parametrize(
    ("ended_by", "events"),
    [(Ignore(), 0), (Retry("later", ValueError("cause")), 1), (Retry("later"), 0), (StaleFencingTokenError(), 1)],
    ids=["ignore", "retry with its cause", "retry", "stale"],
)
def test_a_failure_is_an_error_without_credentials_and_a_decision_of_the_task_is_none(
    spans: InMemorySpanExporter, ended_by: Exception, events: int
) -> None:
    """Traces go to other people than logs. What a retry is for is shown."""
    failure = ValueError("refused by mongodb://ann:secret@db")
    for error in (failure, ended_by):
        with pytest.raises(type(error)), processing("shop/bill", dict):
            raise error
    failed, decided = spans.get_finished_spans()
    assert (failed.status.status_code, decided.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert [len(each.events) for each in (failed, decided)] == [1, events]
    assert "secret" not in failed.to_json()
    assert decided.attributes is not None
    assert decided.attributes["mongo_celery.ended_by"] == type(ended_by).__name__


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
