"""
What the server lets pass, against what handlers want: on a real server, with events of every kind.

The server's filter is made to be fast and may let too much pass, never too little: whatever a handler's selector takes
of an unfiltered stream must come through the filtered one, at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from bson import Timestamp
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery.bridge.change import FLAGS, token_data
from mongo_celery.bridge.fenced import TOMBSTONES
from mongo_celery.bridge.stream.bookkeeping import Bookkeeping
from mongo_celery.bridge.stream.filter import ALL, EXPANDED_OPERATIONS, MOVES
from mongo_celery.bridge.stream.source import Selector, make_scope, resolve_selectors
from mongo_celery.mongo.oplog import operation_time, time_of_token
from tests.rig.stream import StreamReading, now, scope_on, selector_of

Document = dict[str, Any]

_ODD = "päck.ed-^1 (x)"
_CLASSIC = {"insert", "update", "replace", "delete", "drop", "rename", "dropDatabase"}


class World:
    """Two databases and a state, in which everything has happened once; A, B and STATE in texts are their names."""

    def __init__(self, database: Database[Document], state_database: str) -> None:
        self.client: MongoClient[Document] = database.client
        self.names = {"A": database.name, "B": f"{database.name}_b", "STATE": state_database}
        self.start = now(self.client).time
        for name in ("A", "B", "STATE"):
            self._happen(self.client[self.names[name]])
        self._in_a_transaction()
        self._disappear()
        self.end = operation_time(self.client)
        self.client[self.names["B"]]["end"].insert_one({})  # what is at the end is passed when something comes behind

    def _happen(self, database: Database[Document]) -> None:
        for name in ("orders", "invoices", "orders_2", _ODD, f"orders{TOMBSTONES}", "x.orders"):
            collection = database[name]
            collection.insert_many([{"_id": number, "total": number} for number in range(3)])
            collection.update_one({"_id": 1}, {"$set": {"total": 7}})
            collection.update_one({"_id": 1}, [{"$set": {"lines": [1, 2]}}])
            collection.replace_one({"_id": 2}, {"total": 8})
            collection.delete_one({"_id": 2})
            collection.create_index("total", name="by_total")
        database.command("collMod", "orders", validationLevel="moderate")
        database["orders"].drop_index("by_total")
        database.create_collection("seen", viewOn="orders")
        database["orders_2"].rename("archive")
        database["archive"].rename("invoices", dropTarget=True)
        database["x.orders"].drop()

    def _in_a_transaction(self) -> None:
        with self.client.start_session() as session, session.start_transaction():
            for name in ("A", "B"):
                for collection in ("orders", "invoices", _ODD):
                    for number in range(100, 103):
                        self.client[self.names[name]][collection].insert_one({"_id": number}, session=session)

    def _disappear(self) -> None:
        self.client.drop_database(self.names["B"])
        self.client[self.names["B"]]["orders"].insert_one({"_id": "again"})

    def selector(self, *targets: str, **conditions: Any) -> Selector:
        return selector_of(*(self.named(target) for target in targets), **conditions)

    def named(self, target: str) -> str:
        database, dot, rest = target.partition(".")
        return self.names.get(database, database) + dot + rest

    def read(
        self,
        opened: Any,
        pipeline: Sequence[Mapping[str, Any]],
        *,
        expanded: bool,
        after: Mapping[str, Any] | None = None,
    ) -> list[Mapping[str, Any]]:
        options: dict[str, Any] = {"show_expanded_events": True} if expanded else {}
        options |= {"start_after": after} if after else {"start_at_operation_time": self.start}
        found: list[Mapping[str, Any]] = []
        with opened.watch(list(pipeline), max_await_time_ms=1, batch_size=1000, **options) as stream:
            while True:
                event = stream.try_next()
                if event is None:
                    assert stream.alive
                    if _passed(stream.resume_token) > self.end:
                        return found
                elif event["clusterTime"] <= self.end:
                    found.append(event)


def _passed(token: Mapping[str, Any] | None) -> Timestamp:
    return (token and time_of_token(token, None)) or Timestamp(0, 0)


@pytest.fixture(scope="module")
def world(mongo_client: MongoClient[Document]) -> Iterator[World]:
    """Give a world that all tests of this module only read."""
    database = mongo_client["filter_of_a_stream"]
    made = World(database, f"{database.name}_state")
    yield made
    for name in made.names.values():
        mongo_client.drop_database(name)


MATCH = {"$gt": ["$fullDocument.total", 1]}
SOURCES: dict[str, list[dict[str, Any]]] = {
    "two collections": [{"targets": ["A.orders"]}, {"targets": ["A.invoices"]}],
    "two databases": [{"targets": ["A.orders"]}, {"targets": ["B.orders"]}],
    "crossed": [{"targets": ["A.orders", "B.invoices"]}, {"targets": ["B.orders_2"]}],
    "odd names": [{"targets": [f"A.{_ODD}", f"B.{_ODD}"]}, {"targets": ["A.x.orders"]}],
    "a whole database": [{"targets": ["A.*"]}],
    "a whole database beside its own collection": [{"targets": ["A.*"]}, {"targets": ["A.orders"]}],
    "a whole database beside another's collection": [{"targets": ["A.*"]}, {"targets": ["B.orders"]}],
    "two whole databases": [{"targets": ["A.*", "B.*"]}],
    "all": [{"targets": ["*"]}],
    "all beside a collection": [{"targets": ["*"], "operations": {"insert"}}, {"targets": ["B.orders"]}],
    "none of them exists": [{"targets": ["A.nothing"]}, {"targets": ["B.nothing"]}],
    "different operations": [
        {"targets": ["A.orders"], "operations": {"insert", "drop"}},
        {"targets": ["B.orders"], "operations": {"delete", "rename", "dropDatabase"}},
    ],
    "fields and a match": [{"targets": ["A.orders"], "fields": {"lines"}}, {"targets": ["B.orders"], "match": MATCH}],
}

ASKED: dict[str, Any] = {
    "documents": None,
    "classic": _CLASSIC,
    "all": ALL,
    "expanded": EXPANDED_OPERATIONS | {"insert", "update", "rename"},
}


@pytest.mark.parametrize("handlers", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("operations", ASKED.values(), ids=ASKED.keys())
def test_the_servers_filter_lets_everything_pass_that_a_handler_wants(
    world: World, handlers: list[dict[str, Any]], operations: Any
) -> None:
    """P1: the same events at the same places as without it; of the state database and of tombstones nothing."""
    expanded = operations not in (None, _CLASSIC)
    selectors = [
        world.selector(*each["targets"], name=f"h{number}", **{"operations": operations, **_conditions(each)})
        for number, each in enumerate(handlers)
    ]
    scope = make_scope(selectors, state_database=world.names["STATE"], expanded=expanded)
    flagged = [stage for stage in scope.pipeline if "$addFields" in stage]
    whole = world.read(world.client, flagged, expanded=expanded)

    filtered = world.read(scope.find_target(world.client), scope.pipeline, expanded=expanded)

    for selector in resolve_selectors(selectors, Bookkeeping()):
        wanted = _places(event for event in whole if selector.selects(event) and not _is_own(world, event))
        assert _places(event for event in filtered if selector.selects(event)) == wanted
        assert wanted or "nothing" in str(selector.sources)
        assert not any(TOMBSTONES in ns for _, _, ns in wanted)
    own = [event for event in filtered if _is_own(world, event) and "documentKey" in event]
    assert own == []


def _conditions(each: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in each.items() if name != "targets"}


def _is_own(world: World, event: Mapping[str, Any]) -> bool:
    return bool(event["ns"]["db"] == world.names["STATE"])


def _places(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    return [(token_data(event["_id"]), event["operationType"], str(event["ns"])) for event in events]


@pytest.mark.parametrize("kind", ["crossed", "different operations", "a whole database beside another's collection"])
def test_every_event_that_passes_can_be_resumed_from(world: World, kind: str) -> None:
    """P1: a token that the filter hides would be refused with 280; behind each, the rest and nothing else."""
    selectors = [
        world.selector(*each["targets"], name=f"h{number}", **_conditions(each))
        for number, each in enumerate(SOURCES[kind])
    ]
    scope = make_scope(selectors, state_database=world.names["STATE"])
    found = world.read(scope.find_target(world.client), scope.pipeline, expanded=False)
    assert found
    for place, event in enumerate(found, 1):
        rest = world.read(scope.find_target(world.client), scope.pipeline, expanded=False, after=event["_id"])
        assert _places(rest) == _places(found[place:])


def test_a_match_is_computed_for_the_changes_of_its_own_handler_only(
    mongo_url: str, mongo_client: MongoClient[Document], database: Database[Document]
) -> None:
    """P12: an expression that fails on a document stops the stream; on another handler's documents it is not tried."""
    match = {"$gt": [{"$add": ["$fullDocument.n", 1]}, 5]}
    sums = selector_of(f"{database.name}.orders", name="sums", operations={"insert"}, match=match)
    others = selector_of(f"{database.name}.orders", f"{database.name}.names", name="others")
    scope = make_scope([sums, others], state_database="none")
    with StreamReading(mongo_url, scope, now(mongo_client)) as reading:
        database["names"].insert_one({"_id": 1, "n": "a text, to which nothing can be added"})
        database["orders"].insert_one({"_id": 2, "n": 7})
        database["orders"].update_one({"_id": 2}, {"$set": {"n": "another text"}})
        database["orders"].insert_one({"_id": 3, "n": 1})
        reading.wait_for_keys(1, 2, 2, 3)
    assert [event["documentKey"]["_id"] for event in reading.events if sums.selects(event)] == [2]


