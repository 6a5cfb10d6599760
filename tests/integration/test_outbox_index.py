"""The index that comes with an outbox's first use: it keeps no write waiting, and comes when it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery.mongo import indexes
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder
from tests.rig.outbox import Document, Rig


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wait short: what is waited for lasts longer, whatever the machine does. And it is begun once."""
    monkeypatch.setattr(indexes, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(indexes, "AGAIN_SECONDS", 3600.0)


@contextmanager
def written_to(database: Database[Document], collection: str) -> Iterator[ClientSession]:
    """A transaction that has written to a collection: no index can be created there before it ends."""
    database[collection].insert_one({"_id": "before"})
    with database.client.start_session() as session:
        session.start_transaction()
        database[collection].update_one({"_id": "before"}, {"$set": {"open": True}}, session=session)
        yield session


def test_no_write_waits_for_the_end_of_a_transaction_that_keeps_the_index_away(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = rig.outbox(at_once=True)
    with written_to(rig.database, "orders") as session:
        for number in range(3):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
            wait_for(lambda: not rig.orders.count_documents({"pendingEvents": {"$exists": True}}))
        assert not outbox.runtime.pending.indexes.exist()
        delays = [each for each in caplog.records if each.__dict__.get("event") == "index_delayed"]
        assert len(delays) == 1
        session.commit_transaction()  # it has not been ended by the server meanwhile
    assert sorted(rig.sent()) == [[number, 0] for number in range(3)]
    monkeypatch.setattr(indexes, "WAIT_SECONDS", 60.0)
    outbox.sweep()
    assert not outbox.runtime.pending.indexes.exist(), "not before its time"
    monkeypatch.setattr(outbox.runtime.pending.indexes, "_again_at", 0.0)
    outbox.sweep()
    assert outbox.runtime.pending.indexes.exist()


def test_a_look_that_would_read_a_whole_collection_is_given_up_and_forgets_nothing(
    rig: Rig, failpoint: Failpoint, make_client: MakeClient
) -> None:
    """Without the index; what writes hand over goes out meanwhile, and the next look comes after a pause."""
    heard = CommandRecorder()
    client = make_client(appName="looking", event_listeners=[heard])
    outbox = rig.outbox(client[rig.database.name]["orders"], name="looking", at_once=True)
    dispatcher = outbox.runtime.dispatcher
    rig.orders.insert_one(outbox.with_tasks({"_id": 1}, [rig.add.s(1, 0)]))
    with failpoint(mode={"times": 1}, failCommands=["find"], errorCode=50, appName="looking"):  # as after maxTimeMS
        outbox.dispatch()
        wait_for(lambda: dispatcher._rests > 0)
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])
    wait_for(lambda: not outbox.status().pending)
    assert sorted(rig.sent()) == [[1, 0], [2, 0]]
    bounds = [command.get("maxTimeMS", 0) for _, command in heard.of("find") if "$or" in command["filter"]]
    assert bounds
    assert all(0 < bound <= 1000 for bound in bounds)
