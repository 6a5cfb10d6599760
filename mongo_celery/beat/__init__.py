"""A beat that fails over: `celery -A shop beat -S mongo_celery.beat:Scheduler`, on any number of machines."""

from __future__ import annotations

from mongo_celery.beat.scheduler import Scheduler

__all__ = ["Scheduler"]
