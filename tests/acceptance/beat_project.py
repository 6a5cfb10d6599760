"""
The app of `test_beat_processes.py`, with a beat and no bridge.

Its second entry is due at each whole second of the clock, like a crontab, and each message says which one.
"""

from __future__ import annotations

import json
import os
from datetime import datetime

from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import schedule

app = Celery("beat", broker=os.environ["PROJECT_BROKER"])
app.conf.update(
    mongo_celery_database_url=os.environ["PROJECT_MONGO"],
    mongo_celery_database=f"{os.environ['PROJECT_NAMES']}_state",
    mongo_celery_lease_ttl=json.loads(os.environ["PROJECT_OPTIONS"])["lease_ttl"],
    result_expires=None,
    beat_scheduler="mongo_celery.beat:Scheduler",
)


class EachSecond(schedule):
    """Due once in each second of the clock."""

    second: int | None = None

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:  # type: ignore[override]
        now = self.now().timestamp()
        is_due = int(now) > int(last_run_at.timestamp())
        EachSecond.second = int(now) if is_due else None
        return is_due, 1.0 - now % 1.0

    @classmethod
    def take(cls) -> int | None:
        """Return the second that was last decided on, once: a run of an earlier leader has none."""
        second, cls.second = cls.second, None
        return second


@app.on_after_finalize.connect
def add_entries(sender: Celery, **_signal: object) -> None:
    sender.add_periodic_task(0.2, sender.signature("beat.often"), name="often")
    sender.conf.beat_schedule["second"] = {
        "task": "beat.second",
        "schedule": EachSecond(1.0),
        "kwargs": {"second": BeatLazyFunc(EachSecond.take)},
    }
