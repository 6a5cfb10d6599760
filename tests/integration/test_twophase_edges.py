"""Two-phase commit where things go wrong beside it: validators, outages, what others have stored, many at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import AutoReconnect

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.embedded import MongoServer
from mongo_celery.errors import (
    TransactionCanceledError,
    TransactionStateError,
    TransactionTimeoutError,
)
from mongo_celery.twophase.clusters import Clusters
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION
from mongo_celery.twophase.tasks import RUN_TASK
from mongo_celery.twophase.twophase import get_engine
from mongo_celery.twophase.values import to_text
from tests.integration.twophase_rig import Gate, balances, coordinator, make_accounts, markers

Document = dict[str, Any]
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
TUTORIAL_FIELDS: Document = {"_id": {}, "balance": {}, "pendingTransactions": {}}


@pytest.fixture
def bank(database: Database[Document]) -> TwoPhaseCommit:
    """Give a coordinator over two accounts with 1000 each."""
    make_accounts(database, A=1000, B=1000)
    return TwoPhaseCommit(None, database["transactions"], application="bank")


def strict_accounts(database: Database[Document]) -> None:
    schema = {"bsonType": "object", "additionalProperties": False, "properties": TUTORIAL_FIELDS}
    database.create_collection("accounts", validator={"$jsonSchema": schema})
    make_accounts(database, A=1000, B=1000)


def test_a_validator_of_one_participant_undoes_the_other(database: Database[Document]) -> None:
    """Also in recovery of what other code has begun. The reason names the field, and documents are as they were."""
    strict_accounts(database)
    before = list(database["accounts"].find())
    database["stock"].insert_one({"_id": 1, "left": 1})
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents")
    parts = [
        Participant(database["stock"], 1, {"$inc": {"left": -1}}),
        Participant(database["accounts"], "A", {"$inc": {"balance": 5}}),
    ]
    with pytest.raises(TransactionCanceledError, match=r"transactionFence.*validator"):
        bank.run(bank.begin(parts))
    database["transactions"].update_one({"_id": bank.begin(parts)}, {"$set": {"state": "pending"}})

    assert [each.after for each in bank.recover(0)] == ["canceled"]
    assert (database["stock"].find_one() or {})["left"] == 1
    assert list(database["accounts"].find()) == before


@pytest.mark.parametrize(
    "poison",
    [
        {"version": "v1"},
        {"version": 1.5},
        {"version": True},
        {"state": ["pending"]},
        {"participants": ["a"]},
        {"participants": None},
        {"participants": [{"cluster": None, "collection": 5, "id": 1, "apply": "{}", "revert": "{}", "require": "{}"}]},
        {"participants": [{"cluster": None, "collection": "a.b", "id": 1, "apply": '{"$oid": "zz"}'}]},
        {
            "participants": [
                {"cluster": "gone", "collection": "a.b", "id": 1, "apply": "{}", "revert": "{}", "require": "{}"}
            ]
        },
        {"require": 5},
        {"version": 2**63 - 1},
    ],
)
def test_what_one_transaction_does_wrong_does_not_stop_the_recovery_of_others(
    bank: TwoPhaseCommit, database: Database[Document], poison: Document
) -> None:
    """It is reported, each time; nothing is skipped silently. And it takes no other's turn where the limit is small."""
    shape = {"source": "A", "destination": "B", "value": 1, "state": "pending"}
    database["transactions"].insert_many([{"_id": each, **shape, **poison} for each in range(3)])
    good = bank.transfer("A", "B", 100, run=False)
    database["transactions"].update_one({"_id": good}, {"$set": {"state": "pending"}})

    report = {each.id: each for each in [*bank.recover(0, limit=3), *bank.recover(0, limit=3)]}

    assert report[good].after == "done"
    assert all(report[each].error for each in range(3))
    assert balances(database) == {"A": 900, "B": 1100}


def test_a_time_that_python_cannot_hold_does_not_stop_recovery(
    bank: TwoPhaseCommit, database: Database[Document]
) -> None:
    shape = {"source": "A", "destination": "B", "value": 1, "state": "pending"}
    database["transactions"].insert_one({"_id": 1, **shape, "lastModified": DatetimeMS(-(2**60))})
    assert [each.after for each in bank.recover()] == ["done"]


