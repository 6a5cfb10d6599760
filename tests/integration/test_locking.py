"""SELECT ... FOR UPDATE against a real replica set: what is locked, for how long, how it fails, and who races."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.errors import (
    ConfigurationError,
    DocumentLockedError,
    TopologyError,
    TransactionRequiredError,
    TransactionTimeoutError,
)
from mongo_celery.locking import after_commit, select_for_update, select_many_for_update, transactional
from mongo_celery.mongo.transaction.scopes import scope_of
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.integration.locking_rig import GENEROUS, SHORT, Document, as_block_or_function, beside, held, texts
from tests.rig.commands import CommandRecorder

Select = Callable[..., Any]

BOTH = pytest.mark.parametrize("select", [select_for_update, select_many_for_update])


@pytest.fixture
def things(database: Database[Document]) -> Collection[Document]:
    database["things"].insert_many([{"_id": number, "name": f"thing-{number}", "n": 0} for number in (1, 2, 3)])
    return database["things"]


def locked(things: Collection[Document], filter_: Document, select: Select = select_for_update, **options: Any) -> Any:
    """Lock in a transaction of its own; what was returned."""
    return transactional(things.database.client)(select)(things, filter_, **options)


def stored(things: Collection[Document]) -> Document:
    return things.find_one({"_id": 1}) or {}


def test_the_lock_has_a_fresh_id_and_a_time_and_is_returned_with_the_document(things: Collection[Document]) -> None:
    """`{id, at}`, by the server's clock, beside other fields that may surround it. A second lock replaces the first."""
    server_now = things.database.command("hello")["localTime"]
    things.update_one({"_id": 1}, {"$set": {"meta": {"kept": 2}}})
    ids = set()
    for _ in range(2):
        found = locked(things, {"_id": 1}, field="meta.lock")
        assert found == stored(things)
        lock = found["meta"].pop("lock")
        assert (found["meta"], set(lock), type(lock["id"])) == ({"kept": 2}, {"id", "at"}, ObjectId)
        assert timedelta(0) <= lock["at"] - server_now < timedelta(seconds=60)
        ids.add(lock["id"])
    assert len(ids) == 2


@BOTH
def test_a_field_with_another_value_is_refused_and_kept(things: Collection[Document], select: Select) -> None:
    for value in ("Ann", None, 7, [1]):
        things.update_one({"_id": 1}, {"$set": {"_lock": value}})
        with pytest.raises(ConfigurationError):
            locked(things, {"_id": 1}, select)
        assert stored(things)["_lock"] == value
        assert locked(things, {"_id": 1}, field="other")["_lock"] == value


def test_sort_chooses_the_document_and_projection_what_is_returned(things: Collection[Document]) -> None:
    """As in PyMongo; only the chosen one is locked. No match is no error."""
    assert locked(things, {"_id": 9}) is None
    assert locked(things, {"_id": 9}, select_many_for_update) == []
    assert locked(things, {}, sort=[("_id", -1)], projection={"name": 1}) == {"_id": 3, "name": "thing-3"}
    assert [document["_id"] for document in things.find({"_lock": {"$exists": True}})] == [3]
    assert things.count_documents({}) == 3


def test_ids_of_all_types_are_told_apart(things: Collection[Document]) -> None:
    """1 and True are equal in Python and two documents in MongoDB; a document as `_id` is no key in Python."""
    ids: list[Any] = [True, False, 2.5, "a", None, {"x": 1, "y": 2}, {"y": 2, "x": 1}, ObjectId(), 0]
    things.insert_many([{"_id": each, "place": place} for place, each in enumerate(ids, 100)])
    found = locked(things, {"place": {"$gte": 100}}, select_many_for_update, sort=[("place", -1)])
    assert [each["place"] for each in found] == list(range(100 + len(ids) - 1, 99, -1))
    assert things.count_documents({"_lock": {"$exists": True}}) == len(ids)


@BOTH
def test_a_lock_outside_a_transaction_is_refused(things: Collection[Document], select: Select) -> None:
    with pytest.raises(TransactionRequiredError):
        select(things, {"_id": 1}, session=None)
    with things.database.client.start_session() as session:
        with pytest.raises(TransactionRequiredError):
            select(things, {"_id": 1}, session=session)
        with session.start_transaction():
            select(things, {"_id": 1}, session=session)
        with pytest.raises(TransactionRequiredError):
            select(things, {"_id": 1}, session=session)


