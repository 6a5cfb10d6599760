"""
The cases of the drivers' change stream specification, as a bridge has to hold them.

`tests/change-stream-cases.md` lists them.

A reader reads as a listener's does, and `Selector` and `Change` show what a handler would get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any

import pytest
from bson import ObjectId, Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.change import Change, decode_event
from mongo_celery.bridge.partitioning import Partitioner, document_key
from mongo_celery.bridge.stream.bookkeeping import Bookkeeping
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item
from mongo_celery.bridge.stream.reader import StreamReader
from mongo_celery.bridge.stream.source import make_scope, resolve_selectors
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder
from tests.rig.stream import APP_NAME, StreamReading, now, selector_of

Document = dict[str, Any]
Failpoint = Callable[..., AbstractContextManager[None]]


class Watching(StreamReading):
    """The stream of a bridge with one handler, from now on, and what the handler would get of it."""

    def __init__(
        self,
        collection: Collection[Document],
        target: str | None = None,
        *,
        operations: Any = None,
        comment: Any = "a test",
        pipeline: Sequence[Document] = (),
        **options: Any,
    ) -> None:
        client = collection.database.client
        asked = [selector_of(target or collection.full_name, operations=operations)]
        scope = replace(make_scope(asked, state_database="state_of_nobody", **options), last=tuple(pipeline))
        self.commands = CommandRecorder()
        self._collection = collection
        (self.selector,) = resolve_selectors(asked, Bookkeeping())
        address = "{}:{}".format(*(client.address or ("", 0)))
        super().__init__(f"mongodb://{address}/?directConnection=true", scope, now(client))
        self.reader = StreamReader(
            self._client,
            scope,
            now(client),
            deliver=self._take,
            comment=comment,
        )

    def _client(self, timeout: float) -> MongoClient[RawBSONDocument]:
        return MongoClient(
            self._url,
            document_class=RawBSONDocument,
            appname=APP_NAME,
            socketTimeoutMS=int(timeout * 1000),
            heartbeatFrequencyMS=500,
            event_listeners=[self.commands],
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.reader.stop()
        self._collection.insert_one({})  # ends the read that is under way
        super().__exit__(kind, error, traceback)

    def changes(self, count: int) -> list[Change]:
        """What the handler gets, once it is so much; the bridge has met no error."""

        def taken() -> list[Change]:
            events = [item for item in list(self.items) if isinstance(item, ChangeEvent)]
            return [Change(decode_event(each.raw)) for each in events if self.selector.selects(each.document)]

        found = wait_for(lambda: taken() if len(taken()) >= count else None, message=lambda: f"{self.operations}")
        assert self.failure is None
        return found

    def wait_opened(self) -> None:
        """Wait until the server has sent the first batch."""
        wait_for(lambda: self.commands.of("getMore"))


@pytest.fixture
def orders(database: Database[Document]) -> Collection[Document]:
    """Give a collection to watch."""
    return database.create_collection("orders")


# -- what an event carries ---------------------------------------------------------------------------


def test_an_insert_is_an_event_in_the_servers_format_with_its_times(orders: Collection[Document]) -> None:
    """Token, key, namespace, document; cluster time and wall time."""
    with Watching(orders) as watching:
        key = orders.insert_one({"x": 1}).inserted_id
        (change,) = watching.changes(1)
    assert change.operation_type == "insert"
    assert change.ns == {"db": orders.database.name, "coll": "orders"}
    assert change.full_document == {"_id": key, "x": 1}
    assert change.document_key == {"_id": key}
    assert isinstance(key, ObjectId)
    assert set(change.resume_token) >= {"_data"}
    assert isinstance(change.cluster_time, Timestamp)
    assert isinstance(change.wall_time, datetime)


def test_the_four_changes_of_a_document_keep_their_types(orders: Collection[Document]) -> None:
    """Insert, update with its description, replace, delete."""
    with Watching(orders) as watching:
        orders.insert_one({"_id": 1, "x": 1})
        orders.update_one({"x": 1}, {"$set": {"x": 2}})
        orders.replace_one({"x": 2}, {"x": 3})
        orders.delete_one({"x": 3})
        inserted, updated, replaced, deleted = watching.changes(4)
    types = [change.operation_type for change in (inserted, updated, replaced, deleted)]
    assert types == ["insert", "update", "replace", "delete"]
    assert updated.update_description is not None
    assert updated.update_description["updatedFields"] == {"x": 2}
    assert updated.update_description["removedFields"] == []
    assert replaced.full_document == {"_id": 1, "x": 3}
    assert deleted.full_document is None


def test_a_truncated_array_is_said_to_be_one(orders: Collection[Document]) -> None:
    """And touches the array's field, for handlers that name it."""
    orders.insert_one({"_id": 1, "array": ["foo", {"a": "bar"}, 1, 2, 3]})
    with Watching(orders) as watching:
        orders.update_one({"_id": 1}, [{"$set": {"array": ["foo", {"a": "bar"}]}}])
        (change,) = watching.changes(1)
    assert change.update_description == {
        "updatedFields": {},
        "removedFields": [],
        "truncatedArrays": [{"field": "array", "newSize": 2}],
    }
    assert selector_of(orders.full_name, fields={"array"}).selects(change.raw)
    assert not selector_of(orders.full_name, fields={"a"}).selects(change.raw)


