"""Fenced writes against a real replica set: P3 and P4 for each operation and each rule."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson import Decimal128
from pymongo import (
    DeleteMany,
    DeleteOne,
    InsertOne,
    MongoClient,
    ReplaceOne,
    ReturnDocument,
    UpdateMany,
    UpdateOne,
    WriteConcern,
)
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DuplicateKeyError, WriteError

from mongo_celery.bridge.fenced import FencedCollection
from mongo_celery.bridge.fenced.fence import Fence, Origin
from mongo_celery.errors import ConfigurationError, OutdatedChangeError, StaleFencingTokenError
from tests.rig.fenced import (
    DEADLINE_S,
    FENCE,
    KEY,
    Act,
    Document,
    MakeClient,
    Spied,
    Target,
    every_write,
    fence,
    graves,
    stamp,
    stored,
    view,
)


@every_write
def test_a_stale_write_is_refused_and_changes_nothing(target: Target, write: Act) -> None:
    """P3: whatever the operation."""
    view(target, 6).replace_one({"_id": 1}, {"kind": "a", "by": "newer"}, upsert=True)
    before = stored(target)
    with pytest.raises(StaleFencingTokenError) as caught:
        write(view(target, 5))
    assert vars(caught.value)["document_id"] == 1
    assert vars(caught.value)["namespace"] == target.full_name
    assert stored(target) == before


@every_write
def test_the_second_write_of_one_handler_passes_and_so_does_a_newer_one(target: Target, write: Act) -> None:
    """
    F1, F3, F4: an equal token is admitted, a larger one is, and a newer partitioning with a smaller token is.

    The stamps of other keys, and of other partitions, are kept, through replaces and deletes, too.
    """
    other: Document = {"shop/other": {"g": 4, "p": {"2": 77}}}
    for token, partitioning in [(5, 1), (6, 1), (1, 2)]:
        stamps = {KEY: {"g": 1, "p": {"0": 5, "9": 900}}, **other}
        target.replace_one({"_id": 1}, {"kind": "a", FENCE: stamps}, upsert=True)
        graves(target).delete_many({})
        write(view(target, token, partitioning=partitioning))
        left = stored(target) or graves(target).find_one({"_id": 1}) or {}
        kept = {"9": 900} if partitioning == 1 else {}
        assert left[FENCE] == {KEY: {"g": partitioning, "p": {"0": token, **kept}}, **other}


STAMPS: list[Document | None] = [
    *(None, {}, {"shop/other": {"g": 9, "p": {"0": 9}}}, {KEY: {"g": 1}}, {KEY: {}}),
    *({KEY: {"g": g, "p": {i: t}}} for g in (0, 1, 2) for i in ("0", "3") for t in (4, 5, 6)),
]
PLACED = Fence(KEY, 1, 3, 8, Origin(7, b"2")).stamp(None)
PLACES = [
    Fence(KEY, 1, index, 8, Origin(document, place, since))
    for index, document, place, since in product([0, 3], [7, 8], [b"1", b"2", b"3"], [0, 9])
]


@pytest.mark.parametrize(
    ("mine", "stamps"), [*((fence(5), stamps) for stamps in STAMPS), *((mine, PLACED) for mine in PLACES)]
)
def test_the_servers_guard_and_the_pure_one_agree(target: Target, mine: Fence, stamps: Document | None) -> None:
    """F1-F3, F5, for tokens and places, in each kind of write: `guard` matches where `admits` holds."""
    before = {"_id": 1} if stamps is None else {"_id": 1, FENCE: stamps}
    target.insert_one(before)
    assert (target.count_documents({"_id": 1, **mine.guard()}) == 1) == mine.admits(stamps)
    for request in (UpdateOne({"_id": 1}, {"$set": {"n": 1}}), UpdateOne({"_id": 1}, [{"$set": {"n": 1}}])):
        target.replace_one({"_id": 1}, before)
        try:
            FencedCollection(target, mine).bulk_write([request])
        except (OutdatedChangeError, StaleFencingTokenError):
            assert not mine.admits(stamps)
            assert stored(target) == before
        else:
            assert (stored(target) or {})[FENCE] == mine.stamp(stamps)


def test_an_upsert_by_another_field_is_refused(target: Target) -> None:
    """P3: a stale one would insert a second document."""
    for method in ("update_one", "replace_one", "find_one_and_update", "update_many"):
        body = {"by": "me"} if method == "replace_one" else {"$set": {"by": "me"}}
        with pytest.raises(ConfigurationError):
            getattr(view(target, 5), method)({"sku": "x"}, body, upsert=True)
    with pytest.raises(ConfigurationError):
        view(target, 5).bulk_write(
            [UpdateOne(by, {"$set": {"a": 1}}, upsert=True) for by in ({"_id": 9}, {"sku": "x"})]
        )
    assert target.count_documents({}) == 0


@pytest.mark.parametrize("method", ["update_one", "find_one_and_update"])
def test_a_stale_write_with_sort_does_not_fall_on_the_next_document(target: Target, method: str) -> None:
    """P3: the document that the filter and sort name is judged; the guard does not help to choose it."""
    target.insert_many([{"_id": 1, "kind": "a", "n": 1}, {"_id": 2, "kind": "a", "n": 2}])
    sort: Any = [("n", 1)] if method == "find_one_and_update" else {"n": 1}
    getattr(view(target, 6), method)({"kind": "a"}, {"$set": {"by": "newer"}}, sort=sort)
    with pytest.raises(StaleFencingTokenError):
        getattr(view(target, 5), method)({"kind": "a"}, {"$set": {"by": "stale"}}, sort=sort)
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == ["newer", None]


def test_a_document_that_leaves_the_filter_while_it_is_chosen_is_not_written(target: Target, spied: Spied) -> None:
    """P3: the write repeats the user's filter; then the next match is chosen, as MongoDB would."""
    target.insert_many([{"_id": 1, "kind": "a"}, {"_id": 2, "kind": "a"}])
    collection, commands = spied
    commands.before("update", target.name, lambda: target.update_one({"_id": 1}, {"$set": {"kind": "b"}}))
    updated = view(collection, 5).update_one({"kind": "a"}, {"$set": {"by": "me"}}, sort={"_id": 1})
    assert updated.matched_count == 1
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == [None, "me"]


