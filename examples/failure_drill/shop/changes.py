"""What follows an order: it is booked to its customer's account. Booked twice, or not at all, would be seen there."""

import os
import time

from mongo_celery import Change
from shop.celery import bridge

RELEASE = int(os.environ.get("RELEASE", "1"))
HANGS_SECONDS = 600


@bridge.on_change(
    "shop.orders",
    operations={"insert"},
    transactional=True,  # the booking and the mark that it is done: both, or neither
    autoretry_for=(ValueError,),
    default_retry_delay=1,
    max_retries=2,
    failure_policy="dead_letter",  # after that; the partition goes on
)
def book(change: Change) -> None:
    """Add the order to what its customer has to pay."""
    order = change["fullDocument"]
    note_start(order)
    booked = {"$inc": {"orders": 1, "euros": euros(order["price"])}}
    accounts = bridge.collection("shop.accounts")
    accounts.update_one({"_id": order["customer"]}, booked, upsert=True, session=change.session)


def euros(price: object) -> int:
    """The first release has not heard of prices in words."""
    if RELEASE > 1 and price == "ten":
        return 10
    return int(str(price))


def note_start(order: dict[str, object]) -> None:
    """Outside the transaction: what was begun is known, whatever comes of it. An order that hangs does so once."""
    starts = bridge.collection("shop.starts")
    before = starts.count_documents({"order": order["_id"]})
    starts.insert_one({"order": order["_id"], "pid": os.getpid()})
    if order.get("hangs") and not before:
        time.sleep(HANGS_SECONDS)
