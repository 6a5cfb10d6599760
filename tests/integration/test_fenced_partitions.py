"""Fenced writes for changes of one document that are in several partitions: older data never goes over newer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from celery import Celery
from pymongo import DeleteOne, ReplaceOne, UpdateOne
from pymongo.database import Database
from pymongo.errors import AutoReconnect

from mongo_celery import Bridge, Change, Changes
from mongo_celery.bridge.fenced import FencedCollection
from mongo_celery.bridge.fenced.fence import Origin
from mongo_celery.bridge.operations import dead_letter_commands as commands
from mongo_celery.errors import OutdatedChangeError, StaleFencingTokenError
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for
from tests.rig.fenced import FENCE, KEY, fence, stored

Document = dict[str, Any]
Write = Callable[[FencedCollection, Any, Any], Any]


WRITES: dict[str, Write] = {
    "replace_one": lambda target, key, n: target.replace_one({"_id": key}, {"n": n}, upsert=True),
    "update_one": lambda target, key, n: target.update_one({"_id": key}, {"$set": {"n": n}}, upsert=True),
    "a pipeline": lambda target, key, n: target.update_one({"_id": key}, [{"$set": {"n": n}}], upsert=True),
    "find_one_and_update": lambda target, key, n: target.find_one_and_update(
        {"_id": key}, {"$set": {"n": n}}, upsert=True
    ),
    "bulk_write": lambda target, key, n: target.bulk_write([ReplaceOne({"_id": key}, {"n": n}, upsert=True)]),
    "update_many": lambda target, key, n: target.update_many({"_id": key}, {"$set": {"n": n}}, upsert=True),
}


def by_operation(event: Mapping[str, Any]) -> str:
    return str(event["operationType"])


class Shop:
    """
    A handler whose partitions go by operation, and that writes to the collection `copies`.

    Attributes:
        late: operations of which the first execution meets an outage: they are handled when all else is done.
        until: an operation before which the outage does not end, however long it takes. None: it ends at once.
    """

    def __init__(self, database: Database[Document], url: str, write: Write, **options: Any) -> None:
        self.orders, self.copies = database["orders"], database["copies"]
        self.late = {"insert"}
        self.until: str | None = None
        app = Celery("shop", broker="memory://", set_as_current=False)
        self.bridge = Bridge(app, url, name="shop", partitions=61, autodiscover=False)
        given = {"partition_by": by_operation, "failure_policy": "dead_letter", "name": "copy", **options}

        def copy(change: Change) -> None:
            self.meet_outage(change)
            self.write(change.fenced(self.copies.full_name), change)

        def copy_all(changes: Changes) -> None:
            self.meet_outage(changes[0])
            requests: list[Any] = [
                DeleteOne(each.document_key)
                if each.full_document is None
                else ReplaceOne(each.document_key, each.full_document, upsert=True)
                for each in changes
            ]
            changes.fenced(self.copies.full_name).bulk_write(requests)

        self._write = write
        if "batch_size" in given:
            self.bridge.on_changes(self.orders.full_name, **given)(copy_all)
        else:
            self.bridge.on_change(self.orders.full_name, **given)(copy)

    def meet_outage(self, change: Change) -> None:
        if change.operation_type == self.until:
            self.until = None
        if change.operation_type in self.late:
            if self.until is None:
                self.late.discard(change.operation_type)
            raise AutoReconnect("away")

    def write(self, target: FencedCollection, change: Change) -> None:
        key, document = change.document_key["_id"], change.full_document
        if document is None:
            target.delete_one({"_id": key})
        else:
            self._write(target, key, document["n"])

    @property
    def errors(self) -> list[str]:
        """Of the dead letters."""
        return [each.error.partition(":")[0] for each in commands.find(self.bridge.wiring).letters]


@pytest.mark.parametrize("later", ["a replace", "a delete"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_an_older_change_never_goes_over_a_newer_one(
    database: Database[Document], mongo_url: str, write: Write, later: str
) -> None:
    """P2, P9: the execution that comes too late ends in the failure policy, once, and so does its replay."""
    shop = Shop(database, mongo_url, write)
    with BridgeRunner(shop.bridge) as runner:
        shop.orders.insert_one({"_id": 1, "n": 1})
        if later == "a delete":
            shop.orders.delete_one({"_id": 1})
        else:
            shop.orders.replace_one({"_id": 1}, {"n": 2})
        *first, last = [type(call.error) for call in runner.deliver(raises=False).calls]
        assert ({*first}, last) == ({AutoReconnect, type(None)}, OutdatedChangeError)
        assert (stored(shop.copies) or {}).get("n") == (2 if later == "a replace" else None)
        assert shop.errors == ["OutdatedChangeError"]
        assert not runner.deliver().calls

        for over_newer in (False, True):
            shop.bridge.operations.replay_dead_letters(over_newer=over_newer).run()
            wait_for(lambda: bool(runner.deliver(raises=False).calls))
            assert (stored(shop.copies) or {}).get("n") == (1 if over_newer else 2 if later == "a replace" else None)
        assert shop.errors == []


@pytest.mark.parametrize("options", [{"batch_size": 10}, {"batch_size": 10, "coalesce": True}], ids=str)
def test_a_list_compares_each_document_with_its_own_change(
    database: Database[Document], mongo_url: str, options: Document
) -> None:
    """The change of the list that is outdated fails, and no other one of the list."""
    shop = Shop(database, mongo_url, WRITES["bulk_write"], **options)
    with BridgeRunner(shop.bridge) as runner:
        shop.orders.insert_many([{"_id": key, "n": 1} for key in range(4)])
        shop.orders.replace_one({"_id": 1}, {"n": 2})
        shop.orders.delete_one({"_id": 2})
        runner.deliver(raises=False)
        assert {each["_id"]: each["n"] for each in shop.copies.find()} == {0: 1, 1: 2, 3: 1}
        assert shop.errors == ["OutdatedChangeError"] * 2


@pytest.mark.parametrize("session", [False, True], ids=["", "in a transaction"])
def test_a_handler_may_pass_over_what_is_outdated(database: Database[Document], mongo_url: str, session: bool) -> None:
    """Where only the latest state counts; in a transaction too, which the refusal does not end."""
    passed: list[Any] = []
    shop = Shop(database, mongo_url, WRITES["update_one"], transactional=session)

    def write(target: FencedCollection, change: Change) -> None:
        options = {"session": change.session} if session else {}
        n = (change.full_document or {})["n"]
        try:
            target.update_one({"_id": 1}, {"$set": {"n": n}}, upsert=True, **options)
        except OutdatedChangeError:
            passed.append(n)

    shop.write = write  # type: ignore[method-assign]
    with BridgeRunner(shop.bridge) as runner:
        shop.orders.insert_one({"_id": 1, "n": 1})
        shop.orders.replace_one({"_id": 1}, {"n": 2})
        runner.deliver()
        assert (stored(shop.copies) or {})["n"] == 2
        assert passed == [1]


def test_whoever_only_adds_or_writes_for_another_document_is_refused_nothing(
    database: Database[Document], mongo_url: str
) -> None:
    """A sum, and what one target has of several documents, from changes in all partitions and whatever order."""

    def write(target: FencedCollection, key: Any, n: int) -> None:
        target.update_one({"_id": "sum"}, {"$inc": {"n": n}}, upsert=True)
        target.update_one({"_id": "last"}, {"$set": {f"of.{key}": n}}, upsert=True)

    shop = Shop(database, mongo_url, write)
    with BridgeRunner(shop.bridge) as runner:
        for key in (1, 2):
            shop.orders.insert_one({"_id": key, "n": 1})
            shop.orders.replace_one({"_id": key}, {"n": 2})
        runner.deliver()
        assert stored(shop.copies, "sum")["n"] == 6  # type: ignore[index]


def test_an_existing_document_is_as_new_as_its_reading(database: Database[Document], mongo_url: str) -> None:
    """What a snapshot gives is newer than the changes before it, also where these run later."""
    shop = Shop(database, mongo_url, WRITES["replace_one"])
    with BridgeRunner(shop.bridge) as runner:
        shop.orders.insert_one({"_id": 1, "n": 1})
        shop.late, shop.until = {"replace"}, "snapshot"
        shop.orders.replace_one({"_id": 1}, {"n": 2})
        runner.snapshot("copy")
        runner.deliver(retries=False, raises=False)
        assert (stored(shop.copies) or {})["n"] == 2
        runner.deliver(raises=False)
        assert (stored(shop.copies) or {})["n"] == 2
        assert shop.errors == ["OutdatedChangeError"]
        shop.orders.replace_one({"_id": 1}, {"n": 3})
        runner.deliver()
        assert (stored(shop.copies) or {})["n"] == 3


@pytest.mark.parametrize("over_newer", [False, True])
@pytest.mark.parametrize("stamped", ["row", "partition"])
def test_in_another_store_a_replay_is_older_than_its_partition_and_not_older_than_its_row(
    database: Database[Document], mongo_url: str, stamped: str, over_newer: bool
) -> None:
    """P3: a newer change of another document refuses it where one stamp stands for all of them, unless it is asked."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    bridge = Bridge(app, mongo_url, name="shop", partitions=1, run_size=1)
    failing, written, stamps = {1}, list[int](), dict[object, Document]()

    @bridge.on_change(f"{database.name}.orders", failure_policy="dead_letter")
    def note(change: Change) -> None:
        key = change.document_key["_id"]
        if key in failing:
            raise ValueError("no")
        place = key if stamped == "row" else change.partition
        stamps[place] = change.fence.stamp(stamps.get(place))  # raises StaleFencingTokenError
        written.append(key)

    with BridgeRunner(bridge) as runner:
        database.orders.insert_many([{"_id": 1}, {"_id": 2}])
        runner.deliver(raises=False)
        failing.clear()
        bridge.operations.replay_dead_letters(over_newer=over_newer).run()
        wait_for(lambda: any(call.changes[0].replayed for call in runner.deliver(raises=False).calls))
        is_refused = stamped == "partition" and not over_newer
        assert written == ([2] if is_refused else [2, 1])
        letters = commands.find(bridge.wiring).letters
        assert [StaleFencingTokenError.__name__ in each.error for each in letters] == [True] * is_refused


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("document", [7, 8])
@pytest.mark.parametrize("place", [b"1", b"2", b"3"])
@pytest.mark.parametrize("since", [0, 9])
def test_the_servers_guard_and_the_pure_one_agree_on_places(
    database: Database[Document], index: int, document: int, place: bytes, since: int
) -> None:
    """F5, as for the tokens; in each kind of write."""
    target = database["copies"]
    last = fence(8, index=3)
    stamps = type(last)(KEY, 1, 3, 8, Origin(7, b"2")).stamp(None)
    mine = type(last)(KEY, 1, index, 8, Origin(document, place, since))
    target.insert_one({"_id": 1, FENCE: stamps})
    assert (target.count_documents({"_id": 1, **mine.guard()}) == 1) == mine.admits(stamps)
    for request in (UpdateOne({"_id": 1}, {"$set": {"n": 1}}), UpdateOne({"_id": 1}, [{"$set": {"n": 1}}])):
        target.replace_one({"_id": 1}, {FENCE: stamps})
        try:
            FencedCollection(target, mine).bulk_write([request])
        except OutdatedChangeError:
            assert not mine.admits(stamps)
            assert (stored(target) or {})[FENCE] == stamps
        else:
            assert (stored(target) or {})[FENCE] == mine.stamp(stamps)