WRONG: list[Document] = [
    *({"field": name} for name in ("", "$lock", "_id", "_id.lock", "a..b", "a.$b", ".a", "a\0", None, 5)),
    *({"nowait": 1}, {"limit": -1}, {"limit": True}, {"limit": "2"}),
    *({"projection": each} for each in ({"_id.part": 1}, ["_id.part"], {"_id": {"$add": ["$_id", 1]}})),
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_options_that_cannot_work_are_refused(things: Collection[Document], options: Document) -> None:
    """P9: before anything is sent."""
    for select in (select_many_for_update, select_for_update)[: 2 if "field" in options else 1]:
        with transactional(things.database.client) as session, pytest.raises(ConfigurationError):
            select(things, {}, session=session, **options)


@BOTH
def test_a_standalone_server_is_named_as_the_cause(
    standalone_url: str, make_client: MakeClient, select: Select
) -> None:
    """Under `transactional`, as a context, and in a transaction of the driver's own."""
    client = make_client(standalone_url)
    things = client["alone"]["things"]
    with pytest.raises(TopologyError):
        locked(things, {}, select)
    with pytest.raises(TopologyError), transactional(client) as session:
        things.insert_one({}, session=session)
    with client.start_session() as session, pytest.raises(TopologyError), session.start_transaction():
        select(things, {}, session=session)


def test_nowait_fails_at_once_and_nothing_repeats_it(things: Collection[Document]) -> None:
    """The error has no label of MongoDB's, names the document and keeps the conflict as its cause."""
    attempts = []

    def body(session: ClientSession) -> None:
        attempts.append(1)
        select_for_update(things, {"_id": 1}, session=session, nowait=True)

    with held(things, 1), pytest.raises(DocumentLockedError) as caught:
        transactional(things.database.client).run(body)
    assert len(attempts) == 1
    assert isinstance(caught.value.__cause__, OperationFailure)
    transactional(things.database.client).run(body)


def test_who_waits_gets_the_document_as_the_holder_has_left_it(things: Collection[Document]) -> None:
    """Repeated, and only then read: never the state from before."""
    attempts = []

    def add(session: ClientSession) -> None:
        attempts.append(1)
        document = select_for_update(things, {"_id": 1}, session=session)
        things.update_one({"_id": 1}, {"$set": {"n": document["n"] + 1}}, session=session)

    client = things.database.client
    with ExitStack() as stack:
        with transactional(client) as session:
            select_for_update(things, {"_id": 1}, session=session)
            waiting = stack.enter_context(beside(lambda: transactional(client).run(add)))
            wait_for(lambda: len(attempts) > 1, message="a repeated attempt")
            assert not waiting.done()
            things.update_one({"_id": 1}, {"$inc": {"n": 10}}, session=session)
        waiting.result(PATIENCE_SECONDS)
    assert stored(things)["n"] == 11


def test_a_reader_sees_no_lock_until_it_is_committed_and_an_abort_leaves_none(things: Collection[Document]) -> None:
    """A lock stops writers only. An error in the holder's body is enough to free the document."""
    with pytest.raises(ZeroDivisionError), held(things, 1):
        assert ["_lock" in stored(things), 1 // 0] == [False]
    assert "_lock" not in stored(things)
    assert "_lock" in locked(things, {"_id": 1}, nowait=True)


Client = MongoClient[Document]
Notes = Collection[Document]
AS_BLOCK = pytest.mark.parametrize("as_block", [False, True])


def is_refused(notes: Notes) -> bool:
    """Return True when PyMongo sends nothing more within the limit."""
    try:
        notes.database.command("ping")
    except PyMongoError:
        return True
    return False


@AS_BLOCK
def test_a_body_that_outlasts_the_limit_is_aborted_and_frees_its_documents(
    notes: Notes, client: Client, sent: CommandRecorder, as_block: bool
) -> None:
    """No commit is tried that PyMongo would refuse to send: it would then not abort either, and the lock would stay."""
    notes.insert_one({"_id": 1, "text": "old"})
    committed: list[int] = []

    def body(session: ClientSession) -> None:
        after_commit(lambda: committed.append(1), session)
        select_for_update(notes, {"_id": 1}, session=session)
        notes.update_one({"_id": 1}, {"$set": {"text": "new"}}, session=session)
        wait_for(lambda: is_refused(notes))

    with pytest.raises(TransactionTimeoutError) as caught:
        as_block_or_function(client, body, as_block=as_block, timeout=SHORT)
    assert vars(caught.value)["outcome"] == "aborted"
    assert (len(sent.named("abortTransaction")), len(sent.named("commitTransaction"))) == (1, 0)
    assert notes.find_one() == {"_id": 1, "text": "old"}
    assert transactional(client)(select_for_update)(notes, {"_id": 1}, nowait=True)
    assert committed == []


def test_no_commit_is_tried_in_the_last_milliseconds(notes: Notes, client: Client, sent: CommandRecorder) -> None:
    """PyMongo might refuse to send it. After that it would not abort, and the documents would stay locked."""

    def body(session: ClientSession) -> None:
        notes.insert_one({}, session=session)
        scope = scope_of(session)
        assert scope is not None
        scope.deadline = time.monotonic() + 0.009

    with pytest.raises(TransactionTimeoutError):
        transactional(client).run(body)
    assert (len(sent.named("abortTransaction")), len(sent.named("commitTransaction"))) == (1, 0)


def raise_another(_notes: Notes, _session: ClientSession) -> None:
    raise LookupError("busy") from None


LOCKED: Any = pytest.raises(DocumentLockedError)


@AS_BLOCK
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda _notes, _session: "busy", LOCKED),
        (lambda notes, session: notes.insert_one({"text": "to be repeated"}, session=session), LOCKED),
        (raise_another, pytest.raises(LookupError)),
        (lambda _notes, session: session.abort_transaction(), nullcontext()),
    ],
    ids=["returns", "writes", "raises another", "ends it"],
)
def test_a_lock_error_that_is_caught_inside_ends_the_transaction_all_the_same(
    notes: Notes, client: Client, as_block: bool, answer: Callable[..., Any], expected: AbstractContextManager[object]
) -> None:
    """The server has aborted it: it can neither be committed, nor does a repetition help. An own error passes."""
    notes.insert_one({"_id": 1, "text": "held"})
    runs: list[int] = []

    def body(session: ClientSession) -> Any:
        runs.append(1)
        notes.insert_one({"text": "before"}, session=session)
        try:
            select_for_update(notes, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            answer(notes, session)

    with held(notes, 1), expected:
        as_block_or_function(client, body, as_block=as_block, timeout=GENEROUS)
    assert (len(runs), texts(notes)) == (1, ["held"])
    as_block_or_function(client, body, as_block=as_block, timeout=GENEROUS)
    assert texts(notes) == ["held", "before"]


ACTORS = 8
INCREMENTS = 25
TRANSFERS = 10


def race(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(ACTORS) as pool:
        return list(pool.map(work, range(ACTORS)))


def test_with_a_lock_no_update_is_lost(database: Database[Document]) -> None:
    database["counters"].insert_one({"_id": 1, "count": 0})

    @transactional(database.client)
    def count(*, session: ClientSession) -> None:
        document = select_for_update(database["counters"], {"_id": 1}, session=session)
        database["counters"].update_one({"_id": 1}, {"$set": {"count": document["count"] + 1}}, session=session)

    race(lambda _: [count() for _ in range(INCREMENTS)])
    assert [each["count"] for each in database["counters"].find()] == [ACTORS * INCREMENTS]


def test_with_locks_no_writes_skew(database: Database[Document]) -> None:
    """Whoever counts the doctors on duty holds them, so exactly one stays."""
    database["doctors"].insert_many([{"_id": number, "on_duty": True} for number in range(ACTORS)])

    @transactional(database.client)
    def leave(actor: int, *, session: ClientSession) -> None:
        on_duty = select_many_for_update(database["doctors"], {"on_duty": True}, session=session)
        if len(on_duty) > 1:
            database["doctors"].update_one({"_id": actor}, {"$set": {"on_duty": False}}, session=session)

    race(leave)
    assert database["doctors"].count_documents({"on_duty": True}) == 1


def test_opposite_orders_of_locking_end_and_keep_the_sum(database: Database[Document]) -> None:
    """A deadlock is a conflict here: one of the two gives up immediately, and is repeated."""
    database["accounts"].insert_many([{"_id": 0, "balance": 100}, {"_id": 1, "balance": 100}])

    @transactional(database.client)
    def transfer(source: int, *, session: ClientSession) -> None:
        for each, sign in ((source, -1), (1 - source, 1)):
            select_for_update(database["accounts"], {"_id": each}, session=session)
            database["accounts"].update_one({"_id": each}, {"$inc": {"balance": sign}}, session=session)

    race(lambda actor: [transfer(actor % 2) for _ in range(TRANSFERS)])
    assert [each["balance"] for each in database["accounts"].find()] == [100, 100], "as many went one way as the other"
