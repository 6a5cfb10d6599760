"""Fenced writes for changes of one document that are in several partitions: older data never goes over newer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry
from pymongo import DeleteOne, ReplaceOne
from pymongo.database import Database

from mongo_celery import Bridge, Change, Changes
from mongo_celery.bridge.fenced import FencedCollection
from mongo_celery.bridge.operations import dead_letter_commands as commands
from mongo_celery.errors import OutdatedChangeError, StaleFencingTokenError
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for
from tests.rig.fenced import Document, stored

Write = Callable[[FencedCollection, Change], Any]


def set_n(change: Change) -> Document:
    return {"$set": {"n": (change.full_document or {})["n"]}}


def replace(change: Change) -> Any:
    if change.full_document is None:
        return DeleteOne(change.document_key)
    return ReplaceOne(change.document_key, change.full_document, upsert=True)


WRITES: dict[str, Write] = {
    "replace_one": lambda to, change: to.replace_one(change.document_key, change.full_document or {}, upsert=True),
    "update_one": lambda to, change: to.update_one(change.document_key, set_n(change), upsert=True),
    "a pipeline": lambda to, change: to.update_one(change.document_key, [set_n(change)], upsert=True),
    "find_one_and_update": lambda to, change: to.find_one_and_update(change.document_key, set_n(change), upsert=True),
    "bulk_write": lambda to, change: to.bulk_write([replace(change)]),
    "update_many": lambda to, change: to.update_many(change.document_key, set_n(change), upsert=True),
}


class TooEarlyError(Exception):
    """An execution comes before others that the test wants first."""


def by_operation(event: Mapping[str, Any]) -> str:
    return str(event["operationType"])


class Shop:
    """
    A handler whose partitions go by operation, and that writes to the collection `copies`.

    Attributes:
        late: operations of which the first execution is retried: they are handled when all else is done. A list
            that fails is halved and runs again at once, so this is the first execution of a change alone.
    """

    def __init__(self, database: Database[Document], url: str, write: Write, **options: Any) -> None:
        self.orders, self.copies = database["orders"], database["copies"]
        self.late = {"insert"}
        app = Celery("shop", broker="memory://", set_as_current=False)
        self.bridge = Bridge(app, url, name="shop", partitions=61, autodiscover=False)
        given = {"partition_by": by_operation, "failure_policy": "dead_letter", "name": "copy", **options}
        given |= {"autoretry_for": (TooEarlyError,)}

        def copy(change: Change) -> None:
            self.be_late(change)
            target = change.fenced(self.copies.full_name)
            if change.full_document is None:
                target.delete_one(change.document_key)
            else:
                write(target, change)

        def copy_all(changes: Changes) -> None:
            self.be_late(*changes)
            changes.fenced(self.copies.full_name).bulk_write([replace(each) for each in changes])

        if "batch_size" in given:
            self.bridge.on_changes(self.orders.full_name, **given)(copy_all)
        else:
            self.bridge.on_change(self.orders.full_name, **given)(copy)

    def be_late(self, change: Change, *others: Change) -> None:
        if change.operation_type in self.late:
            if not others:
                self.late.discard(change.operation_type)
            raise TooEarlyError

    @property
    def errors(self) -> list[str]:
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
        assert ({*first}, last) == ({Retry, type(None)}, OutdatedChangeError)
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

    def write(target: FencedCollection, change: Change) -> None:
        options = {"session": change.session} if session else {}
        try:
            target.update_one({"_id": 1}, set_n(change), upsert=True, **options)
        except OutdatedChangeError:
            passed.append((change.full_document or {})["n"])

    shop = Shop(database, mongo_url, write, transactional=session)
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

    def write(target: FencedCollection, change: Change) -> None:
        n = (change.full_document or {})["n"]
        target.update_one({"_id": "sum"}, {"$inc": {"n": n}}, upsert=True)
        target.update_one({"_id": "last"}, {"$set": {f"of.{change.document_key['_id']}": n}}, upsert=True)

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
        shop.late = {"replace"}
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
