"""The Celery app whose bridge delivers the outbox: nothing is dispatched by its writers."""

from __future__ import annotations

from mongo_celery.bench.apps import app_with_bridge
from mongo_celery.bench.setting import BenchSetting

setting = BenchSetting.from_environment()
app, bridge = app_with_bridge(setting)
# The task is another app's, so that the workers that deliver do not run it too.
outbox = bridge.outbox(f"{setting.database}.orders", at_once=False, sweep_every=None, foreign_tasks=True)
