"""SELECT ... FOR UPDATE against a real replica set: what is locked, for how long, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery.errors import ConfigurationError, DocumentLockedError, TopologyError, TransactionRequiredError
from mongo_celery.locking import select_for_update, select_many_for_update, transactional
from tests.fixtures.process import wait_for
from tests.integration.locking_rig import Document, beside, held

MakeClient = Callable[..., MongoClient[Document]]
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
    """It is not a lock's, and no repetition helps."""
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
    """Without a session, with one that has no transaction, and after the transaction has ended."""
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
        waiting.result(20)
    assert stored(things)["n"] == 11


def test_a_reader_sees_no_lock_until_it_is_committed_and_an_abort_leaves_none(things: Collection[Document]) -> None:
    """A lock stops writers only. An error in the holder's body is enough to free the document."""
    with pytest.raises(ZeroDivisionError), held(things, 1):
        assert ["_lock" in stored(things), 1 // 0] == [False]
    assert "_lock" not in stored(things)
    assert "_lock" in locked(things, {"_id": 1}, nowait=True)
