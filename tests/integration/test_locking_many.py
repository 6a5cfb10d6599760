"""Many documents locked at once: two commands however many they are, in every form; some of those nobody else holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar

import mongoengine
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery.errors import ConfigurationError, DocumentLockedError
from mongo_celery.locking import (
    select_for_update,
    select_many_for_update,
    skipping,
    transactional,
)
from tests.fixtures.process import wait_for
from tests.integration.locking_rig import Document, Sent, Tasks, Threads, held

MakeClient = Callable[..., MongoClient[Document]]

COUNT = 100
LOCKS = ("find", "update", "findAndModify")


class Spied:
    """A collection of a hundred documents, a way to lock them, and the commands that it sends."""

    def __init__(self, collection: Collection[Document], way: Threads | Tasks, sent: Sent) -> None:
        self.collection, self.way, self.sent = collection, way, sent

    def locked(self, filter_: Document, **options: Any) -> tuple[list[Document], list[str]]:
        """What a call gives, and by which commands."""
        self.sent.commands.clear()
        found = self.way.lock("select_many_for_update", self.collection, filter_, **options)
        return found, [name for each in self.sent.commands if (name := next(iter(each))) in LOCKS]

    def take(self, filter_: Document, **options: Any) -> Any:
        """One that is free, or so many."""
        name = "select_many_for_update" if "limit" in options else "select_for_update"
        return self.way.lock(name, self.collection, filter_, skip_locked=True, **options)

    @property
    def locks(self) -> list[int]:
        return [each["_id"] for each in self.collection.find({"_lock": {"$exists": True}}).sort("_id", 1)]


@pytest.fixture(params=[Threads, Tasks])
def spied(request: pytest.FixtureRequest, database: Database[Document], mongo_url: str) -> Iterator[Spied]:
    """By both ways: what is shown of the locks for threads is true of those for asyncio."""
    database["things"].insert_many([{"_id": number, "n": COUNT - number, "x": 1} for number in range(COUNT)])
    sent = Sent()
    with closing(request.param(mongo_url, event_listeners=[sent])) as way:
        yield Spied(database["things"], way, sent)


@pytest.fixture
def things(database: Database[Document], make_client: MakeClient) -> Collection[Document]:
    """For threads alone; by a client of its own, for what one was refused is left out by all of its calls."""
    database["things"].insert_many([{"_id": number} for number in range(10)])
    return make_client()[database.name]["things"]


def test_a_hundred_are_locked_by_two_commands(spied: Spied) -> None:
    """They come by `_id`, as they are stored, all with the same lock."""
    found, commands = spied.locked({"x": 1}, application="box office")
    assert commands == ["update", "find"]
    assert found == list(spied.collection.find().sort("_id", 1))
    assert {each["_lock"]["application"] for each in found} == {"box office"}
    assert len({each["_lock"]["id"] for each in found}) == 1


def test_none_are_locked_by_one_command(spied: Spied) -> None:
    """What matches nothing is not read."""
    assert spied.locked({"x": 2}) == ([], ["update"])


@pytest.mark.parametrize(
    ("filter_", "options", "commands"),
    [
        ({"_id": 7}, {}, ["findAndModify"]),
        ({"_id": {"$in": [7]}}, {"projection": {"n": 1, "_id": 0}}, ["findAndModify"]),
        ({"_id": {"$in": [7, 3]}}, {"projection": ["n"]}, ["findAndModify"] * 2),
        ({"_id": {"$in": [7, 1000]}}, {"limit": 2}, ["findAndModify"] * 2),
        ({"_id": {"$in": [7, 7.0]}}, {}, ["update", "find"]),
        ({"_id": {"$in": [7, True]}}, {}, ["update", "find"]),
        ({"_id": {"$in": ["7", "8"]}}, {}, ["update"]),
        ({"_id": 7, "x": 1}, {}, ["update", "find"]),
        ({"_id": {"$in": [7, 3]}}, {"limit": 1}, ["find", "update"]),
        ({"_id": {"$in": [7, 3]}}, {"sort": [("n", 1)]}, ["update", "find"]),
    ],
    ids=str,
)
def test_one_or_two_by_id_are_a_command_each(
    spied: Spied, filter_: Document, options: Document, commands: list[str]
) -> None:
    """What is returned is as ever, and nothing else is asked for where the ids might mean others or another order."""
    found, sent = spied.locked(filter_, **options)
    assert sent == commands
    assert found == list(spied.collection.find(filter_, **{"sort": [("_id", 1)], **options}))
    assert len(spied.locks) == len(found)


def test_the_order_and_the_projection_are_the_callers(spied: Spied) -> None:
    """As in PyMongo."""
    found, commands = spied.locked({"_id": {"$lt": 3}}, sort=[("n", 1)], projection={"n": 1, "_id": 0})
    assert (found, commands) == ([{"n": 98}, {"n": 99}, {"n": 100}], ["update", "find"])


@pytest.mark.parametrize(
    ("options", "shown", "count"),
    [
        ({}, None, 2),
        ({"projection": ["n"]}, ["_id", "n"], 2),
        ({"projection": {"n": 1, "_id": 0}}, ["n"], 2),
        ({"projection": {"n": 0}}, ["_id", "x", "_lock"], 3),
        ({"projection": {"_id": 0}}, ["n", "x", "_lock"], 3),
        ({"projection": {"_lock.id": 1}}, ["_id", "_lock"], 3),
        ({"field": "meta.lock"}, ["_id", "n", "x", "meta"], 3),
        ({"projection": {"_id": 1}}, ["_id"], 2),
        ({"projection": []}, ["_id", "n", "x", "_lock"], 2),
        ({"projection": {}}, ["_id", "n", "x", "_lock"], 2),
    ],
    ids=str,
)
def test_a_limit_locks_no_others_and_gives_them_as_they_are_stored(
    spied: Spied, options: Document, shown: list[str] | None, count: int
) -> None:
    """Read first, then written by `_id`: what is returned is what is stored, its lock included."""
    found, commands = spied.locked({}, sort=[("n", 1)], limit=5, **options)
    stored = spied.collection.find({}, options.get("projection"), sort=[("n", 1)], limit=5)
    assert found == list(stored)
    assert len(commands) == count
    if shown is not None:
        assert sorted(found[0]) == sorted(shown)
    field = options.get("field", "_lock")
    assert spied.collection.count_documents({field: {"$exists": True}}) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"filter_": {"_lock": None, "_id": {"$lt": 5}}},
        {"filter_": {"$expr": {"$lt": ["$_lock.at", "$$NOW"]}, "_id": {"$lt": 5}}},
        {"filter_": {"_id": {"$lt": 5}}, "sort": [("_lock.at", 1), ("n", 1)]},
        {
            "filter_": {"$expr": {"$eq": [{"$size": {"$objectToArray": "$$ROOT"}}, 3]}, "_id": {"$lt": 5}},
            "sort": [("n", 1)],
        },
    ],
    ids=str,
)
def test_what_the_lock_itself_changes_is_judged_as_it_was_before(spied: Spied, options: Document) -> None:
    """A filter that the locked documents no longer match, and an order by the lock of before."""
    found, _ = spied.locked(**options)
    reverse = "sort" in options
    assert [each["_id"] for each in found] == sorted(range(5), reverse=reverse)
    assert spied.locks == list(range(5))


def test_parts_of_an_id_are_shown_as_pymongo_does(spied: Spied) -> None:
    """Then a document cannot be known again by what is shown of it, and each is read for itself."""
    spied.collection.insert_many([{"_id": {"a": number, "b": 1}, "n": -number} for number in range(3)])
    for projection in ({"_id.a": 1}, {"_id.a": 0}):
        found, commands = spied.locked({"_id.b": 1}, sort=[("n", 1)], limit=2, projection=projection)
        assert found == list(spied.collection.find({"_id.b": 1}, projection, sort=[("n", 1)], limit=2))
        assert commands == ["find", "update", "find", "find"]


@pytest.mark.parametrize(
    "filter_",
    [{"$expr": {"$gte": ["$n", {"$rand": {}}]}}, {"$where": "return this.x == 1"}, {"$and": [{"$expr": True}]}],
    ids=str,
)
def test_what_may_match_otherwise_the_next_time_is_read_first(spied: Spied, filter_: Document) -> None:
    """Else what was locked and is not found again would have to be looked for in all of the collection."""
    found, commands = spied.locked(filter_)
    assert (len(found), commands) == (COUNT, ["find", "update"])


@pytest.mark.parametrize("skip", [{}, {"skip_locked": True}], ids=str)
def test_what_a_projection_takes_from_the_filter_is_there(spied: Spied, skip: Document) -> None:
    """A place in an array, and the score of a search, also where the documents are read again by their ids."""
    spied.collection.insert_one({"_id": "a", "items": [{"n": 1}, {"n": 2}], "text": "red lamp"})
    spied.collection.create_index([("text", "text")])
    found, _ = spied.locked({"items.n": 2}, limit=1, projection={"items.$": 1}, **skip)
    assert found == [{"_id": "a", "items": [{"n": 2}]}]
    score = {"score": {"$meta": "textScore"}}
    search = {"$text": {"$search": "lamp"}}
    found, _ = spied.locked(search, limit=1, projection=score, sort=[("score", {"$meta": "textScore"})], **skip)
    assert [(each["_id"], each["score"] > 0, "id" in each["_lock"]) for each in found] == [("a", True, True)]
    with pytest.raises(ConfigurationError, match="takes something from the filter"):
        spied.locked({**search, "_lock.id": {"$exists": True}}, limit=1, projection=score, **skip)


def test_a_filter_is_not_put_into_words_unless_an_error_needs_it(spied: Spied) -> None:
    """It may have a hundred thousand ids."""

    class Silent(list[int]):
        def __repr__(self) -> str:
            raise AssertionError

    assert len(spied.locked({"_id": {"$in": Silent(range(3))}})[0]) == 3


def test_raw_documents_are_locked_and_read_too(spied: Spied) -> None:
    """They cannot be amended, so they are read again."""
    raw = spied.collection.with_options(codec_options=CodecOptions(document_class=RawBSONDocument))
    found = spied.way.lock("select_many_for_update", raw, {}, limit=2)
    assert [(each["_id"], "id" in each["_lock"]) for each in found] == [(0, True), (1, True)]


def test_one_that_is_held_refuses_all_and_leaves_none_locked(spied: Spied) -> None:
    """Who meets a conflict has nothing, so no two can hold what the other wants."""
    with held(spied.collection, 50):
        for options in ({}, {"limit": 99, "sort": [("_id", 1)]}):
            with pytest.raises(DocumentLockedError):
                spied.locked({}, nowait=True, **options)
        assert len(spied.locked({"_id": {"$ne": 50}}, nowait=True)[0]) == COUNT - 1


@pytest.mark.mongo_celery_sessionless
@pytest.mark.parametrize("level", ["snapshot", "local", "majority"])
def test_a_change_between_reading_and_writing_is_a_conflict(things: Collection[Document], level: str) -> None:
    """A transaction has one snapshot from its first command on, whatever its read concern."""
    from pymongo.read_concern import ReadConcern

    attempts: list[int] = []

    @transactional(things.database.client, read_concern=ReadConcern(level))
    def lock(*, session: ClientSession) -> list[Document]:
        attempts.append(1)
        things.find_one({"_id": 1}, session=session)
        if len(attempts) == 1:
            things.delete_one({"_id": 0})
        return list(select_many_for_update(things, {}, session=session, limit=2))

    assert [each["_id"] for each in lock()] == [1, 2]
    assert len(attempts) == 2


# -- of several collections ------------------------------------------------------------------------


def test_documents_of_several_collections_are_locked_in_one_order(spied: Spied) -> None:
    """By the names of the collections; the lists come as they were asked for."""
    others = spied.collection.database["another"]
    others.insert_one({"_id": "a"})
    spied.sent.commands.clear()
    wanted: list[Any] = [(spied.collection, {"_id": {"$lt": 2}}), (others, {})]
    things, [other] = spied.way.lock("select_for_update_of", wanted)
    assert ([each["_id"] for each in things], other["_id"]) == ([0, 1], "a")
    assert [each["update"] for each in spied.sent.named("update")] == ["another", "things"]
    assert "_lock" in other
    with held(others, "a"), pytest.raises(DocumentLockedError, match="another"):
        spied.way.lock("select_for_update_of", wanted, nowait=True)


def test_what_is_no_pair_of_a_collection_and_a_filter_is_refused(spied: Spied) -> None:
    with pytest.raises(ConfigurationError, match="pairs of a collection and a filter"):
        spied.way.lock("select_for_update_of", [("things", {})])


# -- skip_locked -----------------------------------------------------------------------------------


def test_what_others_hold_is_skipped(spied: Spied) -> None:
    """Whichever is free is found, at the latest after the held ones have refused."""
    with held(spied.collection, 0, 1, 2):
        assert spied.take({"_id": {"$lt": 4}})["_id"] == 3
        assert spied.take({"_id": {"$lt": 3}}) is None
        assert [each["_id"] for each in spied.take({"_id": {"$lt": 4}}, limit=3)] == [3]
    assert spied.take({"_id": "none"}) is None
    assert spied.take({"_id": "none"}, limit=2) == []


def test_several_that_are_free_come_in_the_order_asked_for(spied: Spied) -> None:
    """Up to the limit, of the first ones that match."""
    found = spied.take({"_id": {"$lt": 5}}, limit=9, sort=[("n", 1)], projection={"n": 1})
    assert found == [{"_id": number, "n": COUNT - number} for number in (4, 3, 2, 1, 0)]


def test_skipping_keeps_the_filter(spied: Spied) -> None:
    """It may have the shard key, without which a sharded collection refuses to write to one document."""
    spied.sent.commands.clear()
    assert spied.take({"x": 1, "n": 1})["_id"] == COUNT - 1
    assert spied.take({"_id": {"$gt": 98}})["_id"] == COUNT - 1
    queries = [each["query"] for each in spied.sent.named("findAndModify")]
    one = {"$eq": COUNT - 1}
    assert queries == [{"x": 1, "n": 1, "_id": one}, {"$and": [{"_id": {"$gt": 98}}, {"_id": one}]}]


def test_what_was_refused_is_left_out_by_its_own_transaction_only(
    things: Collection[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a later one of the same session, nor by another client's, once the half second of all is over."""
    monkeypatch.setattr(skipping, "_LEFT_OUT_SECONDS", 0.0)
    client = things.database.client
    with client.start_session() as session:

        @transactional(client)
        def fail(*, session: ClientSession) -> None:
            if select_for_update(things, {"_id": 0}, session=session, skip_locked=True) is None:
                raise RuntimeError("in another way")

        def refuse_once(*, session: ClientSession) -> None:
            try:
                select_for_update(things, {"_id": 0}, session=session, skip_locked=True)
            except OperationFailure as error:
                raise RuntimeError("in another way") from error

        with held(things, 0), pytest.raises(RuntimeError):
            transactional(client)(refuse_once)(session=session)
        fail(session=session)


