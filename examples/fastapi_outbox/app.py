"""
A FastAPI app with PyMongo's async client, whose documents are saved with their tasks, by one write.

    uvicorn app:api
    celery -A app.celery worker
    celery -A app.celery beat
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bson import ObjectId
from celery import Celery
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel
from pymongo import AsyncMongoClient, MongoClient, ReturnDocument

from mongo_celery import STORED_ID, Outbox, once

MONGO_URL = os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0")

celery = Celery("shop", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"))
client: MongoClient[dict[str, Any]] = MongoClient(MONGO_URL, connect=False)  # of tasks, and of the outbox's thread
orders = Outbox(celery, lambda: client.shop.orders, name="orders", sweep_after=1, sweep_every=1, claim_ttl=2)


@celery.task
@once(lambda: client.shop.done, key=lambda order, what: [order, what])
def confirm(order: str, what: str) -> None:
    """Send the confirmation; here it is written down."""
    client.shop.confirmations.insert_one({"order": order, "what": what})


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The async client belongs to the event loop of the server."""
    async with AsyncMongoClient[dict[str, Any]](MONGO_URL) as mongo:
        app.state.orders = mongo.shop.orders
        yield


api = FastAPI(lifespan=lifespan)


class NewOrder(BaseModel):
    """What a customer sends."""

    customer: str


@api.post("/orders", status_code=201)
async def place(order: NewOrder, request: Request) -> dict[str, Any]:
    """Save a new order with a task that needs its id: one write of the async driver."""
    document = orders.with_tasks({**order.model_dump(), "status": "new"}, [confirm.s(STORED_ID, "placed")])
    done = await request.app.state.orders.insert_one(document)
    orders.dispatch(done.inserted_id)
    return {"order": str(done.inserted_id)}


@api.post("/orders/{identity}/pay")
async def pay(identity: str, request: Request) -> dict[str, Any]:
    """Change an order and start a task with it; one that is paid already is not paid again."""
    paid = orders.with_tasks({"$set": {"status": "paid"}}, [confirm.s(identity, "paid")])
    found = await request.app.state.orders.find_one_and_update(
        {"_id": ObjectId(identity), "status": "new"}, paid, {"status": 1}, return_document=ReturnDocument.AFTER
    )
    if found is None:
        raise HTTPException(409, "it is not there, or paid already")
    orders.dispatch(found["_id"])
    return {"order": identity, "status": found["status"]}
