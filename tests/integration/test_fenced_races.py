"""
Fenced writes that race each other: creation, deletion and their tombstones (P3).

Races are made, not awaited: a listener holds one thread at a named command while a rival runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
from pymongo import DeleteOne, ReplaceOne
from pymongo.errors import DuplicateKeyError, OperationFailure

from mongo_celery.bridge.fenced import TOMBSTONES, FencedCollection
from mongo_celery.errors import StaleFencingTokenError
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder
from tests.rig.fenced import (
    DEADLINE_S,
    FENCE,
    KEY,
    WRITES,
    Act,
    Document,
    MakeClient,
    Spied,
    Target,
    graves,
    stamp,
    stored,
    view,
)

Hold = tuple[str, str | None, int]
"""A command, the end of its collection's name, and how many of them pass. None is a transaction's end."""

Race = Callable[[Act, int, Hold, Act, int], list[Any]]


@pytest.mark.parametrize(("rival", "wins"), [(5, True), (4, True), (6, False)])
def test_a_document_that_appears_during_an_upsert_is_updated_or_judged(
    target: Target, spied: Spied, rival: int, wins: bool
) -> None:
    """P3: E11000 on `_id` is tried once more; equal tokens both pass; a newer one has won."""
    collection, commands = spied
    view(collection, 1).delete_one({"_id": 0})  # makes the index

    def count(mine: FencedCollection) -> int:
        return mine.update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True).matched_count

    # The update before it has missed.
    commands.before("findAndModify", target.name + TOMBSTONES, lambda: count(view(target, rival)))
    with nullcontext() if wins else pytest.raises(StaleFencingTokenError):
        assert count(view(collection, 5)) == 1
    assert stored(target) == {"_id": 1, "n": 2 if wins else 1, FENCE: stamp(max(rival, 5))}


def test_a_duplicate_key_of_another_index_is_the_users_error(target: Target, spied: Spied) -> None:
    """P9: on an insert and on an update, never a verdict about the fence."""
    collection, _ = spied
    target.create_index("email", unique=True)
    target.insert_many([{"_id": 1, "email": "a"}, {"_id": 2, "email": "b"}])
    mine = view(collection, 5)
    for document_id in (2, 3):
        with pytest.raises(DuplicateKeyError) as caught:
            mine.update_one({"_id": document_id}, {"$set": {"email": "a"}}, upsert=True)
        assert caught.value.details is not None
        assert caught.value.details["keyPattern"] == {"email": 1}
    assert target.count_documents({}) == 2


def test_an_upsert_whose_other_conditions_fail_is_a_duplicate_key(target: Target) -> None:
    """P9: as in PyMongo, since the `_id` is taken; the stamp admits, so it is not stale."""
    target.insert_one({"_id": 1, "n": 1, FENCE: stamp(5)})
    with pytest.raises(DuplicateKeyError):
        view(target, 5).update_one({"_id": 1, "n": 2}, {"$set": {"a": 1}}, upsert=True)
    with pytest.raises(StaleFencingTokenError):
        view(target, 4).update_one({"_id": 1, "n": 2}, {"$set": {"a": 1}}, upsert=True)


UPSERTS: dict[str, Act] = {
    "update_one": lambda c: c.update_one({"_id": 1}, {"$set": {"by": "me"}}, upsert=True),
    "pipeline": lambda c: c.update_one({"_id": 1}, [{"$set": {"by": "me"}}], upsert=True),
    "replace_one": lambda c: c.replace_one({"_id": 1}, {"by": "me"}, upsert=True),
    "find_one_and_update": lambda c: c.find_one_and_update({"_id": 1}, {"$set": {"by": "me"}}, upsert=True),
    "bulk": lambda c: c.bulk_write([ReplaceOne({"_id": 1}, {"by": "me"}, upsert=True)]),
    "bulk of two": lambda c: c.bulk_write([ReplaceOne({"_id": i}, {"by": "me"}, upsert=True) for i in (2, 1)]),
}
OTHERS = {name: WRITES[name] for name in ("update_one", "delete_one", "bulk update")}


@pytest.mark.parametrize("write", [*UPSERTS.values(), *OTHERS.values()], ids=[*UPSERTS, *OTHERS])
@pytest.mark.parametrize("existed", [True, False])
def test_a_stale_upsert_cannot_revive_what_was_deleted(target: Target, write: Act, existed: bool) -> None:
    """P3: nor what the newer one found already gone. Another stale write is refused too, and the tombstone stays."""
    if existed:
        view(target, 4).replace_one({"_id": 1}, {"by": "me"}, upsert=True)
    view(target, 6).delete_one({"_id": 1})
    with pytest.raises(StaleFencingTokenError) as caught:
        write(view(target, 5))
    assert vars(caught.value)["document_id"] == 1
    _assert_buried(target)


@pytest.mark.parametrize("upsert", UPSERTS.values(), ids=UPSERTS)
def test_a_newer_upsert_after_a_delete_works_and_keeps_all_stamps(target: Target, upsert: Act) -> None:
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


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("ids", [[1], [1, 2]], ids=["one", "many"])
def test_a_delete_by_another_handler_forgets_no_stamp(target: Target, ids: list[int], is_gone: bool) -> None:
    """P3: a tombstone holds the stamps of the document and of the tombstone before it."""
    view(target, 6).replace_one({"_id": 1}, {"a": 1}, upsert=True)
    if is_gone:
        view(target, 6).delete_one({"_id": 1})
    view(target, 2, key="shop/cleanup").bulk_write([DeleteOne({"_id": each}) for each in ids])
    with pytest.raises(StaleFencingTokenError):
        view(target, 5).replace_one({"_id": 1}, {"a": 1}, upsert=True)


def test_a_tombstone_expires_by_the_servers_clock(target: Target) -> None:
    """P10: seven days after the delete."""
    now = target.database.command("hello")["localTime"]
    view(target, 5).delete_one({"_id": 1})
    [found] = graves(target).find()
    assert 0 <= (found["expireAt"] - now - timedelta(days=7)).total_seconds() < DEADLINE_S
    assert graves(target).index_information()["expireAt_1"]["expireAfterSeconds"] == 0


def test_deletes_do_not_trip_unique_indexes_or_validators(target: Target) -> None:
    """P9: the reason why tombstones are not stubs in the collection itself."""
    target.create_index("email", unique=True)
    target.database.command("collMod", target.name, validator={"email": {"$type": "string"}})
    for i in (1, 2):
        view(target, 5).replace_one({"_id": i}, {"email": str(i)}, upsert=True)
    assert [view(target, 6).delete_one({"_id": i}).deleted_count for i in (1, 2)] == [1, 1]


@pytest.fixture
def race(target: Target, spied: Spied, make_client: MakeClient) -> Race:
    """Give a function that holds a write at a command until a rival's has met it, and returns what both give."""
    collection, commands = spied
    seen = CommandRecorder()
    blocked: list[Document] = [{"$currentOp": {}}, {"$match": {"appName": "rival", "writeConflicts": {"$gt": 0}}}]
    rival = make_client(event_listeners=[seen], appname="rival")[target.database.name][target.name]
    for each in (rival, collection):
        view(each, 1).delete_one({"_id": 0})  # makes the index

    def run(held: Act, held_token: int, hold: Hold, other: Act, token: int) -> list[Any]:
        command, suffix, after = hold
        rivals: list[Future[Any]] = []

        def meet() -> None:
            rivals.append(pool.submit(other, view(rival, token)))
            # Its command has failed, or waits in the server for another transaction's write.
            met = (rivals[0].done, seen.failures.is_set, lambda: list(target.database.client.admin.aggregate(blocked)))
            wait_for(lambda: any(each() for each in met))

        commands.before(command, 1 if suffix is None else target.name + suffix, meet, after=after)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(held, view(collection, held_token))
            return [each.exception(DEADLINE_S) or each.result() for each in chain([first], rivals)]

    return run


