"""The Celery app of the modes with a bridge: one handler that does nothing."""

from __future__ import annotations

from mongo_celery.bench.apps import app_with_bridge
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch
from mongo_celery.bridge.change import Change

setting = BenchSetting.from_environment()
app, bridge = app_with_bridge(setting)

_started = Stopwatch(setting.clock, "started")


@bridge.on_change(f"{setting.database}.orders")
def handler(change: Change) -> None:
    """The handler of a change."""
    del change
    _started.lap()
