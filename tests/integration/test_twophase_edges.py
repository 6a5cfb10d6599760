"""Two-phase commit where things go wrong beside it: validators, outages, what others have stored, many at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from mongo_celery import TwoPhaseCommit
from mongo_celery.embedded import MongoServer
from mongo_celery.errors import TransactionCanceledError, TransactionStateError, TransactionTimeoutError
from mongo_celery.twophase.clusters import Clusters
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION
from mongo_celery.twophase.twophase import get_engine
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.integration.twophase_rig import HELD_SECONDS_MAX, Db, Document, Gate, balances, coordinator, make_accounts


def test_what_another_application_queues_meanwhile_is_not_canceled(
    database: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belonged to nobody when it was read."""
    one, two = (
        TwoPhaseCommit(Celery(name, broker="memory://", set_as_current=False), database["transactions"])
        for name in ("one", "two")
    )
    identity = one.transfer("A", "B", 100, run=False)

    def queue(_seen: object) -> None:
        monkeypatch.undo()
        one.delay(identity)

    monkeypatch.setattr(get_engine(two).log, "refuse_foreign", queue)
    with pytest.raises(TransactionStateError):
        two.cancel(identity)
    assert one.read(identity).state == "initial"


@pytest.mark.parametrize("protocol", ["auto", "documents"])
def test_a_transfer_moves_money_in_no_accounts_but_its_own(database: Db, protocol: str) -> None:
    """An application with others finishes, cancels, recovers and takes back where the transfer was begun."""
    for name in ("one", "two"):
        database[name].insert_many([{"_id": each, "balance": 1000} for each in "AB"])
    log = database["transactions"]
    one, two = (
        TwoPhaseCommit(
            Celery("bank", broker="memory://", set_as_current=False), log, accounts=database[each], protocol=protocol
        )
        for each in ("one", "two")
    )
    two.run(one.transfer("A", "B", 100, run=False))
    two.cancel(one.transfer("A", "B", 100, run=False))
    two.delay(one.transfer("A", "B", 100, id="queued", run=False))
    log.update_one({"_id": one.transfer("A", "B", 100, run=False)}, {"$set": {"state": "pending"}})
    assert {each.after for each in two.recover(0)} == {"done"}
    assert [each["balance"] for each in database["one"].find().sort("_id", 1)] == [700, 1300]
    two.compensate("queued")

    assert [each["balance"] for each in database["one"].find().sort("_id", 1)] == [800, 1200]
    assert [each["balance"] for each in database["two"].find().sort("_id", 1)] == [1000, 1000]


def test_what_a_server_refuses_too_long_is_finished_by_a_call_or_by_recovery(
    database: Db, failpoint: Failpoint
) -> None:
    """Before the claim recovery does nothing: `run` has to be called again, with the id that the error has."""
    make_accounts(database, A=1000, B=1001)
    bank, impatient = (coordinator(database.client, database.name, timeout=seconds) for seconds in (30, 2))
    bank.transfer("B", "A", 1)  # gives both their versions, so that the first update is a change
    stored = bank.transfer("A", "B", 100, run=False)
    with failpoint(failCommands=["insert", "findAndModify"], errorCode=112):
        with pytest.raises(TransactionTimeoutError) as not_stored:
            impatient.transfer("A", "B", 100)
        with pytest.raises(TransactionTimeoutError) as not_claimed:
            impatient.run(stored)
    assert vars(not_claimed.value)["id"] == stored
    assert bank.recover(0) == []
    with pytest.raises(TransactionStateError):
        bank.run(vars(not_stored.value)["id"])
    assert bank.run(stored).state == "done"

    with failpoint(failCommands=["update"], errorCode=112), pytest.raises(TransactionTimeoutError):
        impatient.transfer("A", "B", 10, id=1)
    assert bank.read(1).state == "pending"
    assert [each.after for each in bank.recover(0)] == ["done"]
    assert balances(database) == {"A": 891, "B": 1110}