ENDS: dict[str, Hold] = {"slot": ("findAndModify", TOMBSTONES, 0), "commit": ("commitTransaction", None, 0)}
UPSERT_STEPS: dict[str, Hold] = {
    **ENDS,
    "insert": ("update", "", 1),  # the first one is the miss outside the transaction
    "settling": ("delete", TOMBSTONES, 0),
}
DELETE_STEPS: dict[str, Hold] = {**ENDS, "delete": ("findAndModify", "", 0), "tombstone": ("update", TOMBSTONES, 0)}


def stale_upsert(fenced: FencedCollection) -> Any:
    return fenced.replace_one({"_id": 1}, {"by": "stale"}, upsert=True)


def newer_delete(fenced: FencedCollection) -> Any:
    return fenced.delete_one({"_id": 1})


@pytest.mark.parametrize("step", UPSERT_STEPS.values(), ids=UPSERT_STEPS)
def test_a_stale_upsert_that_overlaps_a_newer_delete_leaves_nothing(target: Target, race: Race, step: Hold) -> None:
    """P3, T1: wherever the upsert is when the delete comes; it is refused, or its document is deleted."""
    upserted, deleted = race(stale_upsert, 5, step, newer_delete, 6)
    _assert_buried(target)
    if isinstance(upserted, StaleFencingTokenError):
        assert deleted.deleted_count == 0
    else:
        assert (upserted.upserted_id, deleted.deleted_count) == (1, 1)


