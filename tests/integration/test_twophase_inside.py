"""Two-phase commit in an open transaction, beside what `test_inside_a_transaction` shows row by row."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pymongo
import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery import Participant, TwoPhaseCommit, transactional
from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionError, TransactionStateError
from mongo_celery.twophase.twophase import get_engine
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.proxy import Proxy
from tests.integration.twophase_rig import Db, Document, advance, balances, coordinator, make_accounts

Client = MongoClient[Document]
NO_SUCH_TRANSACTION = 251


@pytest.fixture
def bank(database: Db) -> TwoPhaseCommit:
    make_accounts(database, A=1000, B=1000)
    database.create_collection("orders")
    app = Celery("bank", broker="memory://", set_as_current=False)
    return TwoPhaseCommit(app, database["transactions"], recover_every=None)


@pytest.fixture
def client(bank: TwoPhaseCommit) -> Client:
    return bank.transactions.database.client


def orders(bank: TwoPhaseCommit) -> list[Any]:
    return [each["_id"] for each in bank.transactions.database["orders"].find().sort("_id", 1)]


@pytest.mark.parametrize("failure", [{"errorCode": 112}, {"closeConnection": True}])
def test_a_delay_asks_mongodb_again(bank: TwoPhaseCommit, database: Db, failpoint: Failpoint, failure: Any) -> None:
    identity = bank.transfer("A", "B", 1, run=False)
    with failpoint(mode={"times": 3}, failCommands=["update"], **failure):
        bank.delay(identity)
    assert database["transactions"].count_documents({"_id": identity, "queuedAt": {"$exists": True}}) == 1


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_cancel_is_logged_when_it_is_committed(
    bank: TwoPhaseCommit, client: Client, caplog: pytest.LogCaptureFixture, *, is_committed: bool
) -> None:
    def body(_session: ClientSession) -> None:
        with pytest.raises(TransactionCanceledError):
            bank.transfer("A", "B", 5000)
        assert caplog.records == []
        if not is_committed:
            raise ValueError

    with nullcontext() if is_committed else pytest.raises(ValueError):  # noqa: PT011
        transactional(client).run(body)
    assert [each.__dict__["event"] for each in caplog.records] == ["transaction_canceled"] * is_committed


def test_what_is_refused_or_canceled_inside_fails_nothing_else(
    bank: TwoPhaseCommit, client: Client, database: Db
) -> None:
    """The body catches it, and what else it does is committed; what is stored already keeps its outcome."""
    bank.transfer("A", "B", 1, id="done")
    with pytest.raises(TransactionCanceledError):
        bank.transfer("A", "B", 5000, id="canceled")
    bank.transfer("A", "B", 10, id="initial", run=False)
    markers = coordinator(client, database.name)
    advance(markers, markers.transfer("A", "B", 7, id="pending", run=False))
    database["orders"].insert_one({"_id": 1})

    def body(session: ClientSession) -> None:
        assert bank.transfer("A", "B", 1, id="done") == bank.run("done").id == "done"
        assert bank.transfer("A", "B", 10, id="initial") == "initial"
        with pytest.raises(TransactionCanceledError):
            bank.transfer("A", "B", 5000, id="canceled")
        with pytest.raises(TransactionCanceledError):
            bank.begin([Participant(database["orders"], each, {"$inc": {"n": 1}}) for each in (1, 1.0)], run=True)
        for call in (
            lambda: bank.transfer("A", "B", 2, id="done"),
            lambda: bank.run("pending"),
            lambda: bank.cancel("pending"),
            lambda: bank.cancel("done"),
            lambda: bank.delay("done"),
            lambda: bank.compensate("canceled"),
        ):
            with pytest.raises(TransactionStateError):
                call()
        client[database.name]["orders"].insert_one({"_id": 2}, session=session)

    transactional(client).run(body)
    assert balances(database) == {"A": 989, "B": 1011}
    assert list(database["orders"].find()) == [{"_id": 1}, {"_id": 2}]


def test_a_change_that_the_server_refuses_fails_the_whole(bank: TwoPhaseCommit, client: Client, database: Db) -> None:
    """The server has aborted the transaction by then, whoever catches the error."""
    database["accounts"].insert_one({"_id": "T", "balance": "much", "pendingTransactions": []})

    def body(session: ClientSession) -> None:
        client[database.name]["orders"].insert_one({"_id": 1}, session=session)
        with pytest.raises(TransactionCanceledError):
            bank.transfer("A", "T", 100)

    with pytest.raises(TransactionError):
        transactional(client).run(body)
    assert balances(database)["A"] == 1000
    assert (orders(bank), database["transactions"].count_documents({})) == ([], 0)


def test_transactions_that_ask_for_the_same_id_at_once_pay_once(
    bank: TwoPhaseCommit, client: Client, database: Db
) -> None:
    """As two processes with one message: each commits what else it does."""

    def pay(number: int, by: int) -> None:
        def body(session: ClientSession) -> None:
            bank.transfer("A", "B", 10, id=number)
            client[database.name]["orders"].insert_one({"_id": {"n": number, "by": by}}, session=session)

        transactional(client).run(body)

    with ThreadPoolExecutor(4) as threads:
        for number in range(5):
            for paid in [threads.submit(pay, number, by) for by in range(4)]:
                paid.result()
    assert balances(database) == {"A": 950, "B": 1050}
    assert len(orders(bank)) == 20


def test_a_transaction_of_the_drivers_is_joined_by_its_session(
    bank: TwoPhaseCommit, client: Client, database: Db
) -> None:
    """Nobody says when that is committed, so nothing is queued in it; a session without a transaction is refused."""
    stored = bank.transfer("A", "B", 1, run=False)
    for ends in ("abort_transaction", "commit_transaction"):
        with client.start_session() as session:
            with pytest.raises(ConfigurationError):
                bank.transfer("A", "B", 10, session=session)
            session.start_transaction()
            bank.transfer("A", "B", 10, session=session)
            with pytest.raises(TransactionCanceledError):
                bank.transfer("A", "nobody", 10, session=session)
            with pytest.raises(ConfigurationError):
                bank.delay(stored, session=session)
            getattr(session, ends)()
    assert balances(database) == {"A": 990, "B": 1010}
    assert sorted(each["state"] for each in database["transactions"].find()) == ["canceled", "done", "initial"]


@pytest.mark.parametrize("lost", [["update"], ["update", "abortTransaction"]])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("skipped", [0, 1])
def test_an_error_of_a_payment_that_is_caught_fails_the_drivers_own_transaction(
    bank: TwoPhaseCommit,
    client: Client,
    database: Db,
    failpoint: Failpoint,
    lost: list[str],
    is_stored: bool,
    skipped: int,
) -> None:
    """P18: neither `done` without the money is committed, nor half of it, also if no abort reaches the server."""
    database["more"].insert_one({"_id": "C", "balance": 0})
    paid, got = database["accounts"], database["more"]
    parts = [
        Participant(f"{paid.database.name}.{name}", each, {"$inc": {"balance": by}})
        for name, each, by in ((paid.name, "A", -100), (got.name, "C", 100))
    ]
    if is_stored:
        bank.begin(parts, id="pay")
    else:
        get_engine(bank).log.prepare()

    def pay(session: ClientSession) -> object:
        if is_stored:
            return bank.run("pay", session=session)
        return bank.begin(parts, id="pay", run=True, session=session)

    def pay_and_commit(session: ClientSession) -> None:
        with session.start_transaction():
            client[database.name]["orders"].insert_one({"_id": 1}, session=session)
            with failpoint(mode={"skip": skipped}, **closes), pytest.raises(PyMongoError):
                pay(session)

    closes = {"failCommands": lost, "closeConnection": True}
    with client.start_session() as session, pytest.raises(OperationFailure) as refused:
        pay_and_commit(session)
    client.admin.command("killAllSessions", [])  # else what no abort has reached locks the collections for a minute
    assert refused.value.code == NO_SUCH_TRANSACTION
    assert [*balances(database).values(), (got.find_one() or {})["balance"]] == [1000, 1000, 0]
    assert [each["state"] for each in database["transactions"].find()] == ["initial"] * is_stored
    assert orders(bank) == []


def test_a_payment_that_reaches_no_server_fails_the_drivers_own_transaction(
    database: Db, proxy: Proxy, make_client: MakeClient
) -> None:
    """P18: the payment would have begun the transaction. What follows it must not begin another one without it."""
    make_accounts(database, A=1000, B=1000)
    database.create_collection("orders")
    client = make_client(proxy.mongo_url)
    bank = TwoPhaseCommit(None, client[database.name]["transactions"], application="bank", recover_every=None)
    get_engine(bank).log.prepare()

    def pay_and_commit(session: ClientSession, *, orders: int) -> None:
        with session.start_transaction():
            proxy.refuse()
            with pytest.raises(PyMongoError), pymongo.timeout(0.5):
                bank.transfer("A", "B", 10, session=session)
            proxy.pass_through()
            for number in range(orders):
                client[database.name]["orders"].insert_one({"_id": number}, session=session)

    for orders in (0, 1):
        with client.start_session() as session, pytest.raises(OperationFailure) as refused:
            pay_and_commit(session, orders=orders)
        assert refused.value.code == NO_SUCH_TRANSACTION
    assert database["orders"].find_one() is None
    assert balances(database) == {"A": 1000, "B": 1000}


def test_a_thread_of_the_body_pays_with_its_session_or_not_at_all(
    bank: TwoPhaseCommit, client: Client, database: Db
) -> None:
    """A thread that has a copy of its context is refused; one that is handed the session joins."""

    def body(session: ClientSession) -> None:
        with pytest.raises(ConfigurationError):
            asyncio.run(asyncio.to_thread(bank.transfer, "A", "B", 10))
        paying = threading.Thread(target=lambda: bank.transfer("A", "B", 10, session=session))
        paying.start()
        paying.join(60)
        raise KeyError

    with pytest.raises(KeyError):
        transactional(client).run(body)
    assert balances(database) == {"A": 1000, "B": 1000}
    assert database["transactions"].count_documents({}) == 0


def test_a_payment_joins_the_innermost_transaction_or_none(
    bank: TwoPhaseCommit, client: Client, database: Db, make_client: MakeClient
) -> None:
    """In one that is begun inside it would be made again with each repetition of that, and be committed with both."""

    def inner(session: ClientSession) -> None:
        assert outer.in_transaction
        with pytest.raises(ConfigurationError):
            bank.transfer("A", "B", 10, session=outer)
        if session.client is client:
            bank.transfer("A", "B", 10)
        else:
            with pytest.raises(ConfigurationError):
                bank.transfer("A", "B", 10)

    with transactional(client) as outer:
        for each in (make_client(), client):
            transactional(each, independent=True).run(inner)

    def repeated(_: ClientSession) -> None:
        with pytest.raises(ConfigurationError):
            bank.transfer("A", "B", 10, session=drivers)

    with client.start_session() as drivers, drivers.start_transaction():
        transactional(make_client(), independent=True).run(repeated)
    assert balances(database) == {"A": 990, "B": 1010}