def test_what_matches_nothing_is_the_users_matter(target: Target) -> None:
    """P3: no document, or a condition of the user's that fails, is a result, not an error."""
    target.insert_one({"_id": 1, "n": 1, FENCE: stamp(4)})
    mine = view(target, 5)
    for filter_ in ({"_id": 1, "n": 2}, {"_id": 9}, {"n": 7}):
        assert mine.update_one(filter_, {"$set": {"a": 1}}).matched_count == 0
        assert mine.replace_one(filter_, {"a": 1}).matched_count == 0
        assert mine.find_one_and_update(filter_, {"$set": {"a": 1}}) is None
        if "_id" not in filter_ or "n" in filter_:
            assert mine.delete_one(filter_).deleted_count == 0
    assert stored(target) == {"_id": 1, "n": 1, FENCE: stamp(4)}
    assert graves(target).count_documents({}) == 0


def test_a_rival_that_changes_the_partitioning_between_two_statements_does_not_swallow_a_write(
    target: Target, spied: Spied
) -> None:
    """P1: neither statement of an operator update may match; then the write is tried again."""
    target.insert_one({"_id": 1, FENCE: stamp(1)})
    collection, commands = spied
    rival = view(target, 3, partitioning=2, index=7)
    # The first has missed, since the stamp was older.
    commands.before("findAndModify", target.name, lambda: rival.update_one({"_id": 1}, {"$set": {"rival": 1}}), after=1)
    assert view(collection, 5, partitioning=2).find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}) is not None
    assert (stored(target) or {}).items() >= {"n": 1, "rival": 1}.items()


