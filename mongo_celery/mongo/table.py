"""
The three writes of every change (claim, handled, commit) as plain commands.

The driver's own retries are left out on purpose. Each of these writes is either harmless to repeat or ended
by its owner when its answer was lost, so callers repeat it themselves; the server's bookkeeping for
retryable writes (a session record for each, and for a find-and-modify a copy of the document) would be
paid for every change and used for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pymongo
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

Change = Mapping[str, Any] | Sequence[Mapping[str, Any]]
MAJORITY: Mapping[str, Any] = {"w": "majority"}
ACKNOWLEDGED: Mapping[str, Any] = {"w": 1}


class Commands:
    """
    Single-document writes on one collection.

    Args:
        collection: where.
        timeout: hard limit of each call in seconds.
    """

    def __init__(self, collection: Collection[dict[str, Any]], timeout: float) -> None:
        self._database = collection.database
        self._name = collection.name
        self._timeout = timeout

    def update(self, guard: Mapping[str, Any], change: Change, concern: Mapping[str, Any] = MAJORITY) -> bool:
        """Update the document that the guard names; False when none matched."""
        command = {"update": self._name, "updates": [{"q": guard, "u": change}], "writeConcern": concern}
        return bool(self._run(command)["n"])

    def find_and_update(self, guard: Mapping[str, Any], change: Change, fields: Mapping[str, Any]) -> Any:
        """Update the document that the guard names by a majority write, and return it as it is then, or None."""
        command = {
            "findAndModify": self._name,
            "query": guard,
            "update": change,
            "new": True,
            "fields": fields,
            "writeConcern": MAJORITY,
        }
        return self._run(command)["value"]

    def _run(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        with pymongo.timeout(self._timeout):
            answer: dict[str, Any] = self._database.command(dict(command))
        failures = [*answer.get("writeErrors", ()), *filter(None, [answer.get("writeConcernError")])]
        if failures:  # a write concern that failed leaves the outcome open
            raise OperationFailure(failures[0].get("errmsg", "write failed"), failures[0].get("code"), answer)
        return answer


def call_timeout(ttl: float) -> float:
    """Hard limit in seconds of one MongoDB call that must not outlive a right of `ttl` seconds."""
    return ttl * 0.3
