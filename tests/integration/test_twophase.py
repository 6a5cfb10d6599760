"""Two-phase commit on the real server: every shape, refusal and rule, one coordinator at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from typing import Any

import pytest
from bson import Decimal128
from bson.datetime_ms import DatetimeMS
from celery import Celery
from pymongo import WriteConcern
from pymongo.errors import AutoReconnect

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionStateError
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.transaction import State, Transaction
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.integration.twophase_rig import LONG_AGO, Db, Document, Tutorial, balances, make_accounts, markers
from tests.rig.commands import CommandRecorder


@pytest.fixture(params=["auto", "documents"])
def bank(database: Db, request: pytest.FixtureRequest) -> TwoPhaseCommit:
    """Give a coordinator over two accounts with 1000 each, with MongoDB transactions and with markers."""
    make_accounts(database, A=1000, B=1000)
    return TwoPhaseCommit(None, database["transactions"], application="bank", protocol=request.param)


def test_a_transfer_is_stored_in_the_tutorials_shape_and_moves_the_money(bank: TwoPhaseCommit, database: Db) -> None:
    identity = bank.transfer("A", "B", 100, run=False)
    stored = database["transactions"].find_one({"_id": identity})
    assert stored is not None
    tutorial = ["_id", "source", "destination", "value", "accounts", "state", "lastModified"]
    assert set(stored) == {*tutorial, "coordinator", "beginBy"}
    assert stored["state"] == "initial"
    assert isinstance(stored["lastModified"], datetime)

    ended = bank.run(identity)

    assert ended.state == "done"
    assert balances(database) == {"A": 900, "B": 1100}
    assert markers(database) == []
    assert bank.run(identity).state == "done"
    assert balances(database) == {"A": 900, "B": 1100}


def test_the_tutorials_dialects_are_understood(bank: TwoPhaseCommit, database: Db) -> None:
    """One spells it with two l, counts in doubles, and transfers nothing."""
    shape = {"source": "A", "destination": "B", "lastModified": LONG_AGO}
    database["transactions"].insert_many(
        [
            {"_id": 1, **shape, "value": 5.0, "state": "cancelled"},
            {"_id": 2, **shape, "value": 5.0, "state": "pending", "version": 1.0},
            {"_id": 3, **shape, "value": 0, "state": "pending"},
            {"_id": 4, **shape, "value": 0, "state": "initial", "lastModified": datetime.now(UTC)},
        ]
    )
    assert bank.cancel(1).state == "canceled"
    assert {each.id: each.after for each in bank.recover(0)} == {2: "done", 3: "done"}
    assert bank.run(4).state == "done"
    assert balances(database) == {"A": 995, "B": 1005}


@pytest.mark.parametrize(
    "failure",
    [
        {"closeConnection": True},
        {"errorCode": 112},
        {"writeConcernError": {"code": 262, "errmsg": "it took too long"}},
        {"writeConcernError": {"code": 11601, "errmsg": "operation was interrupted"}},
    ],
    ids=["cut", "refused for a while", "done, late", "done, interrupted"],
)
@pytest.mark.parametrize("command", ["find", "commitTransaction", "update", "findAndModify"])
def test_an_answer_that_is_lost_is_asked_for_again(
    bank: TwoPhaseCommit, database: Db, failpoint: Failpoint, command: str, failure: Document
) -> None:
    """It is done once, also under an id of the caller's, and who asks again is told that it is done."""
    bank.transfer("A", "B", 10)  # makes indexes and versions
    for times in (1, 2):
        with failpoint(mode={"times": times}, failCommands=[command], **failure):
            bank.transfer("A", "B", 10, id=times)
        bank.transfer("A", "B", 10, id=times)
    assert balances(database) == {"A": 970, "B": 1030}