@pytest.mark.needs_mongodb(5, 0)
@pytest.mark.parametrize("exists", [False, True])
def test_strings_and_names_that_begin_with_a_dollar_are_stored_as_they_are(target: Target, exists: bool) -> None:
    """P2: through an expression, `"$price"` would silently remove its field."""
    if exists:
        target.insert_one({"_id": 1, "old": 1, "price": 3})
    document = {"_id": 1, "a": "$price", "b": {"$c": ["$$ROOT"], "d.e": None}, "f": [], "g": {"$literal": 1}}
    view(target, 5).replace_one({"_id": 1}, document, upsert=True)
    assert stored(target) == {**document, FENCE: stamp(5)}
    view(target, 5).update_one({"_id": 1}, {"$set": {"a": "$old", "g": {"$add": [1, 2]}}})
    assert stored(target) == {**document, "a": "$old", "g": {"$add": [1, 2]}, FENCE: stamp(5)}


@pytest.mark.parametrize("found", [None, {"_id": 1}, {"_id": 1, FENCE: {"shop/other": {"g": 9, "p": {"1": 1}}}}])
@pytest.mark.parametrize(
    "stages",
    [
        [{"$set": {"n": {"$add": [{"$ifNull": ["$n", 0]}, 1]}}}],
        [{"$set": {"n": 1, "x": 2}}, {"$unset": "x"}],
        [{"$replaceWith": {"n": 1}}],
        [{"$replaceRoot": {"newRoot": {"$mergeObjects": ["$$ROOT", {"n": 1}]}}}],
        [{"$set": {"sub": {"n": 1, "_fence": {"shop/forged": {"g": 99}}}}}, {"$replaceWith": "$sub"}],
        [{"$set": {"n": 1, "x": 2}}, {"$project": {"n": 1}}],
        [{"$set": {"n": 1, "x": 2}}, {"$project": {"x": 0}}],
        [{"$set": {"n": 1, "x": {"y": 2}}}, {"$project": {"x": {"y": 0}, "_id": 0}}, {"$unset": ["x"]}],
        pytest.param([{"$set": {"n": "$$amount"}}], marks=pytest.mark.needs_mongodb(5, 0)),
    ],
)
def test_a_pipeline_may_drop_every_field_but_the_fence(
    target: Target, stages: list[Document], found: Document | None
) -> None:
    """F2, F4: stages that rebuild the document keep the stamps, and cannot bring others."""
    kept = (found or {}).get(FENCE, {})
    if found is not None:
        target.insert_one(found)
    variables: dict[str, Any] = {"let": {"amount": 1}} if "$$amount" in str(stages) else {}
    view(target, 5).update_one({"_id": 1}, stages, upsert=True, **variables)
    assert stored(target) == {"_id": 1, "n": 1, FENCE: {**kept, **stamp(5)}}


def test_a_pipeline_whose_new_root_is_missing_fails_as_it_does_without_a_fence(target: Target) -> None:
    """P9: it must not empty the document instead."""
    target.insert_one({"_id": 1, "n": 1})
    with pytest.raises(WriteError):
        view(target, 5).update_one({"_id": 1}, [{"$replaceWith": "$nothing"}])
    assert stored(target) == {"_id": 1, "n": 1}


def test_positional_operators_and_array_filters_work(target: Target) -> None:
    """P9: the guard beside the filter does not hide which element matched."""
    target.insert_one({"_id": 1, "items": [{"sku": "a", "n": 1}, {"sku": "b", "n": 1}]})
    mine = view(target, 5)
    mine.update_one({"_id": 1, "items.sku": "b"}, {"$inc": {"items.$.n": 1}})
    mine.update_one({"_id": 1}, {"$inc": {"items.$[i].n": 5}}, array_filters=[{"i.sku": "a"}])
    assert [i["n"] for i in (stored(target) or {})["items"]] == [6, 2]


