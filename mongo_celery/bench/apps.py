"""The Celery apps of measured processes that have a bridge."""

from __future__ import annotations

from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bench.setting import BenchSetting


def app_with_bridge(setting: BenchSetting) -> tuple[Celery, Bridge]:
    """An app and its bridge: named, placed and begun as the setting says, and with its options."""
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
    return app, bridge
