"""Effects that meet in one document, or one behind the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mongoengine
import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient
from pymongo.client_session import ClientSession

from mongo_celery import STORED_ID, Change, Participant, once, select_for_update, transactional
from mongo_celery.contrib.mongoengine import OutboxMixin
from mongo_celery.errors import (
    ConfigurationError,
    OutboxRefusedError,
    StaleFencingTokenError,
    TransactionCanceledError,
    TransactionStateError,
)
from mongo_celery.testing import pending_entries
from tests.integration.pairs_rig import TABLE, Shop, label, note_nothing, together

row = TABLE.row


@row("fenced-fenced", "a mirror of a mirror ends as its source: full_document has no stamps")
def _(shop: Shop) -> None:
    shop.mirror("orders", "copies", failure_policy="dead_letter")
    shop.mirror("copies", "thirds", failure_policy="dead_letter")
    with shop.run() as runner:
        shop.put(1, 2, 3)
        shop.put(1, n=1)
        shop.orders.delete_one({"_id": 2})
        runner.deliver(raises=False)
        assert shop.letters() == []
    assert shop.documents("orders") == shop.documents("copies") == shop.documents("thirds")


@row("fenced-transactional", "of a stale execution nothing is written; of one that meets a conflict all, once")
def _(shop: Shop) -> None:
    @transactional(lambda: shop.bridge.client)
    def write(change: Change, *, session: ClientSession) -> None:
        shop.add(label(change), session)
        change.fenced(shop.name("sums")).update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True, session=session)
        shop.conflict(session)

    shop.bridge.on_change(shop.orders.full_name, name="write")(write)
    with shop.run() as runner:
        runner.stall("write")
        shop.put(1)
        calls = runner.deliver().calls
    assert [type(call.error) for call in calls] == [type(None), StaleFencingTokenError]
    assert (shop.counted(), shop.documents("sums")) == ({"1.0": 1}, [{"_id": 1, "n": 1}])


@row("fenced-transactional.own_client", "inside a transaction of the app's own client a fenced write is refused")
def _(shop: Shop) -> None:
    @transactional(lambda: shop.client)
    def write(change: Change, *, session: ClientSession) -> None:
        shop.add(label(change), session)
        change.fenced(shop.name("copies")).update_one(change.document_key, {"$set": {"n": 1}}, upsert=True)

    shop.bridge.on_change(shop.orders.full_name, failure_policy="dead_letter")(write)
    with shop.run() as runner:
        shop.put(1)
        (call,) = runner.deliver(raises=False).calls
    assert isinstance(call.error, ConfigurationError), call.error
    assert (shop.counted(), shop.documents("copies")) == ({}, [])


@row("fenced-once", "a step that is done already returns, and what follows it is written")
def _(shop: Shop) -> None:
    @once(lambda: shop.db["marks"], key=lambda key: key)
    def greet(key: int) -> Any:
        return shop.db["greetings"].insert_one({"key": key})

    @shop.bridge.on_change(shop.orders.full_name)
    def handle(change: Change) -> None:
        greet(change.document_key["_id"])
        copy = {"n": (change.full_document or {})["n"]}
        change.fenced(shop.name("copies")).replace_one(change.document_key, copy, upsert=True)

    with shop.run() as runner:
        shop.put(1)
        shop.put(1, n=2)
        runner.deliver()
    assert shop.documents("copies") == shop.documents("orders")
    assert len(shop.documents("greetings")) == 1


@row("fenced-outbox", "a replacement keeps what is pending in its target, and a delete loses none of it")
def _(shop: Shop) -> None:
    box = shop.outbox("copies")
    shop.mirror("orders", "copies", failure_policy="dead_letter")
    with shop.run() as runner:
        shop.put(1)
        runner.deliver()
        shop.db["copies"].update_one({"_id": 1}, box.with_tasks({"$set": {"x": 1}}, [shop.count.s("kept")]))
        shop.put(1, n=1)
        runner.deliver()
        assert len(pending_entries(box)) == 1
        shop.orders.delete_one({"_id": 1})
        runner.deliver(raises=False)
        shop.send(runner)
        if shop.letters():
            shop.replay(runner)
    assert (shop.counted(), shop.documents("copies")) == ({"kept": 1}, [])


@row("fenced-outbox.source", "a copy has nothing of what is pending in its source, whether it has tasks itself or not")
def _(shop: Shop) -> None:
    orders, copies = shop.outbox("orders"), shop.outbox("copies")
    shop.mirror("orders", "plain")
    shop.mirror("orders", "copies")

    @shop.bridge.on_change(shop.orders.full_name)
    def tell(change: Change) -> None:
        copy = copies.with_tasks(change.full_document or {}, [shop.count.s(STORED_ID)])
        change.fenced(shop.name("thirds")).replace_one({"_id": change.document_key["_id"]}, copy, upsert=True)

    with shop.run() as runner:
        shop.orders.insert_one(orders.with_tasks({"_id": 1, "n": 1}, [shop.count.s("order")]))
        runner.deliver()
        assert shop.documents("plain") == shop.documents("copies") == [{"_id": 1, "n": 1}]
        shop.send(runner)
    assert shop.counted() == {"order": 1}


@row("fenced-outbox.mongoengine", "a strict model that declares the stamps reads and saves what has tasks pending")
def _(shop: Shop) -> None:
    class Copy(OutboxMixin, mongoengine.Document):  # type: ignore[misc] # MongoEngine has no types
        number = mongoengine.IntField(primary_key=True)
        n = mongoengine.IntField()
        paid = mongoengine.BooleanField()
        fence = mongoengine.DictField(db_field="_fence")
        meta = {"collection": "copies", "db_alias": shop.db.name}  # noqa: RUF012 - as MongoEngine wants it

    box = shop.outbox("copies")
    mongoengine.connect(shop.db.name, alias=shop.db.name, host=shop.url, uuidRepresentation="standard")
    try:
        shop.mirror("orders", "copies")
        with shop.run() as runner:
            shop.put(1)
            runner.deliver()
            Copy.objects.get(number=1).save(outbox=box, tasks=[shop.count.s("saved")])
            shop.put(1, n=1)
            runner.deliver()
            found = Copy.objects.get(number=1)
            found.paid = True
            found.save()
            shop.put(1, n=2)
            runner.stall()
            shop.put(1, n=3)
            runner.deliver()
            shop.send(runner)
    finally:
        mongoengine.disconnect(shop.db.name)
    assert (shop.counted(), shop.documents("copies")) == ({"saved": 1}, [{"_id": 1, "n": 3}])


@row("fenced-collection", "a stale execution writes nothing and sends nothing")
def _(shop: Shop) -> None:
    @transactional(lambda: shop.bridge.client, outbox=shop.outbox_collection(source=lambda: shop.in_bridge("leaving")))
    def write(change: Change, *, session: ClientSession) -> None:
        shop.count.delay(f"task {label(change)}")
        change.fenced(shop.name("sums")).update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True, session=session)

    shop.bridge.on_change(shop.orders.full_name, name="write")(write)
    with shop.run() as runner:
        runner.stall()
        shop.put(1)
        runner.deliver()
        assert len(shop.send(runner)) == 1
    assert shop.documents("sums") == [{"_id": 1, "n": 1}]


@row("fenced-locks", "a write waits for who has locked the document, and neither is lost; no copy has the lock")
def _(shop: Shop) -> None:
    locked, wrote = threading.Event(), threading.Event()
    shop.mirror("orders", "copies")

    @shop.bridge.on_change(shop.orders.full_name)
    def rename(change: Change) -> None:
        wrote.set()
        change.fenced(shop.name("sums")).update_one({"_id": 1}, {"$set": {"name": "Ann"}})

    @transactional(shop.client)
    def hold(*, session: ClientSession) -> None:
        for name in ("sums", "orders"):
            select_for_update(shop.db[name], {"_id": 1}, session=session)
        locked.set()
        assert wrote.wait(60)
        shop.db["sums"].update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)

    shop.db["sums"].insert_one({"_id": 1, "n": 0})
    with shop.run() as runner:
        shop.put(1)
        holder = threading.Thread(target=hold)
        holder.start()
        assert locked.wait(60)
        runner.deliver()
        holder.join()
        shop.orders.update_one({"_id": 1}, {"$set": {"n": 7}})
        runner.deliver()
    (found,) = shop.documents("sums")
    assert (found["n"], found["name"]) == (1, "Ann")
    assert shop.documents("copies") == [{"_id": 1, "n": 7}]


@row("fenced-twophase", "of a repeated handler the transfer is there once, and a stamp is in nobody's way")
def _(shop: Shop) -> None:
    banks = [shop.bank(), shop.bank_by_markers()]

    @shop.bridge.on_change(shop.orders.full_name)
    def pay(change: Change) -> None:
        change.fenced(shop.name("accounts")).update_one({"_id": "A"}, {"$set": {"payer": "Ann"}})
        for bank in banks:
            bank.transfer("A", "B", 10, id=f"{bank.name} {label(change)}")

    with shop.run() as runner:
        runner.crash("called")
        shop.put(1)
        assert len(runner.deliver().calls) == 2
    assert shop.balances() == {"A": 80, "B": 120, "C": 100}
    assert shop.documents("accounts")[0]["payer"] == "Ann"


@row("fenced-asyncio", "an asynchronous collection is refused, and nothing is written")
def _(shop: Shop) -> None:
    asynchronous: Any = AsyncMongoClient(shop.url)

    @shop.bridge.on_change(shop.orders.full_name, failure_policy="dead_letter")
    def handle(change: Change) -> None:
        change.fenced(asynchronous[shop.db.name]["copies"]).replace_one({"_id": 1}, {"n": 1}, upsert=True)

    with shop.run() as runner:
        shop.put(1)
        (call,) = runner.deliver(raises=False).calls
    assert isinstance(call.error, ConfigurationError), call.error
    assert shop.documents("copies") == []


@row("once-once", "a task that comes twice, and its step that two tasks share, have run once, and all went on")
def _(shop: Shop) -> None:
    @once(lambda: shop.db["marks"], key=lambda order: order)
    def invoice(order: int) -> ObjectId:
        shop.add(f"invoice {order}")
        return ObjectId()  # which JSON cannot have, so that it is not kept

    def paid(order: int) -> None:
        invoice(order)
        shop.add("paid")

    def shipped(order: int, *, session: ClientSession) -> None:
        invoice(order)
        shop.add("shipped", session)

    tasks = [shop.task(each.__name__)(once(lambda: shop.db["marks"])(each)) for each in (paid, shipped)]
    with shop.run() as runner:
        for task in tasks:
            task.delay(7)
        runner.run_tasks(duplicates=True)
    assert shop.counted() == {"invoice 7": 1, "paid": 1, "shipped": 1}


@row("once-once.loop", "a step without key= is refused: its calls could not be told apart")
def _(shop: Shop) -> None:
    @once(lambda: shop.db["marks"])
    def mail(to: str) -> None:
        shop.add(to)

    @shop.task("notify")
    def notify() -> None:
        for to in ("ann", "bob"):
            mail(to)

    with shop.run() as runner:
        notify.delay()
        with pytest.raises(ConfigurationError):
            runner.run_tasks()
    assert shop.counted() == {}


@row("once-once.waits", "a handler whose step runs elsewhere waits, and has all of its retries afterwards")
def _(shop: Shop) -> None:
    began, hold, retries = threading.Event(), threading.Event(), []

    @once(lambda: shop.db["marks"], key=lambda key: key)
    def charge(key: int) -> None:
        shop.add(f"charge {key}")
        began.set()
        assert hold.wait(60)

    @shop.bridge.on_change(shop.orders.full_name, bind=True, autoretry_for=(OSError,), max_retries=2)
    def handle(self: Any, change: Change) -> None:
        retries.append(self.request.retries)
        charge(change.document_key["_id"])
        shop.fail(change)

    other = threading.Thread(target=charge, args=(1,))
    other.start()
    assert began.wait(60)
    shop.failing[1] = 2
    with shop.run() as runner:
        shop.put(1)
        runner.deliver(retries=False, raises=False)
        hold.set()
        other.join()
        runner.deliver()
    assert shop.counted() == {"charge 1": 1}
    assert (retries[0], retries[-3:]) == (0, [0, 1, 2])
    assert len(retries) >= 4


@row("once-outbox", "an entry that is delivered twice has run once")
def _(shop: Shop) -> None:
    box = shop.outbox("parcels")
    with shop.run() as runner:
        box.insert_one({"_id": "parcel"}, tasks=[shop.count.s(STORED_ID)])
        assert len(shop.send(runner, duplicates=True)) == 1
    assert shop.counted() == {"parcel": 1}


@row("once-twophase.whole_database", "a handler of a whole database runs for neither marks nor the log of transactions")
def _(shop: Shop) -> None:
    bank = shop.bank()

    @once(lambda: shop.db["marks"], key=lambda change: change.resume_token["_data"])
    def charge(change: Change) -> None:
        bank.transfer("A", "B", 1, id=change.resume_token["_data"])

    @shop.bridge.on_change(f"{shop.db.name}.*")
    def handle(change: Change) -> None:
        shop.seen.append(change.ns["coll"])
        if change.ns["coll"] == "orders":
            charge(change)

    with shop.run() as runner:
        shop.put(1)
        shop.orders.delete_one({"_id": 1})
        runner.deliver(limit=20)
    assert sorted(shop.seen) == [*["accounts"] * 4, *["orders"] * 2]


@row("once-asyncio", "a coroutine function is refused when it is decorated")
def _(shop: Shop) -> None:
    async def charge() -> None: ...

    with pytest.raises(ConfigurationError):
        once(lambda: shop.db["marks"])(charge)


@row("outbox-outbox", "two outboxes of one collection share what is pending, and each entry goes out once")
def _(shop: Shop) -> None:
    one, two = shop.outbox("docs", name="one"), shop.outbox("docs", name="two")
    with shop.run() as runner:
        for place in range(3):
            one.insert_one({"_id": place}, tasks=[shop.count.s(f"one {place}")])
            two.update_one({"_id": place}, {"$set": {"n": 1}}, tasks=[shop.count.s(f"two {place}")])
        shop.send(runner)
    assert shop.counted() == {f"{box} {n}": 1 for box in ("one", "two") for n in range(3)}


@row("outbox-collection.handler", "a handler's signature is refused by both, as its delay() is, and nothing is written")
def _(shop: Shop) -> None:
    handler: Any = shop.bridge.on_change(shop.orders.full_name, name="handle")(note_nothing)
    box, leaving = shop.outbox("parcels"), shop.outbox_collection()
    for signature in (handler.s(1), shop.app.signature(handler.name, args=(1,))):
        for write in (
            lambda sig: box.insert_one({"_id": 1}, tasks=[sig]),
            lambda sig: box.with_tasks({"_id": 1}, [sig]),
            lambda sig: leaving.add([sig]),
        ):
            with pytest.raises(OutboxRefusedError):
                write(signature)
    assert shop.documents("parcels") == shop.documents("leaving") == []


@row("outbox-twophase", "participants keep what is pending in them, and may get tasks by the transaction itself")
def _(shop: Shop) -> None:
    banks, box = [shop.bank(), shop.bank_by_markers()], shop.outbox("accounts")
    with shop.run() as runner:
        shop.db["accounts"].update_one({"_id": "A"}, box.with_tasks({"$set": {"x": 1}}, [shop.count.s("before")]))
        for bank in banks:
            bank.transfer("A", "B", 10)
        shop.send(runner)
    assert (shop.counted(), shop.balances()) == ({"before": 1}, {"A": 80, "B": 120, "C": 100})


@row("outbox-asyncio.collection", "an asynchronous collection is refused by whatever keeps something in one")
def _(shop: Shop) -> None:
    mongo: Any = AsyncMongoClient(shop.url)
    source: Any = lambda: mongo[shop.db.name]["kept"]  # noqa: E731
    uses: list[Callable[[], object]] = [
        lambda: shop.outbox("kept", source=source).insert_one({"_id": 1}, tasks=[shop.count.s("sent")]),
        lambda: shop.outbox_collection(source=source).add([shop.count.s("sent")]),
        lambda: once(source, key=lambda key: key)(print)("ran"),
        lambda: shop.bank(source).transfer("A", "B", 1),
    ]
    for use in uses:
        with pytest.raises(ConfigurationError):
            use()
    assert (shop.counted(), shop.documents("kept")) == ({}, [])


@row("twophase-twophase", "the same id has the same outcome, also of two at once; with other fields it is refused")
def _(shop: Shop) -> None:
    bank = shop.bank()
    together(*[lambda: bank.transfer("A", "B", 10, id="pay-7")] * 3)
    for _ in range(2):
        with pytest.raises(TransactionCanceledError):
            bank.transfer("A", "B", 1000, id="pay-8")
    with pytest.raises((TransactionStateError, ConfigurationError)):
        bank.transfer("A", "C", 10, id="pay-7")
    bank.begin([Participant(shop.db["accounts"], "C", {"$inc": {"balance": 5}})], id="gift", run=True)
    bank.begin([Participant(shop.db["accounts"], "C", {"$inc": {"balance": 5}})], id="gift", run=True)
    assert shop.balances() == {"A": 90, "B": 110, "C": 105}
