"""Users' code: outboxes, `once`, transactions, locks, two-phase commit, errors. It is checked, and never run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from celery import Celery
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.results import InsertManyResult, InsertOneResult, UpdateResult

from mongo_celery import (
    STORED_ID,
    Bridge,
    Event,
    Outbox,
    OutboxCollection,
    Participant,
    TwoPhaseCommit,
    once,
    select_for_update,
    select_many_for_update,
    transactional,
)
from mongo_celery.errors import (
    ConfigurationError,
    DocumentLockedError,
    MongoCeleryError,
    OutboxRefusedError,
    TransactionCanceledError,
)
from mongo_celery.locking import after_commit

app = Celery("shop")
client: MongoClient[dict[str, Any]] = MongoClient()
bridge = Bridge(app)
orders = bridge.outbox("shop.orders", max_attempts=9)
parcels = OutboxCollection(app, lambda: client.shop.outbox, sweep_every=timedelta(seconds=9))
carts = Outbox(app, client.shop.carts, at_once=False)
coordinator = TwoPhaseCommit(app, lambda: client.bank.transactions, timeout=timedelta(seconds=5))


@app.task
@once(lambda: client.shop.done, keep=timedelta(days=1))
def send_receipt(order_id: str) -> str:
    return order_id


@once(lambda: client.shop.done, key=str.upper)
def charge(order_id: str, *, session: ClientSession) -> int:
    return client.shop.charges.update_one({"_id": order_id}, {"$inc": {"n": 1}}, session=session).modified_count


@transactional(lambda: client, outbox=parcels)
def book(seat: str, *, session: ClientSession) -> dict[str, Any] | None:
    found: dict[str, Any] | None = select_for_update(client.shop.seats, {"_id": seat}, session=session, nowait=True)
    others: list[dict[str, Any]] = select_many_for_update(client.shop.seats, {"row": 1}, session=session, limit=3)
    parcels.add([send_receipt.s(seat)], [Event("seat.booked", {"others": len(others)})], session=session, key=seat)
    after_commit(lambda: None, session)
    return found


def use() -> None:
    assert_type(orders, Outbox)
    written = orders.insert_one({"lines": [1]}, tasks=[send_receipt.s(STORED_ID)], events=[Event("order.placed")])
    assert_type(written, InsertOneResult)
    assert_type(carts.update_one({"_id": 1}, {"$set": {"n": 1}}, upsert=True), UpdateResult)
    assert_type(carts.insert_many([{"_id": 1}], tasks=[send_receipt.s("a")]), InsertManyResult)
    assert_type(orders.name, str)
    assert_type(charge("a"), int)
    book("12a")
    with transactional(client) as session:
        assert_type(session, ClientSession)
    part = Participant(client.bank.accounts, 1, {"$inc": {"balance": -5}}, require={"balance": {"$gte": 5}})
    try:
        coordinator.run(coordinator.begin([part]))
    except TransactionCanceledError as error:
        assert_type(error.retryable, bool)
    except (DocumentLockedError, OutboxRefusedError, ConfigurationError) as error:
        raise error from None
    except MongoCeleryError as error:
        raise SystemExit(error.args) from error
