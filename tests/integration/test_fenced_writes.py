"""
Fenced writes against a real replica set: P3 and P4 for each operation, each rule, each order of a race.

Races are made, not awaited: a listener holds one thread at a named command while a rival runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo import (
    DeleteMany,
    DeleteOne,
    InsertOne,
    MongoClient,
    ReplaceOne,
    ReturnDocument,
    UpdateMany,
    UpdateOne,
)
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure, WriteError
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from mongo_celery.errors import ConfigurationError, ForkedClientError, StaleFencingTokenError
from mongo_celery.fenced import TOMBSTONES, FencedCollection
from mongo_celery.fencing import Fence

Document = dict[str, Any]
MakeClient = Callable[..., MongoClient[Document]]

KEY = "shop/summarise"
DEADLINE_S = 20
FENCE = "_fence"
RIVAL = "rival"


def fence(token: int, *, index: int = 0, generation: int = 1, key: str = KEY) -> Fence:
    return Fence(key, generation, index, token)


def stamp(token: int, *, index: int = 0, generation: int = 1, key: str = KEY) -> Document:
    return {key: {"g": generation, "p": {str(index): token}}}


class Commands(CommandListener):
    """
    Counts a client's commands, holds the first thread that starts the awaited one, and before
    the n-th command runs what `meanwhile` has under n.
    """

    def __init__(self, observer: MongoClient[Document]) -> None:
        self.observer = observer
        self.started_names: list[str] = []
        self.concerns: list[Any] = []
        self.failures = threading.Event()
        self.reached = threading.Event()
        self.go = threading.Event()
        self.awaited: tuple[str, str] | None = None
        self.meanwhile: dict[int, Callable[[], Any]] = {}

    def hold(self, command: str, collection: str) -> None:
        self.awaited = (command, collection)

    def started(self, event: CommandStartedEvent) -> None:
        self.started_names.append(event.command_name)
        self.concerns.append(event.command.get("writeConcern"))
        self.meanwhile.pop(len(self.started_names), bool)()
        if self.awaited == (event.command_name, event.command.get(event.command_name)):
            self.awaited = None
            self.reached.set()
            assert self.go.wait(DEADLINE_S)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Nothing; a test may put something here."""

    def failed(self, event: CommandFailedEvent) -> None:  # noqa: ARG002 - the listener's signature
        self.failures.set()


@pytest.fixture
def target(database: Database[Document]) -> Collection[Document]:
    return database.create_collection("summaries")


@pytest.fixture
def spied(make_client: MakeClient, target: Collection[Document]) -> tuple[Collection[Document], Commands]:
    commands = Commands(target.database.client)
    client = make_client(event_listeners=[commands])
    return client[target.database.name][target.name], commands


def view(collection: Collection[Document], token: int, **options: Any) -> FencedCollection:
    ttl = {"tombstone_ttl": options.pop("tombstone_ttl")} if "tombstone_ttl" in options else {}
    return FencedCollection(collection, fence(token, **options), **ttl)


def graves(collection: Collection[Document]) -> Collection[Document]:
    return collection.database[collection.name + TOMBSTONES]


def stored(collection: Collection[Document], document_id: Any = 1) -> Document | None:
    return collection.find_one({"_id": document_id})


Act = Callable[[FencedCollection], Any]