@pytest.mark.parametrize("step", DELETE_STEPS.values(), ids=DELETE_STEPS)
@pytest.mark.parametrize("existed", [True, False])
def test_a_newer_delete_that_is_overlapped_by_a_stale_upsert_leaves_nothing(
    target: Target, race: Race, step: Hold, existed: bool
) -> None:
    """P3, T1: the other order, at each of the delete's steps."""
    if existed:
        view(target, 4).replace_one({"_id": 1}, {"by": "older"}, upsert=True)
    deleted, _ = race(newer_delete, 6, step, stale_upsert, 5)
    assert not isinstance(deleted, Exception)
    _assert_buried(target)


def _assert_buried(target: Target) -> None:
    """Nothing is there but the tombstone of the newer delete."""
    assert stored(target) is None
    assert (graves(target).find_one({"_id": 1}) or {})[FENCE] == stamp(6)


@pytest.mark.parametrize("skip", range(4))
@pytest.mark.parametrize("act", ["insert", "delete"])
def test_a_write_that_breaks_off_at_any_step_leaves_everything_as_it_was(
    target: Target, make_client: MakeClient, failpoint: Failpoint, act: str, skip: int
) -> None:
    """P3, T3: stamps are in the document or in its tombstone at every moment; the repetition succeeds."""
    name = f"breaks-{act}-{skip}"
    collection = make_client(appname=name)[target.database.name][target.name]
    view(collection, 4).replace_one({"_id": 1}, {"a": 1}, upsert=True)
    if act == "insert":
        view(collection, 5).delete_one({"_id": 1})
    before = (stored(target), graves(target).find_one({"_id": 1}))
    acts: dict[str, Act] = {
        "insert": lambda mine: mine.find_one_and_update({"_id": 1}, {"$set": {"a": 2}}, upsert=True),
        "delete": newer_delete,
    }
    missed = 2 if act == "insert" else 0  # the two guarded statements that find no document
    steps = ["findAndModify", "update", "delete", "commitTransaction"]
    with (
        failpoint(failCommands=steps, errorCode=8000, appName=name, mode={"skip": missed + skip}),
        pytest.raises(OperationFailure),
    ):
        acts[act](view(collection, 6))
    assert (stored(target), graves(target).find_one({"_id": 1})) == before
    acts[act](view(collection, 6))
    assert (stored(target) or graves(target).find_one({"_id": 1}) or {})[FENCE] == stamp(6)


@pytest.mark.parametrize("seed", [0, 3])
def test_of_many_executions_at_once_the_newest_decides(target: Target, seed: int) -> None:
    """P2, P3: eight tokens upsert, replace, delete at once; the largest one's effect is left."""
    acts: list[Act] = [*list(UPSERTS.values())[:3], newer_delete]
    view(target, 0).delete_one({"_id": 0})  # makes the index
    barrier = threading.Barrier(8)

    def run(token: int) -> None:
        barrier.wait(DEADLINE_S)
        try:
            acts[(token + seed) % 4](view(target, token))
        except StaleFencingTokenError:
            assert token < 8

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(1, 9)))
    left, grave = stored(target), graves(target).find_one({"_id": 1})
    assert (left is None) == (grave is not None) == ((8 + seed) % 4 == 3)
    assert (left or grave or {})[FENCE] == stamp(8)
