"""
A Flask app with MongoEngine documents that are saved with their tasks, by one write.

    flask --app app run
    celery -A app.celery worker
    celery -A app.celery beat
"""

import os
from typing import Any

import mongoengine
from bson.json_util import RELAXED_JSON_OPTIONS
from celery import Celery
from flask import Flask, abort, jsonify, request

from mongo_celery import Event, Outbox, once
from mongo_celery.contrib.mongoengine import OutboxMixin

MONGO_URL = os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0")

mongoengine.connect("shop", host=MONGO_URL, connect=False, uuidRepresentation="standard")
app = Flask(__name__)
celery = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"))


class Order(OutboxMixin, mongoengine.Document):  # type: ignore[misc]
    """An order, with the outbox's field while something is pending."""

    customer = mongoengine.StringField(required=True)
    status = mongoengine.StringField(default="new")
    meta = {"collection": "orders"}  # noqa: RUF012 - as MongoEngine wants it


orders = Outbox(celery, Order._get_collection, name="orders", sweep_after=1, sweep_every=1, claim_ttl=2)  # noqa: SLF001


@celery.task
@once(lambda: Order._get_db()["done"], key=lambda order, what: [order, what])  # noqa: SLF001
def confirm(order: str, what: str) -> None:
    """Send the confirmation; here it is written down."""
    Order._get_db()["confirmations"].insert_one({"order": order, "what": what})  # noqa: SLF001


@app.post("/orders")
def place() -> Any:
    """Save a new order with a task that needs its id: one write."""
    order = Order(customer=request.form.get("customer"))
    try:
        order.save(
            outbox=orders,
            tasks=[lambda _id: confirm.s(str(_id), "placed")],
            events=[Event("order.placed", {"customer": order.customer})],
        )
    except mongoengine.ValidationError as error:
        abort(400, str(error))
    return jsonify(order=str(order.pk)), 201


@app.post("/orders/<identity>/pay")
def pay(identity: str) -> Any:
    """Change an order that MongoEngine has read, and start a task with it."""
    order = Order.objects(pk=identity).first() or abort(404)
    order.status = "paid"
    order.save(outbox=orders, tasks=[confirm.s(identity, "paid")])
    return jsonify(order=identity, status=order.status)


@app.post("/orders/<identity>/ship")
def ship(identity: str) -> Any:
    """The same where nothing needs to be read: `with_tasks` gives what `update_one` would take."""
    shipped = orders.with_tasks({"$set": {"status": "shipped"}}, [confirm.s(identity, "shipped")])
    found = Order.objects(pk=identity, status="paid").update_one(__raw__=shipped)
    orders.dispatch()
    return jsonify(order=identity, shipped=bool(found))


@app.get("/orders/<identity>")
def show(identity: str) -> Any:
    """Also while something is pending, the document is the user's alone."""
    order = Order.objects(pk=identity).first() or abort(404)
    return app.response_class(order.to_json(json_options=RELAXED_JSON_OPTIONS), mimetype="application/json")
