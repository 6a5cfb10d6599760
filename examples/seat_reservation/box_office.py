"""The Celery app of the box office, and the one task that sells seats."""

import os
import time
from functools import cache
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from mongo_celery import select_for_update, select_many_for_update, transactional
from mongo_celery.errors import TransactionTimeoutError

PRICE = 10
THINKING_SECONDS = 0.02

app = Celery("box_office", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"))
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    result_backend=os.environ.get("REDIS_URL", "redis://localhost:6379/0"),
    worker_prefetch_multiplier=1,
)


@cache
def client() -> MongoClient[dict[str, Any]]:
    """Open the client where it is first used: in the pool's process, after the fork."""
    return MongoClient(os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0"))


@app.task(autoretry_for=(TransactionTimeoutError,), max_retries=3)
@transactional(client)
def book(request: str, customer: str, seats: list[str], *, session: ClientSession) -> str:
    """
    Sell all of these seats to a customer, or none.

    `autoretry_for` stands above `transactional`: conflicts are repeated inside, and Celery never sees them.
    """
    theater = client()["theater"]
    if theater["bookings"].find_one({"_id": request}, session=session):
        return "booked"  # the message came a second time

    free = {"_id": {"$in": seats}, "customer": None}
    locked = select_many_for_update(theater["seats"], free, session=session)
    if len(locked) < len(seats):
        return "taken"
    wallet = select_for_update(theater["customers"], {"_id": customer}, session=session)
    price = PRICE * len(seats)
    if wallet["money"] < price:
        return "too expensive"

    time.sleep(THINKING_SECONDS)  # time for the others to come in between
    theater["seats"].update_many({"_id": {"$in": seats}}, {"$set": {"customer": customer}}, session=session)
    theater["customers"].update_one({"_id": customer}, {"$inc": {"money": -price}}, session=session)
    booking = {"_id": request, "customer": customer, "seats": seats, "price": price}
    theater["bookings"].insert_one(booking, session=session)
    return "booked"