def test_what_one_client_was_refused_is_no_concern_of_anothers(
    things: Collection[Document], make_client: MakeClient
) -> None:
    """Collections of two clusters may have the same names."""

    def take(collection: Collection[Document]) -> Any:
        lock = transactional(collection.database.client)(select_for_update)
        return lock(collection, {"_id": 0}, skip_locked=True)

    with held(things, 0):
        assert take(things) is None
    assert take(make_client()[things.database.name][things.name])["_id"] == 0


def test_a_drivers_transaction_carries_over_what_was_refused(things: Collection[Document]) -> None:
    """Also where its session has locked before, so that the first attempt's call is not the session's first."""
    client = things.database.client
    with client.start_session() as session:
        session.with_transaction(lambda each: select_for_update(things, {"_id": 9}, session=each))

        def take_one(each: ClientSession) -> Any:
            return select_for_update(things, {"_id": {"$lt": 2}}, session=each, skip_locked=True)

        with held(things, 0):
            assert session.with_transaction(take_one)["_id"] == 1
            for _ in range(3):
                assert session.with_transaction(take_one)["_id"] == 1


@pytest.mark.parametrize("options", [{"nowait": True}, {"wait": 1}, {"nowait": True, "wait": 1}])
def test_skipping_and_waiting_exclude_each_other(spied: Spied, options: Document) -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        spied.take({}, **options)


