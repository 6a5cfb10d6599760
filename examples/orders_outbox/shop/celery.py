"""The shop's app: `celery -A shop worker`, `celery -A shop beat`."""

import os

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Outbox

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"), include=["shop.tasks"])
client: "MongoClient[dict[str, object]]" = MongoClient(
    os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0"), connect=False
)
database = client["shop"]
# Short times, so that the example is: leave them out in a project of yours.
orders = Outbox(app, database["orders"], sweep_after=1, sweep_every=1, claim_ttl=2)
