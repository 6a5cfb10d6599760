"""Eight processes and the same documents: nothing is lost with locks."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from tests.fixtures.process import Processes
from tests.integration.locking_rig import (
    ACTORS,
    INCREMENTS,
    PLACES,
    Crew,
    Document,
    count_with_lock,
    leave_with_lock,
    take_places,
    transfer_in_opposite_order,
)


@pytest.fixture(scope="module")
def crew(
    tmp_path_factory: pytest.TempPathFactory, mongo_url: str, mongo_client: MongoClient[Document]
) -> Iterator[Crew]:
    """Give eight processes, started once for all these tests."""
    database = mongo_client[f"crew_{uuid4().hex[:8]}"]
    with Processes(tmp_path_factory.mktemp("crew")) as processes:
        yield Crew(processes, mongo_url, database["orders"])
    mongo_client.drop_database(database)


@pytest.fixture
def counters(database: Database[Document]) -> Database[Document]:
    database["counters"].insert_one({"_id": 1, "count": 0})
    return database


@pytest.fixture
def doctors(database: Database[Document]) -> Database[Document]:
    database["doctors"].insert_many([{"_id": number, "on_duty": True} for number in range(ACTORS)])
    return database


def test_with_a_lock_no_update_is_lost(crew: Crew, counters: Database[Document]) -> None:
    """Read, add, write: each of the eight sees what the one before it has written."""
    crew.do(count_with_lock, counters)
    document = counters["counters"].find_one()
    assert document is not None
    assert document["count"] == ACTORS * INCREMENTS


def test_with_locks_no_writes_skew(crew: Crew, doctors: Database[Document]) -> None:
    """Whoever counts the doctors on duty holds them, so exactly one stays."""
    crew.do(leave_with_lock, doctors)
    assert doctors["doctors"].count_documents({"on_duty": True}) == 1


def test_opposite_orders_of_locking_end_and_keep_the_sum(crew: Crew, database: Database[Document]) -> None:
    """A deadlock is a conflict here: one of the two gives up at once, and is repeated."""
    database["accounts"].insert_many([{"_id": 1, "balance": 100}, {"_id": 2, "balance": 100}])
    crew.do(transfer_in_opposite_order, database)
    balances = [account["balance"] for account in database["accounts"].find().sort("_id", 1)]
    assert balances == [100, 100], "four processes moved as much one way as four moved the other"


def test_no_place_is_taken_twice_and_none_is_left(crew: Crew, database: Database[Document]) -> None:
    """Half take from the front and half from the back, two at a time; an odd number meets in the middle."""
    places: list[Document] = [{"_id": f"seat-{row}", "row": row, "taken_by": None} for row in range(4 * PLACES + 1)]
    database["places"].insert_many(places)
    got = crew.do(take_places, database)
    assert sum(got) == len(places)
    assert {place["sales"] for place in database["places"].find()} == {1}
