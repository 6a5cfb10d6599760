"""The Celery app of the mode with a bulk handler, which does nothing with its lists unless it is given work."""

from __future__ import annotations

from mongo_celery.bench.apps import app_with_bridge
from mongo_celery.bench.handler_work import handler_work
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch
from mongo_celery.bridge.change import Changes

setting = BenchSetting.from_environment()
app, bridge = app_with_bridge(setting)

_started = Stopwatch(setting.clock, "started")
_work = handler_work(setting)


@bridge.on_changes(f"{setting.database}.orders", batch_size=500)
def handler(changes: Changes) -> None:
    """The handler of a list: each of its changes has a lap, as in all modes."""
    for change in changes:
        now = _started.lap()
        if _work is not None:
            _work.on(change.full_document, now)
