"""
Events that the server cannot give as they were asked for.

Each arrives at its place, once, with as much as can be read of it and a read error that names the reason and the fix.
All others arrive as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from celery import Celery
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery import Bridge
from mongo_celery.bridge.change import FLAGS, read_namespace
from mongo_celery.bridge.operations.places import find_place
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.stream.source import Scope, make_scope
from tests.fixtures.process import wait_for
from tests.integration.stream_rig import Commands, Reading, now, scope_on, selector_of

Document = dict[str, Any]
Read = Callable[[Scope], Reading]

MEGABYTE = 2**20
LONG = {"$gt": [{"$strLenBytes": "$fullDocument.text"}, 100]}
DIVIDES = {"$gt": [{"$divide": [6, "$fullDocument.n"]}, 2]}
"""Holds for n < 3, and fails where n is 0."""


@pytest.fixture
def items(database: Database[Document]) -> Collection[Document]:
    """Give a collection that keeps pre- and post-images."""
    return database.create_collection("items", changeStreamPreAndPostImages={"enabled": True})


@pytest.fixture
def read(mongo_url: str, items: Collection[Document]) -> Read:
    """Give readers of a scope from now on, to be started by `with`."""
    return lambda scope: Reading(mongo_url, scope, now(items.database.client))


def events_of(reading: Reading, key: Any) -> list[ChangeEvent]:
    events = [item for item in reading.items if isinstance(item, ChangeEvent)]
    return [event for event in events if event.document["documentKey"]["_id"] == key]


# -- too large ---------------------------------------------------------------------------------------


def test_an_update_that_is_too_large_with_its_look_up_is_read_without_it(
    read: Read, items: Collection[Document]
) -> None:
    """P12: 9 MB in the update and once more in the document looked up."""
    with read(scope_on(items.full_name, full_document="updateLookup")) as reading:
        items.insert_one({"_id": 1})
        items.update_one({"_id": 1}, {"$set": {"text": "x" * 9 * MEGABYTE}})
        items.insert_one({"_id": 2, "n": 5})
        reading.wait_for_keys(1, 1, 2)
    assert "full_document" in reading.read_errors[1].sentence
    assert "BSONObjectTooLarge, code 10334" in reading.read_errors[1].sentence
    assert not reading.read_errors[1].only_match
    inserted, updated = events_of(reading, 1)
    assert inserted.read_error is None
    assert "fullDocument" not in updated.document
    assert len(updated.document["updateDescription"]["updatedFields"]["text"]) == 9 * MEGABYTE
    assert list(reading.read_errors) == [1]
    assert reading.events[-1]["fullDocument"]["n"] == 5


def test_a_change_of_twenty_megabytes_with_its_images_is_read_without_them(
    read: Read, items: Collection[Document]
) -> None:
    """P12: pre-image, post-image and update of seven megabytes each; a `match` sees them all the same."""
    scope = scope_on(items.full_name, full_document="required", before_change="required", match=LONG)
    with read(scope) as reading:
        items.insert_one({"_id": 1, "text": "a" * 7 * MEGABYTE})
        items.update_one({"_id": 1}, {"$set": {"text": "b" * 7 * MEGABYTE}})
        items.update_one({"_id": 1}, {"$set": {"text": "small"}})
        reading.wait_for_keys(1, 1, 1)
    assert [event.read_error is None for event in events_of(reading, 1)] == [True, False, True]
    assert [event.document[FLAGS]["record"] for event in events_of(reading, 1)] == [True, True, False]
    assert "fullDocument" not in events_of(reading, 1)[1].document
    assert reading.events[-1]["fullDocumentBeforeChange"]["text"] == "b" * 7 * MEGABYTE


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
    assert "without its documents" in reading.read_errors[key].sentence
    (event,) = events_of(reading, key)
    assert event.document["operationType"] == "insert"
    assert "fullDocument" not in event.document
    assert [each[FLAGS]["record"] for each in reading.events] == [True, False]
    assert event.mark.cluster_time is not None


# -- an _id of some megabytes ------------------------------------------------------------------------


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
    assert all(
        "_id" in event.read_error.sentence and not event.read_error.only_match
        for event in unread
        if event.read_error is not None
    )
    places = [event.mark.data for event in events]
    assert places == sorted(set(places))
    assert max(map(len, places)) < 1000
    assert len({event.mark.cluster_time for event in events}) == 5
    told = [record.levelname for record in caplog.records if getattr(record, "event", None) == "change_read_error"]
    assert told == 3 * ["ERROR"]


def test_a_command_that_looks_a_token_up_passes_a_giant_id(
    items: Collection[Document], mongo_url: str, state_database: str
) -> None:
    """P9: a reset to a token reads the stream from its time on, and ends with a server's error otherwise."""
    bridge = Bridge(Celery("shop"), mongo_url, name="shop", database=state_database, autodiscover=False)
    bridge.on_change(items.full_name, name="record")(handle)
    items.insert_one({"_id": 1})
    client = items.database.client
    with items.watch([{"$match": {"documentKey._id": 2}}]) as stream:
        with client.start_session() as session, session.start_transaction():  # so both have one time
            items.insert_one({"_id": "k" * 8_000_000}, session=session)
            items.insert_one({"_id": 2}, session=session)
        token = stream.next()["_id"]["_data"]
    assert find_place(bridge.wiring, token).token == {"_data": token}
    bridge.client.close()