WRITES: dict[str, Act] = {
    "update_one": lambda c: c.update_one({"_id": 1}, {"$set": {"by": "stale"}}),
    "update_one upsert": lambda c: c.update_one({"_id": 1}, {"$set": {"by": "stale"}}, upsert=True),
    "update_one pipeline": lambda c: c.update_one({"_id": 1}, [{"$set": {"by": "stale"}}]),
    "replace_one": lambda c: c.replace_one({"_id": 1}, {"by": "stale"}),
    "replace_one upsert": lambda c: c.replace_one({"_id": 1}, {"by": "stale"}, upsert=True),
    "find_one_and_update": lambda c: c.find_one_and_update({"_id": 1}, {"$set": {"by": "stale"}}),
    "find_one_and_update upsert": lambda c: c.find_one_and_update({"_id": 1}, {"$inc": {"n": 1}}, upsert=True),
    "delete_one": lambda c: c.delete_one({"_id": 1}),
    "update_many": lambda c: c.update_many({"kind": "a"}, {"$set": {"by": "stale"}}),
    "bulk update": lambda c: c.bulk_write([UpdateOne({"_id": 1}, {"$set": {"by": "stale"}})]),
    "bulk replace": lambda c: c.bulk_write([ReplaceOne({"_id": 1}, {"by": "stale"}, upsert=True)]),
    "bulk delete": lambda c: c.bulk_write([DeleteOne({"_id": 1})]),
    "bulk update_many": lambda c: c.bulk_write([UpdateMany({"kind": "a"}, {"$set": {"by": "stale"}})]),
    "by another field": lambda c: c.update_one({"kind": "a"}, {"$set": {"by": "stale"}}),
    "delete by another field": lambda c: c.delete_one({"kind": "a"}),
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


@every_write
@pytest.mark.parametrize("ttl", [0, 60], ids=["no tombstones", "tombstones"])
def test_a_stale_write_is_refused_and_changes_nothing(target: Collection[Document], write: Act, ttl: int) -> None:
    """P3: whatever the operation."""
    view(target, 6).replace_one({"_id": 1}, {"kind": "a", "by": "newer"}, upsert=True)
    before = stored(target)
    with pytest.raises(StaleFencingTokenError) as caught:
        write(view(target, 5, tombstone_ttl=ttl))
    assert vars(caught.value)["document_id"] == 1
    assert vars(caught.value)["namespace"] == target.full_name
    assert stored(target) == before


@every_write
def test_the_second_write_of_one_handler_passes_and_so_does_a_newer_one(
    target: Collection[Document], write: Act
) -> None:
    """F1: an equal token is admitted, a larger one is, and a newer generation with a smaller token is."""
    for token, generation in [(5, 1), (6, 1), (1, 2)]:
        target.replace_one({"_id": 1}, {"kind": "a", FENCE: stamp(5)}, upsert=True)
        graves(target).delete_many({})
        write(view(target, token, generation=generation))
        left = stored(target) or graves(target).find_one({"_id": 1})
        assert left is not None
        assert left[FENCE] == stamp(token, generation=generation)


@every_write
def test_a_document_written_without_a_fence_is_admitted_and_stamped(target: Collection[Document], write: Act) -> None:
    """F1, F2: no stamp is older than any."""
    target.insert_one({"_id": 1, "kind": "a"})
    write(view(target, 5))
    left = stored(target) or graves(target).find_one({"_id": 1})
    assert left is not None
    assert left[FENCE] == stamp(5)


@every_write
def test_the_stamps_of_others_are_kept(target: Collection[Document], write: Act) -> None:
    """F3, F4: other keys, and other partitions of the same key, through replaces and deletes, too."""
    others: Document = {"shop/other": {"g": 4, "p": {"2": 77}}, KEY: {"g": 1, "p": {"9": 900}}}
    target.insert_one({"_id": 1, "kind": "a", FENCE: others})
    write(view(target, 5))
    left = stored(target) or graves(target).find_one({"_id": 1})
    assert left is not None
    assert left[FENCE] == {"shop/other": {"g": 4, "p": {"2": 77}}, KEY: {"g": 1, "p": {"9": 900, "0": 5}}}


@every_write
def test_a_newer_generation_drops_the_older_ones_slots(target: Collection[Document], write: Act) -> None:
    """F3: and the older generation is refused from then on, whatever its token."""
    target.insert_one({"_id": 1, "kind": "a", FENCE: {KEY: {"g": 1, "p": {"9": 900}}}})
    write(view(target, 5, generation=2))
    left = stored(target) or graves(target).find_one({"_id": 1})
    assert left is not None
    assert left[FENCE] == stamp(5, generation=2)
    if stored(target):
        with pytest.raises(StaleFencingTokenError):
            write(view(target, 1000, index=9, generation=1))


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
        document = stored(target)
        assert document is not None
        assert document[FENCE] == mine.stamp(stamps)


# ---------------------------------------------------------------- choosing the document


@pytest.mark.parametrize("method", ["update_one", "replace_one", "find_one_and_update", "update_many"])
def test_an_upsert_by_another_field_is_refused(target: Collection[Document], method: str) -> None:
    """P3: a stale one would insert a second document."""
    body = {"by": "me"} if method == "replace_one" else {"$set": {"by": "me"}}
    with pytest.raises(ConfigurationError, match="equality on _id"):
        getattr(view(target, 5), method)({"sku": "x"}, body, upsert=True)
    with pytest.raises(ConfigurationError, match="equality on _id"):
        view(target, 5).bulk_write(
            [
                UpdateOne({"_id": 9}, {"$set": {"a": 1}}, upsert=True),
                UpdateOne({"sku": "x"}, {"$set": {}}, upsert=True),
            ]
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
    target: Collection[Document], spied: tuple[Collection[Document], Commands]
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
    assert mine.update_one({"_id": 1, "n": 2}, {"$set": {"a": 1}}).matched_count == 0
    assert mine.update_one({"_id": 9}, {"$set": {"a": 1}}).matched_count == 0
    assert mine.replace_one({"n": 7}, {"a": 1}).matched_count == 0
    assert mine.find_one_and_update({"_id": 1, "n": 2}, {"$set": {"a": 1}}) is None
    assert mine.delete_one({"_id": 1, "n": 2}).deleted_count == 0
    assert mine.delete_one({"n": 2}).deleted_count == 0
    assert stored(target) == {"_id": 1, "n": 1, FENCE: stamp(4)}
    assert graves(target).count_documents({}) == 0


def test_a_rival_that_changes_the_generation_between_two_statements_does_not_swallow_a_write(
    target: Collection[Document], spied: tuple[Collection[Document], Commands]
) -> None:
    """P1: neither statement of an operator update may match; then the write is tried again."""
    target.insert_one({"_id": 1, FENCE: stamp(1)})
    collection, commands = spied
    mine = view(collection, 5, generation=2)
    with ThreadPoolExecutor(1) as pool:
        # Hold the second findAndModify: the first has missed, since the stamp was older.
        first_seen = threading.Event()
        original = commands.succeeded

        def after_first(event: CommandSucceededEvent) -> None:
            original(event)
            if event.command_name == "findAndModify" and not first_seen.is_set():
                first_seen.set()
                commands.hold("findAndModify", target.name)

        commands.succeeded = after_first  # type: ignore[method-assign]
        update: Future[Any] = pool.submit(mine.find_one_and_update, {"_id": 1}, {"$inc": {"n": 1}})
        assert commands.reached.wait(DEADLINE_S)
        view(target, 3, generation=2, index=7).update_one({"_id": 1}, {"$set": {"rival": 1}})
        commands.go.set()
        assert update.result(DEADLINE_S) is not None
    document = stored(target)
    assert document is not None
    assert (document["n"], document["rival"]) == (1, 1)


# ---------------------------------------------------------------- what is stored


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
        [{"$set": {"n": "$$amount"}}],
    ],
)
def test_a_pipeline_may_drop_every_field_but_the_fence(
    target: Collection[Document], stages: list[Document], found: Document | None
) -> None:
    """F2, F4: stages that rebuild the document keep the stamps, and cannot bring others."""
    kept = (found or {}).get(FENCE, {})
    if found is not None:
        target.insert_one(found)
    view(target, 5).update_one({"_id": 1}, stages, upsert=True, let={"amount": 1})
    assert stored(target) == {"_id": 1, "n": 1, FENCE: {**kept, **stamp(5)}}


