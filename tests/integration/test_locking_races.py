"""Eight threads and the same documents: nothing is lost with locks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery.locking import select_for_update, select_many_for_update, transactional
from tests.integration.locking_rig import Document

ACTORS = 8
INCREMENTS = 25
TRANSFERS = 10


def race(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(ACTORS) as pool:
        return list(pool.map(work, range(ACTORS)))


def test_with_a_lock_no_update_is_lost(database: Database[Document]) -> None:
    """Read, add, write: each of the eight sees what the one before it has written."""
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