def handle(change: object) -> None:
    """A handler."""
    del change


def test_changes_of_documents_with_a_long_id_arrive_however_they_meet_in_an_answer(
    read: Read, items: Collection[Document]
) -> None:
    """P1, P12: the server closes the connection where a batch and the token behind it are larger than an answer."""
    first, second = (letter * 3_000_000 for letter in "ab")
    with read(scope_on(items.full_name)) as reading:
        items.insert_one({"_id": first})
        items.insert_one({"_id": second, "text": "x" * 10 * MEGABYTE})
        items.insert_one({"_id": 1})
        reading.wait_for_keys(first, second, 1)
    assert ["fullDocument" in event for event in reading.events] == [True, False, True]
    assert list(reading.read_errors) == [second]
    assert "without its documents" in reading.read_errors[second].sentence


# -- an image that is missing ------------------------------------------------------------------------


def test_a_required_image_that_is_missing_concerns_its_event_alone(read: Read, items: Collection[Document]) -> None:
    """P12: written while the collection kept no images."""
    with read(scope_on(items.full_name, full_document="required")) as reading:
        items.insert_one({"_id": 1})
        _keep_images(items, enabled=False)
        items.update_one({"_id": 1}, {"$set": {"n": 1}})
        _keep_images(items, enabled=True)
        items.update_one({"_id": 1}, {"$set": {"n": 2}})
        reading.wait_for_keys(1, 1, 1)
    assert [event.read_error is None for event in events_of(reading, 1)] == [True, False, True]
    assert "whenAvailable" in reading.read_errors[1].sentence
    assert "NoMatchingDocument, code 47" in reading.read_errors[1].sentence


def _keep_images(items: Collection[Document], *, enabled: bool) -> None:
    items.database.command("collMod", items.name, changeStreamPreAndPostImages={"enabled": enabled})


# -- expressions -------------------------------------------------------------------------------------


def test_a_match_that_fails_on_one_document_concerns_its_event_alone(read: Read, items: Collection[Document]) -> None:
    """P12: the event is whole but for the flag."""
    with read(scope_on(items.full_name, match=DIVIDES)) as reading:
        for number in (1, 2, 0, 3):
            items.insert_one({"_id": number, "n": number})
        reading.wait_for_keys(1, 2, 0, 3)
    assert list(reading.read_errors) == [0]
    assert reading.read_errors[0].only_match
    assert "`match`" in reading.read_errors[0].sentence
    assert "divide by zero" in reading.read_errors[0].sentence
    assert reading.events[2]["fullDocument"]["n"] == 0
    assert [event[FLAGS]["record"] for event in reading.events if FLAGS in event] == [True, True, False]


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
    assert "The `match` of divides, sized failed" in reading.read_errors[1].sentence