def test_a_rename_names_both_collections_and_invalidates(orders: Collection[Document]) -> None:
    """`to` is the new namespace; the stream of the collection goes on behind the invalidate."""
    with Watching(orders, operations={"rename", "invalidate", "insert"}) as watching:
        orders.rename("archive")
        orders.insert_one({"_id": "anew"})
        renamed, invalidated, inserted = watching.changes(3)
    assert renamed.operation_type == "rename"
    assert renamed.namespace == orders.full_name
    assert renamed.to == {"db": orders.database.name, "coll": "archive"}
    assert invalidated.operation_type == "invalidate"
    assert invalidated.ns == {}
    assert inserted.document_key == {"_id": "anew"}


def test_a_collection_that_is_replaced_by_a_rename_concerns_its_handler(orders: Collection[Document]) -> None:
    """As `$out` does it: the handler listens to the name that is put in place."""
    orders.database["new_orders"].insert_one({"_id": 1})
    with Watching(orders, operations={"rename"}) as watching:
        orders.database["new_orders"].rename("orders", dropTarget=True)
        (renamed,) = watching.changes(1)
    assert renamed.to["coll"] == "orders"


# -- a later server's events, made by a pipeline -----------------------------------------------------


def _kept(**added: Any) -> list[Document]:
    return [{"$project": {"operationType": 1, "ns": 1, "documentKey": 1, **added}}]


def test_an_unknown_operation_type_comes_to_those_who_ask_for_all(orders: Collection[Document]) -> None:
    """By `"*"`, and to nobody else; it stops nothing."""
    pipeline = [{"$project": {"operationType": "addedInALaterVersion", "ns": 1}}]
    with Watching(orders, operations="*", pipeline=pipeline) as watching:
        orders.insert_one({"_id": 1})
        (change,) = watching.changes(1)
    assert change.operation_type == "addedInALaterVersion"
    assert change.namespace == orders.full_name
    assert not selector_of(orders.full_name).selects(change.raw)
    assert isinstance(Partitioner("_id", document_key).hash(change.raw), int)