def test_a_pipeline_whose_new_root_is_missing_fails_as_it_does_without_a_fence(
    target: Collection[Document],
) -> None:
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
    document = stored(target)
    assert document is not None
    assert [i["n"] for i in document["items"]] == [6, 2]


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


# ---------------------------------------------------------------- duplicate keys


@pytest.mark.parametrize("ttl", [0, 60], ids=["no tombstones", "tombstones"])
@pytest.mark.parametrize(("rival", "wins"), [(5, True), (4, True), (6, False)])
def test_a_document_that_appears_during_an_upsert_is_updated_or_judged(
    target: Collection[Document],
    spied: tuple[Collection[Document], Commands],
    ttl: int,
    rival: int,
    wins: bool,
) -> None:
    """P3: E11000 on `_id` is tried once more; equal tokens both pass; a newer one has won."""
    collection, commands = spied
    act = view(collection, 5, tombstone_ttl=ttl)
    if ttl:
        view(collection, 1, tombstone_ttl=ttl).delete_one({"_id": 0})  # makes the index
    original = commands.succeeded

    def after_miss(event: CommandSucceededEvent) -> None:
        original(event)
        if event.command_name == "update" and not commands.reached.is_set():
            commands.hold("findAndModify" if ttl else "update", target.name + (TOMBSTONES if ttl else ""))

    commands.succeeded = after_miss  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        upsert = pool.submit(act.update_one, {"_id": 1}, {"$inc": {"n": 1}}, upsert=True)
        assert commands.reached.wait(DEADLINE_S)
        view(target, rival, tombstone_ttl=ttl).update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True)
        commands.go.set()
        if wins:
            assert upsert.result(DEADLINE_S).matched_count == 1
        else:
            with pytest.raises(StaleFencingTokenError):
                upsert.result(DEADLINE_S)
    assert stored(target) == {"_id": 1, "n": 2 if wins else 1, FENCE: stamp(max(rival, 5))}


@pytest.mark.parametrize("ttl", [0, 60], ids=["no tombstones", "tombstones"])
def test_a_duplicate_key_of_another_index_is_the_users_error(
    target: Collection[Document], spied: tuple[Collection[Document], Commands], ttl: int
) -> None:
    """P9: on an insert and on an update, at once, never a verdict about the fence."""
    collection, commands = spied
    target.create_index("email", unique=True)
    target.insert_many([{"_id": 1, "email": "a"}, {"_id": 2, "email": "b"}])
    mine = view(collection, 5, tombstone_ttl=ttl)
    for document_id in (2, 3):
        with pytest.raises(DuplicateKeyError) as caught:
            mine.update_one({"_id": document_id}, {"$set": {"email": "a"}}, upsert=True)
        assert caught.value.details is not None
        assert caught.value.details["keyPattern"] == {"email": 1}
    assert commands.started_names.count("update") == 3
    assert target.count_documents({}) == 2


