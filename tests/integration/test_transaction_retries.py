"""
`transactional` against a real replica set: what is repeated, what passes through, and when it ends.

The cases are those of MongoDB's specification "Convenient API for Transactions" (`withTransaction`) and its prose
tests, with the limit given instead of fixed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from pymongo import AsyncMongoClient, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import ClientBulkWriteException, DuplicateKeyError, OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import TransactionTimeoutError
from mongo_celery.locking import select_for_update, transactional
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.integration.locking_rig import SHORT, Document, held
from tests.rig.commands import CommandRecorder

APP = "transaction-retries"
TRANSIENT = "TransientTransactionError"
CONFLICT = {"failCommands": ["update"], "appName": APP, "errorCode": 112, "errorLabels": [TRANSIENT]}
COMMIT = {"failCommands": ["commitTransaction"], "appName": APP}
GONE = {**COMMIT, "errorCode": 251, "errorLabels": [TRANSIENT]}
LOST = {**COMMIT, "closeConnection": True}
APPLIED = {**COMMIT, "writeConcernError": {"code": 64, "errmsg": "late"}}
"""The commit is done, and its answer says that nobody knows whether it will last."""

FUNCTIONS = ("function", "coroutine function")
FORMS = (*FUNCTIONS, "block", "async block")


class Counter:
    """A document that a transaction increments, and how often the body has run."""

    def __init__(self, url: str, data: Collection[Document], make_client: MakeClient) -> None:
        self.sent = CommandRecorder()
        self.client = make_client(appName=APP, event_listeners=[self.sent])
        self.client.admin.command("ping")
        self.things = self.client[data.database.name][data.name]
        self.runs = 0
        self._url = url
        self._data = data

    def increment(self, session: ClientSession) -> str:
        self.runs += 1
        self.things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        return f"run {self.runs}"

    @property
    def n(self) -> int:
        """As another client reads it by a majority."""
        document = self._data.with_options(read_concern=ReadConcern("majority")).find_one({"_id": 1})
        assert document is not None
        return int(document["n"])

    @property
    def commits(self) -> int:
        return len(self.sent.named("commitTransaction"))

    def run(self, form: str = "function", **options: Any) -> str:
        """Increment in a transaction of one of the forms."""
        if form == "function":
            return transactional(self.client, **options).run(self.increment)
        if form == "block":
            with transactional(self.client, **options) as session:
                return self.increment(session)
        return asyncio.run(self._run_async(form, options))

    async def _run_async(self, form: str, options: Document) -> str:
        async with AsyncMongoClient[Document](self._url, appName=APP, event_listeners=[self.sent]) as client:
            await client.admin.command("ping")  # connected before its time begins
            things = client[self.things.database.name][self.things.name]

            async def body(session: Any) -> str:
                self.runs += 1
                await things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
                return f"run {self.runs}"

            if form == "coroutine function":
                return await transactional(client, **options).arun(body)
            async with transactional(client, **options) as session:
                return await body(session)


@pytest.fixture
def counter(database: Database[Document], mongo_url: str, make_client: MakeClient) -> Iterator[Counter]:
    """Give the counter, at 0."""
    database["things"].insert_one({"_id": 1, "n": 0})
    yield Counter(mongo_url, database["things"], make_client)
    # A failpoint that answers for a commit leaves the transaction open, which no real server does.
    database.client.admin.command("killAllSessions", [])


def test_the_result_is_returned_and_a_snapshot_is_committed_by_a_majority(counter: Counter) -> None:
    assert counter.run() == "run 1"
    assert (counter.n, counter.runs, counter.commits) == (1, 1, 1)
    assert counter.sent.named("update")[0]["readConcern"]["level"] == "snapshot"
    assert counter.sent.named("commitTransaction")[0]["writeConcern"] == {"w": "majority"}


@pytest.mark.parametrize("error", [ValueError("not today"), DuplicateKeyError("E11000", 11000)], ids=repr)
def test_an_error_that_is_not_transient_ends_the_transaction_and_passes_unchanged(
    counter: Counter, error: Exception
) -> None:
    def body(session: ClientSession) -> None:
        counter.increment(session)
        raise error

    with pytest.raises(type(error)) as caught:
        transactional(counter.client).run(body)
    assert caught.value is error
    assert (counter.n, counter.runs, counter.commits) == (0, 1, 0)
    assert len(counter.sent.named("abortTransaction")) == 1


def test_an_interruption_frees_what_is_locked(counter: Counter) -> None:
    """KeyboardInterrupt is no Exception; Celery's time limits come in the same way."""

    def body(session: ClientSession) -> None:
        select_for_update(counter.things, {"_id": 1}, session=session)
        raise KeyboardInterrupt

    with counter.client.start_session() as session:
        with pytest.raises(KeyboardInterrupt):
            transactional(counter.client).run(body, session=session)
        assert not session.in_transaction
    transactional(counter.client)(select_for_update)(counter.things, {"_id": 1}, nowait=True)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_a_transient_error_repeats_the_whole_body(counter: Counter, failpoint: Failpoint, form: str) -> None:
    with failpoint(mode={"times": 2}, **CONFLICT):
        assert counter.run(form) == "run 3"
    with failpoint(mode={"times": 1}, failCommands=["update"], appName=APP, closeConnection=True):
        assert counter.run(form) == "run 5"
    assert (counter.n, counter.commits) == (2, 2)


