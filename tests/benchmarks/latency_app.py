"""
The app of the suite `latency`: a task and a handler that note how long a document has waited for them.

`python -m tests.benchmarks.latency_app watch` is the naive loop: watch, and start a task.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bson import json_util
from pymongo import MongoClient

from mongo_celery import Change
from mongo_celery.bench.setting import BenchSetting, make_app, make_bridge
from mongo_celery.bench.stopwatch import Stopwatch

WRITTEN = "written"
"""The field with the monotonic time of a document's write: the same clock in all processes of a host."""

NAIVE = "watch_delay"

setting = BenchSetting.from_environment()
app = make_app(setting)

_waited, _warmed = Stopwatch(setting.clock, "waited"), Stopwatch(setting.clock, "warmed")


def note_wait(document: Mapping[str, Any] | None) -> None:
    """Note how long a document has waited; one without a time is for the warm-up."""
    written = (document or {}).get(WRITTEN)
    if written is None:
        _warmed.lap()
    else:
        _waited.note(time.monotonic() - written)


@app.task(ignore_result=True, name="latency.handle_event")
def handle_event(event: str) -> None:
    note_wait(json_util.loads(event)["fullDocument"])


if setting.mode != NAIVE:
    bridge = make_bridge(app, setting)

    @bridge.on_change(f"{setting.database}.orders")
    def handle(change: Change) -> None:
        note_wait(change.full_document)


def watch() -> None:
    client: MongoClient[dict[str, Any]] = MongoClient(setting.mongo_url)
    with client[setting.database]["orders"].watch(start_at_operation_time=setting.timestamp) as stream:
        for event in stream:
            handle_event.delay(json_util.dumps(event))


if __name__ == "__main__":
    watch()
