"""
Audit records of changes of a bridge's state: person, time, command, effect and reason.

Each record is a separate document that never changes. The server removes it after `KEPT_SECONDS`.
"""

from __future__ import annotations

import getpass
import shlex
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from pymongo import IndexModel
from pymongo.client_session import ClientSession

from mongo_celery.bridge.state.state_collection import StateCollection
from mongo_celery.mongo.steps import run_sync
from mongo_celery.mongo.table import create_indexes
from mongo_celery.mongo.verdicts import storable

COLLECTION = "audit_records"
KEPT_SECONDS = 365 * 24 * 3600
_TEXT_CHARS = 1000
_FIELDS = ("at", "by", "act", "command", "handlers", "effect", "reason")


class AuditRecords(StateCollection):
    """The audit records of one bridge."""

    def prepare(self) -> None:
        """Prepare the collection for records, and let the server remove old ones. A changed TTL is kept."""
        with self._table.limit():
            run_sync(create_indexes(self._table.collection, [IndexModel("at", expireAfterSeconds=KEPT_SECONDS)]))

    def add(self, record: Mapping[str, Any], session: ClientSession | None = None) -> None:
        """Store a record with the server's time, as part of the session's transaction if there is one."""
        collection = self._table.collection
        with self._table.limit():
            at = collection.database.client.admin.command("hello")["localTime"]
            collection.insert_one({"bridge": self._bridge, "at": at, **record}, session=session)

    def read(self, handler: str | None, limit: int) -> list[dict[str, Any]]:
        """Return the last records of one handler or of all, the oldest first."""
        query = {"bridge": self._bridge} if handler is None else {"bridge": self._bridge, "handlers": handler}
        with self._table.limit():
            found = self._table.collection.find(query, dict.fromkeys(_FIELDS, 1)).sort([("at", -1), ("_id", -1)])
            return [{name: each.get(name) for name in _FIELDS} for each in found.limit(limit)][::-1]


def make_record(
    act: str, words: Iterable[str], reason: str | None, by: str, handlers: Iterable[str], effect: Mapping[str, Any]
) -> dict[str, Any]:
    """
    Return an audit record without its time.

    Args:
        act: the command's name.
        words: its arguments, as typed after the name.
        by: the person or program that acts.
        effect: the number of changes, by kind.
    """
    return {
        "act": act,
        "command": _text(f"{act} {shlex.join(words)}".rstrip()),
        "by": _text(by),
        "reason": None if reason is None else _text(reason),
        "handlers": sorted(set(handlers)),
        "effect": dict(effect),
    }


def _text(text: str) -> str:
    return storable(text)[:_TEXT_CHARS]


def user_at_host() -> str:
    """Return this process's user and host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user has no name
        user = "unknown"
    return storable(f"{user}@{socket.gethostname()}")
