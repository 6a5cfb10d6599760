"""What a `transactional=True` handler calls: part of its transaction, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
from pymongo.client_session import ClientSession
from pymongo.errors import InvalidOperation

from mongo_celery import Change, Changes, once, select_for_update, transactional
from mongo_celery.errors import ConfigurationError, TransactionError
from mongo_celery.locking import current
from tests.integration.pairs_rig import TABLE, Program, Shop, label, note_nothing

row = TABLE.row
Body = Callable[[Change], object]
Make = Callable[[Shop], Body]
BOTH = {"1.0": 1, "2.0": 1}


def joins(row_id: str, promise: str, *others: str, moved: int = 0) -> Callable[[Make], Program]:
    """
    Decorate what makes a body of a transactional handler, which counts its change.

    A real conflict repeats it for the first order, and then it fails once and is retried; for the second one its
    execution is killed. So all it does counts once: `others` are effects beside the change's own, and so much has moved
    from account A to B.
    """

    def add(make: Make) -> Program:
        def program(shop: Shop) -> None:
            body = make(shop)

            @shop.bridge.on_change(shop.orders.full_name, transactional=True, autoretry_for=(OSError,))
            def handle(change: Change) -> None:
                shop.add(label(change), change.session)
                body(change)
                assert change.session is not None
                shop.meet(change.session, change.document_key["_id"])

            with shop.run() as runner:
                shop.put(1)
                shop.failing[1] = 1
                assert len(runner.deliver().retries) == 1
                runner.crash("called")
                shop.put(2)
                runner.deliver()
                shop.send(runner)
            assert shop.counted() == {**BOTH, **{f"{name} {key}": 1 for name in others for key in BOTH}}
            assert shop.balances() in ({}, {"A": 100 - moved, "B": 100 + moved, "C": 100})

        return row(row_id, promise)(program)

    return add


def refuses(row_id: str, promise: str, error: type[Exception] = ConfigurationError) -> Callable[[Make], Program]:
    """Decorate what makes a body of a transactional handler that fails so; of the handler nothing is left."""

    def add(make: Make) -> Program:
        def program(shop: Shop) -> None:
            body = make(shop)

            @shop.bridge.on_change(shop.orders.full_name, transactional=True, failure_policy="dead_letter")
            def handle(change: Change) -> None:
                shop.add(label(change), change.session)
                body(change)

            with shop.run() as runner:
                shop.put(1)
                (call,) = runner.deliver(raises=False).calls
                assert isinstance(call.error, error), call.error
                assert error is not ConfigurationError or "bridge.client" in str(call.error)
                assert len(shop.letters()) == 1
                assert shop.send(runner) == []
            assert shop.counted() == {}
            kept = ("orders", "hot", "counted", "accounts")
            assert [name for name in shop.db.list_collection_names() if name not in kept and shop.documents(name)] == []
            assert set(shop.balances().values()) <= {100}

        return row(row_id, promise)(program)

    return add


@joins("fenced-handler", "without session= a fenced write is part of the handler's transaction", "fenced")
def _(shop: Shop) -> Body:
    def body(change: Change) -> None:
        done = change.fenced(shop.name("done"))
        done.update_one({"_id": f"fenced {label(change)}"}, {"$inc": {"n": 1}}, upsert=True)

    return body


@row("fenced-handler.stale", "of a stale execution nothing is committed, whatever it has written")
def _(shop: Shop) -> None:
    @shop.bridge.on_change(shop.orders.full_name, transactional=True)
    def handle(change: Change) -> None:
        shop.add(label(change), change.session)
        change.fenced(shop.name("done")).update_one({"_id": "fenced"}, {"$inc": {"n": 1}}, upsert=True)

    with shop.run() as runner:
        runner.stall()
        shop.put(1)
        assert [call.was_stale for call in runner.deliver().calls] == [False, True]
    assert shop.counted() == {"1.0": 1, "fenced": 1}


@joins("handler-handler", "two of one source count once each, whichever is repeated or killed", "other")
def _(shop: Shop) -> Body:
    def other(change: Change) -> None:
        shop.add(f"other {label(change)}", change.session)

    shop.bridge.on_change(shop.orders.full_name, transactional=True)(other)
    return note_nothing


@joins("handler-handler.called", "one that another one calls is part of it", "other")
def _(shop: Shop) -> Body:
    def other(change: Change) -> None:
        shop.add(f"other {label(change)}", change.session)

    return shop.bridge.on_change(shop.name("others"), transactional=True)(other)


@joins("handler-transactional", "a function of the bridge's client is part of it", "part")
def _(shop: Shop) -> Body:
    @transactional(lambda: shop.bridge.client)
    def add(change: Change, *, session: ClientSession) -> None:
        assert session is change.session is current(shop.bridge.client)
        shop.add(f"part {label(change)}", session)

    return add


@refuses("handler-transactional.caught", "a part that fails aborts it all, caught or not", TransactionError)
def _(shop: Shop) -> Body:
    part = transactional(lambda: shop.bridge.client)(lambda *, session: shop.fail("part"))  # noqa: ARG005
    shop.failing["part"] = 9

    def body(_change: Change) -> None:
        with suppress(OSError):
            part()

    return body


@refuses("handler-transactional.own_client", "a function of the app's own client is refused: it would count twice")
def _(shop: Shop) -> Body:
    return transactional(lambda: shop.client)(lambda _, *, session: shop.add("own", session))


@refuses("handler-transactional.current", "current() of the app's own client is refused: a helper would write outside")
def _(shop: Shop) -> Body:
    return lambda _: shop.add("own", current(shop.client))


@refuses("handler-transactional.block", "so is a block")
def _(shop: Shop) -> Body:
    def body(_change: Change) -> None:
        with transactional(shop.client) as session:
            shop.add("own", session)

    return body


@refuses("handler-transactional.durable", "what is to be committed when it returns is refused, whatever its client")
def _(shop: Shop) -> Body:
    def body(_change: Change) -> None:
        for client in (shop.bridge.client, shop.client):
            with pytest.raises(ConfigurationError):
                transactional(client, durable=True).run(lambda session: shop.add("durable", session))
        transactional(shop.client, durable=True).run(lambda session: shop.add("durable", session))

    return body


@row(
    "handler-transactional.own", "with independent=True a function is committed for itself, each time the handler runs"
)
def _(shop: Shop) -> None:
    @transactional(lambda: shop.client, independent=True)
    def attempt(*, session: ClientSession) -> None:
        shop.add("attempts", session)

    @shop.bridge.on_change(shop.orders.full_name, transactional=True, autoretry_for=(OSError,))
    def handle(change: Change) -> None:
        attempt()
        shop.add(label(change), change.session)
        assert change.session is not None
        shop.meet(change.session, 1)

    shop.failing[1] = 1
    with shop.run() as runner:
        shop.put(1)
        runner.deliver()
    assert shop.counted() == {"1.0": 1, "attempts": 3}


@joins("handler-once", "a step without session has its record in the handler's transaction", "step")
def _(shop: Shop) -> Body:
    @once(lambda: shop.in_bridge("marks"), key=label)
    def charge(change: Change) -> Any:
        shop.add(f"step {label(change)}", change.session)
        return object()

    return lambda change: (charge(change), charge(change))


@joins("handler-once.session", "one with session joins, and a duplicate of another change aborts nothing", "step")
def _(shop: Shop) -> Body:
    @once(lambda: shop.in_bridge("marks"), key=label)
    def charge(change: Change, *, session: ClientSession) -> Any:
        shop.add(f"step {label(change)}", session)
        return object()

    return lambda change: (charge(change), charge(change))


@refuses("handler-once.own_client", "records by the app's own client are refused: they would stay after an abort")
def _(shop: Shop) -> Body:
    return once(lambda: shop.db["marks"], key=label)(lambda _: shop.add("own"))


@joins("handler-outbox", "an entry is stored by the transaction, and sent once after it", "parcel")
def _(shop: Shop) -> Body:
    box = shop.outbox("parcels", source=lambda: shop.in_bridge("parcels"))

    def body(change: Change) -> None:
        task = shop.count.s(f"parcel {label(change)}")
        box.update_one(change.document_key, {"$inc": {"n": 1}}, upsert=True, tasks=[task], session=change.session)

    return body


@refuses("handler-outbox.own_client", "an outbox of the app's own client cannot take the session", InvalidOperation)
def _(shop: Shop) -> Body:
    box = shop.outbox("parcels")
    return lambda change: box.insert_one({"_id": 1}, tasks=[shop.count.s("parcel")], session=change.session)


@joins("handler-collection", "what a part sends or collects goes out once, after the commit", "part", "event")
def _(shop: Shop) -> Body:
    box = shop.outbox_collection(source=lambda: shop.in_bridge("leaving"))

    @transactional(lambda: shop.bridge.client, outbox=box)
    def leave(change: Change, *, session: ClientSession) -> None:
        shop.count.delay(f"part {label(change)}")
        with box.collect(session, key="k") as gathered:
            gathered.add([shop.count.s(f"event {label(change)}")])

    return leave


@refuses("handler-collection.own_client", "a collection of the app's own client is refused, and nothing is sent")
def _(shop: Shop) -> Body:
    leave = transactional(lambda: shop.client, outbox=shop.outbox_collection())
    return lambda _: leave.run(lambda _: shop.count.delay("left"))


@joins("handler-locks", "what is read under a lock and written is there once", "lock")
def _(shop: Shop) -> Body:
    def body(change: Change) -> None:
        assert change.session is not None
        done, key = shop.in_bridge("done"), {"_id": f"lock {label(change)}"}
        done.update_one(key, {"$setOnInsert": {"n": 0}}, upsert=True, session=change.session)
        found = select_for_update(done, key, session=change.session)
        done.update_one(key, {"$set": {"n": found["n"] + 1}}, session=change.session)

    return body


@refuses("handler-locks.own_client", "a lock by the app's own client cannot take the session", InvalidOperation)
def _(shop: Shop) -> Body:
    return lambda change: select_for_update(shop.orders, {"_id": 1}, session=cast("ClientSession", change.session))


@joins("handler-twophase", "a transfer by the bridge's client commits with the handler, and moves once", moved=20)
def _(shop: Shop) -> Body:
    bank = shop.bank(lambda: shop.in_bridge("transactions"))
    return lambda _: bank.transfer("A", "B", 10)


@refuses("handler-twophase.own_client", "a transfer by the app's own client is refused, and nothing moves")
def _(shop: Shop) -> Body:
    bank = shop.bank()
    return lambda _: bank.transfer("A", "B", 10)


def counting_lists(shop: Shop, **options: Any) -> None:
    """A transactional handler of lists, which a conflict repeats, and which fails where that is asked for."""

    @shop.bridge.on_changes(shop.orders.full_name, transactional=True, autoretry_for=(OSError,), **options)
    def handle(changes: Changes) -> None:
        assert changes.session is not None
        for change in changes:
            shop.add(label(change), changes.session)
            shop.meet(changes.session, change.document_key["_id"])


@row("handler-lists", "a list is one transaction; where one change fails its parts are, and each counts once")
def _(shop: Shop) -> None:
    counting_lists(shop)
    with shop.run() as runner:
        shop.put(1, 2, 3, 4)
        shop.failing[3] = 2
        runner.deliver()
        runner.crash("called")
        shop.put(5, 6)
        runner.deliver()
    assert shop.counted() == {f"{place}.0": 1 for place in range(1, 7)}


@row("handler-coalesce", "a list of the latest changes is one transaction; on_change refuses the combination")
def _(shop: Shop) -> None:
    counting_lists(shop, coalesce=True)
    with shop.run() as runner:
        for n in range(3):
            shop.put(1, 2, n=n)
        shop.failing[2] = 1
        runner.deliver()
    assert set(shop.counted().values()) == {1}
    assert shop.counted().keys() >= {"1.2", "2.2"}
    with pytest.raises(ConfigurationError):
        shop.bridge.on_change(shop.orders.full_name, transactional=True, coalesce=True)(note_nothing)


def counting(shop: Shop, **options: Any) -> None:
    """A transactional handler that counts each change, and fails behind that where it is asked for."""

    @shop.bridge.on_change(shop.orders.full_name, transactional=True, **options)
    def handle(change: Change) -> None:
        if change.document_key["_id"]:
            shop.add(label(change), change.session)
            shop.fail(change)


@row("handler-parked", "what is parked has done nothing; released it counts once, and so does what waits behind it")
def _(shop: Shop) -> None:
    counting(shop, failure_policy="park_key")
    with shop.run() as runner:
        shop.put(1, 2)
        shop.put(1, n=1)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        assert shop.counted() == {"2.0": 1}
        runner.crash("called")
        shop.replay(runner)
        assert shop.letters() == []
    assert shop.counted() == {"1.0": 1, "1.1": 1, "2.0": 1}


@row("handler-snapshot", "a document that existed counts once, though its execution is killed")
def _(shop: Shop) -> None:
    counting(shop)
    shop.put(1, 2)
    with shop.run() as runner:
        runner.snapshot("handle")
        runner.crash("called")
        runner.deliver()
    assert shop.counted() == BOTH


@row("handler-rewind", "what a rewound handler is given again it does again: that is what a person asks for")
def _(shop: Shop) -> None:
    counting(shop)
    with shop.run() as runner:
        shop.put(0, 1, 2)
        first = runner.deliver().calls[0].changes[0]
        shop.rewind(runner, "handle", first)
    assert shop.counted() == {"1.0": 2, "2.0": 2}


@row("handler-replay", "a dead letter has done nothing, and its replay counts once, though it is killed")
def _(shop: Shop) -> None:
    counting(shop, failure_policy="dead_letter")
    with shop.run() as runner:
        shop.put(1, 2)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        assert shop.counted() == {"2.0": 1}
        runner.crash("called")
        shop.replay(runner)
        assert shop.letters() == []
    assert shop.counted() == BOTH


@refuses("handler-atomic", "Django's client is another one: all of ours for it are refused, and nothing is done")
def _(shop: Shop) -> Body:
    from mongo_celery.contrib.django import transactional as in_django
    from mongo_celery.locking.django import joined
    from tests.integration.pairs_atomic import of_django, pay

    moving = shop.outbox_collection(source=of_django(shop, "moving"))

    def body(change: Change) -> None:
        for block in (moving.atomic, joined):
            with pytest.raises(ConfigurationError), block():
                pay(shop, label(change))
        assert shop.counted() == {}
        in_django()(lambda: pay(shop, label(change)))()

    return body


@refuses("handler-asyncio", "a coroutine's transaction is of another client: it is refused, and nothing is written")
def _(shop: Shop) -> Body:
    async def work(db: Any) -> None:
        async with transactional(db.client) as session:
            await db["done"].insert_one({"_id": "one", "n": 1}, session=session)

    return lambda _: shop.in_asyncio(work)
