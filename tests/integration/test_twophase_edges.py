"""Two-phase commit where things go wrong beside it: validators, outages, what others have stored, many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from bson.datetime_ms import DatetimeMS
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.embedded import MongoServer
from mongo_celery.errors import (
    ConfigurationError,
    TransactionCanceledError,
    TransactionStateError,
    TransactionTimeoutError,
)
from mongo_celery.twophase.clusters import Clusters
from mongo_celery.twophase.coordinator import BusyError, OvertakenError
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION
from mongo_celery.twophase.states import State
from mongo_celery.twophase.steps import STEP_TASK
from mongo_celery.twophase.values import to_text
from tests.fixtures.process import wait_for
from tests.integration.twophase_rig import Gate, Tutorial, balances, coordinator, make_accounts, markers

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


def test_a_validator_that_knows_no_fence_cancels_and_leaves_nothing_applied(database: Database[Document]) -> None:
    """The reason names the field, and the documents are as they were."""
    strict_accounts(database)
    before = list(database["accounts"].find())
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents")

    for destination in ("B", "missing"):
        with pytest.raises(TransactionCanceledError, match=r"transactionFence.*validator"):
            bank.transfer("A", destination, 100)
    assert list(database["accounts"].find()) == before
    assert database["transactions"].count_documents({"state": "canceled"}) == 2


def test_a_validator_of_one_participant_undoes_the_other(database: Database[Document]) -> None:
    """Without a document to look at first, too: recovery of what other code has begun."""
    strict_accounts(database)
    database["stock"].insert_one({"_id": 1, "left": 1})
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents")
    parts = [
        Participant(database["stock"], 1, {"$inc": {"left": -1}}),
        Participant(database["accounts"], "A", {"$inc": {"balance": 5}}),
    ]
    with pytest.raises(TransactionCanceledError, match="transactionFence"):
        bank.run(bank.begin(parts))
    database["transactions"].update_one({"_id": bank.begin(parts)}, {"$set": {"state": "pending"}})

    assert [each.after for each in bank.recover(0)] == ["canceled"]
    assert (database["stock"].find_one() or {})["left"] == 1
    assert balances(database) == {"A": 1000, "B": 1000}


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


def test_what_is_queued_is_begun_by_no_other_application(database: Database[Document]) -> None:
    """Another one may not know a cluster."""
    make_accounts(database, A=1000, B=1000)
    app = Celery("one", broker="memory://")
    one = TwoPhaseCommit(app, database["transactions"], application="App1")
    two = TwoPhaseCommit(None, database["transactions"], application="App2")
    identity = one.transfer("A", "B", 100, run=False)
    assert set(database["transactions"].find_one() or {}) == {
        *("_id", "source", "destination", "value", "accounts", "state", "lastModified")
    }

    one.delay(identity)

    assert two.recover(0) == []
    with pytest.raises(TransactionStateError, match="App1"):
        two.run(identity)
    with pytest.raises(TransactionStateError, match="App1"):
        TwoPhaseCommit(app, database["transactions"], application="App2", name="two").delay(identity)
    assert [each.after for each in one.recover(0)] == ["done"]
    assert balances(database) == {"A": 900, "B": 1100}


def test_services_that_share_a_log_take_over_nothing_of_each_other(database: Database[Document]) -> None:
    """Each carries the name of its Celery app; where none is known, it has to be given one."""
    transactions = database["transactions"]
    shop, billing = (TwoPhaseCommit(Celery(name, broker="memory://"), transactions) for name in ("shop", "billing"))
    shape = {"source": "A", "destination": "B", "value": 1, "state": "pending", "lastModified": LONG_AGO}
    make_accounts(database, A=1000, B=1000)
    transactions.insert_one({"_id": 1, **shape, "application": shop.application})

    assert (shop.application, billing.application) == ("shop", "billing")
    assert billing.recover() == []
    with pytest.raises(TransactionStateError, match="shop"):
        billing.run(1)
    assert [each.after for each in shop.recover()] == ["done"]
    for app in (None, Celery(broker="memory://"), Celery("__main__", broker="memory://")):
        with pytest.raises(ConfigurationError, match="application="):
            TwoPhaseCommit(app, transactions)


@pytest.mark.parametrize("protocol", ["auto", "documents"])
def test_a_transfer_moves_money_in_no_accounts_but_its_own(database: Database[Document], protocol: str) -> None:
    """Whoever has others refuses it, in every state but the last, and says what to do."""
    for name in ("one", "two"):
        database[name].insert_many([{"_id": each, "balance": 1000} for each in "AB"])
    app = Celery("one", broker="memory://")
    one = TwoPhaseCommit(
        None, database["transactions"], application="bank", accounts=database["one"], protocol=protocol
    )
    two = TwoPhaseCommit(app, database["transactions"], accounts=database["two"], protocol=protocol)
    refused = pytest.raises(
        ConfigurationError, match=rf"in {one.accounts.full_name}, .* {two.accounts.full_name}: .*accounts="
    )
    identity = one.transfer("A", "B", 100, run=False)
    for call in (two.run, two.cancel, two.delay, lambda each: two.step(each, None)):
        with refused:
            call(identity)

    database["transactions"].update_one({"_id": identity}, {"$set": {"state": "pending", "lastModified": LONG_AGO}})
    for call in (two.run, two.cancel):
        with refused:
            call(identity)
    (became,) = two.recover(0)
    assert (became.after, became.stopped) == ("pending", True)
    assert [each.after for each in one.recover(0)] == ["done"]

    assert two.read(identity).state == "done"
    assert [part.namespace for part in two.read(identity).parts] == [one.accounts.full_name] * 2
    with refused:
        two.compensate(identity)
    back = one.compensate(identity, run=False)
    with refused:
        two.run(back)
    assert [each["balance"] for each in database["one"].find().sort("_id", 1)] == [900, 1100]
    one.run(back)

    for name in ("one", "two"):
        assert [each["balance"] for each in database[name].find().sort("_id", 1)] == [1000, 1000]


def test_what_is_queued_by_another_application_is_begun_when_asked_for_all(database: Database[Document]) -> None:
    make_accounts(database, A=1000, B=1000)
    one = TwoPhaseCommit(Celery("one", broker="memory://"), database["transactions"], application="App1")
    one.delay(one.transfer("A", "B", 100, run=False))
    two = TwoPhaseCommit(None, database["transactions"], application="App2")

    assert [each.after for each in two.recover(0, all=True)] == ["done"]
    assert balances(database) == {"A": 900, "B": 1100}


def test_a_timeout_says_whether_recovery_will_do_anything(database: Database[Document], failpoint: Any) -> None:
    """Before the claim it will not: `run` has to be called again, with the id that the error has."""
    make_accounts(database, A=1000, B=1000)
    impatient = TwoPhaseCommit(None, database["transactions"], application="bank", timeout=2)
    stored = impatient.transfer("A", "B", 100, run=False)
    with failpoint(failCommands=["findAndModify"], errorCode=112):
        with pytest.raises(TransactionTimeoutError, match="stored") as not_stored:
            impatient.transfer("A", "B", 100)
        with pytest.raises(TransactionTimeoutError, match="run it again") as not_claimed:
            impatient.run(stored)

    for caught in (not_stored, not_claimed):
        assert "recovery will finish it" not in str(caught.value)
    assert vars(not_claimed.value)["id"] == stored
    assert impatient.recover(0) == []
    with pytest.raises(TransactionStateError, match="no transaction"):
        impatient.run(vars(not_stored.value)["id"])
    assert impatient.run(stored).state == "done"


def test_a_compensation_that_was_canceled_is_followed_by_another(
    bank: TwoPhaseCommit, database: Database[Document]
) -> None:
    """The destination had spent it; later it has it again. What was compensated once is not compensated twice."""
    make_accounts(database, C=0)
    done = bank.transfer("A", "C", 100)
    spent = bank.transfer("C", "B", 100)
    with pytest.raises(TransactionCanceledError, match="does not meet"):
        bank.compensate(done)
    bank.compensate(spent)

    second = bank.compensate(done)
    assert second == {"compensates": done, "attempt": 2}
    assert bank.compensate(done) == second
    assert balances(database) == {"A": 1000, "B": 1000, "C": 0}


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
    assert got == [{"compensates": done}] * 2


@pytest.mark.slow
def test_a_broker_that_is_away_after_a_step_costs_a_retry(database: Database[Document]) -> None:
    """Run here, a retry follows at once: each step goes on although the next cannot be published."""
    make_accounts(database, A=1000, B=1000)
    app = Celery("shop", broker="redis://127.0.0.1:1/0")
    app.conf.update(task_publish_retry=False, broker_transport_options={"socket_connect_timeout": 1})
    bank = TwoPhaseCommit(app, database["transactions"])
    identity = bank.transfer("A", "B", 100, run=False)

    app.tasks[STEP_TASK].apply(args=("default", to_text(identity), None))

    assert bank.log.get(identity).state == "done"
    assert balances(database) == {"A": 900, "B": 1100}
    assert markers(database) == []


def test_what_the_tutorials_code_leaves_in_a_document_without_a_fence_is_undone(
    bank: TwoPhaseCommit, database: Database[Document]
) -> None:
    """One participant marked, the other without marker and version: the first is undone, the second left as it is."""
    tutorial = Tutorial(database)
    tutorial.begin(1, "A", "B", 100)
    tutorial.start(1)
    tutorial.apply(1, "A", -100)
    untouched = database["accounts"].find_one({"_id": "B"})

    assert bank.cancel(1).state == "canceled"
    assert balances(database) == {"A": 1000, "B": 1000}
    assert database["accounts"].find_one({"_id": "B"}) == untouched


def test_a_server_that_refuses_for_a_while_is_waited_for(
    bank: TwoPhaseCommit, database: Database[Document], failpoint: Any
) -> None:
    """Transient errors on every kind of command: the transaction is done once."""
    for command in ("update", "findAndModify", "find"):
        with failpoint(mode={"times": 2}, failCommands=[command], errorCode=112):
            bank.transfer("A", "B", 10)
    assert balances(database) == {"A": 970, "B": 1030}


def test_an_answer_that_is_lost_while_it_is_stored_makes_no_stranger_of_it(
    bank: TwoPhaseCommit, database: Database[Document], failpoint: Any
) -> None:
    """Stored, and told otherwise, under an id of the caller's; who asks again is told that it is done."""
    lost = {"code": 262, "errmsg": "it took too long"}
    with failpoint(mode={"times": 2}, failCommands=["findAndModify"], writeConcernError=lost):
        bank.transfer("A", "B", 10, id="order-1")
    bank.transfer("A", "B", 10, id="order-1")
    assert balances(database) == {"A": 990, "B": 1010}