def test_results_are_pymongos(target: Target) -> None:
    """P9: counts, inserted ids, images before and after, projections."""
    mine = view(target, 5)
    inserted = mine.update_one({"_id": 1}, {"$set": {"n": 1}, "$setOnInsert": {"s": 1}}, upsert=True)
    assert (inserted.matched_count, inserted.upserted_id, inserted.acknowledged) == (0, 1, True)
    again = mine.update_one({"_id": 1}, {"$set": {"n": 1}}, upsert=True)
    assert (again.matched_count, again.modified_count, again.upserted_id) == (1, 0, None)
    assert mine.replace_one({"_id": 2}, {"n": 7}, upsert=True).upserted_id == 2
    before = mine.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, {"n": 1, "_id": 0})
    after = mine.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, return_document=ReturnDocument.AFTER)
    created = mine.find_one_and_update({"_id": 3}, {"$set": {"n": 1}}, upsert=True)
    assert (before, after["n"], after["s"], created) == ({"n": 1}, 3, 1, None)
    assert mine.delete_one({"n": 7}).deleted_count == 1


def test_update_many_guards_each_document(target: Target) -> None:
    """P3: one that is newer raises; the admitted ones are updated and stamped, the newer one is as it was."""
    target.insert_many([{"_id": i, "kind": "a"} for i in range(4)])
    view(target, 6).update_one({"_id": 2}, {"$set": {"by": "newer"}})
    with pytest.raises(StaleFencingTokenError) as caught:
        view(target, 5).update_many({"kind": "a"}, {"$set": {"by": "me"}})
    assert vars(caught.value)["document_id"] == 2
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == ["me", "me", "newer", "me"]
    assert view(target, 6).update_many({"kind": "a"}, {"$set": {"by": "me"}}).matched_count == 4


def test_update_many_meets_each_document_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: also when the update moves documents along the index that finds them, and over several batches."""
    monkeypatch.setattr("mongo_celery.bridge.fenced.bulk.BATCH", 50)
    target.create_index("n")
    target.insert_many([{"_id": i, "n": 0} for i in range(220)])
    result = view(target, 5).update_many({"n": {"$gte": 0}}, {"$inc": {"n": 1}}, hint="n_1")
    assert (result.matched_count, result.modified_count) == (220, 220)
    assert target.count_documents({"n": 1, f"{FENCE}.{KEY}.p.0": 5}) == 220


def test_a_bulk_write_is_judged_document_by_document(target: Target) -> None:
    """P3: stale raises, missing is the user's matter, what was admitted stays."""
    target.insert_many([{"_id": 1}, {"_id": 2, FENCE: stamp(6)}, {"_id": 3}])
    mine = view(target, 5)
    assert mine.bulk_write([UpdateOne({"_id": i}, {"$set": {"by": "me"}}) for i in (1, 9, 3)]).modified_count == 2
    with pytest.raises(StaleFencingTokenError) as caught:
        mine.bulk_write([UpdateOne({"_id": i}, {"$set": {"by": "again"}}) for i in (1, 9, 2)])
    assert vars(caught.value)["document_id"] == 2
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == ["again", None, "me"]


@pytest.mark.parametrize("deleted", [False, True], ids=["stored", "deleted"])
@pytest.mark.parametrize(("there", "asked"), [({"k": 1.0}, {"k": 1}), (math.nan, Decimal128("NaN"))], ids=str)
def test_a_stale_bulk_write_is_told_however_the_id_is_spelled(
    target: Target, there: Any, asked: Any, deleted: bool
) -> None:
    """P3: JavaScript writes `{k: 1}` as a double; the judgement of many must be that of one. See `test_identity.py`."""
    view(target, 6).update_one({"_id": there}, {"$set": {"by": "newer"}}, upsert=True)
    if deleted:
        view(target, 6).delete_one({"_id": there})
    else:
        target.insert_one({"_id": "other"})
    mine, change = view(target, 5), {"$set": {"by": "stale"}}
    if not deleted:
        with pytest.raises(StaleFencingTokenError):
            mine.update_many({}, change)
    with pytest.raises(StaleFencingTokenError):
        mine.update_one({"_id": asked}, change)
    for upsert in (False, True):
        with pytest.raises(StaleFencingTokenError):
            mine.bulk_write([UpdateOne({"_id": each}, change, upsert=upsert) for each in ("other", asked)])
    assert (stored(target, asked) or {"by": "newer"})["by"] == "newer"


