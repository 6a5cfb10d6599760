"""A Celery app without a bridge, as a colleague's app on the same broker."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("bare", broker=os.environ.get("PROJECT_BROKER", "memory://"))
