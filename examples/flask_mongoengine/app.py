"""
A Flask app with MongoEngine documents whose tasks are saved with them.

    flask --app app run
    celery -A app.celery worker
    celery -A app.celery beat
"""

import os
from typing import Any

import mongoengine
from celery import Celery
from flask import Flask, abort, jsonify, request

from mongo_celery import Event, Outbox, once

MONGO_URL = os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0")

mongoengine.connect("shop", host=MONGO_URL, connect=False, uuidRepresentation="standard")
app = Flask(__name__)
celery = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"))


class Order(mongoengine.Document):  # type: ignore[misc]
    """An order. `pendingEvents` belongs to the outbox, so the class need not know it: strict is off."""

    customer = mongoengine.StringField(required=True)
    status = mongoengine.StringField(default="new")
    meta = {"collection": "orders", "strict": False}  # noqa: RUF012 - as MongoEngine wants it


def orders_collection() -> Any:
    """The collection of the model; without MongoEngine's side effect of making indexes."""
    return Order._get_db()[Order._get_collection_name()]  # noqa: SLF001


orders = Outbox(celery, orders_collection, name="orders", sweep_after=1, sweep_every=1)


@celery.task
@once(lambda: Order._get_db()["done"])  # noqa: SLF001
def confirm(order: str) -> None:
    """Send the confirmation; here it is written down."""
    Order._get_db()["confirmations"].insert_one({"order": order})  # noqa: SLF001


@app.post("/orders")
def place() -> Any:
    """Save a new order with its task."""
    order = Order(customer=request.form.get("customer"))
    try:
        order.validate()
    except mongoengine.ValidationError as error:
        abort(400, str(error))
    document = order.to_mongo().to_dict()
    inserted = orders.insert_one(document, events=[Event("order.placed", {"customer": order.customer})])
    identity = str(inserted.inserted_id)
    orders.delay(inserted.inserted_id, confirm, identity)
    return jsonify(order=identity), 201


@app.post("/orders/<identity>/pay")
def pay(identity: str) -> Any:
    """Change an order that MongoEngine has read, and start a task with it."""
    order = Order.objects(pk=identity).first() or abort(404)
    orders.update_one({"_id": order.pk}, {"$set": {"status": "paid"}}, tasks=[confirm.s(f"{identity} is paid")])
    return jsonify(order=identity, status=order.reload().status)
