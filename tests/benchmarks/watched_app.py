"""The Celery app whose bridge delivers the outbox: nothing is dispatched by its writers."""

from __future__ import annotations

from mongo_celery.bench.setting import BenchSetting, make_app, make_bridge

setting = BenchSetting.from_environment()
app = make_app(setting)
bridge = make_bridge(app, setting)
# The task is another app's, so that the workers that deliver do not run it too.
outbox = bridge.outbox(f"{setting.database}.orders", at_once=False, sweep_every=None, foreign_tasks=True)
