"""A Celery app with two bridges, one of whose MongoDBs is away, and with a module of tasks that may not be there."""

from __future__ import annotations

import os

from celery import Celery

from mongo_celery import Bridge

app = Celery("halves", broker=os.environ["PROJECT_BROKER"], include=os.environ.get("PROJECT_INCLUDE", "os").split())
Bridge(app, os.environ["PROJECT_MONGO"], name="there", database=f"{os.environ['PROJECT_NAMES']}_state")
Bridge(app, "mongodb://127.0.0.1:1/?replicaSet=rs0", name="away")
