"""
A bridge with a handler that does nothing and one that takes a second, in a group or not.

Everything comes from the environment: `PROJECT_MONGO`, `PROJECT_BROKER`, `PROJECT_NAMES` (the name that all databases
begin with), `PROJECT_OPTIONS` (the bridge's options as JSON) and `PROJECT_GROUP` (of the slow handler; empty for none).
"""

from __future__ import annotations

import json
import os
import time

from celery import Celery

from mongo_celery import Bridge, Change

NAMES = os.environ["PROJECT_NAMES"]
SLOW_SECONDS = 1.0

app = Celery("groups", broker=os.environ["PROJECT_BROKER"])
bridge = Bridge(
    app,
    os.environ["PROJECT_MONGO"],
    name="shop",
    database=f"{NAMES}_state",
    **json.loads(os.environ.get("PROJECT_OPTIONS", "{}")),
)


@bridge.on_change(f"{NAMES}_data.quick")
def quick(change: Change) -> None:
    """Do nothing."""
    del change


@bridge.on_change(f"{NAMES}_data.slow", group=os.environ.get("PROJECT_GROUP") or None)
def slow(change: Change) -> None:
    """Keep a slot of the worker."""
    del change
    time.sleep(SLOW_SECONDS)
