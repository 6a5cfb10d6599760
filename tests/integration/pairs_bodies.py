"""Effects that meet in one body: what the transaction's fate is, is that of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from mongo_celery import once, select_for_update, select_many_for_update, transactional
from mongo_celery.errors import ConfigurationError, TransactionError
from mongo_celery.locking import after_commit, asynchronous, current
from tests.integration.pairs_rig import TABLE, Shop, together

row, fate = TABLE.row, TABLE.fate
Body = Callable[[str], object]


@row("transactional-transactional", "a part that fails aborts the whole, though its error is caught")
def _(shop: Shop) -> None:
    @transactional(shop.client)
    def part(*, session: ClientSession) -> None:
        shop.add("part", session)
        raise KeyError

    @transactional(shop.client)
    def whole(*, session: ClientSession) -> None:
        shop.add("whole", session)
        with suppress(KeyError):
            part()

    with pytest.raises(TransactionError):
        whole()
    assert shop.counted() == {}


@row("transactional-transactional.other_client", "another client of the cluster is refused, and nothing is written")
def _(shop: Shop) -> None:
    part = transactional(lambda: shop.bridge.client)(lambda *, session: shop.add("part", session))

    @transactional(shop.client)
    def whole(*, session: ClientSession) -> None:
        shop.add("whole", session)
        part()

    with pytest.raises(ConfigurationError):
        whole()
    assert shop.counted() == {}


@fate("transactional-once", "a step without session has its record in the transaction", "step", "body")
def _(shop: Shop) -> Body:
    @once(lambda: shop.db["marks"], key=lambda key: key)
    def step(key: str) -> object:
        shop.add(f"step {key}", current(shop.client))
        return object()  # nothing that could be kept

    @transactional(shop.client)
    def body(key: str, *, session: ClientSession) -> None:
        step(key)
        step(key)
        shop.add(f"body {key}", session)
        shop.meet(session, key)

    return body


@row("transactional-once.task", "a duplicate step of a second task aborts nothing of it")
def _(shop: Shop) -> None:
    @once(lambda: shop.db["marks"], key=lambda order: order)
    def invoice(order: int, *, session: ClientSession) -> Any:
        return shop.db["invoices"].insert_one({"order": order}, session=session)

    @shop.task("book")
    @transactional(shop.client)
    def book(order: int, what: str, *, session: ClientSession) -> None:
        shop.add(what, session)
        invoice(order)
        shop.conflict(session)

    with shop.run() as runner:
        book.delay(7, "first")
        book.delay(7, "second")
        runner.run_tasks()
    assert shop.counted() == {"first": 1, "second": 1}
    assert len(shop.documents("invoices")) == 1


@fate("transactional-outbox", "entries are stored with it, by the outbox or by the driver", "own", "plain")
def _(shop: Shop) -> Body:
    box = shop.outbox("parcels")

    @transactional(shop.client)
    def body(key: str, *, session: ClientSession) -> None:
        box.insert_one({"_id": key}, tasks=[shop.count.s(f"own {key}")], session=session)
        update = box.with_tasks({"$set": {"n": 1}}, [shop.count.s(f"plain {key}")])
        shop.db["parcels"].update_one({"_id": key}, update, session=session)
        shop.meet(session, key)

    return body


@row("transactional-outbox.dispatch", "dispatch() inside is about what is committed, however long the body takes")
def _(shop: Shop) -> None:
    box, parcels = shop.outbox("parcels", at_once=True), shop.db["parcels"]

    @transactional(shop.client)
    def pack(*, session: ClientSession) -> None:
        parcels.insert_one(box.with_tasks({"_id": 1}, [shop.count.s("sent")]), session=session)
        box.dispatch(1)
        for place in ("soon", "later"):  # until whatever looked for what is pending has looked
            other = box.with_tasks({"$set": {"n": 1}}, [shop.count.s(place)])
            together(lambda place=place, other=other: parcels.update_one({"_id": place}, other, upsert=True))
            runner.assert_enqueued("count", [place])

    with shop.run() as runner:
        box.insert_one({"_id": 0}, tasks=[shop.count.s("first")])
        runner.assert_enqueued("count", ["first"])
        pack()
        runner.assert_enqueued("count", ["sent"])


@fate("transactional-collection", "what the body sends is sent after it, and callbacks are called", "left", "callback")
def _(shop: Shop) -> Body:
    @transactional(shop.client, outbox=shop.outbox_collection())
    def body(key: str, *, session: ClientSession) -> None:
        shop.count.delay(f"left {key}")
        after_commit(lambda: shop.add(f"callback {key}"))
        shop.meet(session, key)

    return body


@row("transactional-locks", "what is read under a lock and written is never lost")
def _(shop: Shop) -> None:
    shop.bank()

    @transactional(shop.client)
    def add(*, session: ClientSession) -> None:
        found = select_for_update(shop.db["accounts"], {"_id": "A"}, session=session)
        shop.db["accounts"].update_one({"_id": "A"}, {"$set": {"balance": found["balance"] + 1}}, session=session)

    together(add, add, add)
    assert shop.balances()["A"] == 103


@fate("transactional-twophase", "a transfer is part of it", moved=10)
def _(shop: Shop) -> Body:
    bank = shop.bank()

    @transactional(shop.client)
    def body(key: str, *, session: ClientSession) -> None:
        bank.transfer("A", "B", 10, id=key)
        shop.meet(session, key)

    return body


@row("transactional-twophase.markers", "a transfer with markers is refused inside: others would see it at once")
def _(shop: Shop) -> None:
    shop.bank()
    bank = shop.bank_by_markers()

    @transactional(shop.client)
    def body(*, session: ClientSession) -> None:
        shop.add("body", session)
        bank.transfer("A", "B", 10)

    with pytest.raises(ConfigurationError):
        body()
    assert (shop.counted(), set(shop.balances().values())) == ({}, {100})


@row("transactional-asyncio", "a coroutine's body is repeated as a function's, and counts once")
def _(shop: Shop) -> None:
    async def work(db: Any) -> None:
        @transactional(db.client)
        async def add(*, session: AsyncClientSession) -> None:
            await db["hot"].find_one({"_id": 1}, session=session)
            await db["done"].update_one({"_id": "one"}, {"$inc": {"n": 1}}, upsert=True, session=session)
            if not shop.seen:
                together(shop.heat)
            shop.seen.append(1)
            await db["hot"].update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True, session=session)

        await add()

    shop.in_asyncio(work)
    assert (shop.counted(), len(shop.seen)) == ({"one": 1}, 2)


@row("transactional-asyncio.inside", "a coroutine's transaction inside a function's is refused, and nothing is written")
def _(shop: Shop) -> None:
    async def work(db: Any) -> None:
        async with transactional(db.client) as session:
            await db["done"].insert_one({"_id": "inside", "n": 1}, session=session)

    @transactional(shop.client)
    def body(*, session: ClientSession) -> None:
        shop.add("outside", session)
        shop.in_asyncio(work)

    with pytest.raises(ConfigurationError):
        body()
    assert shop.counted() == {}


@fate("once-collection", "record, writes and what follows are there together", "paid", "told")
def _(shop: Shop) -> Body:
    @once(lambda: shop.db["marks"], key=lambda key: key, outbox=shop.outbox_collection())
    def settle(key: str, *, session: ClientSession) -> None:
        shop.add(f"paid {key}", session)
        shop.count.delay(f"told {key}")
        shop.meet(session, key)

    return lambda key: (settle(key), settle(key))


@fate("once-locks", "a duplicate adds nothing to what is counted under a lock", "book")
def _(shop: Shop) -> Body:
    shop.db["seats"].insert_one({"_id": 1})

    @once(lambda: shop.db["marks"], key=lambda key: key)
    def book(key: str, *, session: ClientSession) -> None:
        select_for_update(shop.db["seats"], {"_id": 1}, session=session)
        shop.add(f"book {key}", session)
        shop.meet(session, key)

    return lambda key: (book(key), book(key))


@fate("once-twophase", "with session a transfer is in the transaction of the record", moved=10)
def _(shop: Shop) -> Body:
    bank = shop.bank()

    @once(lambda: shop.db["marks"], key=lambda key: key)
    def pay(key: str, *, session: ClientSession) -> None:
        bank.transfer("A", "B", 10)
        shop.meet(session, key)

    return lambda key: (pay(key), pay(key))


@fate("outbox-collection", "entries of both are stored by one transaction", "parcel", "left")
def _(shop: Shop) -> Body:
    box = shop.outbox("parcels")

    @transactional(shop.client, outbox=shop.outbox_collection())
    def body(key: str, *, session: ClientSession) -> None:
        box.insert_one({"_id": key}, tasks=[shop.count.s(f"parcel {key}")], session=session)
        shop.count.delay(f"left {key}")
        shop.meet(session, key)

    return body


@fate("outbox-locks", "a document is locked and gets tasks in one transaction, though its outbox waits", "packed")
def _(shop: Shop) -> Body:
    box = shop.outbox("parcels")
    shop.db["parcels"].insert_many([{"_id": "1"}, {"_id": "2"}])

    @transactional(shop.client)
    def body(key: str, *, session: ClientSession) -> None:
        select_for_update(shop.db["parcels"], {"_id": key}, session=session)
        box.update_one({"_id": key}, {"$set": {"n": 1}}, tasks=[shop.count.s(f"packed {key}")], session=session)
        shop.meet(session, key)

    return body


@row("outbox-asyncio", "what a coroutine's transaction inserts is sent once if it is committed, else never")
def _(shop: Shop) -> None:
    box = shop.outbox("parcels")

    async def work(db: Any) -> None:
        @transactional(db.client)
        async def pack(key: str, *, session: AsyncClientSession) -> None:
            parcel = box.with_tasks({"_id": key}, [shop.count.s(f"parcel {key}")])
            await db["parcels"].insert_one(parcel, session=session)
            box.dispatch(key)
            shop.fail(key)

        await pack("1")
        with suppress(OSError):
            await pack("2")

    shop.failing["2"] = 1
    with shop.run() as runner:
        shop.in_asyncio(work)
        shop.send(runner)
    assert shop.counted() == {"parcel 1": 1}


@fate("collection-collection", "a part with another collection has the fate of the whole", "whole", "part")
def _(shop: Shop) -> Body:
    one, two = shop.outbox_collection("ones"), shop.outbox_collection("twos")

    @transactional(shop.client, outbox=two)
    def part(key: str, *, session: ClientSession) -> None:  # noqa: ARG001 - what is sent needs none
        shop.count.delay(f"part {key}")
        shop.fail(key)

    @transactional(shop.client, outbox=one)
    def body(key: str, *, session: ClientSession) -> None:
        shop.count.delay(f"whole {key}")
        part(key)
        shop.conflict(session)

    return body


@fate("collection-locks", "what is sent under a lock is sent once", "ticket")
def _(shop: Shop) -> Body:
    shop.db["seats"].insert_one({"_id": 1})

    @transactional(shop.client, outbox=shop.outbox_collection())
    def body(key: str, *, session: ClientSession) -> None:
        select_for_update(shop.db["seats"], {"_id": 1}, session=session)
        shop.count.delay(f"ticket {key}")
        shop.meet(session, key)

    return body


@fate("collection-twophase", "a transfer, and one that is queued, go with what is sent", "paid", moved=11)
def _(shop: Shop) -> Body:
    bank = shop.bank()
    stored = {key: bank.transfer("A", "B", 1, run=False) for key in "12"}

    @transactional(shop.client, outbox=shop.outbox_collection())
    def body(key: str, *, session: ClientSession) -> None:
        bank.transfer("A", "B", 10)
        bank.delay(stored[key])
        shop.count.delay(f"paid {key}")
        shop.meet(session, key)

    return body


@row("collection-asyncio", "a coroutine's transaction takes no outbox=: it is refused")
def _(shop: Shop) -> None:
    box = shop.outbox_collection()

    async def work(db: Any) -> None:
        @transactional(db.client, outbox=box)
        async def leave(*, session: AsyncClientSession) -> None:
            await db["done"].insert_one({"_id": 1, "n": 1}, session=session)

        await leave()

    with pytest.raises(ConfigurationError):
        shop.in_asyncio(work)
    assert shop.counted() == {}


@row("locks-locks", "those that lock the same documents in opposite orders all come to their end")
def _(shop: Shop) -> None:
    shop.bank()

    @transactional(shop.client)
    def move(order: str, *, session: ClientSession) -> None:
        for name in order:
            select_many_for_update(shop.db["accounts"], {"_id": name}, session=session)
        for name, amount in zip(order, (-1, 1), strict=True):
            shop.db["accounts"].update_one({"_id": name}, {"$inc": {"balance": amount}}, session=session)

    together(lambda: move("AB"), lambda: move("BA"), lambda: move("AB"))
    assert shop.balances() == {"A": 99, "B": 101, "C": 100}


@row("locks-twophase", "who has locked an account pays from it, and a transfer by somebody else waits")
def _(shop: Shop) -> None:
    bank = shop.bank()

    @transactional(shop.client)
    def pay(*, session: ClientSession) -> None:
        select_for_update(shop.db["accounts"], {"_id": "A"}, session=session)
        bank.transfer("A", "B", 10)

    together(pay, lambda: bank.transfer("A", "C", 1))
    assert shop.balances() == {"A": 89, "B": 110, "C": 101}


@row("locks-asyncio", "what coroutines read under a lock and write is never lost")
def _(shop: Shop) -> None:
    shop.bank()

    async def work(db: Any) -> None:
        @transactional(db.client)
        async def add(*, session: AsyncClientSession) -> None:
            found = await asynchronous.select_for_update(db["accounts"], {"_id": "A"}, session=session)
            update = {"$set": {"balance": found["balance"] + 1}}
            await db["accounts"].update_one({"_id": "A"}, update, session=session)

        await asyncio.gather(add(), add(), add())

    shop.in_asyncio(work)
    assert shop.balances()["A"] == 103


@row("twophase-asyncio", "a transfer inside a coroutine's transaction is refused, and nothing moves")
def _(shop: Shop) -> None:
    bank = shop.bank()

    async def work(db: Any) -> None:
        async with transactional(db.client) as session:
            await db["done"].insert_one({"_id": 1, "n": 1}, session=session)
            bank.transfer("A", "B", 10)

    with pytest.raises(ConfigurationError):
        shop.in_asyncio(work)
    assert (shop.counted(), set(shop.balances().values())) == ({}, {100})


@row("asyncio-asyncio", "coroutines have transactions of their own, and one that joins has the fate of its whole")
def _(shop: Shop) -> None:
    async def work(db: Any) -> None:
        @transactional(db.client)
        async def part(key: str, *, session: AsyncClientSession) -> None:
            await db["done"].update_one({"_id": key}, {"$inc": {"n": 1}}, upsert=True, session=session)
            shop.fail(key)

        @transactional(db.client)
        async def whole(key: str, *, session: AsyncClientSession) -> None:  # noqa: ARG001 - its parts have it
            await part(f"first {key}")
            await part(key)

        await asyncio.gather(whole("one"), whole("two"), whole("three"), return_exceptions=True)

    shop.failing["two"] = 1
    shop.in_asyncio(work)
    assert shop.counted() == {"first one": 1, "one": 1, "first three": 1, "three": 1}