def test_an_upsert_whose_other_conditions_fail_is_a_duplicate_key(target: Collection[Document]) -> None:
    """P9: as in PyMongo, since the `_id` is taken; the stamp admits, so it is not stale."""
    target.insert_one({"_id": 1, "n": 1, FENCE: stamp(5)})
    with pytest.raises(DuplicateKeyError):
        view(target, 5).update_one({"_id": 1, "n": 2}, {"$set": {"a": 1}}, upsert=True)
    with pytest.raises(StaleFencingTokenError):
        view(target, 4).update_one({"_id": 1, "n": 2}, {"$set": {"a": 1}}, upsert=True)


def test_rivals_that_create_and_delete_in_turns_do_not_wear_out_an_upsert(
    target: Collection[Document], spied: tuple[Collection[Document], Commands]
) -> None:
    """P1: by `_id` alone an admitted upsert gets through, for each of its misses is a rival's success."""
    collection, commands = spied
    rival = view(target, 9, index=7, tombstone_ttl=0)
    # update (miss), update (insert), find (judge), and so on
    for place in (2, 5, 8):
        commands.meanwhile[place] = lambda: rival.replace_one({"_id": 1}, {}, upsert=True)
    for place in (4, 7):
        commands.meanwhile[place] = lambda: rival.delete_one({"_id": 1})
    view(collection, 5, tombstone_ttl=0).update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True)
    assert commands.started_names == ["update", "update", "find"] * 3 + ["update"]
    assert stored(target) == {"_id": 1, "n": 1, FENCE: {KEY: {"g": 1, "p": {"0": 5, "7": 9}}}}


# ---------------------------------------------------------------- deletes


UPSERTS: dict[str, Act] = {
    "update_one": lambda c: c.update_one({"_id": 1}, {"$set": {"by": "me"}}, upsert=True),
    "pipeline": lambda c: c.update_one({"_id": 1}, [{"$set": {"by": "me"}}], upsert=True),
    "replace_one": lambda c: c.replace_one({"_id": 1}, {"by": "me"}, upsert=True),
    "find_one_and_update": lambda c: c.find_one_and_update({"_id": 1}, {"$set": {"by": "me"}}, upsert=True),
    "bulk": lambda c: c.bulk_write([ReplaceOne({"_id": 1}, {"by": "me"}, upsert=True)]),
    "bulk of two": lambda c: c.bulk_write([ReplaceOne({"_id": i}, {"by": "me"}, upsert=True) for i in (2, 1)]),
}
every_upsert = pytest.mark.parametrize("upsert", UPSERTS.values(), ids=UPSERTS.keys())


@every_upsert
@pytest.mark.parametrize("existed", [True, False])
def test_a_stale_upsert_cannot_revive_what_was_deleted(
    target: Collection[Document], upsert: Act, existed: bool
) -> None:
    """P3: nor what the newer one found already gone; readers of the collection see no tombstone."""
    if existed:
        view(target, 4).replace_one({"_id": 1}, {"by": "me"}, upsert=True)
    view(target, 6).delete_one({"_id": 1})
    with pytest.raises(StaleFencingTokenError) as caught:
        upsert(view(target, 5))
    assert vars(caught.value)["document_id"] == 1
    assert stored(target) is None
    assert target.count_documents({"_id": 1}) == 0


@pytest.mark.parametrize("act", ["update_one", "delete_one", "bulk", "update_one upsert"])
def test_a_stale_write_to_what_was_deleted_is_refused(target: Collection[Document], act: str) -> None:
    """P3: the tombstone is the stamp of what is gone, and a stale delete does not take it back."""
    view(target, 6).delete_one({"_id": 1})
    with pytest.raises(StaleFencingTokenError) as caught:
        WRITES["bulk update" if act == "bulk" else act](view(target, 5))
    assert vars(caught.value)["document_id"] == 1
    grave = graves(target).find_one({"_id": 1})
    assert grave is not None
    assert grave[FENCE] == stamp(6)