def test_a_server_that_refuses_too_long_leaves_the_transaction_to_recovery(
    database: Database[Document], failpoint: Any
) -> None:
    make_accounts(database, A=1000, B=1001)
    impatient = TwoPhaseCommit(None, database["transactions"], application="bank", timeout=2, protocol="documents")
    impatient.transfer("B", "A", 1)  # gives both their versions, so that the first update is a change
    database["accounts"].update_one({"_id": "A"}, {"$set": {"balance": 1000}})
    with (
        failpoint(failCommands=["update"], errorCode=112),
        pytest.raises(TransactionTimeoutError, match="recovery"),
    ):
        impatient.transfer("A", "B", 10, id=1)

    assert impatient.log.get(1).state == "pending"
    assert [each.after for each in impatient.recover(0)] == ["done"]
    assert balances(database) == {"A": 990, "B": 1010}


def test_a_standalone_server_is_served_by_markers(standalone_url: str, make_client: Callable[..., Any]) -> None:
    """It has no MongoDB transactions; all calls do what they do elsewhere."""
    database = make_client(standalone_url)["bank"]
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")

    done = bank.transfer("A", "B", 100)
    assert all(set(each) == {"_id", "balance", MARKERS, PARTICIPANT_VERSION} for each in database["accounts"].find())
    assert bank.compensate(done) == {"compensates": done}
    with pytest.raises(TransactionCanceledError, match="does not meet"):
        bank.transfer("A", "B", 1001)
    assert balances(database) == {"A": 1000, "B": 1000}


