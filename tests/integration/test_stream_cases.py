"""
The cases of the drivers' change stream specification, as a bridge has to hold them.

`tests/change-stream-cases.md` lists them.

A reader reads as a listener's does, and `Selector` and `Change` show what a handler would get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from bson import Timestamp
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.change import Change, decode_event
from mongo_celery.bridge.partitioning import Partitioner, document_key
from mongo_celery.bridge.stream.bookkeeping import Bookkeeping
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item
from mongo_celery.bridge.stream.source import make_scope, resolve_selectors
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder
from tests.rig.stream import StreamReading, now, selector_of

Document = dict[str, Any]


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
        (self.selector,) = resolve_selectors(asked, Bookkeeping())
        address = "{}:{}".format(*(client.address or ("", 0)))
        url = f"mongodb://{address}/?directConnection=true"
        super().__init__(url, scope, now(client), commands=self.commands, comment=comment)

    def changes(self, count: int) -> list[Change]:
        """What the handler gets, once it is so much; the bridge has met no error."""

        def taken() -> list[Change]:
            events = [item for item in list(self.items) if isinstance(item, ChangeEvent)]
            return [Change(decode_event(each.raw)) for each in events if self.selector.selects(each.document)]

        found = wait_for(lambda: taken() if len(taken()) >= count else None, message=lambda: f"{self.operations}")
        assert self.failure is None
        return found


@pytest.fixture
def orders(database: Database[Document]) -> Collection[Document]:
    return database.create_collection("orders")


def test_the_four_changes_of_a_document_keep_the_servers_format(orders: Collection[Document]) -> None:
    with Watching(orders) as watching:
        orders.insert_one({"_id": 1, "x": 1})
        orders.update_one({"x": 1}, {"$set": {"x": 2}})
        orders.replace_one({"x": 2}, {"x": 3})
        orders.delete_one({"x": 3})
        changes = watching.changes(4)
    inserted, updated, replaced, deleted = changes
    assert [change.operation_type for change in changes] == ["insert", "update", "replace", "delete"]
    documents = [{"_id": 1, "x": 1}, {"_id": 1, "x": 3}, None]
    assert [change.full_document for change in (inserted, replaced, deleted)] == documents
    assert updated.update_description is not None
    assert updated.update_description["updatedFields"] == {"x": 2}
    assert updated.update_description["removedFields"] == []
    for change in changes:
        assert (change.ns, change.document_key) == ({"db": orders.database.name, "coll": "orders"}, {"_id": 1})
        assert "_data" in change.resume_token
        assert isinstance(change.cluster_time, Timestamp)
        assert isinstance(change.wall_time, datetime)


def test_a_truncated_array_is_said_to_be_one(orders: Collection[Document]) -> None:
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


_KEPT = {"operationType": 1, "ns": 1, "documentKey": 1}
LATER: dict[str, Document] = {
    "an unknown operation type": {"operationType": "addedInALaterVersion", "ns": 1},
    "a new field": {**_KEPT, "newField": "newValue"},
    "more in the namespace": {**_KEPT, "ns": {"db": "$ns.db", "coll": "$ns.coll", "viewOn": "db.coll"}},
}


@pytest.mark.parametrize("shape", LATER.values(), ids=LATER)
def test_an_event_of_another_shape_comes_to_its_handler(orders: Collection[Document], shape: Document) -> None:
    with Watching(orders, operations="*", pipeline=[{"$project": shape}]) as watching:
        orders.insert_one({"_id": 1})
        (change,) = watching.changes(1)
    assert change.namespace == orders.full_name
    assert change.raw.get("newField") == shape.get("newField")
    assert ("viewOn" in change.ns) is ("viewOn" in str(shape))
    is_known = change.operation_type == "insert"
    assert is_known is (shape["operationType"] == 1)
    assert selector_of(orders.full_name).selects(change.raw) is is_known, "an unknown type comes by `*` alone"
    assert isinstance(Partitioner("_id", document_key).hash(change.raw), int)


@pytest.mark.parametrize(("comment", "expanded"), [("a text", True), ({"name": "a document"}, False)])
def test_the_comment_is_sent_with_each_read_and_expanded_events_are_asked_for_only_if_they_are_wanted(
    orders: Collection[Document], comment: Any, expanded: bool
) -> None:
    with Watching(orders, comment=comment, expanded=expanded) as watching:
        orders.insert_one({"_id": 1})
        watching.changes(1)
        wait_for(lambda: watching.commands.of("getMore"))
    opened = watching.commands.of("aggregate")
    assert all(command["comment"] == comment for _, command in [*opened, *watching.commands.of("getMore")])
    assert opened[0][1]["pipeline"][0]["$changeStream"].get("showExpandedEvents", False) is expanded


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
    (name, command), *_ = watching.commands.of("aggregate")
    assert name == ("admin" if target == "cluster" else database.name)
    assert command["aggregate"] == aggregated
    first = command["pipeline"][0]["$changeStream"]
    assert set(first) - {"fullDocument", "startAtOperationTime"} == stage


def test_expanded_events_come_with_fields_of_their_own_to_the_handler_that_asks_for_them(
    orders: Collection[Document],
) -> None:
    database = orders.database
    orders.create_index("y", name="y_1")
    database.create_collection("existing")
    operations = ["insert", "createIndexes", "dropIndexes", "create", "create", "modify", "rename"]
    target = f"{database.name}.*"
    with Watching(orders, target, operations=set(operations), expanded=True) as watching:
        orders.insert_one({"_id": 1})
        orders.create_index("x", name="x_1")
        orders.drop_index("y_1")
        database.create_collection("foo")
        database.create_collection("bar", viewOn="orders")
        database.command("collMod", "orders", validationLevel="off")
        orders.rename("existing", dropTarget=True)
        changes = watching.changes(len(operations))
    assert [change.operation_type for change in changes] == operations
    assert not any(selector_of(target).selects(change.raw) for change in changes[1:])
    inserted, indexed, *_, renamed = changes
    assert inserted.collection_uuid == indexed.collection_uuid is not None
    place = {"db": database.name, "coll": "existing"}
    assert renamed.to == place
    assert indexed.operation_description is not None
    assert renamed.operation_description is not None
    assert indexed.operation_description["indexes"][0]["name"] == "x_1"
    assert (renamed.operation_description["to"], bool(renamed.operation_description["dropTarget"])) == (place, True)


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


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("asked", ["whenAvailable", "required", "off"])
@pytest.mark.parametrize("image", ["full_document", "before_change"])
def test_images_come_as_they_are_asked_for(
    orders: Collection[Document], image: str, asked: str, recorded: bool
) -> None:
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