@every_upsert
def test_a_newer_upsert_after_a_delete_works_and_keeps_all_stamps(target: Collection[Document], upsert: Act) -> None:
    """P4, T2, T3: the tombstone's stamps move into the document, those of other subscriptions, too."""
    view(target, 50, key="shop/other").replace_one({"_id": 1}, {"a": 1}, upsert=True)
    view(target, 90, index=3).update_one({"_id": 1}, {"$set": {"a": 2}})
    view(target, 6).delete_one({"_id": 1})
    upsert(view(target, 7))
    expected = {**stamp(50, key="shop/other"), KEY: {"g": 1, "p": {"0": 7, "3": 90}}}
    assert stored(target) == {"_id": 1, "by": "me", FENCE: expected}
    assert graves(target).count_documents({}) == 0
    for stale in (view(target, 6), view(target, 89, index=3), view(target, 49, key="shop/other")):
        with pytest.raises(StaleFencingTokenError):
            upsert(stale)


def test_a_delete_by_another_subscription_does_not_forget_the_first(target: Collection[Document]) -> None:
    """P3, T3: a tombstone holds the stamps of all, so a stale execution of either is refused."""
    view(target, 6).replace_one({"_id": 1}, {"a": 1}, upsert=True)
    view(target, 2, key="shop/cleanup").delete_one({"_id": 1})
    with pytest.raises(StaleFencingTokenError):
        view(target, 5).replace_one({"_id": 1}, {"a": 1}, upsert=True)


def test_a_tombstone_expires_by_the_servers_clock(target: Collection[Document]) -> None:
    """P10: `tombstone_ttl` seconds after the delete; None is for ever; 0 leaves none."""
    now = target.database.command("hello")["localTime"]
    view(target, 5, tombstone_ttl=3600).delete_one({"_id": 1})
    view(target, 5, tombstone_ttl=None).delete_one({"_id": 2})
    view(target, 5, tombstone_ttl=0).delete_one({"_id": 3})
    found = {d["_id"]: d.get("expireAt") for d in graves(target).find()}
    assert set(found) == {1, 2}
    assert 3600 <= (found[1] - now).total_seconds() < 3600 + DEADLINE_S
    assert found[2] is None
    assert graves(target).index_information()["expireAt_1"]["expireAfterSeconds"] == 0
    with pytest.raises(ConfigurationError):
        view(target, 5, tombstone_ttl=-1)


def test_deletes_do_not_trip_unique_indexes_or_validators(target: Collection[Document]) -> None:
    """P9: the reason why tombstones are not stubs in the collection itself."""
    target.create_index("email", unique=True)
    target.database.command("collMod", target.name, validator={"email": {"$type": "string"}})
    for i in (1, 2):
        view(target, 5).replace_one({"_id": i}, {"email": str(i)}, upsert=True)
    assert [view(target, 6).delete_one({"_id": i}).deleted_count for i in (1, 2)] == [1, 1]


def _wait_until_met(seen: Commands) -> None:
    """Until a rival's command has failed, or waits in the server for another transaction's write."""
    blocked: list[Document] = [
        {"$currentOp": {}},
        {"$match": {"appName": RIVAL, "writeConflicts": {"$gt": 0}}},
    ]
    deadline = time.monotonic() + DEADLINE_S
    while not seen.failures.wait(0.01) and not list(seen.observer.admin.aggregate(blocked)):
        assert time.monotonic() < deadline


def _race(
    paused: Callable[[], Any],
    commands: Commands,
    hold: tuple[str, str],
    rival: Callable[[], Any],
    seen: Commands,
) -> tuple[Any, Any]:
    """Hold `paused` at a command until `rival` has met it or has ended; the outcomes of both."""
    commands.hold(*hold)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(paused)
        assert commands.reached.wait(DEADLINE_S)
        second = pool.submit(rival)
        second.add_done_callback(lambda _: seen.failures.set())
        _wait_until_met(seen)
        commands.go.set()
        return tuple(f.exception(DEADLINE_S) or f.result() for f in (first, second))  # type: ignore[return-value]


