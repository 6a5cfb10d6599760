"""The index that comes with an outbox's first use: it keeps no write waiting, and comes when it can."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import monitoring
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery import Outbox, OutboxCollection
from mongo_celery.mongo import table
from mongo_celery.outbox import index
from mongo_celery.outbox.index import OutboxIndex
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.integration.outbox_rig import Rig, opened

Document = dict[str, Any]


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wait short: what is waited for lasts longer, whatever the machine does. And it is begun once."""
    monkeypatch.setattr(index, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(index, "AGAIN_SECONDS", 3600.0)


@contextmanager
def written_to(database: Database[Document], collection: str) -> Iterator[ClientSession]:
    """A transaction that has written to a collection: no index can be created there before it ends."""
    database[collection].insert_one({"_id": "before"})
    with database.client.start_session() as session:
        session.start_transaction()
        database[collection].update_one({"_id": "before"}, {"$set": {"open": True}}, session=session)
        yield session


def delays(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.__dict__.get("event") == "index_delayed"]


def test_no_write_waits_for_the_end_of_a_transaction_that_keeps_the_index_away(
    rig: Rig, database: Database[Document], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks are delivered without it, once it is said; and it comes when the transaction has ended."""
    outbox = rig.outbox(at_once=True)
    with written_to(database, "orders") as session:
        for number in range(3):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
            wait_for(lambda: not database["orders"].count_documents({"pendingEvents": {"$exists": True}}))
        assert not outbox.backing.is_indexed()
        (said,) = delays(caplog)
        assert "the index pendingEvents" in said
        assert "each sweep reads the whole collection" in said
        session.commit_transaction()  # it has not been ended by the server meanwhile
    assert sorted(rig.sent()) == [[number, 0] for number in range(3)]
    monkeypatch.setattr(index, "WAIT_SECONDS", 60.0)
    outbox.sweep()
    assert not outbox.backing.is_indexed(), "not before its time"
    monkeypatch.setattr(outbox.backing.indexes, "_again_at", 0.0)
    outbox.sweep()
    assert outbox.backing.is_indexed()


def test_an_outbox_of_transactions_is_kept_waiting_no_longer(
    rig: Rig, database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """It has its indexes made before it writes: by the writer itself."""
    outbox = OutboxCollection(rig.app, database["parcels"], sweep_every=None, at_once=False)
    with written_to(database, "parcels") as session:
        with caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
            outbox.add([rig.add.s(1, 1)], key="k")
        assert database["parcels"].count_documents({"_id": "k"}) == 1
        assert not outbox.backing.is_indexed()
        assert len(delays(caplog)) == 1
        session.commit_transaction()
    database["parcels"].delete_one({"_id": "before"})
    assert outbox.sweep(older_than=0).dispatched == 1
    outbox.backing.close()


def test_a_relay_waits_longer_the_more_documents_there_are(
    rig: Rig, database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a large collection would never have its index; a writer has no such patience."""
    database["orders"].insert_many([{"_id": number} for number in range(500)])
    outbox = rig.outbox(at_once=False)
    wanted = index.of_pending(outbox.backing.plain, outbox.field)
    assert wanted.exists() is False
    monkeypatch.setattr(index, "WAIT_SECONDS", 1e-6)
    monkeypatch.setattr(table, "_DOCUMENTS_A_SECOND", 5)
    assert not wanted.create(patiently=False)
    assert wanted.create(patiently=True)
    assert wanted.exists()


def test_relays_wait_for_no_thread_that_creates_the_index_and_writers_once(
    rig: Rig, database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large collection is read for minutes, and the dispatcher asks for its relay several times in a turn."""
    outbox = OutboxCollection(rig.app, database["parcels"], sweep_every=None, at_once=False)
    begun, end, create = threading.Event(), threading.Event(), OutboxIndex.create

    def slowly(wanted: OutboxIndex, *, patiently: bool) -> bool:
        begun.set()
        assert end.wait(120)
        return create(wanted, patiently=patiently)

    monkeypatch.setattr(OutboxIndex, "create", slowly)
    monkeypatch.setattr(index, "WAIT_SECONDS", 600.0)
    patient = threading.Thread(target=lambda: outbox.backing.relay)
    patient.start()
    try:
        assert begun.wait(60)
        assert outbox.backing.relay  # and has not waited for 600 s
        monkeypatch.setattr(index, "WAIT_SECONDS", 0.0)
        outbox.backing.indexes.ensure(patiently=False)
    finally:
        end.set()
        patient.join()
    assert outbox.backing.is_indexed()
    outbox.backing.close()


class Looks(monitoring.CommandListener):
    """Notes the bounds of all `find` on a collection of orders."""

    def __init__(self) -> None:
        self.bounds: list[int | None] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name == "find" and "$or" in event.command["filter"]:
            self.bounds.append(event.command.get("maxTimeMS"))

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Nothing."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing."""


def test_a_look_that_would_read_a_whole_collection_is_given_up_and_forgets_nothing(
    rig: Rig, database: Database[Document], failpoint: Failpoint, make_client: MakeClient
) -> None:
    """Without the index; what writes hand over goes out meanwhile, and the next look comes after a pause."""
    heard = Looks()
    client = make_client(appName="looking", event_listeners=[heard])
    outbox = Outbox(rig.app, client[database.name]["orders"], name="looking", sweep_every=None)
    dispatcher = outbox.backing.dispatcher
    database["orders"].insert_one(outbox.with_tasks({"_id": 1}, [rig.add.s(1, 0)]))
    with failpoint(mode={"times": 1}, failCommands=["find"], errorCode=50, appName="looking"):  # as after maxTimeMS
        outbox.dispatch()
        wait_for(lambda: dispatcher._rests > 0)
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])
    wait_for(lambda: not outbox.status().pending)
    assert sorted(rig.sent()) == [[1, 0], [2, 0]]
    assert heard.bounds
    assert all(bound is not None and 0 < bound <= 1000 for bound in heard.bounds)
    outbox.backing.close()
