"""The Celery app of the modes with a bridge: one handler, which does nothing unless a measurement gives it work."""

from __future__ import annotations

from mongo_celery.bench.apps import app_with_bridge
from mongo_celery.bench.handler_work import handler_work
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch
from mongo_celery.bridge.change import Change

setting = BenchSetting.from_environment()
app, bridge = app_with_bridge(setting)

_started = Stopwatch(setting.clock, "started")
_work = handler_work(setting)


@bridge.on_change(f"{setting.database}.orders", **setting.handler)
def handler(change: Change) -> None:
    """The handler of a change."""
    now = _started.lap()
    if _work is not None:
        _work.on(change.full_document, now)