def test_the_servers_filter_passes_no_document_of_a_neighbour(world: World) -> None:
    """
    P12: else every write of a neighbour would be decoded here; also with a condition, which is no filter.

    What moves a whole collection is rare, and passes wherever it is: a snapshot must not take it for an end.
    """
    selectors = [world.selector("A.orders", name="a"), world.selector("B.orders", name="b", match=MATCH)]
    scope = make_scope(selectors, state_database=world.names["STATE"])

    found = world.read(scope.find_target(world.client), scope.pipeline, expanded=False)

    of_documents = [event for event in found if event["operationType"] not in MOVES]
    assert {event["ns"]["coll"] for event in of_documents} == {"orders"}
    assert {event["operationType"] for event in of_documents} == {"insert", "update", "replace", "delete"}
    assert all(set(event[FLAGS]) == {"b"} for event in found)


@pytest.mark.parametrize("count", [2, 200])
def test_the_server_applies_the_filter_to_the_oplog_itself(world: World, count: int) -> None:
    """P12: what is filtered behind the oplog is first made an event of, which costs more than the filter."""
    selectors = [world.selector(f"A.c{number}", f"B.c{number}", name=f"h{number}") for number in range(count)]
    (stage,) = make_scope(selectors, state_database=world.names["STATE"]).pipeline
    command = {"aggregate": 1, "pipeline": [{"$changeStream": {"allChangesForCluster": True}}, stage], "cursor": {}}

    explained = world.client.admin.command("explain", command)

    scan = str(explained["stages"][0]["$cursor"]["queryPlanner"]["parsedQuery"])
    assert f"{world.names['A']}.c1'" in scan


def test_a_dropped_database_of_which_single_collections_are_watched_is_read_on(
    mongo_url: str, mongo_client: MongoClient[Document], database: Database[Document]
) -> None:
    """P1: no handler asks for the drop; the stream is opened behind the invalidate that follows."""
    scope = scope_on(f"{database.name}.orders", f"{database.name}.invoices")
    assert (scope.database, scope.collection) == (database.name, None)
    database["orders"].insert_one({"_id": 0})
    with StreamReading(mongo_url, scope, now(mongo_client)) as reading:
        database["invoices"].insert_one({"_id": 1})
        mongo_client.drop_database(database)
        database["orders"].insert_one({"_id": 2})
        database["others"].insert_one({"_id": "not watched"})
        database["orders"].drop()
        database["orders"].insert_one({"_id": 3})
        reading.wait_for_keys(1, 2, 3)
        assert [each for each in reading.operations if each not in {"drop", "dropDatabase"}] == [
            "insert",
            "invalidate",
            "insert",
            "insert",
        ]