def test_many_are_skipped_with_a_limit_only(spied: Spied) -> None:
    """All that are free cannot be told: one that is held refuses them all."""
    with pytest.raises(ConfigurationError, match="limit="):
        spied.take({}, limit=0)


# -- mappers ---------------------------------------------------------------------------------------


def test_a_document_of_mongoengine_is_loaded_where_the_lock_is_declared(database: Database[Document]) -> None:
    """By default it refuses what its class does not know."""

    class Strict(mongoengine.Document):  # type: ignore[misc]
        n = mongoengine.IntField()

    class Declared(mongoengine.Document):  # type: ignore[misc]
        n = mongoengine.IntField()
        lock = mongoengine.DictField()

    class Lenient(mongoengine.Document):  # type: ignore[misc]
        n = mongoengine.IntField()
        meta: ClassVar[Document] = {"strict": False}

    database["seats"].insert_one({"n": 1})
    lock = transactional(database.client)(select_for_update)
    found = lock(database["seats"], {}, field="lock")
    assert Declared._from_son(found).lock["id"] == found["lock"]["id"]
    assert Lenient._from_son(lock(database["seats"], {})).n == 1
    with pytest.raises(mongoengine.FieldDoesNotExist):
        Strict._from_son(found)


# -- validators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", [select_for_update, select_many_for_update])
def test_a_validator_that_refuses_the_lock_is_named_with_the_cure(
    database: Database[Document], select: Callable[..., Any]
) -> None:
    """Nothing repeats it, and another field that it allows is enough."""
    schema = {"properties": {"_id": {}, "state": {"bsonType": "object"}}, "additionalProperties": False}
    strict = database.create_collection("strict", validator={"$jsonSchema": schema})
    strict.insert_one({"_id": 1})
    lock = transactional(database.client)(select)
    with pytest.raises(
        ConfigurationError, match=r"strict refuses .* field '_lock'.* allow it there.* field="
    ) as caught:
        lock(strict, {"_id": 1})
    assert isinstance(caught.value.__cause__, OperationFailure)
    assert strict.find_one() == {"_id": 1}
    assert lock(strict, {"_id": 1}, field="state")


