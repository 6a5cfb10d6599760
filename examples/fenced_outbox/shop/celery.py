"""The shop's app: `celery -A shop listener`, `celery -A shop worker`."""

import os

from celery import Celery

from mongo_celery import Bridge

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"), include=["shop.changes"])
bridge = Bridge(
    app,
    os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0"),
    name="shop",
    # Short times, so that the example is: leave them out in a project of yours.
    claim_ttl=2,  # both say how soon a change starts again when its worker was killed
    dispatch_grace=2,
)
# The listener delivers what a killed worker has left behind; no beat is needed.
parcels = bridge.outbox("shop.parcels", sweep_every=None)