def test_a_stale_bulk_write_is_told_where_only_the_collation_makes_ids_equal(database: Database[Document]) -> None:
    """P3: no key knows that, so the server is asked; the other document has its own stamp."""
    target = database.create_collection("summaries", collation={"locale": "en", "strength": 2})
    target.insert_many([{"_id": "a", FENCE: stamp(6)}, {"_id": "b", FENCE: stamp(4)}])
    mine = view(target, 5)
    with pytest.raises(StaleFencingTokenError) as caught:
        mine.bulk_write([UpdateOne({"_id": each}, {"$set": {"by": "me"}}) for each in ("B", "A")])
    assert vars(caught.value)["document_id"] == "A"
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == [None, "me"]


@pytest.mark.parametrize(
    "method", ["update_one", "update_many", "replace_one", "find_one_and_update", "delete_one", "bulk_write"]
)
def test_a_stale_write_is_told_where_only_its_own_collation_makes_ids_equal(target: Target, method: str) -> None:
    """P3: by a collation a filter on `_id` means another `_id` than it says, so the document is looked for first."""
    options: Document = {"collation": {"locale": "en", "strength": 2}}
    given: list[Any] = [{"_id": "A"}, {"by": "me"} if method == "replace_one" else {"$set": {"by": "me"}}]
    if method == "bulk_write":
        given, options = [[UpdateOne(*given, **options)]], {}
    elif method == "delete_one":
        del given[1]
    target.insert_one({"_id": "a", FENCE: stamp(6)})
    with pytest.raises(StaleFencingTokenError):
        getattr(view(target, 5), method)(*given, **options)
    assert target.find_one() == {"_id": "a", FENCE: stamp(6)}
    getattr(view(target, 7), method)(*given, **options)
    left = target.find_one()
    assert left is None or left[FENCE] == stamp(7)


def test_a_bulk_write_does_not_lose_a_document_that_appears_before_it_is_judged(target: Target, spied: Spied) -> None:
    """P1: the command missed it, the look finds it with an older stamp: it is written then, once."""
    collection, commands = spied
    commands.meanwhile[2] = lambda: view(target, 4).replace_one({"_id": 2}, {"n": 10}, upsert=True)
    result = view(collection, 5).bulk_write([UpdateOne({"_id": i}, {"$inc": {"n": 1}}, upsert=True) for i in (1, 2, 3)])
    assert {d["_id"]: d["n"] for d in target.find()} == {1: 1, 2: 11, 3: 1}
    assert (result.matched_count, result.upserted_ids) == (1, {0: 1, 2: 3})


def test_a_bulk_write_does_all_kinds_in_the_users_order(target: Target) -> None:
    """P2: a document that occurs twice sees its requests in order; counts and places are PyMongo's."""
    target.insert_many([{"_id": 1, "n": 1, "kind": "a"}, {"_id": 2, "n": 2, "kind": "a"}])
    result = view(target, 5).bulk_write(
        [
            UpdateOne({"_id": 1}, {"$inc": {"n": 10}}),
            ReplaceOne({"_id": 7}, {"n": 7}, upsert=True),
            UpdateOne({"_id": 8}, [{"$set": {"n": 8}}], upsert=True),
            UpdateOne({"_id": 7}, {"$inc": {"n": 1}}),
            DeleteOne({"_id": 2}),
            UpdateOne({"_id": 2, "kind": "a"}, {"$set": {"n": 22}}, upsert=True),
            UpdateMany({"kind": "a"}, {"$inc": {"n": 100}}),
            UpdateOne({"n": 8}, {"$set": {"last": True}}),
        ]
    )
    assert {d["_id"]: d["n"] for d in target.find()} == {1: 111, 2: 122, 7: 8, 8: 8}
    assert all(d[FENCE] == stamp(5) for d in target.find())
    assert result.upserted_ids == {1: 7, 2: 8, 5: 2}
    assert (result.matched_count, result.deleted_count, result.upserted_count) == (5, 1, 3)