def test_many_documents_on_which_a_match_fails_are_found_among_others(read: Read, items: Collection[Document]) -> None:
    """P12: every third of a batch; nothing else is read with less, lost or out of order."""
    with read(scope_on(items.full_name, match=DIVIDES)) as reading:
        items.insert_many([{"_id": number, "n": number % 3} for number in range(60)])
        reading.wait_for_keys(*range(60))
    assert list(reading.read_errors) == list(range(0, 60, 3))
    assert reading.failure is None


def test_the_match_that_fails_is_found_among_many_with_few_openings(
    mongo_url: str, items: Collection[Document]
) -> None:
    """P12: a handler whose `match` always fails must not slow down a bridge with many others."""
    conditions = {f"h{number:02}": {"$gt": [{"$size": "$fullDocument.list"}, number]} for number in range(40)}
    selectors = [selector_of(items.full_name, name=name, match=match) for name, match in conditions.items()]
    selectors.append(selector_of(items.full_name, name="divides", match=DIVIDES))
    scope, commands = make_scope(selectors, state_database="none"), Commands()
    with Reading(mongo_url, scope, now(items.database.client), commands=commands) as reading:
        items.insert_one({"_id": 1, "n": 0, "list": []})
        reading.wait_for_keys(1)
    (event,) = reading.events
    assert set(event[FLAGS]) == set(conditions)
    assert reading.read_errors[1].only_match
    assert commands.names.count("aggregate") < 30


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


def test_a_pipeline_that_fails_on_one_document_concerns_its_event_alone(
    read: Read, items: Collection[Document]
) -> None:
    """P12: whatever a stage may fail on, its documents are left out."""
    pipeline = [{"$addFields": {"half": {"$divide": [1, "$fullDocument.n"]}}}]
    with read(scope_on(items.full_name, pipeline=pipeline)) as reading:
        for number in (1, 0, 2):
            items.insert_one({"_id": number, "n": number})
        reading.wait_for_keys(1, 0, 2)
    assert list(reading.read_errors) == [0]
    assert not reading.read_errors[0].only_match
    assert "fullDocument" not in reading.events[1]
    assert reading.events[2]["half"] == 0.5


def test_a_pipeline_that_always_fails_is_loud(
    read: Read, items: Collection[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """P15: a record for each event."""
    pipeline = [{"$addFields": {"number": {"$toInt": "$operationType"}}}]
    with read(scope_on(items.full_name, pipeline=pipeline)) as reading:
        items.insert_many([{"_id": number} for number in range(5)])
        reading.wait_for_keys(*range(5))
    assert list(reading.read_errors) == list(range(5))
    failed = [record for record in caplog.records if getattr(record, "event", None) == "change_read_error"]
    assert len(failed) == 5
    assert "ConversionFailure, code 241" in failed[0].getMessage()


def test_a_read_error_inside_a_transaction_leaves_its_other_changes_whole(
    read: Read, items: Collection[Document]
) -> None:
    """P1: all of them have one cluster time; the token tells them apart."""
    client = items.database.client
    with read(scope_on(items.full_name, match=DIVIDES)) as reading:
        with client.start_session() as session, session.start_transaction():
            for number in range(6):
                items.insert_one({"_id": number, "n": number % 3}, session=session)
        items.insert_one({"_id": 6, "n": 1})
        reading.wait_for_keys(*range(7))
    assert list(reading.read_errors) == [0, 3]


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
    with Reading(mongo_url, scope, Position(event.mark.token, event.mark.cluster_time)) as again:
        again.wait_for_keys(2)


def test_text_that_is_no_text_beside_the_documents_stops_nothing(read: Read, items: Collection[Document]) -> None:
    """P12: a pipeline that lifts a field to the top makes the reader itself decode it."""
    with read(scope_on(items.full_name, pipeline=[{"$addFields": {"s": "$fullDocument.s"}}])) as reading:
        body = b"\x10_id\x00\x01\x00\x00\x00" + b"\x02s\x00\x03\x00\x00\x00\xff\xfe\x00"
        items.database.get_collection("items").insert_one(
            RawBSONDocument((len(body) + 5).to_bytes(4, "little") + body + b"\x00")
        )
        items.insert_one({"_id": 2})
        reading.wait_for_keys(1, 2)
    assert reading.read_errors == {}
