"""One user's write, amended by two owners at once: a fence's stamp and an outbox's entries in one update."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import ReplaceOne, UpdateOne
from pymongo.collection import Collection

from mongo_celery.bridge.fenced.fence import FIELD as STAMPS
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.writes import Body, BulkRequest, Operators, Pipeline, Replacement, parse_target
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import FIELD as PENDING
from mongo_celery.outbox.pending import make_addition, new_field, refuse_in_update
from tests.rig.fenced import Document, fence, stamp

NOW = datetime(2024, 2, 29, 12, 0, 0, 5000, UTC)
SHARED: Document = {"left": "$price", "n": 2}
"""What every body of the tests makes of `{n: 1}`; a string like a path must stay one."""

BODIES: dict[str, Body] = {
    "operators": Operators({"$set": {"left": "$price"}, "$inc": {"n": 1}, "$max": {"top": 7}, "$push": {"list": 1}}),
    "pipeline": Pipeline([{"$set": {"left": {"$literal": "$price"}, "n": {"$add": [{"$ifNull": ["$n", 1]}, 1]}}}]),
    "pipeline that drops fields": Pipeline([{"$replaceWith": {"left": {"$literal": "$price"}, "n": 2}}]),
    "pipeline that projects": Pipeline([{"$project": {"left": {"$literal": "$price"}, "n": {"$literal": 2}}}]),
    "replacement": Replacement(SHARED),
}
every_body = pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())


def entry(name: str) -> Entry:
    return Entry(
        id=name,
        kind="task",
        at=NOW,
        name="$send",
        argsrepr="()",
        content_type="application/json",
        content_encoding="utf-8",
        payload="$payload",
    )


def written(target: Collection[Document], body: Body, token: int, name: str) -> int:
    """Write a body to document 1 under the conditions of both owners and return how many matched."""
    mine, entries = fence(token), [entry(name)]
    document = parse_target({"_id": 1})
    assert document is not None
    return target.bulk_write(
        [
            UpdateOne(
                document.where(guard),
                body.build_update(stamps, make_addition(entries)),
            )
            for guard, stamps in mine.list_guards(body)
        ]
    ).matched_count


def shared_part(document: Document) -> Document:
    return {name: document.get(name) for name in SHARED}


@every_body
@pytest.mark.parametrize("mine", [stamp(4), stamp(6, partitioning=0)], ids=["my partitioning", "an older partitioning"])
def test_a_write_carries_the_stamp_and_the_entries_and_does_what_it_did(
    target: Collection[Document], body: Body, mine: Document
) -> None:
    """W1, W3: the stamps of others and what was pending stay; one statement matches, and exactly one."""
    older = {**mine, **stamp(9, key="shop/other")}
    first = new_field([entry("first")])
    target.insert_one({"_id": 1, "n": 1, STAMPS: older, PENDING: first})
    assert written(target, body, 5, "second") == 1
    [document] = target.find()
    assert shared_part(document) == SHARED
    assert document[STAMPS] == {**older, **stamp(5)}
    assert [each["id"] for each in document[PENDING]["events"]] == ["first", "second"]
    assert document[PENDING]["events"][1]["payload"] == "$payload"
    assert document[PENDING]["count"] == 2


@every_body
def test_either_owner_can_refuse_a_write_and_then_none_of_it_happens(target: Collection[Document], body: Body) -> None:
    """W4: the conditions stand beside each other, and neither owner needs the other to have been there."""
    target.insert_one({"_id": 1, "n": 1})
    assert written(target, body, 5, "first") == 1
    [document] = target.find()
    assert shared_part(document) == SHARED
    assert document[STAMPS] == stamp(5)
    assert ([each["id"] for each in document[PENDING]["events"]], document[PENDING]["count"]) == (["first"], 1)
    assert written(target, body, 4, "stale") == 0
    assert target.find_one() == document


@every_body
def test_an_insertion_carries_the_fields_of_both(target: Collection[Document], body: Body) -> None:
    """W1: as values, not as expressions."""
    own = {STAMPS: stamp(5), PENDING: new_field([entry("first")])}
    document = parse_target({"_id": 1})
    assert document is not None
    kind: Any = ReplaceOne if isinstance(body, Replacement) else UpdateOne
    target.bulk_write([kind(document.insert_only_filter(), body.insertion(own), upsert=True)])
    [found] = target.find()
    assert found["left"] == "$price"
    assert found[STAMPS] == stamp(5)
    assert found[PENDING]["events"][0]["payload"] == "$payload"


def test_a_path_into_an_own_field_is_found_in_every_body() -> None:
    """W2: and a name that only begins alike is not."""
    bodies: list[Body] = [
        Operators({"$rename": {"a": f"{PENDING}.events"}}),
        Pipeline([{"$set": {"a": 1}}, {"$unset": [f"{PENDING}.events"]}]),
        Replacement({"a": 1, f"{PENDING}.events": 1}),
    ]
    assert {body.find_name(PENDING) for body in bodies} == {f"{PENDING}.events"}
    assert {body.find_name("pending") for body in bodies} == {None}
    with pytest.raises(OutboxRefusedError, match=PENDING):
        refuse_in_update({"$rename": {"a": f"{PENDING}.events"}})


def test_a_request_of_a_bulk_write_is_taken_apart() -> None:
    """PyMongo has no public names for its parts: this fails where it gives them others."""
    request: Any = UpdateOne({"_id": 1}, {"$set": {"a": 1}}, True, {"locale": "en"}, [{"x": 1}], "a_1")
    options = {"collation": {"locale": "en"}, "array_filters": [{"x": 1}], "hint": "a_1"}
    assert BulkRequest.of(request) == BulkRequest({"_id": 1}, {"$set": {"a": 1}}, True, None, options)
    assert BulkRequest.of(ReplaceOne({"a": 1}, {"b": 1})) == BulkRequest({"a": 1}, {"b": 1}, False, None, {})