def test_deletes_of_a_bulk_write_bury_all_that_they_name(target: Target) -> None:
    """P3: also what was not there; an older execution revives none of it, and what is named twice goes once."""
    target.insert_many([{"_id": 1, FENCE: stamp(4, key="shop/other")}, {"_id": 2, FENCE: stamp(4)}, {"_id": 4}])
    result = view(target, 5).bulk_write([DeleteOne({"_id": i}) for i in (1, 2, 3, 2)])
    assert (result.deleted_count, [each["_id"] for each in target.find()]) == (2, [4])
    buried = {each["_id"]: each[FENCE] for each in graves(target).find()}
    assert buried == {1: stamp(5) | stamp(4, key="shop/other"), 2: stamp(5), 3: stamp(5)}
    for i in (1, 2, 3):
        with pytest.raises(StaleFencingTokenError):
            view(target, 4).replace_one({"_id": i}, {}, upsert=True)
    assert view(target, 5).bulk_write([ReplaceOne({"_id": i}, {}, upsert=True) for i in (1, 2, 3)]).upserted_count == 3


@pytest.mark.parametrize("newer", ["document", "tombstone"])
def test_a_stale_delete_of_a_bulk_write_is_told_behind_what_was_admitted(target: Target, newer: str) -> None:
    """P3: as of all its requests: those before are done, those behind are not tried."""
    target.insert_many([{"_id": i} for i in (1, 2, 3)])
    view(target, 6).update_one({"_id": 2}, {"$set": {"by": "newer"}})
    if newer == "tombstone":
        view(target, 6).delete_one({"_id": 2})
    with pytest.raises(StaleFencingTokenError) as caught:
        view(target, 5).bulk_write([DeleteOne({"_id": i}) for i in (1, 2, 3)])
    assert vars(caught.value)["document_id"] == 2
    assert {each["_id"] for each in target.find()} == {2, 3} - ({2} if newer == "tombstone" else set())


def test_what_stands_before_an_error_is_done_also_where_it_creates(target: Target) -> None:
    """P9: as in PyMongo; who says by an error's place how much is finished must not be told too much."""
    target.create_index("email", unique=True)
    target.insert_many([{"_id": 1, "email": "a"}, {"_id": 2, "email": "b"}])
    requests: list[Any] = [
        ReplaceOne({"_id": 7}, {"email": "g"}, upsert=True),
        UpdateOne({"_id": 2}, {"$set": {"email": "a"}}),
        ReplaceOne({"_id": 8}, {"email": "h"}, upsert=True),
    ]
    for ordered, made in ((True, {7}), (False, {7, 8})):
        with pytest.raises(BulkWriteError) as caught:
            view(target, 5).bulk_write(requests, ordered)
        assert [each["index"] for each in caught.value.details["writeErrors"]] == [1]
        assert {each["_id"] for each in target.find()} == {1, 2} | made
        assert caught.value.details["nUpserted"] == 1
    requests = [ReplaceOne({"_id": n}, {"email": "x" if n < 12 else f"y{n}"}, upsert=True) for n in (10, 11, 12)]
    with pytest.raises(BulkWriteError):
        view(target, 5).bulk_write(requests)
    assert {each["_id"] for each in target.find({"_id": {"$gte": 10}})} == {10}, "of several new ones, too"
    requests = [UpdateOne({"_id": 1}, {"$set": {"x": 1}}), ReplaceOne({"_id": 20}, {"email": "b"}, upsert=True)]
    with pytest.raises(BulkWriteError) as caught:
        view(target, 5).bulk_write(requests)
    assert (caught.value.details["nMatched"], caught.value.details["nModified"]) == (1, 1)


@pytest.mark.parametrize("request_", [InsertOne({"_id": 1}), DeleteMany({})])
def test_a_bulk_write_refuses_what_it_cannot_fence(target: Target, request_: Any) -> None:
    """P9: before anything is written."""
    with pytest.raises(ConfigurationError):
        view(target, 5).bulk_write([ReplaceOne({"_id": 1}, {}, upsert=True), request_])
    assert target.count_documents({}) == 0


