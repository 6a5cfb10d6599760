"""The Celery app of the spill's suite: one handler, whose documents say how long it takes, and whether it stands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mongo_celery import Change
from mongo_celery.bench.setting import BenchSetting, make_app, make_bridge
from mongo_celery.bench.stopwatch import Stopwatch

CURED = "cured"
"""A file in the clock's directory: from then on nothing stands any more."""

HOUR = 3600

setting = BenchSetting.from_environment()
app = make_app(setting)
bridge = make_bridge(app, setting)

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