def test_a_member_that_has_not_found_its_set_yet_is_no_standalone_server() -> None:
    """It says so once in a process: markers would be used there for ever."""
    with MongoServer(replica_set="late") as server, MongoClient[Document](server.url) as client:
        assert client.admin.command("hello").get("setName") is None
        assert not Clusters(lambda: client["bank"]["transactions"], {}).is_standalone(None)


def test_one_that_is_partly_on_a_standalone_server_goes_by_markers(
    database: Database[Document], standalone_url: str, make_client: Callable[..., Any]
) -> None:
    """Receipts need MongoDB transactions in every cluster."""
    other = make_client(standalone_url)
    far = other[database.name]["stock"]
    far.insert_one({"_id": 1, "left": 3})
    make_accounts(database, A=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", clients={"far": other})

    bank.begin(
        [
            Participant(database["accounts"], "A", {"$inc": {"balance": -5}}),
            Participant(far, 1, {"$inc": {"left": -1}}, require={"left": {"$gte": 1}}),
        ],
        run=True,
    )
    assert PARTICIPANT_VERSION in (far.find_one() or {})
    assert (far.find_one() or {})["left"] == 2
    assert balances(database) == {"A": 995}


def test_with_markers_what_cannot_be_written_gives_the_others_back_after_the_deadline(
    database: Database[Document], failpoint: Any
) -> None:
    """A right that was taken away in the middle; it says so until it is given back, and then it is canceled."""
    database["stock"].insert_one({"_id": 1, "left": 3})
    make_accounts(database, A=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents")
    identity = bank.begin(
        [
            Participant(database["accounts"], "A", {"$inc": {"balance": -5}}),
            Participant(database["stock"], 1, {"$inc": {"left": 1}}),
        ]
    )
    bank.step(identity, None)

    with failpoint(failCommands=["update"], namespace=f"{database.name}.stock", errorCode=13):
        with pytest.raises(TransactionStateError, match=r"stays pending: .* cannot be read or written"):
            bank.run(identity)
        assert balances(database) == {"A": 995}
        database["transactions"].update_one({}, {"$set": {"deadline": LONG_AGO}})
        (became,) = bank.recover(0)
        assert became.after == "canceling"
        assert "refuses to be undone" in (became.error or "")
        assert balances(database) == {"A": 1000}

    assert [each.after for each in bank.recover(0)] == ["canceled"]
    assert (database["stock"].find_one() or {})["left"] == 3


def test_a_transfer_whose_commit_was_done_and_told_otherwise_is_known_again(
    database: Database[Document], failpoint: Any
) -> None:
    """Who ends a session while its commit waits for its majority does not keep it from being done, once."""
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")
    bank.transfer("A", "B", 1)
    told = {"writeConcernError": {"code": 11601, "errmsg": "operation was interrupted"}}
    with failpoint(mode={"times": 1}, failCommands=["commitTransaction"], **told):
        identity = bank.transfer("A", "B", 100)

    assert bank.read(identity).state == "done"
    assert bank.transfer("A", "B", 100, id=identity) == identity
    assert balances(database) == {"A": 899, "B": 1101}


def test_what_stood_still_for_so_long_that_it_may_be_purged_is_not_stored_again(database: Database[Document]) -> None:
    """An attempt before may have been committed, and its transaction removed: it would be done twice."""
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")
    mark = ObjectId.from_datetime(datetime.now(UTC) - timedelta(minutes=10))
    with pytest.raises(TransactionTimeoutError, match="stood still for too long") as caught:
        bank.log.insert({"source": "A"}, "order", state=State.DONE, mark=mark)
    assert caught.value.outcome == "unknown"  # type: ignore[attr-defined]
    assert database["transactions"].find_one() is None


def test_indexes_that_take_too_long_keep_nobody_waiting(
    database: Database[Document], failpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a log of millions, after an upgrade: nothing rests on them."""
    make_accounts(database, A=1000, B=1000)
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", timeout=5)
    with failpoint(failCommands=["createIndexes"], errorCode=50):
        bank.transfer("A", "B", 100)
        wait_for(lambda: "the indexes of" in caplog.text)

    assert balances(database) == {"A": 900, "B": 1100}


def test_a_step_that_changes_nothing_is_asked_for_again(bank: TwoPhaseCommit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has done more than what can be read yet: a chain that ended here would have no next link."""
    identity = bank.transfer("A", "B", 100, run=False)

    def overtaken(*_: object) -> None:
        raise OvertakenError

    monkeypatch.setattr(bank, "_stepped", overtaken)
    with pytest.raises(BusyError):
        bank.step(identity, None)


def test_with_markers_a_cluster_that_is_away_keeps_nobodys_money(
    database: Database[Document], make_replica_set: Callable[..., Any], make_client: Callable[..., Any]
) -> None:
    """After the deadline: whoever answers has it back, and the rest follows when that cluster is there again."""
    make_accounts(database, A=1000)
    server = make_replica_set()
    far = make_client(server.url)[database.name]
    far["accounts"].insert_one({"_id": "B", "balance": 1000, "pendingTransactions": []})
    options: Document = {"protocol": "documents", "clients": {"far": far.client}, "timeout": 12}
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", **options)
    paying = Participant(database["accounts"], "A", {"$inc": {"balance": -100}})
    identity = bank.begin([paying, Participant(far["accounts"], "B", {"$inc": {"balance": 100}})])
    server.pause()
    try:
        database["transactions"].update_one({"_id": identity}, {"$set": {"state": "pending", "deadline": LONG_AGO}})
        database["accounts"].update_one({"_id": "A"}, {"$inc": {"balance": -100}, "$push": {MARKERS: identity}})
        assert balances(database)["A"] == 900
        (stays,) = bank.recover(0)
    finally:
        server.resume()

    assert (stays.after, balances(database)["A"]) == ("canceling", 1000)
    (became,) = bank.recover(0)
    assert became.after == "canceled"
    assert (far["accounts"].find_one() or {})["balance"] == 1000
