"""What follows when a customer leaves. A message may come twice: `once` makes the effects single."""

from typing import Any

from mongo_celery import once
from shop.celery import app, database


@app.task
@once(lambda: database["done"])
def say_goodbye(customer: str, *, session: Any) -> None:
    """Write to the customer; here it is written down."""
    database["goodbyes"].insert_one({"customer": customer}, session=session)


@app.task
@once(lambda: database["done"])
def refund(customer: str, amount: int, *, session: Any) -> None:
    """Pay back what the customer had left."""
    database["refunds"].insert_one({"customer": customer, "amount": amount}, session=session)