STEPS = {
    "before its slot": ("findAndModify", TOMBSTONES),
    "before its insert": ("update", ""),
    "before its settling": ("delete", TOMBSTONES),
    "before its commit": ("commitTransaction", None),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_stale_upsert_that_overlaps_a_newer_delete_leaves_nothing(
    target: Collection[Document],
    spied: tuple[Collection[Document], Commands],
    make_client: MakeClient,
    step: str,
) -> None:
    """P3, T1: wherever the upsert is when the delete comes; it is refused, or its document is deleted."""
    collection, commands = spied
    view(target, 1).delete_one({"_id": 0})
    seen = Commands(target.database.client)
    rival = make_client(event_listeners=[seen], appname=RIVAL)[target.database.name][target.name]
    view(rival, 1).delete_one({"_id": 0})
    view(collection, 1).delete_one({"_id": 0})
    command, suffix = STEPS[step]
    if step == "before its insert":
        # The first `update` is the miss outside the transaction; the insert is the second.
        original = commands.started
        counted = Counter[str]()

        def second_only(event: CommandStartedEvent) -> None:
            counted[event.command_name] += event.command_name == "update"
            if counted["update"] == 2 and event.command_name == "update":
                commands.awaited = ("update", target.name)
            original(event)

        commands.started = second_only  # type: ignore[method-assign]
        hold = ("never", "")
    else:
        hold = (command, 1 if suffix is None else target.name + suffix)  # type: ignore[assignment]
    upserted, deleted = _race(
        lambda: view(collection, 5).replace_one({"_id": 1}, {"by": "stale"}, upsert=True),
        commands,
        hold,
        lambda: view(rival, 6).delete_one({"_id": 1}),
        seen,
    )
    assert stored(target) is None
    grave = graves(target).find_one({"_id": 1})
    assert grave is not None
    assert grave[FENCE] == stamp(6)
    if isinstance(upserted, StaleFencingTokenError):
        assert deleted.deleted_count == 0
    else:
        assert (upserted.upserted_id, deleted.deleted_count) == (1, 1)


@pytest.mark.parametrize(
    "hold",
    [
        ("findAndModify", TOMBSTONES),
        ("findAndModify", ""),
        ("update", TOMBSTONES),
        ("commitTransaction", None),
    ],
    ids=["before its slot", "before its delete", "before its tombstone", "before its commit"],
)
@pytest.mark.parametrize("existed", [True, False])
def test_a_newer_delete_that_is_overlapped_by_a_stale_upsert_leaves_nothing(
    target: Collection[Document],
    spied: tuple[Collection[Document], Commands],
    make_client: MakeClient,
    hold: tuple[str, str | None],
    existed: bool,
) -> None:
    """P3, T1: the other order, at each of the delete's steps."""
    collection, commands = spied
    seen = Commands(target.database.client)
    rival = make_client(event_listeners=[seen], appname=RIVAL)[target.database.name][target.name]
    view(rival, 1).delete_one({"_id": 0})
    view(collection, 1).delete_one({"_id": 0})
    if existed:
        view(target, 4).replace_one({"_id": 1}, {"by": "older"}, upsert=True)
    command, suffix = hold
    deleted, _ = _race(
        lambda: view(collection, 6).delete_one({"_id": 1}),
        commands,
        (command, 1 if suffix is None else target.name + suffix),  # type: ignore[arg-type]
        lambda: view(rival, 5).replace_one({"_id": 1}, {"by": "stale"}, upsert=True),
        seen,
    )
    assert not isinstance(deleted, Exception)
    assert stored(target) is None
    grave = graves(target).find_one({"_id": 1})
    assert grave is not None
    assert grave[FENCE] == stamp(6)


@pytest.mark.parametrize("skip", range(4))
@pytest.mark.parametrize("act", ["insert", "delete"])
def test_a_write_that_breaks_off_at_any_step_leaves_everything_as_it_was(
    target: Collection[Document], make_client: MakeClient, act: str, skip: int
) -> None:
    """P3, T3: stamps are in the document or in its tombstone at every moment; the repetition succeeds."""
    name = f"breaks-{act}-{skip}"
    client = make_client(appname=name)
    collection = client[target.database.name][target.name]
    view(collection, 4).replace_one({"_id": 1}, {"a": 1}, upsert=True)
    if act == "insert":
        view(collection, 5).delete_one({"_id": 1})
    before = (stored(target), graves(target).find_one({"_id": 1}))
    write: Callable[[], Any] = (
        (lambda: view(collection, 6).find_one_and_update({"_id": 1}, {"$set": {"a": 2}}, upsert=True))
        if act == "insert"
        else (lambda: view(collection, 6).delete_one({"_id": 1}))
    )
    missed = 2 if act == "insert" else 0  # the two guarded statements that find no document
    client.admin.command(
        "configureFailPoint",
        "failCommand",
        mode={"skip": missed + skip},
        data={
            "failCommands": ["findAndModify", "update", "delete", "commitTransaction"],
            "errorCode": 8000,
            "appName": name,
        },
    )
    try:
        with pytest.raises(OperationFailure):
            write()
    finally:
        client.admin.command("configureFailPoint", "failCommand", mode="off")
    assert (stored(target), graves(target).find_one({"_id": 1})) == before
    write()
    left = stored(target) or graves(target).find_one({"_id": 1})
    assert left is not None
    assert left[FENCE] == stamp(6)


@pytest.mark.parametrize("seed", range(3))
def test_of_many_executions_at_once_the_newest_decides(target: Collection[Document], seed: int) -> None:
    """P2, P3: eight tokens upsert, replace, delete at once; the largest one's effect is left."""
    acts: list[Callable[[int], Any]] = [
        lambda t: view(target, t).update_one({"_id": 1}, {"$set": {"by": t}}, upsert=True),
        lambda t: view(target, t).replace_one({"_id": 1}, {"by": t}, upsert=True),
        lambda t: view(target, t).delete_one({"_id": 1}),
        lambda t: view(target, t).update_one({"_id": 1}, [{"$set": {"by": t}}], upsert=True),
    ]
    view(target, 0).delete_one({"_id": 0})
    barrier = threading.Barrier(8)

    def run(token: int) -> None:
        barrier.wait(DEADLINE_S)
        try:
            acts[(token + seed) % 4](token)
        except StaleFencingTokenError:
            assert token < 8

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(1, 9)))
    left, grave = stored(target), graves(target).find_one({"_id": 1})
    if (8 + seed) % 4 == 2:
        assert left is None
        assert grave is not None
        assert grave[FENCE] == stamp(8)
    else:
        assert left == {"_id": 1, "by": 8, FENCE: stamp(8)}
        assert grave is None


