"""
MongoDB rights: the right that a server reports as missing, and the rights of a connection's user.

A refusal names the command, not the right. The right may have another name (`remove` for the command `delete`), and a
command may need several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import MongoClient

_REFUSED = re.compile(r"not authorized on (\S+) to execute command \{ (\w+): (?:\"([^\"]*)\")?")
_ATLAS = re.compile(r"not allowed to do action \[(\w+)\] on \[([^\]]*)\]")
_ACTIONS = {
    "find": "find",
    "getMore": "find",
    "count": "find",
    "distinct": "find",
    "insert": "insert",
    "update": "update",
    "delete": "remove",
    "findAndModify": "find or update",
    "createIndexes": "createIndex",
}
_SPECIAL = (("$changeStream", "changeStream or find"), ("$merge", "find, insert or update"), ("aggregate:", "find"))


def missing_right(error: BaseException) -> str | None:
    """
    Return the missing right, such as `remove on shop_state.backlog`. None if unknown.

    If a command needs several rights on one collection, the server does not name the missing one, so all are named.
    """
    text = str(error)
    known = _ATLAS.search(text)
    if known is not None:
        return f"{known[1]} on {known[2]}"
    found = _REFUSED.search(text)
    if found is None:
        return None
    database, command, collection = found.groups()
    return f"{_action(command, text[found.start(2) :])} on {database}{f'.{collection}' if collection else ''}"


def _action(command: str, text: str) -> str:
    if command == "aggregate":
        return next(action for sign, action in _SPECIAL if sign in text)
    action = _ACTIONS.get(command, command)
    # Statements travel outside the command, so it does not show if one of them may insert.
    may_insert = "upsert: true" in text or "updates: [" not in text
    return f"{action} or insert" if action == "update" and may_insert else action


@dataclass(frozen=True, slots=True)
class Allowed:
    """
    The rights of a connection's user, as reported by the server.

    Attributes:
        privileges: the answer of `connectionStatus`. None without a login: then everything is allowed.
    """

    privileges: Sequence[Mapping[str, Any]] | None

    def may(self, action: str, resource: Mapping[str, Any]) -> bool:
        """Return True if an action is allowed on a resource: `{db, collection}` or `{cluster}`, as in privileges."""
        if self.privileges is None:
            return True
        return any(action in each["actions"] and _covers(each["resource"], resource) for each in self.privileges)


def read_rights(client: MongoClient[Any]) -> Allowed:
    """Return the rights of a connection's user. No right is needed for this."""
    answer = client.admin.command("connectionStatus", showPrivileges=True)["authInfo"]
    return Allowed(answer["authenticatedUserPrivileges"] if answer["authenticatedUsers"] else None)


def _covers(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return True if a right on one resource covers another. An empty name means all, except system resources."""
    if held.get("anyResource"):
        return True
    if "cluster" in wanted or "db" not in held:
        return bool(wanted.get("cluster") and held.get("cluster"))
    return held["db"] in ("", wanted["db"]) and held["collection"] in ("", wanted["collection"])