def test_a_transient_error_inside_a_clients_bulk_write_repeats_the_body(counter: Counter, failpoint: Failpoint) -> None:
    """PyMongo hides the cause of such an error, and its label, in an attribute; a collection's bulk write wraps it."""
    with failpoint(mode={"times": 1}, **CONFLICT):
        update = UpdateOne({"_id": 2}, {"$inc": {"n": 1}}, upsert=True)
        transactional(counter.client).run(lambda session: counter.things.bulk_write([update], session=session))
    cause = OperationFailure("conflict", 112, {"errorLabels": [TRANSIENT]})

    def body(session: ClientSession) -> None:
        counter.increment(session)
        if counter.runs == 1:
            raise ClientBulkWriteException({"error": cause}, verbose=False)

    transactional(counter.client).run(body)
    assert (counter.n, counter.runs) == (1, 2)


@pytest.mark.mongo_celery_sessionless
def test_a_swallowed_conflict_is_not_taken_for_success(counter: Counter, database: Database[Document]) -> None:
    """The server has aborted the transaction, whatever the body thinks; its commit says so."""

    def body(session: ClientSession) -> None:
        counter.runs += 1
        try:
            counter.things.find_one({"_id": 1}, session=session)
            if counter.runs == 1:
                database["things"].update_one({"_id": 1}, {"$set": {"n": 10}})
            counter.things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        except PyMongoError:
            return

    transactional(counter.client).run(body)
    assert (counter.n, counter.runs) == (11, 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "unknown",
    [LOST, APPLIED, {**APPLIED, "writeConcernError": {"code": 11601, "errmsg": "operation was interrupted"}}],
    ids=["not done", "done", "done, its wait for a majority is ended"],
)
def test_an_unknown_result_repeats_the_commit_and_not_the_body(
    counter: Counter, failpoint: Failpoint, unknown: Document, form: str
) -> None:
    """The last is no unknown result to PyMongo: killOp or killSessions beside a commit that is done."""
    with failpoint(mode={"times": 2}, **unknown):
        assert counter.run(form) == "run 1"
    assert (counter.n, counter.runs, counter.commits) == (1, 1, 3)


@pytest.mark.parametrize("form", FUNCTIONS)
@pytest.mark.parametrize("code", [24, 112, 246, 251])
def test_a_commit_that_finds_the_transaction_gone_repeats_the_body(
    counter: Counter, failpoint: Failpoint, code: int, form: str
) -> None:
    """LockTimeout, WriteConflict, SnapshotUnavailable, NoSuchTransaction, with the labels of the server's own."""
    with failpoint(mode={"times": 2}, **COMMIT, errorCode=code):
        assert counter.run(form) == "run 3"
    assert (counter.n, counter.commits) == (1, 3)


@pytest.mark.parametrize(
    ("refusal", "code", "n"),
    [
        ({**COMMIT, "errorCode": 8000}, 8000, 0),
        ({**APPLIED, "writeConcernError": {"code": 79, "errmsg": "no such members"}}, 79, 1),
        ({**APPLIED, "writeConcernError": {"code": 100, "errmsg": "no such members"}}, 100, 1),
    ],
    ids=["without a label", "UnknownReplWriteConcern", "UnsatisfiableWriteConcern"],
)
def test_a_refused_commit_is_no_reason_to_repeat(
    counter: Counter, failpoint: Failpoint, refusal: Document, code: int, n: int
) -> None:
    """Its error passes unchanged. What no member can confirm is committed, and stays unconfirmed."""
    with failpoint(mode={"times": 1}, **refusal), pytest.raises(OperationFailure) as caught:
        counter.run()
    assert caught.value.code == code
    assert (counter.runs, counter.commits) == (1, 1)
    wait_for(lambda: counter.n == n, message="the commit, which nobody has waited for")


def test_a_commit_whose_time_has_passed_is_not_repeated(counter: Counter, failpoint: Failpoint) -> None:
    """MaxTimeMSExpired has the label of an unknown result, and is the one that must not be repeated."""
    with failpoint(mode={"times": 1}, **COMMIT, errorCode=50), pytest.raises(TransactionTimeoutError) as caught:
        counter.run()
    assert caught.value.outcome == "unknown"  # type: ignore[attr-defined]
    assert (counter.runs, counter.commits) == (1, 1)


@pytest.mark.parametrize("ending", ["commit_transaction", "abort_transaction"])
def test_a_body_that_ends_its_transaction_itself_is_left_alone(counter: Counter, ending: str) -> None:
    def body(session: ClientSession) -> str:
        result = counter.increment(session)
        getattr(session, ending)()
        counter.things.insert_one({"_id": "outside"}, session=session)
        return result

    assert transactional(counter.client).run(body) == "run 1"
    assert counter.n == counter.commits == (1 if ending == "commit_transaction" else 0)
    assert counter.things.find_one({"_id": "outside"})  # as PyMongo has it: of no transaction any more


