"""What follows an order. A message may come twice: `once` makes the effects single."""

from typing import Any

from mongo_celery import once
from shop.celery import app, database


@app.task
@once(lambda: database["done"])
def send_receipt(order: int, *, session: Any) -> None:
    """Send the receipt; here it is written down."""
    database["receipts"].insert_one({"order": order}, session=session)


@app.task
@once(lambda: database["done"])
def reserve(article: str, *, session: Any) -> None:
    """Take one article from the stock."""
    database["stock"].update_one({"_id": article}, {"$inc": {"left": -1, "reserved": 1}}, session=session)
