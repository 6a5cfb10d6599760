"""
What follows an order: its parcel is packed, once, and what was packed is sent.

The decision to send is made by the write that packs, since a handler that runs again finds the parcel packed.
"""

import os
import signal

from mongo_celery import Change, once
from shop.celery import app, bridge, parcels


@bridge.on_change("shop.orders", operations={"insert"})
def pack(change: Change) -> None:
    """Pack the parcel of an order, if it waits; then have it sent."""
    order = change.document_key["_id"]
    waiting, packed = {"_id": order, "state": "waiting"}, {"$set": {"state": "packed"}}
    fenced = change.fenced("shop.parcels")
    if change["fullDocument"]["how"] == "outbox":
        fenced.update_one(waiting, parcels.with_tasks(packed, [send.s(order)], id=order))
        accident(order)
    elif fenced.update_one(waiting, packed).matched_count:
        accident(order)
        send.delay(order)


@app.task
@once(lambda: bridge.collection("shop.done"), key=lambda order: order)
def send(order: str) -> None:
    """Send the parcel; here it is written down."""
    bridge.collection("shop.sent").insert_one({"order": order})


def accident(order: str) -> None:
    """What a deploy, the out-of-memory killer or a power cut do: here once to each order that says so."""
    struck = bridge.collection("shop.orders").update_one({"_id": order, "accident": True}, {"$unset": {"accident": 1}})
    if struck.modified_count:
        os.kill(os.getpid(), signal.SIGKILL)