# ---------------------------------------------------------------- many documents


def test_update_many_guards_each_document(target: Collection[Document]) -> None:
    """P3: one that is newer raises; the admitted ones are updated and stamped, the newer one is as it was."""
    target.insert_many([{"_id": i, "kind": "a"} for i in range(4)])
    view(target, 6).update_one({"_id": 2}, {"$set": {"by": "newer"}})
    with pytest.raises(StaleFencingTokenError) as caught:
        view(target, 5).update_many({"kind": "a"}, {"$set": {"by": "me"}})
    assert vars(caught.value)["document_id"] == 2
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == ["me", "me", "newer", "me"]
    assert view(target, 6).update_many({"kind": "a"}, {"$set": {"by": "me"}}).matched_count == 4


def test_update_many_meets_each_document_once(target: Collection[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: also when the update moves documents along the index that finds them, and over several batches."""
    monkeypatch.setattr("mongo_celery.fenced.bulk.BATCH", 50)
    target.create_index("n")
    target.insert_many([{"_id": i, "n": 0} for i in range(220)])
    result = view(target, 5).update_many({"n": {"$gte": 0}}, {"$inc": {"n": 1}}, hint="n_1")
    assert (result.matched_count, result.modified_count) == (220, 220)
    assert target.count_documents({"n": 1, f"{FENCE}.{KEY}.p.0": 5}) == 220


def test_a_bulk_write_is_judged_document_by_document(target: Collection[Document]) -> None:
    """P3: stale raises, missing is the user's matter, what was admitted stays."""
    target.insert_many([{"_id": 1}, {"_id": 2, FENCE: stamp(6)}, {"_id": 3}])
    mine = view(target, 5)
    result = mine.bulk_write([UpdateOne({"_id": i}, {"$set": {"by": "me"}}) for i in (1, 9, 3)])
    assert (result.matched_count, result.modified_count) == (2, 2)
    with pytest.raises(StaleFencingTokenError) as caught:
        mine.bulk_write([UpdateOne({"_id": i}, {"$set": {"by": "again"}}) for i in (1, 9, 2)])
    assert vars(caught.value)["document_id"] == 2
    assert [d.get("by") for d in target.find(sort=[("_id", 1)])] == ["again", None, "me"]


def test_a_bulk_write_does_not_lose_a_document_that_appears_before_it_is_judged(
    target: Collection[Document], spied: tuple[Collection[Document], Commands]
) -> None:
    """P1: the command missed it, the look finds it with an older stamp: it is written then, once."""
    collection, commands = spied
    commands.meanwhile[2] = lambda: view(target, 4).replace_one({"_id": 2}, {"n": 10}, upsert=True)
    result = view(collection, 5).bulk_write([UpdateOne({"_id": i}, {"$inc": {"n": 1}}, upsert=True) for i in (1, 2, 3)])
    assert {d["_id"]: d["n"] for d in target.find()} == {1: 1, 2: 11, 3: 1}
    assert (result.matched_count, result.upserted_ids) == (1, {0: 1, 2: 3})


def test_a_bulk_write_does_all_kinds_in_the_users_order(target: Collection[Document]) -> None:
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


def test_a_bulk_writes_errors_name_the_users_places(target: Collection[Document]) -> None:
    """P9: ordered stops at the first, unordered goes on; both report PyMongo's error."""
    target.create_index("email", unique=True)
    target.insert_many([{"_id": 1, "email": "a"}, {"_id": 2, "email": "b"}, {"_id": 3, "email": "c"}])
    requests: list[Any] = [
        UpdateOne({"_id": 1}, {"$set": {"x": 1}}),
        UpdateOne({"_id": 2}, {"$set": {"email": "a"}}),
        UpdateOne({"_id": 3}, {"$set": {"x": 1}}),
        ReplaceOne({"_id": 4, "q": 1}, {"email": "a"}, upsert=True),
    ]
    for ordered, places, third in [(True, [1], None), (False, [1, 3], 1)]:
        with pytest.raises(BulkWriteError) as caught:
            view(target, 5).bulk_write(requests, ordered)
        assert [e["index"] for e in caught.value.details["writeErrors"]] == places
        document = stored(target, 3)
        assert document is not None
        assert document.get("x") == third


@pytest.mark.parametrize("request_", [InsertOne({"_id": 1}), DeleteMany({})])
def test_a_bulk_write_refuses_what_it_cannot_fence(target: Collection[Document], request_: Any) -> None:
    """P9: before anything is written."""
    with pytest.raises(ConfigurationError, match=type(request_).__name__):
        view(target, 5).bulk_write([ReplaceOne({"_id": 1}, {}, upsert=True), request_])
    assert target.count_documents({}) == 0


# ---------------------------------------------------------------- sessions, concerns, costs, forks


def test_a_users_transaction_holds_every_write(
    target: Collection[Document], mongo_client: MongoClient[Document]
) -> None:
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
    target: Collection[Document], mongo_client: MongoClient[Document]
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
    target: Collection[Document], make_client: MakeClient, restored: bool
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


COSTS: dict[str, tuple[Act, list[str]]] = {
    "update_one": (WRITES["update_one"], ["update"]),
    "update_one upsert": (WRITES["update_one upsert"], ["update"]),
    "update_one pipeline": (WRITES["update_one pipeline"], ["update"]),
    "replace_one upsert": (WRITES["replace_one upsert"], ["update"]),
    "find_one_and_update": (WRITES["find_one_and_update"], ["findAndModify"]),
    "by another field": (WRITES["by another field"], ["find", "update"]),
    "update_many": (WRITES["update_many"], ["find", "update"]),
    "bulk": (lambda c: c.bulk_write([ReplaceOne({"_id": 1}, {}, upsert=True)] * 1), ["update"]),
    "delete_one": (WRITES["delete_one"], ["findAndModify", "findAndModify", "update", "commitTransaction"]),
    "insert": (
        lambda c: c.replace_one({"_id": 2}, {}, upsert=True),
        ["update", "findAndModify", "update", "delete", "commitTransaction"],
    ),
    "bulk of two inserts": (
        lambda c: c.bulk_write([ReplaceOne({"_id": i}, {}, upsert=True) for i in (2, 3)]),
        ["update", "find", "update", "find", "update", "delete", "commitTransaction"],
    ),
}


@pytest.mark.parametrize("cost", COSTS)
def test_round_trips_are_those_of_the_table(
    target: Collection[Document], spied: tuple[Collection[Document], Commands], cost: str
) -> None:
    """P3 is cheap: one round trip by `_id` where the document exists, and majority always."""
    collection, commands = spied
    weak = collection.with_options(write_concern=collection.write_concern.__class__(w=1))
    view(weak, 4).delete_one({"_id": 0})
    target.insert_one({"_id": 1, "kind": "a", FENCE: stamp(4)})
    commands.started_names.clear()
    commands.concerns.clear()
    write, expected = COSTS[cost]
    write(view(weak, 5))
    assert commands.started_names == expected
    # A transaction's commands carry no concern but the commit's.
    concerns = dict(zip(commands.started_names, commands.concerns, strict=True))
    last = "commitTransaction" if "commitTransaction" in expected else expected[-1]
    assert concerns[last] == {"w": "majority"}


def test_without_tombstones_inserts_and_deletes_are_cheap(
    spied: tuple[Collection[Document], Commands],
) -> None:
    """P3: two round trips and one; what is given up is written at `tombstone_ttl`."""
    collection, commands = spied
    mine = view(collection, 5, tombstone_ttl=0)
    mine.replace_one({"_id": 1}, {"a": 1}, upsert=True)
    mine.delete_one({"_id": 1})
    assert commands.started_names == ["update", "update", "delete"]
    assert all(concern == {"w": "majority"} for concern in commands.concerns)


@every_write
def test_a_client_from_before_a_fork_is_refused(
    target: Collection[Document], write: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: before any command; a child that shares its parent's sockets reads another's answers."""
    target.insert_one({"_id": 1, "kind": "a"})
    parent = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: parent + 1)
    with pytest.raises(ForkedClientError):
        write(view(target, 5))
    monkeypatch.undo()
    assert stored(target) == {"_id": 1, "kind": "a"}


def test_the_sql_example_does_what_it_says() -> None:
    """P3 in another store: the example checks itself, and its README shows its output."""
    folder = Path(__file__).parents[2] / "examples" / "fenced_sql"
    done = subprocess.run(
        [sys.executable, folder / "fenced_sql.py"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"```text\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert done.stdout == shown[1]