def test_two_that_compensate_at_once_get_the_same_id(
    database: Db, mongo_client: MongoClient[Document], mongo_url: str
) -> None:
    """P18."""
    make_accounts(database, A=1000, B=1000)
    bank = coordinator(mongo_client, database.name)
    done = bank.transfer("A", "B", 100)
    gate = Gate(hold_before=2)  # it has read the transaction, and is about to store the opposite one
    got: list[Any] = []
    with MongoClient[Document](mongo_url, event_listeners=[gate]) as client:
        slow = coordinator(client, database.name)
        thread = threading.Thread(target=lambda: got.append(slow.compensate(done)), daemon=True)
        thread.start()
        assert gate.held.wait(60)
        got.append(bank.compensate(done))
        gate.released.set()
        thread.join(HELD_SECONDS_MAX)
    assert got[0] == got[1]
    assert database["transactions"].count_documents({}) == 2
    assert balances(database) == {"A": 1000, "B": 1000}


@pytest.mark.parametrize("step", ["note_compensated", "queue"])
def test_a_compensation_of_a_standalone_server_may_die_between_two_steps(
    standalone_url: str, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """With markers it is stored, noted and queued one after the other. Of what has expired nothing is done."""
    database = make_client(standalone_url)[f"dies_{step}"]
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")
    log = get_engine(bank).log
    insert = log.insert

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    def expire(*given: Any, **options: Any) -> bool:
        stored = insert(*given, **options)
        database["transactions"].delete_one({"_id": "gone"})
        return stored

    bank.transfer("A", "B", 100, id="pay")
    assert all(set(each) == {"_id", "balance", MARKERS, PARTICIPANT_VERSION} for each in database["accounts"].find())
    with pytest.raises(TransactionCanceledError):
        bank.transfer("A", "B", 1001)
    with monkeypatch.context() as dying:
        dying.setattr(log, step, die)
        with pytest.raises(KeyboardInterrupt):
            bank.compensate("pay")
    assert bank.recover(older_than=0) == []
    bank.compensate("pay", run=False)
    assert [each.after for each in bank.recover(older_than=0)] == ["done"]

    bank.transfer("A", "B", 100, id="gone")
    monkeypatch.setattr(log, "insert", expire)
    with pytest.raises(TransactionStateError):
        bank.compensate("gone")
    assert bank.recover(older_than=0) == []
    assert balances(database) == {"A": 900, "B": 1100}


def test_a_member_that_has_not_found_its_set_yet_is_no_standalone_server() -> None:
    """It says so once in a process: markers would be used there for ever."""
    with MongoServer(replica_set="late") as server, MongoClient[Document](server.url) as client:
        assert client.admin.command("hello").get("setName") is None
        assert Clusters(lambda: client["bank"]["transactions"], {}).has_transactions()


@pytest.mark.parametrize("protocol", ["auto", "documents"])
def test_a_call_that_stood_still_while_it_stored_does_not_do_the_same_again(
    database: Db, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Its answer was lost, another call has done it, and it was removed after its retention."""
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(
        None, database["transactions"], application="bank", protocol=protocol, deadline=60, retention=600
    )
    engine = get_engine(bank)
    owner = engine.log if protocol == "documents" else engine.local
    name = "insert" if protocol == "documents" else "store_done"
    store = getattr(owner, name)

    def stand_still(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, name, store)
        bank.transfer("A", "B", 100, id="pay")
        database["transactions"].delete_one({"_id": "pay"})
        later = time.time() + 60
        monkeypatch.setattr("mongo_celery.twophase.log.time.time", lambda: later)
        raise AutoReconnect("the answer is lost")

    monkeypatch.setattr(owner, name, stand_still)
    with pytest.raises(TransactionTimeoutError):
        bank.transfer("A", "B", 100, id="pay")
    assert balances(database) == {"A": 900, "B": 1100}