def test_what_is_paid_is_what_is_taken_to_the_last_digit(bank: TwoPhaseCommit, database: Db) -> None:
    """Python's decimals round where a sign is changed, to the caller's context or to 28 digits. BSON has 34."""
    digits = Decimal128("1.000000000000000000000000000000001")
    make_accounts(database, **dict.fromkeys("CDEFG", 0))
    with localcontext(prec=4):
        bank.transfer("A", "B", Decimal("123.45"))
    for source, destination in ("CD", "EF"):
        bank.transfer(source, destination, digits, require={})
    bank.compensate(bank.transfer("E", "F", digits, require={}))
    bank.transfer("G", "E", 2.5, require={})

    left: dict[str, Any] = balances(database)
    assert (left["A"], left["B"]) == (Decimal128("876.55"), Decimal128("1123.45"))
    assert (left["C"], left["D"], left["F"]) == (Decimal128(f"-{digits}"), digits, digits)
    assert left["G"] == -2.5


def test_the_same_id_with_the_same_fields_has_the_same_outcome(bank: TwoPhaseCommit, database: Db) -> None:
    for _ in range(3):
        assert bank.transfer("A", "B", 1, id="order-1") == "order-1"
    assert bank.transfer("A", "B", 1, id="order-1", run=False) == "order-1"
    assert balances(database) == {"A": 999, "B": 1001}

    for _ in range(2):
        with pytest.raises(TransactionCanceledError):
            bank.transfer("A", "B", 1000, id="order-2")
        bank.transfer("B", "A", 1)  # by now it could be paid
    assert balances(database) == {"A": 1001, "B": 999}

    stock = database["stock"]
    stock.insert_one({"_id": "lamp", "left": 3})
    parts = [Participant(stock, "lamp", {"$inc": {"left": -1}}, require={"left": {"$gte": 1}})]
    assert [bank.begin(parts, id=3, run=run) for run in (False, False, True, True)] == [3] * 4
    assert (stock.find_one({}, {"left": 1}) or {})["left"] == 2

    bank.transfer("A", "B", 100, id=4, run=False)
    database["transactions"].update_one({"_id": 4}, {"$set": {"state": "pending"}})
    assert bank.transfer("A", "B", 100, id=4) == 4
    assert bank.read(4).state == "done"
    assert balances(database) == {"A": 901, "B": 1099}


def test_a_transfer_has_a_rule_with_operators(bank: TwoPhaseCommit, database: Db) -> None:
    """Also with MongoDB 4.4, which stores no names with `$`, and also if other code has stored the filter itself."""
    rule = {"balance": {"$gte": 5}, "$or": [{"closed": {"$exists": False}}]}
    for _ in range(2):
        bank.transfer("A", "B", 900, id=1, require=rule)
        bank.transfer("A", "B", 1, id=2, require=rule, run=False)
    bank.run(2)
    with pytest.raises(TransactionCanceledError):
        bank.transfer("A", "B", 1, require={"balance": {"$gte": 100}})
    assert balances(database) == {"A": 99, "B": 1901}


@pytest.mark.needs_mongodb(5, 0)
def test_a_rule_that_is_stored_as_it_is_counts(bank: TwoPhaseCommit, database: Db) -> None:
    rule = {"balance": {"$gte": 1000}}
    for _ in range(2):
        bank.transfer("A", "B", 1, id=1, require=rule, run=False)
        database["transactions"].update_one({"_id": 1}, [{"$set": {"require": {"$literal": rule}}}])
    bank.run(1)
    bank.transfer("A", "B", 1, id=1, require=rule)
    assert balances(database) == {"A": 999, "B": 1001}


