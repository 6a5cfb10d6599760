"""
Features that users combine: each effect in each way in which changes come, and all effects in one transaction.

The handlers of all effects run side by side in one bridge, so that an effect that disturbs another one shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery import Change, Outbox, OutboxCollection, TwoPhaseCommit, once, select_for_update, transactional
from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import after_commit, current
from mongo_celery.testing import BridgeRunner
from tests.integration.pairs_rig import EFFECTS, FORGETFUL, Document, Shop

Way = Callable[[Shop, BridgeRunner], None]


@pytest.fixture
def shop(mongo_url: str, database: Database[Document]) -> Iterator[Shop]:
    made = Shop(mongo_url, database)
    with closing(made.bridge.client):
        yield made


def repeated(shop: Shop, runner: BridgeRunner) -> None:
    """Orders 1 and 2 are written twice, and the second one fails once."""
    shop.put(1, 2)
    shop.put(1, 2, n=1)
    shop.arrive(runner)
    shop.failing[2] = 1
    runner.deliver()


def parked(shop: Shop, runner: BridgeRunner) -> None:
    """Order 1 fails and its key is parked, its second change waits, and order 2 is handled. Then it is released."""
    shop.put(1, 2)
    shop.failing[1] = 1
    runner.deliver(raises=False)
    shop.put(1, n=1)
    runner.deliver(raises=False)
    assert shop.letters() == {"parked": len(EFFECTS), "parked_behind": len(EFFECTS)}
    shop.replay(runner)


def snapshot(shop: Shop, runner: BridgeRunner) -> None:
    """Two orders exist already, and the second one fails once."""
    for name in EFFECTS:
        runner.snapshot(name)
    shop.failing[2] = 1
    runner.deliver()


def rewind(shop: Shop, runner: BridgeRunner) -> None:
    """Two orders are handled, and again, since a person sends the handlers back."""
    shop.put(0)
    first = runner.deliver().calls[0].changes[0]
    shop.put(1, 2)
    runner.deliver()
    shop.rewind(runner, first)


def replay(shop: Shop, runner: BridgeRunner) -> None:
    """Order 1 becomes a dead letter and order 2 is handled. Then the dead letter is replayed."""
    shop.put(1, 2)
    shop.failing[1] = 1
    runner.deliver(raises=False)
    assert shop.letters() == {"failed": len(EFFECTS)}
    shop.replay(runner)


RETRYING = {"autoretry_for": (OSError,)}
WAYS: dict[str, tuple[Way, Document, set[str]]] = {
    "repeated": (repeated, RETRYING, {"1.0", "1.1", "2.0", "2.1"}),
    "parked": (parked, {"failure_policy": "park_key"}, {"1.0", "1.1", "2.0"}),
    "snapshot": (snapshot, RETRYING, {"1.0", "2.0"}),
    "rewind": (rewind, {}, {"1.0", "2.0"}),
    "replay": (replay, {"failure_policy": "dead_letter"}, {"1.0", "2.0"}),
}
"""By name: what happens, the options of the handlers, and the changes that are to be there."""


@pytest.mark.parametrize("kind", ["single", "lists", "coalesce"])
@pytest.mark.parametrize("way", WAYS)
def test_each_effect_of_a_change_counts_once_in_whatever_way_it_comes(shop: Shop, way: str, kind: str) -> None:
    """P1, P2, P6: an effect without a memory counts again only where a person asks for the same changes again."""
    happen, options, labels = WAYS[way]
    is_coalesced = (way, kind) == ("repeated", "coalesce")
    if is_coalesced:
        labels = {"1.1", "2.1"}
    shop.register(kind, **options)
    if way == "snapshot":
        shop.put(1, 2)
    with BridgeRunner(shop.bridge) as runner:
        happen(shop, runner)
        assert shop.letters() == {}
        shop.send(runner)
    times = {name: 2 if way == "rewind" and name in FORGETFUL else 1 for name in EFFECTS}
    counting = EFFECTS.keys() - {"fenced", "locks", "twophase"}
    counted = shop.counted()
    if is_coalesced:
        counted.pop("handler 2.0", None)  # its list is one transaction, of which the parts come when it fails
    assert counted == {f"{name} {each}": times[name] for name in counting for each in labels}
    assert shop.documents("mirror") == [each for each in shop.documents("orders") if each["_id"]]
    assert shop.balances() == {"A": 100 - len(labels), "B": 100 + len(labels)}
    assert [each["n"] for each in shop.documents("sums")] == [len(labels) * times["locks"]]
    assert shop.resumed == labels


def effects_of_a_body(shop: Shop) -> Callable[[str, ClientSession], None]:
    """All that can be part of a transaction. It counts each effect under a name and the key."""
    box, bank, others = shop.box(Outbox, "parcels"), shop.bank(), shop.box(OutboxCollection, "others")
    stored = {key: bank.transfer("A", "B", 1, run=False) for key in "12"}
    shop.db["seats"].insert_one({"_id": 1})

    @once(lambda: shop.db["steps"], key=lambda key: key)
    def step(key: str) -> object:
        shop.add(f"step {key}", current(shop.client))
        return object()  # nothing that could be kept

    @transactional(shop.client, outbox=others)
    def part(key: str, *, session: ClientSession) -> None:
        shop.add(f"part {key}", session)
        shop.count.delay(f"part sent {key}")

    def body(key: str, session: ClientSession) -> None:
        select_for_update(shop.db["seats"], {"_id": 1}, session=session)
        shop.add(f"body {key}", session)
        step(key)
        step(key)
        box.insert_one({"_id": key}, tasks=[shop.count.s(f"parcel {key}")], session=session)
        update = box.with_tasks({"$set": {"n": 1}}, [shop.count.s(f"plain {key}")])
        shop.db["parcels"].update_one({"_id": key}, update, session=session)
        shop.count.delay(f"sent {key}")
        part(key)
        bank.transfer("A", "B", 10)
        bank.run(stored[key])
        after_commit(lambda: shop.add(f"callback {key}"))
        shop.conflict(session)
        shop.fail("body", key)

    return body


@pytest.mark.parametrize("around", ["transactional", "once"])
def test_all_effects_of_a_transaction_have_its_fate(shop: Shop, around: str) -> None:
    """P18: the first transaction is repeated by a conflict and committed, and the second one is aborted."""
    body, leaving = effects_of_a_body(shop), shop.box(OutboxCollection, "leaving")
    decorate: Any = {
        "transactional": transactional(shop.client, outbox=leaving),
        "once": once(lambda: shop.db["marks"], key=lambda key: key, outbox=leaving),
    }[around]
    run = decorate(lambda key, *, session: body(key, session))
    shop.failing["2"] = 1
    run("1")
    with pytest.raises(OSError, match="away"):
        run("2")
    if around == "once":
        run("1")

    @shop.bridge.on_change(shop.orders.full_name)
    def idle(_change: Change) -> None:
        """A runner needs a handler."""

    with BridgeRunner(shop.bridge) as runner:
        shop.send(runner)
    names = ("body", "step", "parcel", "plain", "sent", "part", "part sent", "callback")
    assert shop.counted() == {f"{name} 1": 1 for name in names}
    assert shop.balances() == {"A": 89, "B": 111}


def test_an_asynchronous_collection_is_refused_by_whatever_keeps_something_in_one(shop: Shop, mongo_url: str) -> None:
    source: Any = AsyncMongoClient(mongo_url)[shop.db.name]["kept"]

    @shop.bridge.on_change(shop.orders.full_name, failure_policy="dead_letter")
    def handle(change: Change) -> None:
        change.fenced(source).replace_one({"_id": 1}, {"n": 1}, upsert=True)

    uses: list[Callable[[], object]] = [
        lambda: Outbox(shop.app, lambda: source, name="a").insert_one({"_id": 1}, tasks=[shop.count.s("sent")]),
        lambda: OutboxCollection(shop.app, lambda: source, name="b").add([shop.count.s("sent")]),
        lambda: once(lambda: source, key=lambda key: key)(print)("ran"),
        lambda: TwoPhaseCommit(shop.app, lambda: source).transfer("A", "B", 1),
    ]
    for use in uses:
        with pytest.raises(ConfigurationError):
            use()
    with BridgeRunner(shop.bridge) as runner:
        shop.put(1)
        (call,) = runner.deliver(raises=False).calls
    assert isinstance(call.error, ConfigurationError)
    assert shop.documents("kept") == []


def test_a_handler_of_a_whole_database_is_not_fed_by_records_and_transfers(shop: Shop) -> None:
    """P12: it would feed itself, by its idempotency records and by the log of the transactions that it starts."""
    bank, seen = shop.bank(), list[str]()

    @once(lambda: shop.db["marks"], key=lambda change: change.resume_token["_data"])
    def charge(change: Change) -> None:
        bank.transfer("A", "B", 1, id=change.resume_token["_data"])

    @shop.bridge.on_change(f"{shop.db.name}.*")
    def handle(change: Change) -> None:
        seen.append(change.ns["coll"])
        if change.ns["coll"] == "orders":
            charge(change)

    with BridgeRunner(shop.bridge) as runner:
        shop.put(1)
        runner.deliver(limit=20)
    assert seen == ["orders", "accounts", "accounts"]
