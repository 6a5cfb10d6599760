"""The Celery app, its bridge, and the outbox of the orders: `celery -A shop listener`, `celery -A shop worker`."""

import os

from celery import Celery

from mongo_celery import Bridge, once

MONGO_URL = os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0")

app = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"), include=["shop.changes"])
bridge = Bridge(app, MONGO_URL, name="shop")
# The listener delivers what a killed process has left behind; no beat is needed.
orders = bridge.outbox("shop.orders", sweep_every=None)


@app.task
@once(lambda: bridge.collection("shop.done"), key=lambda order, what: [order, what])
def confirm(order: str, what: str) -> None:
    """Send the confirmation; here it is written down."""
    bridge.collection("shop.confirmations").insert_one({"order": order, "what": what})
