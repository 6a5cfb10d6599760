"""
A Celery app with traces: every process writes its spans as lines of JSON into a file of its own.

With `TRACED_INSTRUMENTED` Celery itself is traced too, by OpenTelemetry's instrumentation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from pymongo import MongoClient

from mongo_celery import Bridge, Change

NAME = os.environ.get("PROJECT_NAMES", "traced")
PARTITIONS = int(os.environ.get("TRACED_PARTITIONS", "1"))
URL = os.environ.get("PROJECT_MONGO", "mongodb://localhost/")


class Lines(SpanExporter):
    """One file a process; a span is a line."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        path = Path(os.environ["TRACED_SPANS"]) / f"{os.getpid()}.json"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(json.loads(span.to_json(indent=None))) + "\n" for span in spans)
        return SpanExportResult.SUCCESS


if "TRACED_SPANS" in os.environ:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Lines(), schedule_delay_millis=50))
    trace.set_tracer_provider(provider)
if "TRACED_INSTRUMENTED" in os.environ:
    instrumentor: Any = CeleryInstrumentor  # untyped
    instrumentor().instrument()

app = Celery("traced", broker=os.environ.get("PROJECT_BROKER", "memory://"))
app.conf.update(task_acks_late=True, worker_hijack_root_logger=False)
bridge = Bridge(
    app,
    URL,
    name="traced",
    database=f"{NAME}_state",
    partitions=PARTITIONS,
    queues=1,
    run_size=10,
    lease_ttl=4,
    autodiscover=False,
)
notes = bridge.outbox(f"{NAME}_data.notes", sweep_every=None)


@bridge.on_change(f"{NAME}_data.orders", failure_policy="skip", max_retries=1)
def bill(change: Change) -> None:
    """Note the order, by a task of the outbox; or fail, as the order says."""
    order: dict[str, Any] = change.full_document or {}
    if order.get("fails") and not bill.request.retries:
        raise bill.retry(exc=ValueError("not yet"), countdown=0.05)
    notes.insert_one({"_id": order["_id"]}, tasks=[write_down.s(order["_id"])])


@app.task
def write_down(order: int) -> None:
    """Record that it ran, and what of a trace its message carried."""
    client: MongoClient[dict[str, Any]] = bridge.client
    parent = getattr(write_down.request, "traceparent", None)
    client[f"{NAME}_data"]["done"].insert_one({"_id": order, "traceparent": parent})
