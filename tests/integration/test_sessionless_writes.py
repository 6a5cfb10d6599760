"""`require_sessions`, which the plugin has around each test: it finds a write beside an open transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pymongo import AsyncMongoClient, InsertOne, MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery import transactional
from mongo_celery.locking import after_commit
from mongo_celery.testing import require_sessions
from tests.integration.locking_rig import Document, Notes

pytestmark = pytest.mark.mongo_celery_sessionless

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "bulk_write": lambda notes, session: notes.bulk_write([InsertOne({})], session=session),
    "delete_many": lambda notes, session: notes.delete_many({}, session=session),
    "delete_one": lambda notes, session: notes.delete_one({}, session=session),
    "find_one_and_delete": lambda notes, session: notes.find_one_and_delete({}, session=session),
    "find_one_and_replace": lambda notes, session: notes.find_one_and_replace({}, {"n": 1}, session=session),
    "find_one_and_update": lambda notes, session: notes.find_one_and_update({}, {"$inc": {"n": 1}}, session=session),
    "insert_many": lambda notes, session: notes.insert_many([{}], session=session),
    "insert_one": lambda notes, session: notes.insert_one({}, session=session),
    "insert_one, by its place": lambda notes, session: notes.insert_one({}, False, session),
    "replace_one": lambda notes, session: notes.replace_one({}, {"n": 1}, session=session),
    "update_many": lambda notes, session: notes.update_many({}, {"$inc": {"n": 1}}, session=session),
    "update_one": lambda notes, session: notes.update_one({}, {"$inc": {"n": 1}}, session=session),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_each_write_needs_the_session(notes: Notes, mongo_url: str, write: Callable[..., Any]) -> None:
    async def run_async() -> None:
        async with AsyncMongoClient[Document](mongo_url) as client:
            found = client[notes.database.name]["notes"]
            await transactional(client).arun(lambda session: write(found, session))
            await write(found, None)
            with pytest.raises(AssertionError, match="notes"):
                await transactional(client).arun(lambda _: write(found, None))

    client, before = notes.database.client, Collection.insert_one

    @require_sessions()
    def run() -> None:
        transactional(client).run(lambda session: write(notes, session))
        write(notes, None)
        count = notes.count_documents({})
        with pytest.raises(AssertionError, match="notes"):
            transactional(client).run(lambda _: write(notes, None))
        assert notes.count_documents({}) == count
        asyncio.run(run_async())

    with pytest.raises(AssertionError, match="session="):
        run()
    assert Collection.insert_one is before


def test_the_block_ends_with_what_was_caught_inside(notes: Notes) -> None:
    """A task of Celery's, or a careless `except`, takes the error away; the block does not forget it."""

    def body(_: ClientSession) -> None:
        with suppress(AssertionError):
            notes.insert_one({})

    with pytest.raises(AssertionError, match="session="), require_sessions():
        transactional(notes.database.client).run(body)
    assert notes.count_documents({}) == 0


def test_another_client_of_the_cluster_is_found_and_one_of_another_cluster_is_not(
    notes: Notes, mongo_url: str, standalone_url: str
) -> None:
    """What is meant to stay has a transaction of its own, or waits for the commit."""
    name = notes.database.name
    with MongoClient[Document](mongo_url) as other, MongoClient[Document](standalone_url) as elsewhere:

        def body(_: ClientSession) -> None:
            elsewhere[name]["notes"].insert_one({})
            transactional(other, independent=True).run(lambda own: other[name]["notes"].insert_one({}, session=own))
            after_commit(lambda: notes.insert_one({}))
            with pytest.raises(AssertionError, match=r"session\.client"):
                other[name]["notes"].insert_one({})

        with pytest.raises(AssertionError, match=r"session\.client"), require_sessions():
            transactional(notes.database.client).run(body)
        assert (notes.count_documents({}), elsewhere[name]["notes"].count_documents({})) == (2, 1)
        elsewhere.drop_database(name)
