"""The Celery app of the modes without a bridge: tasks that do nothing, as people write them."""

from __future__ import annotations

from bson import json_util
from celery import Celery

from mongo_celery.bench.handler_work import handler_work
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch

setting = BenchSetting.from_environment()
app = Celery("mongo_celery_bench", broker=setting.redis_url)
app.conf.task_default_queue = setting.name

_started = Stopwatch(setting.clock, "started")
_ended = Stopwatch(setting.clock, "ended")
_work = handler_work(setting)


@app.task(ignore_result=True)
def only(event: str) -> None:
    """The one task of an event."""
    now = _started.lap()
    if _work is not None:
        _work.on(json_util.loads(event)["fullDocument"], now)


@app.task(ignore_result=True)
def first(event: str) -> None:
    """The first task of a chain."""
    del event
    _started.lap()


@app.task(ignore_result=True)
def second(token: str) -> None:
    """The second task of a chain."""
    del token
    _ended.lap()
