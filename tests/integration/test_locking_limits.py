"""Where locks and transactions end: a body that outlasts its limit, a lock error that is caught, bounds of waiting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
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
from tests.integration.locking_rig import Document, Sent, held

MakeClient = Callable[..., MongoClient[Document]]
Body = Callable[[ClientSession], Any]
Run = Callable[..., Any]

LIMIT = 2.0
GENEROUS = 30.0
"""More than any of these needs; what does not end by itself fails with TransactionTimeoutError."""

WRITE_MILLISECONDS_MAX = 20_000
LONGER_THAN_ONE_WAIT = 1.5


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
    """Give a collection of three documents that are due."""
    database["things"].insert_many([{"_id": number, "n": 0, "due": datetime(2020, 1, 1)} for number in (1, 2, 3)])  # noqa: DTZ001
    return database["things"]


def due(now: datetime) -> Document:
    """A filter that is another one at each attempt."""
    return {"_id": 1, "due": {"$lt": now}}


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


def busy_or_free(things: Collection[Document], runs: list[int], **bound: Any) -> Body:
    """A body that catches the lock error, where it should not."""

    def body(session: ClientSession) -> str:
        runs.append(1)
        things.insert_one({"_id": "before"}, session=session)
        try:
            select_for_update(things, {"_id": 1}, session=session, **bound)
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
    body = busy_or_free(things, runs, nowait=True)
    with held(things, 1), pytest.raises(DocumentLockedError) as caught:
        run(things.database.client, body, timeout=GENEROUS)
    assert isinstance(caught.value.__cause__, OperationFailure)
    assert len(runs) == 1
    assert things.find_one({"_id": "before"}) is None
    assert run(things.database.client, body, timeout=GENEROUS) == "free"


def test_an_error_at_the_bound_of_waiting_that_is_caught_inside_does_not_begin_the_wait_anew(
    things: Collection[Document],
) -> None:
    """Once it is raised, the call ends with it."""
    with held(things, 1), pytest.raises(DocumentLockedError, match=r"within 1 s"):
        run_as_function(things.database.client, busy_or_free(things, [], wait=1), timeout=GENEROUS)


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


@pytest.mark.parametrize("select", [select_for_update, select_many_for_update])
def test_waiting_ends_at_its_bound_though_the_filter_changes(things: Collection[Document], select: Any) -> None:
    """A filter with the present time is another one at each attempt, for the same call."""
    runs: list[int] = []

    def body(session: ClientSession) -> None:
        runs.append(1)
        select_for_update(things, {"_id": 2}, session=session)
        select(things, due(datetime.now(UTC)), session=session, wait=1)

    with held(things, 1), pytest.raises(DocumentLockedError, match=r"within 1 s"):
        run_as_function(things.database.client, body, timeout=GENEROUS)
    assert len(runs) > 1


def test_each_call_of_a_body_has_a_bound_of_its_own(things: Collection[Document]) -> None:
    """What one has waited does not count for the next, on the same collection either."""
    met: list[int] = []

    def body(session: ClientSession) -> None:
        select_for_update(things, {"_id": 2}, session=session, wait=GENEROUS)
        met.append(2)
        select_for_update(things, {"_id": 1}, session=session, wait=1)
        met.append(1)

    with held(things, 1), pytest.raises(DocumentLockedError, match=r"'_id': 1.*within 1 s"):
        run_as_function(things.database.client, body, timeout=GENEROUS)
    assert len(met) > 1
    assert set(met) == {2}


def test_the_drivers_own_transactions_wait_no_longer_though_the_filter_changes(things: Collection[Document]) -> None:
    """Also on a session that has locked in transactions before."""

    def body(session: ClientSession) -> None:
        select_for_update(things, due(datetime.now(UTC)), session=session, wait=1)

    with things.database.client.start_session() as session:
        for _ in range(2):
            session.with_transaction(body)
        with held(things, 1), pytest.raises(DocumentLockedError, match=r"within 1 s"):
            session.with_transaction(body)


def test_a_later_transaction_of_a_drivers_session_waits_anew(things: Collection[Document]) -> None:
    """The caller has given the first one up; its waiting is no longer the later one's."""

    def conflict(session: ClientSession) -> None:
        session.start_transaction()
        with pytest.raises(OperationFailure):  # to be repeated: not yet a DocumentLockedError
            select_for_update(things, {"_id": 1}, session=session, wait=1)
        session.abort_transaction()

    with things.database.client.start_session() as session, held(things, 1):
        conflict(session)
        with pytest.raises(DocumentLockedError):
            run_as_function(
                things.database.client,
                lambda other: select_for_update(things, {"_id": 1}, session=other, wait=LONGER_THAN_ONE_WAIT),
            )
        conflict(session)
