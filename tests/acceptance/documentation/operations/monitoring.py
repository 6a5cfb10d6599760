"""
What `docs/operations/monitoring.md` needs, and what its code must have done.

Its receivers of signals report to a module in place of Sentry's, and to a server on this machine in place of Slack's.
Its set-up of tracing must have exported a span.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mongo_celery.signals import change_dead_lettered, change_halted, send_signal
from mongo_celery.tracing import sending, trace_headers
from tests.fixtures.process import wait_for

FACTS = {"handler": "orders", "partition": 3, "key": "shop.orders insert 1", "error": "KeyError: 'total'"}


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Give an exporter and the address of a webhook."""
    del mongo_url, redis_url
    reported: list[str] = []
    sentry: Any = ModuleType("sentry_sdk")
    sentry.capture_message = lambda text, level: reported.append(f"{level}: {text}")
    sys.modules["sentry_sdk"] = sentry
    exporter = InMemorySpanExporter()
    with _webhook() as (address, posted):
        namespace: dict[str, Any] = {"exporter": exporter, "SLACK_WEBHOOK": address}
        yield namespace

        command = "celery -A shop changes retry orders 3"
        send_signal(change_halted, "shop", **FACTS, command=command)
        send_signal(change_dead_lettered, "shop", **FACTS, reason="failed", dead_letter="82", command=command)
        wait_for(lambda: posted)
        assert [command in text for text in (*reported, posted[0]["text"])] == [True, True]
    with sending("shop/summarise", dict):
        assert "traceparent" in trace_headers()
    namespace["provider"].force_flush()
    assert [span.name for span in exporter.get_finished_spans()] == ["send shop/summarise"]
    namespace["provider"].shutdown()


@contextmanager
def _webhook() -> Iterator[tuple[str, list[Any]]]:
    """Serve a webhook; its address, and what was posted."""
    posted: list[Any] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Webhook)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", posted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
