"""
Events that the server cannot give as they were asked for.

Each arrives at its place, once, with as much as can be read of it and a read error that names the reason and the fix.
All others arrive as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.change import FLAGS, read_namespace
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.stream.source import Scope, make_scope
from tests.fixtures.process import wait_for
from tests.rig.stream import StreamReading, now, scope_on, selector_of

Document = dict[str, Any]
Read = Callable[[Scope], StreamReading]

MEGABYTE = 2**20
LONG = {"$gt": [{"$strLenBytes": "$fullDocument.text"}, 100]}
DIVIDES = {"$gt": [{"$divide": [6, "$fullDocument.n"]}, 2]}
"""Holds for n < 3, and fails where n is 0."""


@pytest.fixture
def items(database: Database[Document]) -> Collection[Document]:
    """Give a collection that keeps pre- and post-images, if the server has them."""
    keeps_images = database.client.server_info()["versionArray"] >= [6]
    images: Document = {"changeStreamPreAndPostImages": {"enabled": True}} if keeps_images else {}
    return database.create_collection("items", **images)


@pytest.fixture
def read(mongo_url: str, items: Collection[Document]) -> Read:
    return lambda scope: StreamReading(mongo_url, scope, now(items.database.client))


def events_of(reading: StreamReading, key: Any) -> list[ChangeEvent]:
    events = [item for item in reading.items if isinstance(item, ChangeEvent)]
    return [event for event in events if event.document["documentKey"]["_id"] == key]


@pytest.mark.needs_mongodb_before(6, 0, 9)
def test_an_update_that_is_too_large_with_its_look_up_is_read_without_it(
    read: Read, items: Collection[Document]
) -> None:
    """P12: 9 MB in the update and once more in the document looked up."""
    with read(scope_on(items.full_name, full_document="updateLookup")) as reading:
        items.insert_one({"_id": 1})
        items.update_one({"_id": 1}, {"$set": {"text": "x" * 9 * MEGABYTE}})
        items.insert_one({"_id": 2, "n": 5})
        reading.wait_for_keys(1, 1, 2)
    assert "10334" in reading.read_errors[1].sentence
    assert not reading.read_errors[1].only_match
    inserted, updated = events_of(reading, 1)
    assert inserted.read_error is None
    assert "fullDocument" not in updated.document
    assert len(updated.document["updateDescription"]["updatedFields"]["text"]) == 9 * MEGABYTE
    assert list(reading.read_errors) == [1]
    assert reading.events[-1]["fullDocument"]["n"] == 5


@pytest.mark.needs_mongodb(6)
def test_a_replacement_that_is_too_large_keeps_its_own_document(read: Read, items: Collection[Document]) -> None:
    """P12: it fits without the pre-image. Within a transaction, since no server sends that in fragments."""
    items.insert_one({"_id": 1, "text": "a" * 9 * MEGABYTE})
    with read(scope_on(items.full_name, before_change="whenAvailable")) as reading:
        with items.database.client.start_session() as session, session.start_transaction():
            items.replace_one({"_id": 1}, {"text": "b" * 9 * MEGABYTE}, session=session)
        items.insert_one({"_id": 2})
        reading.wait_for_keys(1, 2)
    (event,) = events_of(reading, 1)
    assert event.read_error is not None
    assert "fullDocumentBeforeChange" not in event.document
    assert event.document["fullDocument"]["text"] == "b" * 9 * MEGABYTE


def test_an_insert_that_is_too_large_by_itself_is_read_without_its_document(
    read: Read, items: Collection[Document]
) -> None:
    """
    P12: a document just below 16 MB with a long key, which the event repeats: no option makes it fit.

    A `match` sees the document all the same.
    """
    key = "k" * 6000
    with read(scope_on(items.full_name, full_document="updateLookup", match=LONG)) as reading:
        items.insert_one({"_id": key, "text": "x" * (16 * MEGABYTE - len(key) - 40)})
        items.insert_one({"_id": 2, "text": ""})
        reading.wait_for_keys(key, 2)
    (event,) = events_of(reading, key)
    assert event.document["operationType"] == "insert"
    assert "fullDocument" not in event.document
    assert [each[FLAGS]["record"] for each in reading.events] == [True, False]
    assert event.mark.cluster_time is not None


@pytest.mark.parametrize("megabytes", [4.5, 8])
def test_changes_of_a_document_with_a_giant_id_are_named_at_their_places_and_the_others_arrive(
    read: Read, items: Collection[Document], caplog: pytest.LogCaptureFixture, megabytes: float
) -> None:
    """
    P1, P12: the resume token holds the `_id` twice, so the server cannot hand over the event, or nobody can keep it.

    The first one is the last entry of the oplog when it is read. In the transaction all have one cluster time.
    """
    giant, client = "k" * int(megabytes * 1e6), items.database.client
    with read(scope_on(items.full_name, match={"$literal": True})) as reading:
        items.insert_one({"_id": 1})
        items.insert_one({"_id": giant})
        wait_for(lambda: len(reading.events) == 2)
        with client.start_session() as session, session.start_transaction():
            items.insert_one({"_id": 2}, session=session)
            items.replace_one({"_id": giant}, {"n": 0}, session=session)
            items.insert_one({"_id": 3}, session=session)
        items.update_one({"_id": giant}, {"$set": {"n": 1}})
        items.insert_one({"_id": 4})
        wait_for(lambda: len(reading.events) == 7, message=lambda: str(reading.failure))
    assert [event.get("documentKey", {}).get("_id") for event in reading.events] == [1, None, 2, None, 3, None, 4]
    assert reading.operations == ["insert", "insert", "insert", "replace", "insert", "update", "insert"]
    events = [item for item in reading.items if isinstance(item, ChangeEvent)]
    unread = [event for event in events if event.read_error is not None]
    assert [read_namespace(event.document) for event in unread] == 3 * [items.full_name]
    assert not any(event.read_error.only_match for event in unread if event.read_error is not None)
    places = [event.mark.data for event in events]
    assert places == sorted(set(places))
    assert max(map(len, places)) < 1000
    assert len({event.mark.cluster_time for event in events}) == 5
    told = [record.levelname for record in caplog.records if getattr(record, "event", None) == "change_read_error"]
    assert told == 3 * ["ERROR"]


def test_an_event_of_which_a_fragment_does_not_fit_beside_its_token_is_read_without_its_document(
    read: Read, items: Collection[Document]
) -> None:
    """P1, P12: all of it is 17 MB, and the fragment with its document 15 MB before a token of 4 MB."""
    key = "k" * 2_000_000
    with read(scope_on(items.full_name)) as reading:
        items.insert_one({"_id": key, "text": "x" * 9_000_000})
        items.insert_one({"_id": 1})
        reading.wait_for_keys(key, 1)
    assert "fullDocument" not in reading.events[0]
    assert list(reading.read_errors) == [key]


def test_changes_of_documents_with_a_long_id_arrive_however_they_meet_in_an_answer(
    read: Read, items: Collection[Document]
) -> None:
    """
    P1, P12: a batch and the token behind it may be larger than an answer.

    Some servers close the connection then, others say that the answer is too large.
    """
    first, second = (letter * 3_000_000 for letter in "ab")
    with read(scope_on(items.full_name)) as reading:
        items.insert_one({"_id": first})
        items.insert_one({"_id": second, "text": "x" * 10 * MEGABYTE})
        items.insert_one({"_id": 1})
        reading.wait_for_keys(first, second, 1)
    assert ["fullDocument" in event for event in reading.events] == [True, False, True]
    assert list(reading.read_errors) == [second]


def test_a_match_that_fails_leaves_the_flags_of_others(read: Read, items: Collection[Document]) -> None:
    """P12: which of several expressions fails is found out; those that hold are judged as always."""
    conditions = {
        "odd": {"$eq": [{"$mod": ["$fullDocument.n", 2]}, 1]},
        "divides": DIVIDES,
        "zero": {"$eq": ["$fullDocument.n", 0]},
        "sized": {"$gt": [{"$size": "$fullDocument.list"}, 0]},
        "any": {"$literal": True},
    }
    selectors = [selector_of(items.full_name, name=name, match=match) for name, match in conditions.items()]
    with read(make_scope(selectors, state_database="none")) as reading:
        items.insert_one({"_id": 1, "n": 0})
        items.insert_one({"_id": 2, "n": 1, "list": [1]})
        reading.wait_for_keys(1, 2)
    failed, whole = reading.events
    assert dict(failed[FLAGS]) == {"odd": False, "zero": True, "any": True}
    assert dict(whole[FLAGS]) == {"odd": True, "divides": True, "zero": False, "sized": True, "any": True}
    assert list(reading.read_errors) == [1]
    assert "divides, sized" in reading.read_errors[1].sentence


def test_a_document_on_which_a_match_fails_is_found_behind_thousands_of_others(
    read: Read, items: Collection[Document]
) -> None:
    """P12, P15: in a batch that the server cannot give, with few openings."""
    count = 5000
    with read(scope_on(items.full_name, match=DIVIDES)) as reading:
        items.insert_many([{"_id": number, "n": number % count} for number in range(1, count + 3)])
        reading.wait_for_keys(*range(1, count + 3))
    assert list(reading.read_errors) == [count]
    assert reading.reader.status.reopenings < 20, "each error halves the rest"


def test_reading_resumes_after_a_restart_behind_a_read_error(
    mongo_url: str, read: Read, items: Collection[Document]
) -> None:
    """P1: the place of such an event is one to resume from, and it does not come again."""
    scope = scope_on(items.full_name, match=DIVIDES)
    with read(scope) as reading:
        items.insert_one({"_id": 1, "n": 0})
        reading.wait_for_keys(1)
        (event,) = events_of(reading, 1)
    items.insert_one({"_id": 2, "n": 1})
    with StreamReading(mongo_url, scope, Position(event.mark.token, event.mark.cluster_time)) as again:
        again.wait_for_keys(2)