@pytest.mark.parametrize(
    ("pipeline", "ns"),
    [
        pytest.param(_kept(newField="newValue"), {"db", "coll"}, id="a new field"),
        pytest.param(
            _kept(ns={"db": "$ns.db", "coll": "$ns.coll", "viewOn": "db.coll"}),
            {"db", "coll", "viewOn"},
            id="more in the namespace",
        ),
    ],
)
def test_an_event_of_another_shape_comes_to_its_handler(
    orders: Collection[Document], pipeline: Sequence[Document], ns: set[str]
) -> None:
    """What handler, partition and order rest on is there; what else it has is passed on."""
    with Watching(orders, pipeline=pipeline) as watching:
        orders.insert_one({"_id": 1})
        (change,) = watching.changes(1)
    assert set(change.ns) == ns
    assert change.raw.get("newField", "newValue") == "newValue"
    assert isinstance(Partitioner("_id", document_key).hash(change.raw), int)


# -- what is sent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("comment", ["a text", {"name": "a document"}])
def test_the_comment_is_sent_with_the_stream_and_with_each_read(orders: Collection[Document], comment: Any) -> None:
    """So an operator finds the bridge in the server's logs and in `currentOp`."""
    with Watching(orders, comment=comment) as watching:
        orders.insert_one({"_id": 1})
        watching.changes(1)
        watching.wait_opened()
    sent = [*watching.commands.of("aggregate"), *watching.commands.of("getMore")]
    assert len(sent) >= 2
    assert all(command["comment"] == comment for _, command in sent)


@pytest.mark.parametrize(
    ("target", "aggregated", "stage"),
    [("collection", "orders", set()), ("database", 1, set()), ("cluster", 1, {"allChangesForCluster"})],
)
def test_the_stream_is_the_pipelines_first_stage_on_what_is_watched(
    orders: Collection[Document], target: str, aggregated: object, stage: set[str]
) -> None:
    """A collection, a database, or the cluster by way of `admin`; each sees what happens there and nothing else."""
    database = orders.database
    elsewhere = database.client[f"{database.name}_b"]["orders"]
    targets = {"collection": orders.full_name, "database": f"{database.name}.*", "cluster": "*"}
    with Watching(orders, targets[target]) as watching:
        for number, collection in enumerate((database["others"], elsewhere, orders)):
            collection.insert_one({"_id": number})
        seen = {"collection": {2}, "database": {0, 2}, "cluster": {0, 1, 2}}[target]
        own = {database.name, elsewhere.database.name}
        wait_for(lambda: 2 in watching.keys)
    database.client.drop_database(elsewhere.database)
    assert {event["documentKey"]["_id"] for event in watching.events if event["ns"]["db"] in own} == seen
    ((name, command),) = watching.commands.of("aggregate")
    assert name == ("admin" if target == "cluster" else database.name)
    assert command["aggregate"] == aggregated
    first = command["pipeline"][0]["$changeStream"]
    assert set(first) - {"fullDocument", "startAtOperationTime"} == stage


@pytest.mark.parametrize("expanded", [True, False])
def test_expanded_events_are_asked_for_only_if_they_are_wanted(orders: Collection[Document], expanded: bool) -> None:
    """A server before 6.0 refuses an option that it does not know."""
    with Watching(orders, expanded=expanded) as watching:
        watching.wait_opened()
    (_, command), *_ = watching.commands.of("aggregate")
    assert command["pipeline"][0]["$changeStream"].get("showExpandedEvents", False) is expanded


# -- expanded events ---------------------------------------------------------------------------------


def test_expanded_events_have_fields_of_their_own(orders: Collection[Document]) -> None:
    """The collection's UUID, and a description of what was done."""
    orders.database.create_collection("existing")
    asked = {"insert", "createIndexes", "rename"}
    with Watching(orders, operations=asked, expanded=True) as watching:
        orders.insert_one({"_id": 1})
        orders.create_index("x", name="x_1")
        orders.rename("existing", dropTarget=True)
        inserted, indexed, renamed = watching.changes(3)
    assert [change.operation_type for change in (inserted, indexed, renamed)] == ["insert", "createIndexes", "rename"]
    assert inserted.collection_uuid == indexed.collection_uuid is not None
    assert indexed.operation_description is not None
    assert indexed.operation_description["indexes"][0]["name"] == "x_1"
    place = {"db": orders.database.name, "coll": "existing"}
    assert renamed.to == place
    assert renamed.operation_description is not None
    assert renamed.operation_description["to"] == place
    assert renamed.operation_description["dropTarget"]


