"""The Celery app whose bridge delivers the outbox: nothing is dispatched by its writers."""

from __future__ import annotations

from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bench.setting import BenchSetting

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
)
# The task is another app's, so that the workers that deliver do not run it too.
outbox = bridge.outbox(f"{setting.database}.orders", at_once=False, sweep_every=None, foreign_tasks=True)