def test_the_limit_holds_for_what_can_be_taken_over(bank: TwoPhaseCommit, database: Database[Document]) -> None:
    shape = {"source": "A", "destination": "B", "value": 1, "state": "pending"}
    database["transactions"].insert_many([{"_id": each, **shape} for each in range(5)])
    assert [each.id for each in bank.recover(0, limit=2)] == [0, 1]
    assert [each.id for each in bank.recover(0, limit=9)] == [2, 3, 4]


def test_what_another_application_queues_meanwhile_is_not_canceled(
    database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belonged to nobody when it was read."""
    make_accounts(database, A=1000, B=1000)
    one = TwoPhaseCommit(Celery("one", broker="memory://"), database["transactions"], application="App1")
    two = TwoPhaseCommit(None, database["transactions"], application="App2")
    identity = one.transfer("A", "B", 100, run=False)
    log = get_engine(two).log
    refuse_foreign = log.refuse_foreign

    def queue_then(seen: Any) -> None:
        monkeypatch.setattr(log, "refuse_foreign", refuse_foreign)
        refuse_foreign(seen)
        one.delay(identity)

    monkeypatch.setattr(log, "refuse_foreign", queue_then)
    with pytest.raises(TransactionStateError, match="App1"):
        two.cancel(identity)
    assert one.read(identity).state == "initial"


@pytest.mark.parametrize("protocol", ["auto", "documents"])
def test_a_transfer_moves_money_in_no_accounts_but_its_own(database: Database[Document], protocol: str) -> None:
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
    with pytest.raises(TransactionStateError, match="with another accounts"):
        two.transfer("A", "B", 100, id="queued")


def test_a_timeout_says_whether_recovery_will_do_anything(database: Database[Document], failpoint: Any) -> None:
    """Before the claim it will not: `run` has to be called again, with the id that the error has."""
    make_accounts(database, A=1000, B=1000)
    impatient = TwoPhaseCommit(None, database["transactions"], application="bank", timeout=2)
    stored = impatient.transfer("A", "B", 100, run=False)
    with failpoint(failCommands=["findAndModify"], errorCode=112):
        with pytest.raises(TransactionTimeoutError, match="in the log") as not_stored:
            impatient.transfer("A", "B", 100)
        with pytest.raises(TransactionTimeoutError, match="Run it again") as not_claimed:
            impatient.run(stored)

    for caught in (not_stored, not_claimed):
        assert "Recovery will finish it" not in str(caught.value)
    assert vars(not_claimed.value)["id"] == stored
    assert impatient.recover(0) == []
    with pytest.raises(TransactionStateError, match="no transaction"):
        impatient.run(vars(not_stored.value)["id"])
    assert impatient.run(stored).state == "done"


def test_two_that_compensate_at_once_get_the_same_id(
    bank: TwoPhaseCommit, database: Database[Document], mongo_url: str
) -> None:
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
        thread.join(20)
    assert got[0] == got[1]
    assert database["transactions"].count_documents({}) == 2
    assert balances(database) == {"A": 1000, "B": 1000}


def test_the_task_of_delay_runs_a_transaction_and_may_come_twice(database: Database[Document]) -> None:
    """Done, or canceled; and nothing more happens when the broker delivers it again."""
    make_accounts(database, A=1000, B=1000)
    app = Celery("shop", broker="memory://")
    bank = TwoPhaseCommit(app, database["transactions"], protocol="documents")
    done, canceled = (bank.transfer("A", "B", value, run=False) for value in (100, 5000))
    for identity, state in ((done, "done"), (canceled, "canceled")):
        for _ in range(2):
            assert app.tasks[RUN_TASK].apply(args=("default", to_text(identity))).get() == state
    assert balances(database) == {"A": 900, "B": 1100}
    assert markers(database) == []


def test_a_server_that_refuses_too_long_leaves_the_transaction_to_recovery(
    database: Database[Document], failpoint: Any
) -> None:
    make_accounts(database, A=1000, B=1001)
    impatient = TwoPhaseCommit(None, database["transactions"], application="bank", timeout=2, protocol="documents")
    impatient.transfer("B", "A", 1)  # gives both their versions, so that the first update is a change
    database["accounts"].update_one({"_id": "A"}, {"$set": {"balance": 1000}})
    with (
        failpoint(failCommands=["update"], errorCode=112),
        pytest.raises(TransactionTimeoutError, match="Recovery"),
    ):
        impatient.transfer("A", "B", 10, id=1)

    assert impatient.read(1).state == "pending"
    assert [each.after for each in impatient.recover(0)] == ["done"]
    assert balances(database) == {"A": 990, "B": 1010}


def test_a_standalone_server_is_served_by_markers(standalone_url: str, make_client: Callable[..., Any]) -> None:
    """It has no MongoDB transactions; all calls do what they do elsewhere."""
    database = make_client(standalone_url)["bank"]
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")

    done = bank.transfer("A", "B", 100)
    assert all(set(each) == {"_id", "balance", MARKERS, PARTICIPANT_VERSION} for each in database["accounts"].find())
    assert bank.compensate(done)["compensates"] == done
    with pytest.raises(TransactionCanceledError, match="does not meet"):
        bank.transfer("A", "B", 1001)
    assert balances(database) == {"A": 1000, "B": 1000}


def test_a_compensation_that_a_standalone_server_refuses_is_not_done_later(
    standalone_url: str, make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction expires in the middle of the call."""
    database = make_client(standalone_url)["refused"]
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")
    bank.transfer("A", "B", 100, id="pay")
    log = get_engine(bank).log
    insert = log.insert

    def expire(*given: Any, **options: Any) -> bool:
        stored = insert(*given, **options)
        database["transactions"].delete_one({"_id": "pay"})
        return stored

    monkeypatch.setattr(log, "insert", expire)
    with pytest.raises(TransactionStateError, match="There is no transaction"):
        bank.compensate("pay")
    assert bank.recover(older_than=0) == []
    assert balances(database) == {"A": 900, "B": 1100}


@pytest.mark.parametrize("step", ["note_compensated", "queue"])
def test_a_compensation_that_dies_between_two_steps_is_queued_by_the_next_call(
    standalone_url: str, make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Without MongoDB transactions it is stored, noted and queued one after the other."""
    database = make_client(standalone_url)[f"dies_{step}"]
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")
    bank.transfer("A", "B", 100, id="pay")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(get_engine(bank).log, step, die)
        with pytest.raises(KeyboardInterrupt):
            bank.compensate("pay")
    assert bank.recover(older_than=0) == []
    bank.compensate("pay", run=False)
    assert [each.after for each in bank.recover(older_than=0)] == ["done"]
    assert balances(database) == {"A": 1000, "B": 1000}


def test_a_member_that_has_not_found_its_set_yet_is_no_standalone_server() -> None:
    """It says so once in a process: markers would be used there for ever."""
    with MongoServer(replica_set="late") as server, MongoClient[Document](server.url) as client:
        assert client.admin.command("hello").get("setName") is None
        assert Clusters(lambda: client["bank"]["transactions"], {}).has_transactions()


@pytest.mark.parametrize("protocol", ["auto", "documents"])
def test_a_call_that_stood_still_while_it_stored_does_not_do_the_same_again(
    database: Database[Document], monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Its answer was lost, another call has done it, and it was removed after its retention."""
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(
        None, database["transactions"], application="bank", protocol=protocol, deadline=2, retention=10, timeout=10
    )
    engine = get_engine(bank)
    owner = engine.log if protocol == "documents" else engine.local
    name = "insert" if protocol == "documents" else "store_done"
    store = getattr(owner, name)

    def stand_still(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, name, store)
        bank.transfer("A", "B", 100, id="pay")
        database["transactions"].delete_one({"_id": "pay"})
        later = time.time() + 10
        monkeypatch.setattr("mongo_celery.twophase.log.time.time", lambda: later)
        raise AutoReconnect("the answer is lost")

    monkeypatch.setattr(owner, name, stand_still)
    with pytest.raises(TransactionTimeoutError, match="was frozen"):
        bank.transfer("A", "B", 100, id="pay")
    assert balances(database) == {"A": 900, "B": 1100}