def test_a_users_transaction_holds_every_write(target: Target, mongo_client: MongoClient[Document]) -> None:
    """P3: `session` is passed through: an abort undoes documents, stamps and tombstones alike."""
    target.insert_one({"_id": 1, "a": 1})
    view(target, 1).delete_one({"_id": 0})
    with mongo_client.start_session() as session, session.start_transaction():
        mine = view(target, 5)
        mine.delete_one({"_id": 1}, session=session)
        mine.replace_one({"_id": 2}, {"a": 2}, upsert=True, session=session)
        mine.update_one({"a": 2}, {"$inc": {"a": 1}}, session=session)
        mine.update_many({"a": 3}, {"$inc": {"a": 1}}, session=session)
        mine.bulk_write([ReplaceOne({"_id": i}, {"b": 1}, upsert=True) for i in (3, 4)], session=session)
        assert mine.find_one_and_update({"_id": 2}, {"$inc": {"a": 1}}, session=session)["a"] == 4
        assert stored(target) == {"_id": 1, "a": 1}
        session.abort_transaction()
    assert list(target.find()) == [{"_id": 1, "a": 1}]
    assert [d["_id"] for d in graves(target).find()] == [0]


def test_a_stale_upsert_in_a_users_transaction_is_stale_there_too(
    target: Target, mongo_client: MongoClient[Document]
) -> None:
    """P3: E11000 has ended the transaction in the server, so the stamp is read outside of it."""
    view(target, 6).replace_one({"_id": 1}, {"by": "newer"}, upsert=True)
    with mongo_client.start_session() as session, session.start_transaction():
        with pytest.raises(StaleFencingTokenError):
            view(target, 5).replace_one({"_id": 1}, {"by": "stale"}, upsert=True, session=session)
        session.abort_transaction()
    with mongo_client.start_session() as session, session.start_transaction():
        with pytest.raises(DuplicateKeyError):
            view(target, 7).replace_one({"_id": 1, "by": "x"}, {"by": "y"}, upsert=True, session=session)
        session.abort_transaction()


@pytest.mark.parametrize("restored", [False, True])
def test_the_first_fenced_write_of_a_process_may_stand_in_a_users_transaction(
    target: Target, make_client: MakeClient, restored: bool
) -> None:
    """P9: making the tombstones' index, also if it was lost, does not wait for the transaction around it."""
    if restored:
        graves(target).insert_one({"_id": 0, FENCE: stamp(1)})
    client = make_client()
    mine = view(client[target.database.name][target.name], 5)

    def body(session: Any) -> None:
        mine.update_one({"_id": 9}, {"$set": {"a": 1}}, session=session)
        mine.replace_one({"_id": 1}, {"a": 1}, upsert=True, session=session)
        mine.delete_one({"_id": 2}, session=session)

    with client.start_session() as session, pymongo.timeout(DEADLINE_S):
        session.with_transaction(body)
    assert stored(target) == {"_id": 1, "a": 1, FENCE: stamp(5)}


@every_write
def test_every_fenced_write_is_answered_by_the_majority(target: Target, spied: Spied, write: Act) -> None:
    """P3: whatever the collection's own concern is. A transaction's commands carry none but the commit's."""
    collection, commands = spied
    target.insert_one({"_id": 1, "kind": "a", FENCE: stamp(4)})
    write(view(collection.with_options(write_concern=WriteConcern(1)), 5))
    assert commands.sent[-1][1].get("writeConcern") == {"w": "majority"}


def test_the_sql_example_does_what_it_says() -> None:
    """P3 in another store: the example checks itself, and its README shows its output."""
    folder = Path(__file__).parents[2] / "examples" / "fenced_sql"
    command = [sys.executable, str(folder / "fenced_sql.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    shown = re.search(r"fenced_sql.py\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert done.stdout == shown[1]
