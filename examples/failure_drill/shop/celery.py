"""The shop's app: `celery -A shop listener`, `celery -A shop worker`."""

import os

from celery import Celery

from mongo_celery import Bridge

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"), include=["shop.changes"])
bridge = Bridge(
    app,
    os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0"),
    name="shop",
    # Short times, so that the drill is: leave them out in a project of yours.
    lease_ttl=3,  # how soon another listener leads when one was killed
    claim_ttl=2,  # how soon a change starts again when its worker was killed
    dispatch_grace=2,
)
