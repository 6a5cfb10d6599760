"""The Celery app, and the bridge beside it."""

import os

from celery import Celery

from mongo_celery import Bridge

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"), include=["shop.changes"])
bridge = Bridge(app, os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0"), name="shop")
