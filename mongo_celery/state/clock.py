"""The cluster's logical clock, as a client can read it."""

from __future__ import annotations

from typing import Any

from bson import Timestamp
from pymongo import MongoClient


def last_operation_time(client: MongoClient[dict[str, Any]]) -> Timestamp | None:
    """
    The cluster time of the last operation that the primary has applied; None on a standalone server.

    A set with authentication gives no `operationTime` until it has made its signing keys, some moments after
    its start; the time of its last write is there from the beginning. A mongos has only the former.
    """
    answer = client.admin.command("hello")
    applied = answer.get("lastWrite", {}).get("opTime", {}).get("ts")
    time = answer.get("operationTime") or applied
    return None if time is None else Timestamp(time.time, time.inc)