@pytest.mark.parametrize(
    ("form", "timeout"), [("function", SHORT), ("coroutine function", SHORT), ("function", timedelta(seconds=SHORT))]
)
def test_transient_errors_end_with_the_time(counter: Counter, form: str, timeout: Any) -> None:
    with held(counter._data, 1), pytest.raises(TransactionTimeoutError) as caught:
        counter.run(form, timeout=timeout)
    assert caught.value.outcome == "aborted"  # type: ignore[attr-defined]
    assert isinstance(caught.value.__cause__, PyMongoError)
    assert counter.runs > 1
    assert counter.commits == 0


@pytest.mark.mongo_celery_sessionless
@pytest.mark.parametrize("form", ["run", "with", "with, limited by the caller"])
def test_a_write_that_waits_for_its_own_transaction_is_named(counter: Counter, form: str) -> None:
    """One without `session=`, to a document that the body has written: nothing else would end the wait."""
    call, things = transactional(counter.client, timeout=SHORT if form in {"run", "with"} else None), counter.things

    def body(session: ClientSession) -> None:
        for given in (session, None):
            things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=given)

    def run_block() -> None:
        with pymongo.timeout(SHORT), call as session:
            body(session)

    with pytest.raises((TransactionTimeoutError, PyMongoError)) as caught:
        call.run(body) if form == "run" else run_block()
    assert isinstance(caught.value, TransactionTimeoutError) is (form in {"run", "with"})
    assert "session=" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert counter.n == 0


def test_a_call_that_the_server_ends_with_the_time_is_the_end_of_the_time(
    counter: Counter, failpoint: Failpoint
) -> None:
    """The server gives up a moment before the client would; the caller must not see which of the two was first."""
    late = {"errorCode": 50, "blockConnection": True, "blockTimeMS": int((SHORT - 0.1) * 1000)}
    with (
        failpoint(mode={"times": 1}, failCommands=["update"], appName=APP, **late),
        pytest.raises(TransactionTimeoutError) as caught,
    ):
        counter.run(timeout=SHORT)
    assert caught.value.outcome == "aborted"  # type: ignore[attr-defined]
    assert counter.runs == 1


def test_commits_that_find_the_transaction_gone_end_with_the_time(counter: Counter, failpoint: Failpoint) -> None:
    """The body is repeated no longer; nothing was committed. A body that the time ends in has no commit any more."""
    with failpoint(**GONE), pytest.raises(TransactionTimeoutError) as caught:
        counter.run(timeout=SHORT)
    assert caught.value.outcome == "aborted"  # type: ignore[attr-defined]
    assert counter.commits > 1
    assert counter.runs - counter.commits in {0, 1}
    assert counter.n == 0


@pytest.mark.parametrize("form", FORMS)
def test_commits_of_unknown_result_end_with_the_time_and_say_so(
    counter: Counter, failpoint: Failpoint, form: str
) -> None:
    """Here it was committed, and nobody could know."""
    with failpoint(**APPLIED), pytest.raises(TransactionTimeoutError) as caught:
        counter.run(form, timeout=SHORT)
    assert caught.value.outcome == "unknown"  # type: ignore[attr-defined]
    assert caught.value.retryable
    assert counter.runs == 1
    assert counter.commits > 1
    wait_for(lambda: counter.n == 1, message="the commit, which nobody has waited for")


@pytest.mark.parametrize(("held_back", "outcome"), [(b"never sent", "aborted"), (b"commitTransaction", "unknown")])
def test_a_server_that_hangs_does_not_hold_the_caller(
    counter: Counter, proxy: Proxy, make_client: MakeClient, held_back: bytes, outcome: str
) -> None:
    """In the body, what it had locked is free. A commit may yet arrive, so nobody knows."""
    client = make_client(proxy.mongo_url)
    client.admin.command("ping")  # connected before its time begins
    things = client[counter.things.database.name][counter.things.name]

    def body(session: ClientSession) -> None:
        things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        things.update_one({"_id": 2}, {"$set": {"never sent": 1}}, session=session)

    proxy.hold(held_back)
    with pytest.raises(TransactionTimeoutError) as caught:
        transactional(client, timeout=SHORT).run(body)
    proxy.wait_until_held()
    assert caught.value.outcome == outcome  # type: ignore[attr-defined]
    if outcome == "aborted":
        transactional(counter.client)(select_for_update)(counter.things, {"_id": 1}, nowait=True)


def test_as_a_context_a_transient_error_passes_with_its_label(counter: Counter, failpoint: Failpoint) -> None:
    """A block cannot be run again; its caller can, and sees from the label that it may."""
    with (
        failpoint(mode={"times": 1}, **CONFLICT),
        pytest.raises(OperationFailure) as caught,
        transactional(counter.client) as session,
    ):
        counter.increment(session)
    assert caught.value.has_error_label(TRANSIENT)
    assert counter.runs == 1
