"""A production case: what the command prints is, in a unit test, the change that the worker gave to the handler."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from celery import Celery
from click.testing import CliRunner
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.cli.dead_letters import list_dead_letters
from mongo_celery.errors import HandlerUsageError
from mongo_celery.testing import BridgeRunner, load_change
from tests.fixtures.mongo import MakeClient

Document = dict[str, Any]
UUID_ = UUID("12345678123456781234567812345678")
VALUES: Document = {
    "decimal": Decimal128("1.10"), "object_id": ObjectId(), "naive": datetime.fromisoformat("2026-11-30T12:00:00.123"),
    "old": datetime.fromisoformat("1900-01-01"), "bytes": b"\0\xff",
    "binary": Binary(b"x", 5), "uuid": Binary.from_uuid(UUID_),
    "int": 7, "long": Int64(7), "large": Int64(1 << 60), "double": 7.0, "nan": float("inf"), "time": Timestamp(9, 2),
    "regex": Regex("^a.b$", "im"), "code": Code("f()"), "scoped": Code("f()", {"a": Int64(1)}), "min": MinKey(),
    "max": MaxKey(), "ref": DBRef("orders", 1, "shop"), "none": None, "true": True, "text": "é\u2028$",
    "nested": [{"a": [Int64(1), 1, 1.0]}],
}  # fmt: skip


def typed(value: Any) -> Any:
    """Return a value with the types of all parts."""
    if isinstance(value, dict):
        return {name: typed(each) for name, each in value.items()}
    return [typed(each) for each in value] if isinstance(value, list) else (type(value), value)


@pytest.mark.needs_mongodb(6, 0)
def test_a_case_is_the_change_that_the_worker_gave(
    database: Database[Document], mongo_url: str, tmp_path: Path
) -> None:
    """With all types of BSON; from a file, its name, its text or its object, as `dead-letters list` prints it."""
    orders = database.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    options: Document = {"autodiscover": False, "full_document_before_change": "whenAvailable"}
    app, given = Celery("shop", broker="memory://", set_as_current=False), list[Change]()
    bridge = Bridge(app, mongo_url, name="shop", **options)

    @bridge.on_change(orders.full_name, failure_policy="dead_letter")
    def fail(change: Change) -> None:
        given.append(change)
        raise RuntimeError

    with BridgeRunner(bridge) as runner:
        orders.insert_one({"_id": {"shop": 1, "number": Int64(7)}, **VALUES})
        orders.update_one({}, {"$set": {"nested.0.a.0": Int64(2)}, "$unset": {"min": 1}})
        orders.replace_one({}, {"double": 2.0})
        orders.delete_one({})
        runner.deliver(raises=False)
        done = CliRunner().invoke(list_dead_letters, ["--full", "--json"], obj=SimpleNamespace(app=app))
    printed = json.loads(done.stdout)
    cases = [{**printed, "count": 1, "dead_letters": [each]} for each in printed["dead_letters"]]
    assert [each.operation_type for each in given] == ["insert", "update", "replace", "delete"]
    for change, case in zip(given, cases, strict=True):
        file = tmp_path / "case.json"
        file.write_text(json.dumps(case))
        for found in map(load_change, (file, str(file), json.dumps(case), case, case["dead_letters"][0])):
            assert typed(found.raw) == typed(change.raw)
        for name in ("namespace", "document_key", "wall_time", "full_document", "resume_token"):
            assert getattr(found, name) == getattr(change, name)
    with pytest.raises(RuntimeError):
        app.tasks["tests.integration.test_cases.fail"](found)


def test_the_codec_of_a_client_decodes_a_case(make_client: MakeClient) -> None:
    case = {"event": {"_id": {"_data": "82"}, "operationType": "insert", "at": {"$date": "2026-11-30T12:00:00Z"}}}
    assert load_change(case)["at"] == datetime(2026, 11, 30, 12)  # noqa: DTZ001 - by default times are naive
    assert load_change(case, client=make_client(tz_aware=True))["at"] == datetime(2026, 11, 30, 12, tzinfo=UTC)


UNREADABLE: list[Any] = [
    *({"dead_letters": []}, {"dead_letters": None}, {"dead_letters": [{"event": {}}] * 2}),
    *({"dead_letters": [{"event": None, "raw": "AAAA"}]}, {"event": [1]}, {"event": {"_id": {"_data": "82"}}}),
    {"event": {"operationType": "insert", "at": {"$date": {"$numberLong": "253402300800000"}}}},
    {"event": {"operationType": "insert", "at": {"$date": "a user's text"}}},
    *({"handler": "orders"}, "[]", "[null]", '{"dead_letters": [{"event": {"operationType": "ins'),
]


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_case_without_one_readable_change_is_refused(case: str | Document) -> None:
    with pytest.raises(HandlerUsageError):
        load_change(case)


def test_a_file_in_the_encoding_of_powershell_is_read_and_one_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"event": {"operationType": "insert", "note": "é"}}), "utf-16")
    assert load_change(file)["note"] == "é"
    file.write_text("orders/3 is halted at change 7")
    with pytest.raises(HandlerUsageError):
        load_change(file)
