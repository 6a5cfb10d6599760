"""
What is done for a change, in each way in which changes come: nine effects by six ways.

Each effect meets the failure that is asked for at its worst place: inside its transaction, or behind what it has done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from mongo_celery import Change, Changes, once, select_for_update, transactional
from tests.integration.pairs_rig import FEATURES, TABLE, Shop, label

Effect = Callable[[Shop], Callable[[Change], object]]
Way = Callable[[Shop, Callable[[Change], object]], None]


# -- effects -----------------------------------------------------------------------------------------


def fenced(shop: Shop) -> Callable[[Change], None]:
    def mirror(change: Change) -> None:
        copy = {"n": (change.full_document or {})["n"]}
        change.fenced(shop.name("mirror")).replace_one(change.document_key, copy, upsert=True)
        shop.fail(change)

    return mirror


def in_transaction(shop: Shop) -> Callable[[Change], None]:
    @transactional(lambda: shop.client)
    def add(change: Change, *, session: ClientSession) -> None:
        shop.add(label(change), session)
        shop.fail(change)

    return add


def once_step(shop: Shop) -> Callable[[Change], None]:
    @once(lambda: shop.db["marks"], key=label)
    def charge(change: Change) -> Any:
        shop.add(label(change))
        return shop.db["charges"].insert_one({})  # nothing that Celery could keep

    def handle(change: Change) -> None:
        charge(change)
        shop.fail(change)
        shop.seen.append(label(change))

    return handle


def outbox(shop: Shop) -> Callable[[Change], None]:
    box = shop.outbox("summaries")

    def summarise(change: Change) -> None:
        entry = box.with_tasks({"$set": {"n": 1}}, [shop.count.s(label(change))])
        shop.db["summaries"].update_one(change.document_key, entry, upsert=True)
        shop.fail(change)

    return summarise


def collection(shop: Shop) -> Callable[[Change], None]:
    box = shop.outbox_collection()

    @shop.task("note")
    def note(key: str) -> None:
        shop.add(key)

    @transactional(lambda: shop.client, outbox=box)
    def leave(change: Change, *, session: ClientSession) -> None:
        shop.db["left"].insert_one({}, session=session)
        note.delay(label(change))
        shop.fail(change)

    return leave


def locks(shop: Shop) -> Callable[[Change], None]:
    shop.db["sums"].insert_one({"_id": "all", "n": 0})

    @transactional(lambda: shop.client)
    def add(change: Change, *, session: ClientSession) -> None:
        found = select_for_update(shop.db["sums"], {"_id": "all"}, session=session)
        shop.db["sums"].update_one({"_id": "all"}, {"$set": {"n": found["n"] + 1}}, session=session)
        shop.add(label(change), session)
        shop.fail(change)

    return add


def twophase(shop: Shop) -> Callable[[Change], None]:
    bank = shop.bank()

    def pay(change: Change) -> None:
        bank.transfer("A", "B", 1, id=label(change))
        shop.fail(change)

    return pay


def atomic(shop: Shop) -> Callable[[Change], None]:
    from django_mongodb_backend import transaction  # type: ignore[import-untyped]

    from tests.integration.pairs_atomic import pay

    def handle(change: Change) -> None:
        with transaction.atomic():
            pay(shop, label(change))
            shop.fail(change)

    return handle


def in_asyncio(shop: Shop) -> Callable[[Change], None]:
    def handle(change: Change) -> None:
        async def work(db: Any) -> None:
            @transactional(db.client)
            async def add(*, session: AsyncClientSession) -> None:
                await db["done"].update_one({"_id": label(change)}, {"$inc": {"n": 1}}, upsert=True, session=session)
                shop.fail(change)

            await add()

        shop.in_asyncio(work)

    return handle


# -- ways --------------------------------------------------------------------------------------------


def lists(shop: Shop, effect: Callable[[Change], object]) -> None:
    """Three orders in a list, the second of which fails once."""

    @shop.bridge.on_changes(shop.orders.full_name, autoretry_for=(OSError,))
    def handle(changes: Changes) -> None:
        for change in changes:
            try:
                effect(change)
            except OSError as error:
                raise changes.failed_at(change) from error

    with shop.run() as runner:
        shop.put(1, 2, 3)
        shop.failing[2] = 1
        runner.deliver()
        shop.send(runner)


def coalesce(shop: Shop, effect: Callable[[Change], object]) -> None:
    """Two orders, each written twice; the second fails once."""

    @shop.bridge.on_changes(shop.orders.full_name, coalesce=True, autoretry_for=(OSError,))
    def handle(changes: Changes) -> None:
        for change in changes:
            try:
                effect(change)
            except OSError as error:
                raise changes.failed_at(change) from error

    with shop.run() as runner:
        shop.put(1, 2)
        shop.put(1, 2, n=1)
        shop.arrive(runner)
        shop.failing[2] = 1
        runner.deliver()
        shop.send(runner)


def parked(shop: Shop, effect: Callable[[Change], object]) -> None:
    """Order 1 fails and is parked, its second change waits behind it, order 2 goes on; then the key is released."""

    @shop.bridge.on_change(shop.orders.full_name, failure_policy="park_key")
    def handle(change: Change) -> None:
        effect(change)

    with shop.run() as runner:
        shop.put(1, 2)
        shop.put(1, n=1)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        assert [cause for _, cause in shop.letters()] == ["parked", "parked_behind"]
        shop.replay(runner)
        assert shop.letters() == []
        shop.send(runner)


def snapshot(shop: Shop, effect: Callable[[Change], object]) -> None:
    """Two orders that existed, the second of which fails once."""

    @shop.bridge.on_change(shop.orders.full_name, autoretry_for=(OSError,))
    def handle(change: Change) -> None:
        effect(change)

    shop.put(1, 2)
    with shop.run() as runner:
        runner.snapshot("handle")
        shop.failing[2] = 1
        assert len(runner.deliver().calls) == 3
        shop.send(runner)


def rewind(shop: Shop, effect: Callable[[Change], object]) -> None:
    """Two orders are handled, and again, since a person sends the handler back."""

    @shop.bridge.on_change(shop.orders.full_name)
    def handle(change: Change) -> None:
        if change.document_key["_id"]:
            effect(change)

    with shop.run() as runner:
        shop.put(0, 1, 2)
        ((first, *_),) = (call.changes for call in runner.deliver().calls[:1])
        assert len(shop.rewind(runner, "handle", first).calls) == 2
        shop.send(runner)


def replay(shop: Shop, effect: Callable[[Change], object]) -> None:
    """Order 1 becomes a dead letter, order 2 goes on; then the letter is replayed."""

    @shop.bridge.on_change(shop.orders.full_name, failure_policy="dead_letter")
    def handle(change: Change) -> None:
        effect(change)

    with shop.run() as runner:
        shop.put(1, 2)
        shop.failing[1] = 1
        runner.deliver(raises=False)
        assert [cause for _, cause in shop.letters()] == ["failed"]
        shop.replay(runner)
        assert shop.letters() == []
        shop.send(runner)


# -- the table ---------------------------------------------------------------------------------------

EFFECTS: dict[str, tuple[Effect, str]] = {
    "fenced": (fenced, "the copy is as its source"),
    "transactional": (in_transaction, "a body that fails is aborted, and counts once"),
    "once": (once_step, "a step that is done is not repeated, and what follows it is done"),
    "outbox": (outbox, "a task with `once` and a key runs once, however often it is stored"),
    "collection": (collection, "what an aborted body sends is dropped, and what another one sends is sent once"),
    "locks": (locks, "the sum under a lock has each change once"),
    "twophase": (twophase, "a transfer with an id of the change moves once"),
    "atomic": (atomic, "Django's part is aborted, and counts once"),
    "asyncio": (in_asyncio, "a coroutine's body that fails is aborted, and counts once"),
}
WAYS: dict[str, tuple[Way, str, set[str]]] = {
    "lists": (lists, "a list whose second change fails once", {"1.0", "2.0", "3.0"}),
    "coalesce": (coalesce, "the latest changes, one of which fails once", {"1.1", "2.1"}),
    "parked": (parked, "a key that is parked and released, and others", {"1.0", "1.1", "2.0"}),
    "snapshot": (snapshot, "documents that existed, one of which fails once", {"1.0", "2.0"}),
    "rewind": (rewind, "changes that come again since a person asks for it", {"1.0", "2.0"}),
    "replay": (replay, "a dead letter that is replayed, and others", {"1.0", "2.0"}),
}
FORGETFUL = {"transactional", "collection", "locks", "atomic", "asyncio"}
"""Effects that have no memory of what they were done for: what comes again after a success counts again."""


def in_way(effect: str, way: str) -> Callable[[Shop], None]:
    """The program of a pair: the effect in this way, and each change counts as often as is promised."""
    make, run, keys = EFFECTS[effect][0], WAYS[way][0], WAYS[way][2]
    times = 2 if way == "rewind" and effect in FORGETFUL else 1

    def program(shop: Shop) -> None:
        run(shop, make(shop))
        if effect == "fenced":
            given = [each for each in shop.documents("orders") if each["_id"]]
            assert shop.documents("mirror") == given
        elif effect == "twophase":
            assert shop.balances() == {"A": 100 - len(keys), "B": 100 + len(keys), "C": 100}
        else:
            assert shop.counted() == dict.fromkeys(keys, times)
        if effect == "locks":
            assert [each["n"] for each in shop.db["sums"].find()] == [len(keys) * times]
        if effect == "once":
            assert set(shop.seen) == keys

    return program


for _effect in EFFECTS:
    for _way in WAYS:
        _pair = "-".join(sorted((_effect, _way), key=FEATURES.index))
        TABLE.row(_pair, f"{WAYS[_way][1]}: {EFFECTS[_effect][1]}")(in_way(_effect, _way))