def test_a_document_that_was_invalid_before_is_not_blamed_on_the_lock(database: Database[Document]) -> None:
    """The validator came later, and refuses whatever is written to it."""
    database["old"].insert_one({"_id": 1, "n": "one"})
    database.command("collMod", "old", validator={"n": {"$type": "int"}})
    with pytest.raises(ConfigurationError, match=r"or has refused it before: .*validation.* cure that"):
        transactional(database.client)(select_for_update)(database["old"], {"_id": 1})


# -- operations on a whole collection --------------------------------------------------------------


def test_a_collection_that_an_operation_waits_for_is_refused_like_a_document(spied: Spied) -> None:
    """It stands before everybody who comes later, as long as an older transaction keeps it waiting."""
    database = spied.collection.database
    change = {"collMod": spied.collection.name, "validationLevel": "moderate"}
    waiting: list[Document] = [
        {"$currentOp": {}},
        {"$match": {"command.collMod": spied.collection.name, "waitingForLock": True}},
        {"$project": {"op": 1}},
    ]
    with ThreadPoolExecutor(1) as pool, held(spied.collection, 0):
        changing = pool.submit(database.command, change)
        wait_for(lambda: list(database.client.admin.aggregate(waiting)), message="an operation that waits")
        with pytest.raises(DocumentLockedError, match="an operation such as createIndex") as caught:
            spied.locked({"_id": 1}, nowait=True)
    assert changing.result()["ok"] == 1
    assert isinstance(caught.value.__cause__, OperationFailure)
