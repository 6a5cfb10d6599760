"""Fenced writes against a real replica set: P3 and P4 for each operation and each rule."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pymongo import ReturnDocument, UpdateOne
from pymongo.collection import Collection
from pymongo.errors import WriteError

from mongo_celery.errors import ConfigurationError, StaleFencingTokenError
from tests.rig.commands import CommandRecorder
from tests.rig.fenced import DEADLINE_S, FENCE, KEY, Act, Document, every_write, fence, graves, stamp, stored, view


@every_write
def test_a_stale_write_is_refused_and_changes_nothing(target: Collection[Document], write: Act) -> None:
    """P3: whatever the operation."""
    view(target, 6).replace_one({"_id": 1}, {"kind": "a", "by": "newer"}, upsert=True)
    before = stored(target)
    with pytest.raises(StaleFencingTokenError) as caught:
        write(view(target, 5))
    assert vars(caught.value)["document_id"] == 1
    assert vars(caught.value)["namespace"] == target.full_name
    assert stored(target) == before


@every_write
def test_the_second_write_of_one_handler_passes_and_so_does_a_newer_one(
    target: Collection[Document], write: Act
) -> None:
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


@pytest.mark.parametrize(
    "stamps",
    [
        None,
        {},
        {"shop/other": {"g": 9, "p": {"0": 9}}},
        *({KEY: {"g": g, "p": {i: t}}} for g in (0, 1, 2) for i in ("0", "3") for t in (4, 5, 6)),
        {KEY: {"g": 1}},
        {KEY: {}},
    ],
)
def test_the_servers_guard_and_the_pure_one_agree(target: Collection[Document], stamps: Document | None) -> None:
    """F1-F3: `guard` matches where `admits` holds, and `expression` gives what `stamp` gives."""
    mine = fence(5)
    target.insert_one({"_id": 1} if stamps is None else {"_id": 1, FENCE: stamps})
    assert (target.count_documents({"_id": 1, **mine.guard()}) == 1) == mine.admits(stamps)
    if mine.admits(stamps):
        target.update_one({"_id": 1}, [{"$set": {FENCE: mine.expression()}}])
        assert (stored(target) or {})[FENCE] == mine.stamp(stamps)


# ---------------------------------------------------------------- choosing the document


def test_an_upsert_by_another_field_is_refused(target: Collection[Document]) -> None:
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
def test_a_stale_write_with_sort_does_not_fall_on_the_next_document(target: Collection[Document], method: str) -> None:
    """P3: the document that the filter and sort name is judged; the guard does not help to choose it."""
    target.insert_many([{"_id": 1, "kind": "a", "n": 1}, {"_id": 2, "kind": "a", "n": 2}])
    sort: Any = [("n", 1)] if method == "find_one_and_update" else {"n": 1}
    getattr(view(target, 6), method)({"kind": "a"}, {"$set": {"by": "newer"}}, sort=sort)
    with pytest.raises(StaleFencingTokenError):
        getattr(view(target, 5), method)({"kind": "a"}, {"$set": {"by": "stale"}}, sort=sort)
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == ["newer", None]


def test_a_document_that_leaves_the_filter_while_it_is_chosen_is_not_written(
    target: Collection[Document], spied: tuple[Collection[Document], CommandRecorder]
) -> None:
    """P3: the write repeats the user's filter; then the next match is chosen, as MongoDB would."""
    target.insert_many([{"_id": 1, "kind": "a"}, {"_id": 2, "kind": "a"}])
    collection, commands = spied
    commands.hold("update", target.name)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(view(collection, 5).update_one, {"kind": "a"}, {"$set": {"by": "me"}}, sort={"_id": 1})
        assert commands.reached.wait(DEADLINE_S)
        target.update_one({"_id": 1}, {"$set": {"kind": "b"}})
        commands.go.set()
        assert update.result(DEADLINE_S).matched_count == 1
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == [None, "me"]


def test_what_matches_nothing_is_the_users_matter(target: Collection[Document]) -> None:
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
    target: Collection[Document], spied: tuple[Collection[Document], CommandRecorder]
) -> None:
    """P1: neither statement of an operator update may match; then the write is tried again."""
    target.insert_one({"_id": 1, FENCE: stamp(1)})
    collection, commands = spied
    mine = view(collection, 5, partitioning=2)
    commands.hold("findAndModify", target.name, after=1)  # the first has missed, since the stamp was older
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(mine.find_one_and_update, {"_id": 1}, {"$inc": {"n": 1}})
        assert commands.reached.wait(DEADLINE_S)
        view(target, 3, partitioning=2, index=7).update_one({"_id": 1}, {"$set": {"rival": 1}})
        commands.go.set()
        assert update.result(DEADLINE_S) is not None
    assert (stored(target) or {}).items() >= {"n": 1, "rival": 1}.items()


# ---------------------------------------------------------------- what is stored


@pytest.mark.needs_mongodb(5, 0)
@pytest.mark.parametrize("exists", [False, True])
def test_strings_and_names_that_begin_with_a_dollar_are_stored_as_they_are(
    target: Collection[Document], exists: bool
) -> None:
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
    target: Collection[Document], stages: list[Document], found: Document | None
) -> None:
    """F2, F4: stages that rebuild the document keep the stamps, and cannot bring others."""
    kept = (found or {}).get(FENCE, {})
    if found is not None:
        target.insert_one(found)
    variables: dict[str, Any] = {"let": {"amount": 1}} if "$$amount" in str(stages) else {}
    view(target, 5).update_one({"_id": 1}, stages, upsert=True, **variables)
    assert stored(target) == {"_id": 1, "n": 1, FENCE: {**kept, **stamp(5)}}


def test_a_pipeline_whose_new_root_is_missing_fails_as_it_does_without_a_fence(target: Collection[Document]) -> None:
    """P9: it must not empty the document instead."""
    target.insert_one({"_id": 1, "n": 1})
    with pytest.raises(WriteError):
        view(target, 5).update_one({"_id": 1}, [{"$replaceWith": "$nothing"}])
    assert stored(target) == {"_id": 1, "n": 1}


def test_positional_operators_and_array_filters_work(target: Collection[Document]) -> None:
    """P9: the guard beside the filter does not hide which element matched."""
    target.insert_one({"_id": 1, "items": [{"sku": "a", "n": 1}, {"sku": "b", "n": 1}]})
    mine = view(target, 5)
    mine.update_one({"_id": 1, "items.sku": "b"}, {"$inc": {"items.$.n": 1}})
    mine.update_one({"_id": 1}, {"$inc": {"items.$[i].n": 5}}, array_filters=[{"i.sku": "a"}])
    assert [i["n"] for i in (stored(target) or {})["items"]] == [6, 2]


def test_results_are_pymongos(target: Collection[Document]) -> None:
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
