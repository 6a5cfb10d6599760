"""
The FastAPI app, which writes with PyMongo's async client: `uvicorn shop.api:api`.

Nothing of it runs in the listener or in workers, and it needs neither of them to answer.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from bson import ObjectId
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from pymongo import AsyncMongoClient, ReturnDocument
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.database import AsyncDatabase

from mongo_celery import STORED_ID, transactional
from mongo_celery.locking import after_commit
from shop.celery import MONGO_URL, confirm, orders


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The async client belongs to the event loop of the server: each process opens it when it starts to serve."""
    async with AsyncMongoClient[dict[str, Any]](MONGO_URL) as client:
        app.state.mongo = client
        yield


api = FastAPI(lifespan=lifespan)


def database(request: Request) -> AsyncDatabase[dict[str, Any]]:
    """A dependency: the shop's database."""
    return request.app.state.mongo.shop  # type: ignore[no-any-return]


Shop = Annotated[AsyncDatabase[dict[str, Any]], Depends(database)]


class NewOrder(BaseModel):
    """What a customer sends."""

    customer: str


@api.post("/orders", status_code=201)
async def place(order: NewOrder, shop: Shop) -> dict[str, Any]:
    """Save a new order with a task that needs its id: one write of the async driver."""
    document = orders.with_tasks({**order.model_dump(), "status": "new"}, [confirm.s(STORED_ID, "placed")])
    done = await shop.orders.insert_one(document)
    orders.dispatch(done.inserted_id)
    return {"order": str(done.inserted_id)}


@api.post("/orders/{identity}/pay")
async def pay(identity: str, shop: Shop) -> dict[str, Any]:
    """Change an order and start a task with it; one that is paid already is not paid again."""
    paid = orders.with_tasks({"$set": {"status": "paid"}}, [confirm.s(identity, "paid")])
    found = await shop.orders.find_one_and_update(
        {"_id": ObjectId(identity), "status": "new"}, paid, {"status": 1}, return_document=ReturnDocument.AFTER
    )
    if found is None:
        raise HTTPException(409, "it is not there, or not new")
    orders.dispatch(found["_id"])
    return {"order": identity, "status": found["status"]}


@api.post("/orders/{identity}/cancel")
@transactional(lambda: api.state.mongo, timeout=20)
async def cancel(identity: str, shop: Shop, *, session: AsyncClientSession) -> dict[str, Any]:
    """Two documents and a task, or nothing: a paid order is canceled, and its customer has a credit."""
    canceled = orders.with_tasks({"$set": {"status": "canceled"}}, [confirm.s(identity, "canceled")])
    found = await shop.orders.find_one_and_update(
        {"_id": ObjectId(identity), "status": "paid"}, canceled, session=session
    )
    if found is None:
        raise HTTPException(409, "it is not there, or not paid")
    credit = {"$inc": {"credits": 1}}
    await shop.customers.update_one({"_id": found["customer"]}, credit, upsert=True, session=session)
    after_commit(lambda: orders.dispatch(found["_id"]))
    return {"order": identity, "status": "canceled"}


@api.get("/orders/{identity}")
async def line(identity: str, shop: Shop) -> dict[str, Any]:
    """What the handler has made of the order: a moment behind, and read by one look-up."""
    found = await shop.order_lines.find_one({"_id": ObjectId(identity)})
    if found is None:
        raise HTTPException(404, "no line yet")
    return {"order": identity, "text": found["text"]}
