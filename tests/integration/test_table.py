"""A table's calls: each within its time, and repeated by the driver only where it is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

from mongo_celery.mongo.table import Table
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.rig.commands import CommandRecorder

Document = dict[str, Any]
APP = "table"
ALL = ["find", "aggregate", "update", "delete", "findAndModify"]
BLOCKED: Document = {"blockConnection": True, "appName": APP}

CALLS: dict[str, Callable[[Table], object]] = {
    "find_one": lambda table: table.find_one({}),
    "find": lambda table: table.find({}),
    "aggregate": lambda table: table.aggregate([{"$match": {}}]),
    "update": lambda table: table.update({"_id": 1}, {"$set": {"a": 1}}),
    "find_and_update": lambda table: table.find_and_update({"_id": 1}, {"$set": {"a": 1}}),
    "delete_all": lambda table: table.delete_all({}),
    "update_unretried": lambda table: table.update_unretried({"_id": 1}, {"$set": {"a": 1}}),
    "find_and_update_unretried": lambda table: table.find_and_update_unretried({"_id": 1}, {"$set": {"a": 1}}, {}),
}
RETRIED = {"update": True, "find_and_update": True, "update_unretried": False, "find_and_update_unretried": False}


@pytest.fixture
def make_table(make_client: MakeClient, database: Any) -> Callable[[float], Table]:
    database["rows"].insert_one({"_id": 1})
    rows = make_client(appName=APP)[database.name]["rows"]
    rows.find_one({})  # connected before a test counts time
    return lambda timeout: Table(rows, timeout)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_call_ends_within_its_time(make_table: Callable[[float], Table], failpoint: Failpoint, call: str) -> None:
    with failpoint(failCommands=ALL, blockTimeMS=600, **BLOCKED), pytest.raises(PyMongoError) as raised:
        CALLS[call](make_table(0.2))
    assert raised.value.timeout


@pytest.mark.parametrize("call", sorted(RETRIED))
def test_only_some_writes_are_repeated_by_the_driver(
    make_table: Callable[[float], Table], failpoint: Failpoint, call: str
) -> None:
    cut = failpoint(mode={"times": 1}, failCommands=["update", "findAndModify"], closeConnection=True, appName=APP)
    with cut:
        if RETRIED[call]:
            assert CALLS[call](make_table(10.0))
        else:
            with pytest.raises(AutoReconnect):
                CALLS[call](make_table(10.0))


@pytest.mark.parametrize("call", ["update_unretried", "find_and_update_unretried"])
def test_a_write_concern_that_failed_is_an_error_of_a_plain_command_too(
    make_table: Callable[[float], Table], failpoint: Failpoint, call: str
) -> None:
    """A command returns it beside `ok: 1`; taken for success, a fail-over could take the write back."""
    failed = {"writeConcernError": {"code": 64, "errmsg": "late"}}
    with failpoint(failCommands=["update", "findAndModify"], appName=APP, **failed), pytest.raises(OperationFailure):
        CALLS[call](make_table(10.0))


def test_only_an_aggregation_that_sorts_asks_for_the_disk(make_client: MakeClient, database: Any) -> None:
    """Shared clusters of Atlas refuse whatever asks for it, by an error that looks like a refused login."""
    asked = CommandRecorder()
    table = Table(make_client(event_listeners=[asked])[database.name]["rows"], 5)
    table.aggregate([{"$match": {}}, {"$set": {"a": 1}}])
    table.aggregate([{"$match": {}}, {"$sort": {"a": 1}}])
    assert [each.get("allowDiskUse") for each in asked.named("aggregate")] == [None, True]
