"""What is sent with an order: an ordinary task, which runs inside the app's context like a view."""

from celery import shared_task

from mongo_celery import once
from shop.extensions import bridge, mongo


@shared_task
@once(lambda: bridge.collection("done"), key=lambda order, what: [order, what])
def confirm(order: str, what: str) -> None:
    """Send the confirmation; here it is written down."""
    mongo.db.confirmations.insert_one({"order": order, "what": what})
