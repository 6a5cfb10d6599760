"""The pages of the shop. They write, and start tasks with what they write; what follows is up to `shop.changes`."""

from typing import Any

import mongoengine
from bson import ObjectId
from flask import Blueprint, abort, jsonify, request

from mongo_celery import STORED_ID, Event
from shop.extensions import mongo, orders
from shop.models import Order
from shop.tasks import confirm

pages = Blueprint("pages", __name__)


@pages.post("/orders")
def place() -> Any:
    """Save a new order with a task that needs its id: one write of MongoEngine."""
    order = Order(customer=request.form.get("customer"))
    try:
        order.save(
            outbox=orders,
            tasks=[confirm.s(STORED_ID, "placed")],
            events=[Event("order.placed", {"customer": order.customer})],
        )
    except mongoengine.ValidationError as error:
        abort(400, str(error))
    return jsonify(order=str(order.pk)), 201


@pages.post("/orders/<identity>/pay")
def pay(identity: str) -> Any:
    """Change an order that MongoEngine has read, and start a task with it."""
    order = Order.objects(pk=identity).first() or abort(404)
    order.status = "paid"
    order.save(outbox=orders, tasks=[confirm.s(identity, "paid")])
    return jsonify(order=identity, status=order.status)


@pages.post("/orders/<identity>/ship")
def ship(identity: str) -> Any:
    """The same where nothing needs to be read; and one lamp less, by Flask-PyMongo."""
    shipped = orders.with_tasks({"$set": {"status": "shipped"}}, [confirm.s(identity, "shipped")])
    found = Order.objects(pk=identity, status="paid").update_one(__raw__=shipped)
    orders.dispatch(ObjectId(identity))
    if found:
        mongo.db.stock.update_one({"_id": "lamp"}, {"$inc": {"left": -1}})
    return jsonify(order=identity, shipped=bool(found))


@pages.get("/orders/<ObjectId:identity>")
def show(identity: ObjectId) -> Any:
    """What the handler has rendered: a moment behind, and read by one look-up."""
    return mongo.db.pages.find_one_or_404({"_id": identity})["text"]