def test_a_cancel_is_logged_by_the_process_that_stored_it(
    bank: TwoPhaseCommit, database: Db, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    move, others = TransactionLog.move, [1]

    def overtaken(self: TransactionLog, seen: Transaction, state: State, **given: Any) -> Transaction:
        if state in {State.CANCELED, State.CANCELING} and others:
            others.pop()
            database["transactions"].update_one({"_id": seen.id}, {"$set": {"version": 99}})
        return move(self, seen, state, **given)

    monkeypatch.setattr(TransactionLog, "move", overtaken)
    identity = bank.transfer("A", "B", 5000, run=False)
    with pytest.raises(TransactionCanceledError):
        bank.run(identity)
    assert others == []
    assert [each.__dict__["event"] for each in caplog.records] == ["transaction_canceled"]


def test_a_cancel_whose_answer_was_lost_is_logged(
    bank: TwoPhaseCommit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    move, lost = TransactionLog.move, [1]

    def move_and_lose(self: TransactionLog, seen: Transaction, state: State, **given: Any) -> Transaction:
        moved = move(self, seen, state, **given)
        if state in {State.CANCELED, State.CANCELING} and lost:
            lost.pop()
            raise AutoReconnect("no answer")
        return moved

    monkeypatch.setattr(TransactionLog, "move", move_and_lose)
    with pytest.raises(TransactionCanceledError):
        bank.run(bank.transfer("A", "B", 5000, run=False))
    assert lost == []
    assert [each.__dict__["event"] for each in caplog.records] == ["transaction_canceled"]


def test_a_cancel_that_another_process_has_stored_is_not_logged_again(
    bank: TwoPhaseCommit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    insert, others = TransactionLog.insert, [1]

    def overtaken(self: TransactionLog, *given: Any, **more: Any) -> bool:
        if more.get("state") is State.CANCELED and others:
            others.pop()
            with pytest.raises(TransactionCanceledError):
                bank.transfer("A", "B", 5000, id=1)
        return insert(self, *given, **more)

    monkeypatch.setattr(TransactionLog, "insert", overtaken)
    with pytest.raises(TransactionCanceledError):
        bank.transfer("A", "B", 5000, id=1)
    assert [each.__dict__["event"] for each in caplog.records] == ["transaction_canceled"]


def test_the_same_id_with_other_fields_is_refused(bank: TwoPhaseCommit, database: Db) -> None:
    """Also where the difference is a rule, a type, the kind or the accounts, and where the document is other code's."""
    bank.transfer("A", "B", 1, id=1)
    database["transactions"].insert_one({"_id": 2, "what": 1})
    before = list(database["transactions"].find())

    one = Participant(database["accounts"], "A", {"$inc": {"balance": -1}})
    elsewhere = TwoPhaseCommit(None, database["transactions"], application="bank", accounts=database["others"])
    others: list[Callable[[], object]] = [
        lambda: bank.transfer("A", "B", 2, id=1),
        lambda: bank.transfer("A", "B", 1.0, id=1),
        lambda: bank.transfer("B", "A", 1, id=1),
        lambda: bank.transfer("A", "B", 1, id=1, require={"balance": {"$gte": 1}}),
        lambda: bank.transfer("A", "B", 1, id=1, run=False, require={}),
        lambda: elsewhere.transfer("A", "B", 1, id=1),
        lambda: bank.begin([one], id=1),
        lambda: bank.transfer("A", "B", 1, id=2),
    ]
    for again in others:
        with pytest.raises(TransactionStateError):
            again()
    assert list(database["transactions"].find()) == before
    assert balances(database) == {"A": 999, "B": 1001}


def test_many_that_ask_for_the_same_id_at_once_do_it_once(
    bank: TwoPhaseCommit, database: Db, make_client: MakeClient
) -> None:
    """As two processes that were handed the same message; each with a client of its own."""
    protocol = bank._protocol
    banks = [
        TwoPhaseCommit(None, make_client()[database.name]["transactions"], application="bank", protocol=protocol)
        for _ in range(4)
    ]
    with ThreadPoolExecutor(len(banks)) as threads:
        for number in range(5):
            asked = [threads.submit(each.transfer, "A", "B", 10, id=number) for each in banks]
            assert [each.result() for each in asked] == [number] * len(banks)
    assert balances(database) == {"A": 950, "B": 1050}
    assert markers(database) == []


@pytest.mark.parametrize(
    ("source", "destination", "value"), [("A", "Z", 1), ("Z", "B", 1), ("A", "B", 1001), ("A", "T", 100)]
)
def test_what_cannot_be_done_is_canceled_loudly_and_nothing_stays_applied(
    bank: TwoPhaseCommit, database: Db, source: str, destination: str, value: int
) -> None:
    """An account that is not there, one that cannot pay, and a balance to which the server can add nothing."""
    make_accounts(database, T="much")  # type: ignore[arg-type]
    before = balances(database)
    with pytest.raises(TransactionCanceledError) as caught:
        bank.transfer(source, destination, value, id=1)

    assert vars(caught.value)["id"] == 1
    assert vars(caught.value)["reason"] == (database["transactions"].find_one() or {})["reason"] != ""
    assert bank.read(1).state == "canceled"
    assert balances(database) == before
    assert markers(database) == []
    with pytest.raises(TransactionCanceledError):
        bank.run(1)


def test_any_number_of_participants_in_any_collections(
    bank: TwoPhaseCommit, database: Db, request: pytest.FixtureRequest
) -> None:
    database["stock"].insert_many([{"_id": 1, "left": 3}, {"_id": 2, "left": 0}])
    database["orders"].insert_one({"_id": "o", "lines": {}})

    def reserve(article: int) -> Participant:
        return Participant(database["stock"], article, {"$inc": {"left": -1}}, require={"left": {"$gte": 1}})

    order = Participant(
        f"{database.name}.orders", "o", {"$set": {"lines.reserved": True}}, {"$unset": {"lines.reserved": ""}}
    )
    bank.run(bank.begin([reserve(1), order]))
    assert database["stock"].find_one({"_id": 1}, {"left": 1}) == {"_id": 1, "left": 2}
    assert database["orders"].find_one({"_id": "o"}, {"lines": 1}) == {"_id": "o", "lines": {"reserved": True}}

    with pytest.raises(TransactionCanceledError):
        bank.run(bank.begin([order, reserve(1), reserve(2)]))
    assert database["stock"].find_one({"_id": 1}, {"left": 1}) == {"_id": 1, "left": 2}
    # What was there before stays, unless it had to be taken back by the user's own update.
    left = {} if request.node.callspec.params["bank"] == "documents" else {"reserved": True}
    assert database["orders"].find_one({"_id": "o"}, {"lines": 1}) == {"_id": "o", "lines": left}


def test_cancel_rolls_back_what_is_pending_and_refuses_what_is_applied(bank: TwoPhaseCommit, database: Db) -> None:
    waiting = bank.transfer("A", "B", 100, run=False)
    assert bank.cancel(waiting).state == "canceled"
    assert bank.cancel(waiting).state == "canceled"

    written = database["transactions"].with_options(write_concern=WriteConcern("majority"))  # not so before 5.0
    written.insert_one(
        {"_id": 2, "source": "A", "destination": "B", "value": 100, "state": "pending", "lastModified": LONG_AGO}
    )
    Tutorial(database).apply(2, "A", -100)
    assert balances(database)["A"] == 900
    assert bank.cancel(2, "changed her mind").reason == "changed her mind"
    assert balances(database) == {"A": 1000, "B": 1000}

    done = bank.transfer("A", "B", 100)
    with pytest.raises(TransactionStateError):
        bank.cancel(done)
    assert balances(database) == {"A": 900, "B": 1100}
    with pytest.raises(TransactionStateError):
        bank.compensate(waiting)


def test_what_is_compensated_has_come_back_when_the_call_returns(bank: TwoPhaseCommit, database: Db) -> None:
    make_accounts(database, C=0)
    done = bank.transfer("A", "C", 100)
    assert balances(database) == {"A": 900, "B": 1000, "C": 100}
    compensation = bank.compensate(done)
    assert compensation["compensates"] == done
    assert bank.compensate(done) == compensation
    assert balances(database) == {"A": 1000, "B": 1000, "C": 0}

    spent = bank.transfer("A", "C", 100)
    bank.transfer("C", "B", 100)
    for _ in range(2):
        with pytest.raises(TransactionCanceledError):
            bank.compensate(spent)
    bank.transfer("B", "C", 100)
    assert bank.compensate(spent)["attempt"] == 3
    assert balances(database) == {"A": 1000, "B": 1000, "C": 0}


def test_a_compensation_that_is_interrupted_anywhere_happens_once(
    bank: TwoPhaseCommit, database: Db, make_client: MakeClient
) -> None:
    """Before each of its commands. Recovery finishes what was stored, and whoever asks again finds the same."""
    sent = CommandRecorder()
    log = make_client(event_listeners=[sent])[database.name]["transactions"]
    fragile = TwoPhaseCommit(None, log, application="bank", protocol=bank._protocol)
    fragile.compensate(fragile.transfer("A", "B", 1))  # indexes

    def interrupt() -> None:
        # Before a commit PyMongo would abort no more, and the server would keep documents locked for a minute.
        if "commitTransaction" in sent.sent[-1][1]:
            sent.meanwhile = {len(sent.sent) + 1: interrupt}
        elif "abortTransaction" not in sent.sent[-1][1]:
            raise KeyboardInterrupt

    number, stored, is_done = 0, 0, False
    while not is_done:
        number += 1
        done = bank.transfer("A", "B", 100)
        sent.meanwhile = {len(sent.sent) + number: interrupt}
        with suppress(KeyboardInterrupt):
            fragile.compensate(done)
            is_done = True
        sent.meanwhile = {}
        if number % 2:
            stored += database["transactions"].count_documents({"_id.compensates": done})
            bank.recover(0)
        bank.compensate(done)
        assert [each["state"] for each in database["transactions"].find({"_id.compensates": done})] == ["done"]
        assert balances(database) == {"A": 1000, "B": 1000}
    assert number > 4
    assert stored > 1
    assert markers(database) == []


def test_a_cancel_that_would_take_back_what_was_spent_stays_visible_until_it_can(
    bank: TwoPhaseCommit, database: Db
) -> None:
    make_accounts(database, C=0)
    database["transactions"].insert_one({"_id": 3, "source": "A", "destination": "C", "value": 100, "state": "pending"})
    tutorial = Tutorial(database)
    tutorial.apply(3, "A", -100)
    tutorial.apply(3, "C", 100)
    bank.transfer("C", "B", 60)

    with pytest.raises(TransactionStateError):
        bank.cancel(3)
    assert bank.read(3).state == "canceling"
    assert "stoppedBy" in (database["transactions"].find_one({"_id": 3}) or {})
    assert [each.after for each in bank.recover(0)] == ["canceling"]
    assert balances(database)["C"] == 40
    bank.transfer("B", "C", 60)
    assert [each.after for each in bank.recover(0)] == ["canceled"]
    assert "stoppedBy" not in (database["transactions"].find_one({"_id": 3}) or {})
    assert balances(database) == {"A": 1000, "B": 1000, "C": 0}


@pytest.mark.parametrize("reached", range(7))
def test_recovery_finishes_what_tutorial_code_has_left_at_any_point(
    bank: TwoPhaseCommit, database: Db, reached: int
) -> None:
    tutorial = Tutorial(database)
    steps: list[Callable[[], object]] = [
        lambda: tutorial.apply(1, "A", -100),
        lambda: tutorial.apply(1, "B", 100),
        lambda: tutorial.applied(1),
        lambda: tutorial.pull(1, "A"),
        lambda: tutorial.pull(1, "B"),
        lambda: tutorial.done(1),
    ]
    tutorial.begin(1, "A", "B", 100)
    tutorial.start(1)
    for step in steps[:reached]:
        step()

    report = bank.recover(0)

    assert [(each.id, each.after, each.error) for each in report] == ([(1, "done", None)] if reached < 6 else [])
    assert bank.read(1).state == "done"
    assert balances(database) == {"A": 900, "B": 1100}
    assert markers(database) == []


def test_an_application_leaves_transactions_of_others_alone_unless_asked(database: Db) -> None:
    """Begun or queued: another one may not know a cluster. Each has the name of its app, or has to be given one."""
    make_accounts(database, A=1000, B=1000)
    log = database["transactions"]
    shop, billing = (TwoPhaseCommit(Celery(name, broker="memory://"), log) for name in ("shop", "billing"))
    shape = {"source": "A", "destination": "B", "value": 1, "state": "pending", "lastModified": LONG_AGO}
    log.insert_many([{"_id": "begun", **shape, "application": "shop"}, {"_id": "of nobody", **shape}])
    shop.delay(shop.transfer("A", "B", 100, id="queued", run=False))

    assert [each.id for each in billing.recover(0)] == ["of nobody"]
    for identity in ("begun", "queued"):
        for call in (billing.run, billing.cancel, billing.delay):
            with pytest.raises(TransactionStateError):
                call(identity)
    with pytest.raises(TransactionStateError):
        billing.transfer("A", "B", 100, id="queued")
    assert {each.id: each.after for each in shop.recover(0)} == {"begun": "done", "queued": "done"}
    assert billing.transfer("A", "B", 100, id="queued") == "queued", "it is done, and whoever asks is told so"

    log.insert_one({"_id": "left", **shape, "application": "shop"})
    shop.delay(shop.transfer("A", "B", 100, id="queued, too", run=False))
    assert {each.id for each in billing.recover(0, all=True)} == {"left", "queued, too"}
    assert balances(database) == {"A": 797, "B": 1203}
    for app in (None, Celery(broker="memory://"), Celery("__main__", broker="memory://")):
        with pytest.raises(ConfigurationError):
            TwoPhaseCommit(app, log)


_PART = {"cluster": None, "collection": "a.b", "id": 1, "apply": "{}", "revert": "{}", "require": "{}"}
POISON: list[Document] = [
    *({"version": version} for version in ("v1", 1.5, True, 2**63 - 1)),
    *({"participants": parts} for parts in (None, ["a"], [{"collection": "x"}])),
    *({"participants": [{**_PART, **part}]} for part in ({"collection": 5}, {"apply": '{"$oid": "zz"}'})),
    {"participants": [{**_PART, "cluster": "gone"}]},
    *({"state": ["pending"]}, {"require": 5}, {"value": "1"}, {"source": None, "destination": None}),
]


def test_what_nobody_can_read_is_refused_and_does_not_stop_recovery(bank: TwoPhaseCommit, database: Db) -> None:
    """It is reported, each time, and takes no other's turn. Foreign states stay as they are."""
    shape = {"source": "A", "destination": "B", "value": 1, "state": "pending", "lastModified": LONG_AGO}
    database["transactions"].insert_many([{"_id": number, **shape, **each} for number, each in enumerate(POISON)])
    database["transactions"].insert_many([{"_id": "frozen", **shape, "state": "frozen"}, {"_id": "good", **shape}])

    for identity in ("frozen", POISON.index({"value": "1"}), "no such"):
        with pytest.raises(TransactionStateError):
            bank.run(identity)
    report = {each.id: each for _ in POISON for each in bank.recover(0, limit=3)}
    assert report.pop("good").after == "done"
    assert [number for number, _ in enumerate(POISON) if not report.pop(number).error] == []
    assert report == {}
    assert database["transactions"].count_documents({"_id": "frozen", "state": "frozen"}) == 1
    assert balances(database) == {"A": 999, "B": 1001}


def test_recovery_takes_what_is_old_by_the_servers_clock(bank: TwoPhaseCommit, database: Db) -> None:
    """Fresh ones are somebody's. A time that is missing, or is none, or that Python cannot hold counts as long ago."""
    shape = {"source": "A", "destination": "B", "value": 1, "state": "pending"}
    now = datetime.now(UTC)
    times = {"fresh": now, "old": now - timedelta(hours=1), "text": "yesterday", "ancient": DatetimeMS(-(2**60))}
    database["transactions"].insert_many([{"_id": name, **shape, "lastModified": each} for name, each in times.items()])
    database["transactions"].insert_one({"_id": "timeless", **shape})

    taken = [each.id for each in bank.recover(limit=3)]
    assert len(taken) == 3
    assert {*taken, *(each.id for each in bank.recover())} == {"old", "timeless", "text", "ancient"}
    assert bank.read("fresh").state == "pending"
    assert {each.id for each in bank.recover(timedelta(0))} == {"fresh"}


def test_a_participant_that_is_deleted_in_the_middle_leaves_the_sum_of_the_others_right(
    bank: TwoPhaseCommit, database: Db
) -> None:
    """Deleted before its turn: canceled. Deleted after it was changed: nothing is left to settle there."""
    tutorial = Tutorial(database)
    for identity, states in ((1, ()), (2, ("B", "applied"))):
        tutorial.begin(identity, "A", "B", 100)
        tutorial.start(identity)
        tutorial.apply(identity, "A", -100)
        if states:
            make_accounts(database, B=1000)
            tutorial.apply(identity, "B", 100)
            tutorial.applied(identity)
        database["accounts"].delete_one({"_id": "B"})

    report = {each.id: each.after for each in bank.recover(0)}

    assert report == {1: "canceled", 2: "done"}
    assert balances(database) == {"A": 900}
