"""
The app on which `test_outbox_cli.py` runs the command lines: two outboxes, no bridge.

Everything comes from the environment: `PROJECT_MONGO`, `PROJECT_BROKER`, `PROJECT_NAMES` (the name that all
databases begin with), and `PROJECT_KNOWS` (set if the app accepts the serializer of the task `bill`).
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Outbox
from tests.fixtures.serializer import ACCEPTED

NAMES = os.environ["PROJECT_NAMES"]

app = Celery("outbox_cli", broker=os.environ["PROJECT_BROKER"])
if os.environ.get("PROJECT_KNOWS"):
    app.conf.accept_content = ACCEPTED


@cache
def _client() -> MongoClient[dict[str, Any]]:
    return MongoClient(os.environ["PROJECT_MONGO"])


def _collection(name: str) -> Collection[dict[str, Any]]:
    return _client()[f"{NAMES}_data"][name]


orders = Outbox(
    app,
    lambda: _collection("orders"),
    name="orders",
    database=f"{NAMES}_state",
    sweep_after=0.01,
    sweep_every=1,
    failure_policy="dead_letter",
)
parcels = Outbox(app, lambda: _collection("parcels"), name="parcels", database=f"{NAMES}_state", sweep_every=None)


@app.task
def receipt(order: int) -> None:
    """A task that every version of the app can deliver."""


@app.task
def bill(order: int) -> None:
    """A task that the app can deliver if it accepts its serializer."""
