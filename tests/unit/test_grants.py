"""The roles that `changes grants` prints, by the options and sources of a bridge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from celery import Celery

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations.grants import ROLES, Right, find_gaps, find_roles, list_rights
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.rights import Allowed, missing_right

_OPLOG = {"resource": {"cluster": True}, "actions": ["serverStatus"]}


def wiring_on(*sources: Any, **options: Any) -> Wiring:
    bridge = Bridge(Celery("grants", set_as_current=False), "mongodb://nowhere", name="shop", **options)
    for number, source in enumerate(sources):
        bridge.on_change(source, name=f"h{number}", operations=None)(handle_named(f"h{number}"))
    return bridge.wiring


def handle_named(name: str) -> Any:
    def named(_change: Change) -> None:
        """A handler."""

    named.__name__ = named.__qualname__ = name
    return named


def test_the_stream_asks_for_as_much_as_the_sources_need() -> None:
    """One collection, one database, or the cluster: what the stream is opened on. No handler is no role."""
    for sources, on in ((("a.b",), ("a", "b")), (("a.b", "a.c"), ("a", "")), (("a.b", "c.d"), ("", ""))):
        rights = list_rights(wiring_on(*sources), "listener")
        assert [tuple(each.resource.values()) for each in rights if "changeStream" in each.actions] == [on]
    with pytest.raises(ConfigurationError):
        list_rights(wiring_on(), "listener")


def test_no_role_reads_more_than_it_needs() -> None:
    """No entry of the oplog, which has the writes of all databases; and who neither signs nor rotates writes no key."""
    wiring = wiring_on("a.b", database="own")
    rights = {role: list_rights(wiring, role) for role in ROLES}
    entire = [each for found in rights.values() for each in found if each.database == "local"]
    assert {each.actions for each in entire} == {("collStats",)}
    assert all(each.collection for found in rights.values() for each in found if each.database == "own")
    assert {role: _actions(found, "bridge_keys") for role, found in rights.items()} == {
        "listener": {"find", "insert", "update"},
        "worker": {"find"},
        "operator": {"find", "update"},
        "viewer": set(),
    }
    assert {name for each in rights["viewer"] for name in each.actions} == {"find", "serverStatus", "collStats"}
    assert _actions(rights["worker"], "leases") == {"find"}
    assert not _actions(rights["worker"], "keys"), "an outbox's"
    wiring.public.outbox("a.b", database="own")
    assert _actions(list_rights(wiring, "worker"), "keys") == {"find", "insert", "update"}


def _actions(rights: Sequence[Right], collection: str) -> set[str]:
    return {name for each in rights if each.collection == collection for name in each.actions}


def test_what_a_user_lacks_is_named_by_role() -> None:
    """Rights on a database hold for its collections; what is optional is not asked for."""
    wiring = wiring_on("a.b", database="own")
    actions = ["find", "insert", "update", "remove", "createIndex", "collStats"]
    readwrite = {"resource": {"db": "own", "collection": ""}, "actions": actions}
    found = find_gaps(wiring, Allowed([readwrite]))
    assert found["worker"] == []
    assert found["listener"] == ["changeStream on a.b", "find on a.b", "serverStatus on the cluster"]
    assert found["operator"] == ["serverStatus on the cluster"]
    assert found["viewer"] == []
    assert find_roles(wiring, Allowed([readwrite])) == [], "a listener that lacks something is no worker"
    commanding = [{**readwrite, "actions": ["find", "update"]}, _OPLOG]
    assert find_roles(wiring, Allowed(commanding)) == ["viewer"], "an operator replays and discards dead letters, too"
    moved = ("dead_letters", "audit_records", "partitions", "snapshots", "backlog", "handlers")
    moving = [{**readwrite, "resource": {"db": "own", "collection": each}} for each in moved]
    every = find_roles(wiring, Allowed([*commanding, *moving]))
    assert every == ["worker", "operator", "viewer"], "who moves positions may claim"
    assert not any(find_gaps(wiring, Allowed(None)).values())
    assert not any(find_gaps(wiring, Allowed([{"resource": {"anyResource": True}, "actions": _all(wiring)}])).values())


def _all(wiring: Wiring) -> list[str]:
    return [action for role in ROLES for right in list_rights(wiring, role) for action in right.actions]


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ('{ find: "leases", filter: {} }', "find on s.leases"),
        ('{ delete: "spill", deletes: [] }', "remove on s.spill"),
        ('{ update: "leases", updates: [ { q: {}, upsert: true } ] }', "update or insert on s.leases"),
        ('{ update: "leases", updates: [ { q: {}, multi: false } ] }', "update on s.leases"),
        ('{ aggregate: "b", pipeline: [ { $changeStream: {} } ] }', "changeStream or find on s.b"),
        ("{ aggregate: 1, pipeline: [ { $changeStream: {} } ] }", "changeStream or find on s"),
    ],
)
def test_the_right_is_read_from_the_refusal(said: str, right: str | None) -> None:
    """The server says the command; Atlas says the action."""
    assert missing_right(RuntimeError(f"not authorized on s to execute command {said}")) == right
    atlas = RuntimeError("user is not allowed to do action [insert] on [shop.spill]")
    assert [missing_right(each) for each in (atlas, RuntimeError("not primary"))] == ["insert on shop.spill", None]
