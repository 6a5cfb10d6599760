"""What `docs/operations/monitoring.md` needs, and what its set-up of tracing must have exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mongo_celery.tracing import sending, trace_headers


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An exporter."""
    del mongo_url, redis_url
    exporter = InMemorySpanExporter()
    namespace: dict[str, Any] = {"exporter": exporter}
    yield namespace

    with sending("shop/summarise", dict):
        assert "traceparent" in trace_headers()
    namespace["provider"].force_flush()
    assert [span.name for span in exporter.get_finished_spans()] == ["send shop/summarise"]
    namespace["provider"].shutdown()