EXPANDED: dict[str, tuple[str, Callable[[Collection[Document]], object]]] = {
    "an index": ("createIndexes", lambda orders: orders.create_index("x", name="x_1")),
    "an index that goes": ("dropIndexes", lambda orders: orders.drop_index("y_1")),
    "a collection": ("create", lambda orders: orders.database.create_collection("foo")),
    "a view": ("create", lambda orders: orders.database.create_collection("foo", viewOn="orders")),
    "an option": ("modify", lambda orders: orders.database.command("collMod", "orders", validationLevel="off")),
}


@pytest.mark.parametrize(("operation", "act"), EXPANDED.values(), ids=EXPANDED.keys())
def test_an_expanded_event_comes_to_the_handler_that_asks_for_it(
    orders: Collection[Document], operation: str, act: Callable[[Collection[Document]], object]
) -> None:
    """By its name, on a database; and to nobody who asks for changes of documents."""
    orders.create_index("y", name="y_1")
    target = f"{orders.database.name}.*"
    with Watching(orders, target, operations={operation}, expanded=True) as watching:
        act(orders)
        (change,) = watching.changes(1)
    assert change.operation_type == operation
    assert not selector_of(target).selects(change.raw)


@pytest.mark.parametrize("is_there", [True, False], ids=["before it is read on", "afterwards"])
@pytest.mark.parametrize("goes", ["drop", "rename"])
def test_a_collection_that_is_made_again_comes_to_the_handler_that_asks_for_it(
    orders: Collection[Document], goes: str, is_there: bool
) -> None:
    """Behind the invalidate, by which the stream on a collection ends."""
    with Watching(orders, operations={"create"}, expanded=True) as watching:
        orders.drop() if goes == "drop" else orders.rename("away")
        if not is_there:
            wait_for(lambda: "invalidate" in watching.operations and watching.commands.of("aggregate")[1:])
        orders.database.create_collection("orders")
        (change,) = watching.changes(1)
    assert change.operation_type == "create"
    begin = watching.commands.of("aggregate")[-1][1]["pipeline"][0]["$changeStream"]
    assert "startAfter" in begin


# -- images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("asked", ["whenAvailable", "required", "off"])
@pytest.mark.parametrize("image", ["full_document", "before_change"])
def test_images_come_as_they_are_asked_for(
    orders: Collection[Document], image: str, asked: str, recorded: bool
) -> None:
    """Where one is required and none is recorded, the change is not passed over in silence."""
    if (image, asked) == ("full_document", "off"):
        return  # no such mode
    orders.insert_one({"_id": 1})
    orders.database.command("collMod", "orders", changeStreamPreAndPostImages={"enabled": recorded})
    options: dict[str, Any] = {image: asked}
    with Watching(orders, **options) as watching:
        orders.update_one({"_id": 1}, {"$set": {"x": 1}})
        if asked == "required" and not recorded:
            wait_for(lambda: [item for item in list(watching.items) if _is_refusal(item)])
            return
        (change,) = watching.changes(1)
    whole = {"_id": 1, "x": 1} if image == "full_document" else {"_id": 1}
    field = {"full_document": "fullDocument", "before_change": "fullDocumentBeforeChange"}[image]
    assert change.operation_type == "update"
    assert change.update_description is not None
    assert (field in change.raw) is (asked != "off")
    assert change.raw.get(field) == (whole if recorded and asked != "off" else None)


def _is_refusal(item: Item) -> bool:
    return isinstance(item, Failed) or (isinstance(item, ChangeEvent) and item.read_error is not None)
