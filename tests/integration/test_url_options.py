"""Options of MongoDB's URL are meant for the user's own reads and writes. The package does its own by its own rules."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery import (
    Bridge,
    Change,
    Outbox,
    OutboxCollection,
    Participant,
    TwoPhaseCommit,
    once,
    select_for_update,
    transactional,
)
from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.bridge.operations import dead_letter_commands
from mongo_celery.bridge.operations.mongodb_check import check_mongodb
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.testing import BridgeRunner

Document = dict[str, Any]

# The session's set has no secondary: what is not asked of the primary fails.
OPTIONS = [
    f"readPreference=secondary&readConcernLevel={level}&w={w}&retryWrites=false&retryReads=false"
    for level, w in (("available", "0"), ("linearizable", "1&journal=false"), ("snapshot", "majority"), ("local", "0"))
]


@pytest.fixture(params=OPTIONS, ids=["available", "linearizable", "snapshot", "local"])
def url(request: pytest.FixtureRequest, mongo_url: str) -> str:
    return f"{mongo_url}{'&' if '?' in mongo_url else '/?'}{request.param}&serverSelectionTimeoutMS=3000"


@pytest.fixture
def app() -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False)


def test_a_bridge_reads_and_writes_by_its_own_rules(url: str, app: Celery, database: Database[Document]) -> None:
    """Stream, claims, outcomes, snapshots, transactions, dead letters and `check`; P9 and P12 hold with any URL."""
    bridge, source = Bridge(app, url, name="shop", autodiscover=False), database["orders"].full_name
    tried = list[str]()

    @bridge.on_change(source, start_from="snapshot")
    def fenced(change: Change) -> None:
        target = change.fenced(f"{database.name}.copies")
        target.replace_one({"_id": change.document_key["_id"]}, change.full_document or {}, upsert=True)

    @bridge.on_change(source, transactional=True, commit="inline")
    def inside(change: Change) -> None:
        assert change.session is not None
        totals = change.session.client[database.name]["totals"]
        totals.update_one({"_id": 0}, {"$inc": {"n": 1}}, upsert=True, session=change.session)

    @bridge.on_change(source, failure_policy="park_key", max_retries=0)
    def parked(change: Change) -> None:
        if change.document_key["_id"] not in tried:
            tried.append(change.document_key["_id"])
            raise ValueError(change.document_key["_id"])

    database["orders"].insert_one({"_id": "before"})
    with BridgeRunner(bridge, url=url) as runner:
        database["orders"].insert_many([{"_id": name, "total": 1} for name in ("a", "b")])
        runner.deliver(raises=False)
        assert {each["_id"] for each in database["copies"].find()} == {"before", "a", "b"}
        assert database["totals"].find_one() == {"_id": 0, "n": 2}

        found = [each for each in check_mongodb(bridge.wiring.reach(), bridge.wiring) if each.severity == "failing"]
        assert not found
        assert read_snapshot(bridge.wiring).handlers
        letters = dead_letter_commands.find(bridge.wiring, "parked").letters
        assert len(letters) == 2
        first, second = (each.id for each in letters)
        operations = bridge.operations
        assert operations.replay_dead_letters(ids=[first]).run().fields["done"] == 1
        assert operations.discard_dead_letters(ids=[second]).run().fields["done"] == 1
        match = '{"$eq": ["$fullDocument.total", 1]}'
        started = operations.start_snapshot("fenced", sources=[source], match=match).run()
        assert [each["estimated"] for each in started.fields["parts"]] == [3]


def test_a_fenced_delete_in_a_users_session_is_made_by_its_own_rules(url: str, database: Database[Document]) -> None:
    """P3, P6: it begins a transaction of its own there."""
    with MongoClient[Document](url) as client, client.start_session() as session:
        target = Change.build("delete", ns="shop.orders", fence=Fence("shop/bury", 0, 0, 1)).fenced(
            client[database.name]["copies"]
        )
        target.replace_one({"_id": 1}, {"a": 1}, upsert=True)
        assert target.delete_one({"_id": 1}, session=session).deleted_count == 1
    assert database["copies"].find_one() is None


def test_a_stream_waits_for_events_however_short_the_time_of_calls(app: Celery) -> None:
    """Each wait would end in an error."""
    bridge = Bridge(app, "mongodb://localhost:1/?timeoutMS=200&socketTimeoutMS=100&retryReads=true", name="shop")
    with bridge.wiring.stream_client(7.0) as client:
        options = client.options
    assert (options.timeout, options.pool_options.socket_timeout, options.retry_reads) == (None, 7.0, False)


def test_outboxes_locks_and_transfers_read_and_write_by_their_own_rules(
    url: str, app: Celery, database: Database[Document]
) -> None:
    """What is not asked of the primary by majority fails here."""
    sent = list[str]()

    @app.task(shared=False)
    def ship(name: str) -> None:
        sent.append(name)

    with MongoClient[Document](url) as client:
        data = client[database.name]
        parcels = Outbox(app, data["parcels"], name="parcels", at_once=False)
        leaving = OutboxCollection(app, data["leaving"], name="leaving")
        parcels.insert_one({"_id": 1}, tasks=[ship.s("one")])
        parcels.update_one({"_id": 1}, {"$set": {"x": 1}}, tasks=[ship.s("two")])
        assert parcels.sweep(older_than=0).dispatched == 2
        parcels.delete_one({"_id": 1})

        @transactional(client, outbox=leaving)
        def leave(*, session: ClientSession) -> None:
            data["customers"].insert_one({"_id": "Ann"}, session=session)
            assert select_for_update(data["customers"], {"_id": "Ann"}, session=session)
            ship.delay("four")

        leave()
        database["accounts"].insert_many([{"_id": "A", "balance": 10}, {"_id": "B", "balance": 0}])
        bank = TwoPhaseCommit(app, data["transactions"], application="shop")
        moved = [Participant(data["accounts"], key, {"$inc": {"balance": by}}) for key, by in (("A", -4), ("B", 4))]
        transfer = bank.begin(moved)
        bank.run(transfer)
        assert database["accounts"].find_one({"_id": "B"}) == {"_id": "B", "balance": 4}
        bank.compensate(transfer)
        bank.recover()
        assert database["accounts"].find_one({"_id": "A"}) == {"_id": "A", "balance": 10}

        @once(data["done"])
        def settle(name: str) -> None:
            sent.append(name)

        settle("five")
        assert sent[-1] == "five"
