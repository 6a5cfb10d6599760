"""Where locks and transactions end: a body that outlasts its limit, a holder that does, a lock error that is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.errors import DocumentLockedError, TransactionTimeoutError
from mongo_celery.locking import after_commit, select_for_update, select_many_for_update, transactional
from tests.fixtures.process import wait_for
from tests.integration.locking_rig import Document, held
from tests.rig.commands import CommandRecorder

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
    sent, committed = CommandRecorder(), []
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


def return_busy(_things: Collection[Document], _session: ClientSession) -> str:
    return "busy"


def write_a_note(things: Collection[Document], session: ClientSession) -> None:
    """Fail as if to be repeated. It would meet the lock again."""
    things.insert_one({"_id": "note"}, session=session)


def raise_another(_things: Collection[Document], _session: ClientSession) -> None:
    raise LookupError("busy") from None


@BOTH_WAYS
@pytest.mark.parametrize(
    ("answer", "error"),
    [(return_busy, DocumentLockedError), (write_a_note, DocumentLockedError), (raise_another, LookupError)],
)
def test_a_lock_error_that_is_caught_inside_ends_the_transaction_all_the_same(
    things: Collection[Document], run: Run, answer: Callable[..., Any], error: type[Exception]
) -> None:
    """The server has aborted it: it can neither be committed, nor does a repetition help. An own error passes."""
    runs: list[int] = []

    def body(session: ClientSession) -> Any:
        runs.append(1)
        things.insert_one({"_id": "before"}, session=session)
        try:
            select_for_update(things, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            return answer(things, session)
        return "free"

    with held(things, 1), pytest.raises(error):
        run(things.database.client, body, timeout=GENEROUS)
    assert len(runs) == 1
    assert things.count_documents({}) == 3
    assert run(things.database.client, body, timeout=GENEROUS) == "free"


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
    with held(things, 1), pytest.raises(error) as caught:
        run(things.database.client, body, timeout=LIMIT)
    assert things.count_documents({"_id": 2, "_lock": {"$exists": True}}) == 0
    if run is run_as_function:
        assert len(runs) > 1
        assert vars(caught.value)["outcome"] == "aborted"
        assert "transactionLifetimeLimitSeconds" in str(caught.value)
