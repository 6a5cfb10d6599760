"""The Celery app of the modes with a bridge: one handler that does nothing."""

from __future__ import annotations

from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch
from mongo_celery.bridge.change import Change

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

_started = Stopwatch(setting.clock, "started")


@bridge.on_change(f"{setting.database}.orders")
def handler(change: Change) -> None:
    """The handler of a change."""
    del change
    _started.lap()
