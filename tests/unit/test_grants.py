"""The roles that `changes grants` prints, by the options and sources of a bridge; and what the docs say of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations.grants import ROLES, Right, find_gaps, find_roles, list_rights
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.cli.grants import _ROLES
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.rights import Allowed, missing_right

_OPLOG = {"resource": {"cluster": True}, "actions": ["serverStatus"]}
PAGE = Path(__file__).parents[2] / "docs/security.md"


def handle(_change: Change) -> None:
    """A handler."""


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


def watched(*sources: str) -> dict[str, Any]:
    (found,) = [right for right in list_rights(wiring_on(*sources), "listener") if "changeStream" in right.actions]
    return found.resource


def oplog_without(**options: Any) -> str | None:
    (found,) = [
        right for right in list_rights(wiring_on("a.b", **options), "listener") if right.actions == ("serverStatus",)
    ]
    return found.without


def test_the_stream_asks_for_as_much_as_the_sources_need() -> None:
    """One collection, one database, or the cluster: what the stream is opened on."""
    assert watched("a.b") == {"db": "a", "collection": "b"}
    assert watched("a.b", "a.c") == {"db": "a", "collection": ""}
    assert watched("a.b", "c.d") == {"db": "", "collection": ""}


def test_the_oplog_is_needed_where_a_start_is_its_oldest_entry() -> None:
    """Else it is optional: it only lets the listener warn."""
    assert oplog_without() is None
    assert oplog_without(start_from="now") is not None
    assert oplog_without(start_from="now", on_history_lost="oldest") is None


def test_the_worker_of_a_bridge_with_an_outbox_reads_its_signing_key() -> None:
    """It delivers what was written, and verifies it. A bridge without one needs no such right."""
    wiring = wiring_on("a.b")
    assert "keys" not in {right.collection for right in list_rights(wiring, "worker")}
    wiring.public.outbox("a.b", database="state")
    (found,) = [right for right in list_rights(wiring, "worker") if right.collection == "keys"]
    assert (found.database, found.actions, found.without) == ("state", ("find", "insert", "update"), None)


def test_images_ask_for_a_look_at_the_collections() -> None:
    """For `check` where an option wants them, and for `snapshot`; optional both times."""
    for options in ({}, {"full_document_before_change": "whenAvailable"}):
        wanting = wiring_on("a.b", **options)
        (found,) = [each for each in list_rights(wanting, "operator") if "listCollections" in each.actions]
        assert (found.resource, found.without is None) == ({"db": "a", "collection": ""}, False)
        assert ("check" in (found.without or "")) == bool(options)


def test_a_start_with_a_snapshot_asks_for_a_look_at_the_collections() -> None:
    """Else it is optional: only `changes snapshot start` fails without."""
    for start, is_optional in (("snapshot", False), ("oldest", True)):
        wiring = wiring_on("a.b", start_from=start)
        (found,) = [each for each in list_rights(wiring, "listener") if "listCollections" in each.actions]
        assert (found.without is not None) == is_optional


def test_the_state_is_the_bridges_own_database() -> None:
    """And no right there is on more than one collection."""
    for role in ROLES:
        state = [each for each in list_rights(wiring_on("a.b", database="own"), role) if each.database == "own"]
        assert state
        assert all(each.collection for each in state)


def test_no_role_reads_more_than_it_needs() -> None:
    """No entry of the oplog, which has the writes of all databases; and who neither signs nor rotates writes no key."""
    rights = {role: list_rights(wiring_on("a.b", database="own"), role) for role in ROLES}
    entire = [each for found in rights.values() for each in found if each.database == "local"]
    assert {each.actions for each in entire} == {("collStats",)}
    assert {role: _actions(found, "bridge_keys") for role, found in rights.items()} == {
        "listener": {"find", "insert", "update"},
        "worker": {"find"},
        "operator": {"find", "update"},
        "viewer": set(),
    }
    assert {name for each in rights["viewer"] for name in each.actions} == {"find", "serverStatus", "collStats"}
    assert _actions(rights["worker"], "leases") == {"find"}


def _actions(rights: Sequence[Right], collection: str) -> set[str]:
    return {name for each in rights if each.collection == collection for name in each.actions}


def test_without_a_handler_nobody_knows_what_is_watched() -> None:
    """A role that watches nothing would be of no use, and one that watches all too much."""
    with pytest.raises(ConfigurationError, match="Import the module"):
        list_rights(wiring_on(), "listener")


def test_the_help_names_all_roles() -> None:
    """It is written without importing what knows them."""
    assert tuple(ROLES) == _ROLES


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
    assert find_roles(wiring, Allowed([*commanding, *moving])) == ["worker", "operator", "viewer"], (
        "who moves positions may claim"
    )
    del moving[0]
    assert find_roles(wiring, Allowed([*commanding, *moving])) == ["viewer"]
    assert not any(find_gaps(wiring, Allowed(None)).values())
    assert not any(find_gaps(wiring, Allowed([{"resource": {"anyResource": True}, "actions": _all(wiring)}])).values())


def _all(wiring: Wiring) -> list[str]:
    return [action for role in ROLES for right in list_rights(wiring, role) for action in right.actions]


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ('not authorized on s to execute command { find: "leases", filter: {} }', "find on s.leases"),
        ('not authorized on s to execute command { delete: "spill", deletes: [] }', "remove on s.spill"),
        (
            'not authorized on s to execute command { update: "leases", updates: [ { q: {}, upsert: true } ] }',
            "update or insert on s.leases",
        ),
        (
            'not authorized on s to execute command { update: "leases", updates: [ { q: {}, multi: false } ] }',
            "update on s.leases",
        ),
        ('not authorized on s to execute command { update: "leases", ordered: true }', "update or insert on s.leases"),
        (
            'not authorized on a to execute command { aggregate: "b", pipeline: [ { $changeStream: {} } ] }',
            "changeStream or find on a.b",
        ),
        ("not authorized on admin to execute command { aggregate: 1, pipeline: [ { $changeStream: {} } ] }",
         "changeStream or find on admin"),
        ("user is not allowed to do action [insert] on [shop.spill]", "insert on shop.spill"),
        ("not primary", None),
    ],
)  # fmt: skip
def test_the_right_is_read_from_the_refusal(said: str, right: str | None) -> None:
    """The server says the command; Atlas says the action."""
    assert missing_right(RuntimeError(said)) == right


# -- the docs --------------------------------------------------------------------------------------


def test_the_docs_have_the_rights_that_the_command_prints() -> None:
    """A table a role in docs/security.md: resources, actions and what is optional, as for its bridge."""
    wiring = wiring_on("shop.orders")
    for role in ROLES:
        assert _rows_of(role) == [_row(right) for right in list_rights(wiring, role)]


def _row(right: Right) -> tuple[str, str, bool]:
    where = "the cluster" if right.database is None else f"{right.database}.{right.collection}"
    return where, ", ".join(right.actions), right.without is not None


def _rows_of(role: str) -> Sequence[tuple[str, str, bool]]:
    text = PAGE.read_text().partition(f"### {role.capitalize()}s\n")[2].partition("\n##")[0]
    rows = re.findall(r"^\| `?([^|`]+)`? \| `([^|`]+)` \| (.+) \|$", text, re.MULTILINE)
    return [(where.strip(), actions, meaning.startswith("optional")) for where, actions, meaning in rows]


def test_help_is_shown_without_an_app() -> None:
    """As of every command."""
    from mongo_celery.cli.grants import grants

    done = CliRunner().invoke(grants, ["--help"])
    assert done.exit_code == 0, done.output
    assert "mongosh" in done.output
