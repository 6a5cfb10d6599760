"""Where locks and transactions end: a body that outlasts its limit, a holder that does, a lock error that is caught."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pymongo
import pytest
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.errors import DocumentLockedError, TransactionTimeoutError
from mongo_celery.locking import after_commit, select_for_update, select_many_for_update, transactional
from tests.fixtures.process import wait_for
from tests.integration.locking_rig import Document, Sent, held

MakeClient = Callable[..., MongoClient[Document]]
Body = Callable[[ClientSession], Any]
Run = Callable[..., Any]

LIMIT = 2.0
GENEROUS = 30.0
"""More than any of these needs; what does not end by itself fails with TransactionTimeoutError."""

WRITE_MILLISECONDS_MAX = 20_000


def run_as_function(client: MongoClient[Document], body: Body, **options: Any) -> Any:
    """Run a body as the decorator does."""
    return transactional(client, **options).run(body)


def run_as_context(client: MongoClient[Document], body: Body, **options: Any) -> Any:
    """Run a body as a block."""
    with transactional(client, **options) as session:
        return body(session)


BOTH_WAYS = pytest.mark.parametrize("run", [run_as_function, run_as_context])


@pytest.fixture
def things(database: Database[Document]) -> Collection[Document]:
    """Give a collection of three documents."""
    database["things"].insert_many([{"_id": number, "n": 0} for number in (1, 2, 3)])
    return database["things"]


def use_up_the_time(things: Collection[Document]) -> None:
    """Return when PyMongo would send nothing more within the limit."""

    def refused() -> bool:
        try:
            things.database.command("ping")
        except PyMongoError:
            return True
        return False

    wait_for(refused, message="the end of the limit")


def write_at_once(things: Collection[Document], make_client: MakeClient) -> int:
    """Write as another client does, which waits for a lock; but not for long."""
    update = {"q": {"_id": 1}, "u": {"$inc": {"n": 10}}}
    other = make_client()[things.database.name]
    answer = other.command("update", things.name, updates=[update], maxTimeMS=WRITE_MILLISECONDS_MAX)
    return int(answer["nModified"])


@BOTH_WAYS
def test_a_body_that_outlasts_the_limit_is_aborted_and_frees_its_documents(
    things: Collection[Document], make_client: MakeClient, run: Run
) -> None:
    """No commit is tried that PyMongo would refuse to send: it would then not abort either, and the lock would stay."""
    sent, committed = Sent(), []
    client = make_client(event_listeners=[sent])
    spied = client[things.database.name][things.name]

    def body(session: ClientSession) -> None:
        after_commit(lambda: committed.append(1), session)
        select_for_update(spied, {"_id": 1}, session=session)
        spied.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        use_up_the_time(things)

    with pytest.raises(TransactionTimeoutError, match=r"was aborted.*timeout=") as caught:
        run(client, body, timeout=LIMIT)
    assert caught.value.outcome == "aborted"  # type: ignore[attr-defined]
    assert (len(sent.named("abortTransaction")), len(sent.named("commitTransaction"))) == (1, 0)
    assert write_at_once(things, make_client) == 1
    stored = things.find_one({"_id": 1})
    assert stored is not None
    assert (stored["n"], "_lock" in stored, committed) == (10, False, [])


def busy_or_free(things: Collection[Document], runs: list[int]) -> Body:
    """A body that catches the lock error, where it should not."""

    def body(session: ClientSession) -> str:
        runs.append(1)
        things.insert_one({"_id": "before"}, session=session)
        try:
            select_for_update(things, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            return "busy"
        return "free"

    return body


@BOTH_WAYS
def test_a_lock_error_that_is_caught_inside_ends_the_transaction_all_the_same(
    things: Collection[Document], run: Run
) -> None:
    """The server has aborted it: it can neither be committed, nor would a repetition help."""
    runs: list[int] = []
    body = busy_or_free(things, runs)
    with held(things, 1), pytest.raises(DocumentLockedError) as caught:
        run(things.database.client, body, timeout=GENEROUS)
    assert isinstance(caught.value.__cause__, OperationFailure)
    assert len(runs) == 1
    assert things.find_one({"_id": "before"}) is None
    assert run(things.database.client, body, timeout=GENEROUS) == "free"


@BOTH_WAYS
def test_a_body_that_catches_the_lock_error_and_goes_on_ends_with_it(things: Collection[Document], run: Run) -> None:
    """Whatever it sends then fails as if to be repeated; it would meet the lock again."""
    runs: list[int] = []

    def body(session: ClientSession) -> None:
        runs.append(1)
        try:
            select_for_update(things, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            things.insert_one({"_id": "note"}, session=session)

    with held(things, 1), pytest.raises(DocumentLockedError):
        run(things.database.client, body, timeout=GENEROUS)
    assert len(runs) == 1
    assert things.find_one({"_id": "note"}) is None


@BOTH_WAYS
def test_a_body_may_answer_a_lock_error_with_its_own(things: Collection[Document], run: Run) -> None:
    """It passes unchanged, as any other does."""

    def body(session: ClientSession) -> None:
        try:
            select_for_update(things, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            raise LookupError("busy") from None

    with held(things, 1), pytest.raises(LookupError, match="busy"):
        run(things.database.client, body, timeout=GENEROUS)


def test_a_body_that_catches_the_lock_error_and_aborts_gives_its_result(things: Collection[Document]) -> None:
    """It has ended the transaction itself, and knows what it returns."""

    def body(session: ClientSession) -> str:
        try:
            select_for_update(things, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            session.abort_transaction()
        return "busy"

    with held(things, 1):
        assert run_as_function(things.database.client, body, timeout=GENEROUS) == "busy"


@BOTH_WAYS
@pytest.mark.parametrize("select", [select_for_update, select_many_for_update])
def test_timeout_bounds_the_wait_for_a_holder(things: Collection[Document], run: Run, select: Any) -> None:
    """A function is repeated until then, a block is not. Either is aborted, and nothing of it stays."""
    runs: list[int] = []

    def body(session: ClientSession) -> None:
        runs.append(1)
        select(things, {"_id": 2}, session=session)
        select(things, {"_id": 1}, session=session)

    error = TransactionTimeoutError if run is run_as_function else OperationFailure
    began = time.monotonic()
    with held(things, 1), pytest.raises(error) as caught:
        run(things.database.client, body, timeout=LIMIT)
    assert time.monotonic() - began < GENEROUS
    assert things.count_documents({"_id": 2, "_lock": {"$exists": True}}) == 0
    if run is run_as_function:
        assert len(runs) > 1
        assert vars(caught.value)["outcome"] == "aborted"
        assert "transactionLifetimeLimitSeconds" in str(caught.value)


def test_a_holder_that_outlasts_the_driver_bounds_its_own_transactions_too(things: Collection[Document]) -> None:
    """`with_transaction` repeats a conflict as long as `pymongo.timeout` lets it."""
    runs: list[int] = []

    def body(session: ClientSession) -> None:
        runs.append(1)
        select_for_update(things, {"_id": 1}, session=session)

    with things.database.client.start_session() as session:
        with held(things, 1), pytest.raises(PyMongoError), pymongo.timeout(LIMIT):
            session.with_transaction(body)
        assert len(runs) > 1
        session.with_transaction(body)
