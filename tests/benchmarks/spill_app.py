"""The Celery app of the spill's suite: one handler, whose documents say how long it takes, and whether it stands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from celery import Celery

from mongo_celery import Bridge, Change
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch

CURED = "cured"
"""A file in the clock's directory: from then on nothing stands any more."""

HOUR = 3600

setting = BenchSetting.from_environment()
app = Celery("mongo_celery_bench", broker=setting.redis_url)
app.conf.task_default_queue = setting.name
bridge = Bridge(
    app,
    setting.mongo_url,
    name=setting.name,
    database=setting.state_database,
    start_from=setting.timestamp,
    autodiscover=False,
    **setting.bridge,
)

_others, _standing = Stopwatch(setting.clock, "others"), Stopwatch(setting.clock, "standing")


@bridge.on_change(f"{setting.database}.orders", bind=True)
def handler(task: Any, change: Change) -> None:
    """Take the time that the document says, and note the start."""
    document = change.full_document or {}
    act = document.get("act")
    if act and not (Path(setting.clock) / CURED).exists():
        if act == "parked":
            task.retry(countdown=HOUR)
        raise RuntimeError(f"{act}, as asked")
    if document.get("seconds"):
        time.sleep(document["seconds"])
    (_standing if document.get("stands") else _others).lap()
