"""
The oplog and the cluster's logical clock, as a client can read them: where a change stream can begin.

`operation_time` is now, `read_oplog` how far back a stream reaches, `time_of_token` where a position lies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mongo_celery.errors import AccessError, DeploymentError, TopologyError
from mongo_celery.mongo.verdicts import Verdict, verdict_on

_TIME_BYTES = 9
_TIMESTAMP_TYPE = 0x82


@dataclass(frozen=True, slots=True)
class Oplog:
    """The reach of the oplog: its first and last entries' times."""

    first: Timestamp
    last: Timestamp

    @property
    def window_seconds(self) -> int:
        """How far back the oplog reaches from its last entry."""
        return self.last.time - self.first.time


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


def operation_time(client: MongoClient[dict[str, Any]]) -> Timestamp:
    """
    As `last_operation_time`, where there must be one.

    Raises:
        TopologyError: on a standalone server.
    """
    time = last_operation_time(client)
    if time is None:
        raise TopologyError
    return time


def check_topology(client: MongoClient[dict[str, Any]]) -> None:
    """Raise `TopologyError` unless the client talks to a replica set or a sharded cluster."""
    hello = client.admin.command("hello")
    if hello.get("msg") != "isdbgrid" and "setName" not in hello:
        raise TopologyError


def read_oplog(client: MongoClient[dict[str, Any]]) -> Oplog:
    """
    The first and last times of the oplog.

    Raises:
        AccessError: without the right to read it; the message names the right and the alternatives.
        DeploymentError: there is none, as behind a mongos.
    """
    oplog = client.get_database("local")["oplog.rs"]
    try:
        first = oplog.find_one({}, {"ts": 1}, sort=[("$natural", 1)])
        last = oplog.find_one({}, {"ts": 1}, sort=[("$natural", -1)])
    except OperationFailure as error:
        if verdict_on(error) is Verdict.ACCESS:
            raise AccessError(
                "The MongoDB user may not read the oplog, which start_from='oldest' needs: grant the action find on "
                "{db: 'local', collection: 'oplog.rs'}, or set start_from to 'now' or to a time.",
            ) from error
        raise
    if first is None or last is None:
        raise DeploymentError(
            "There is no oplog to read here (a mongos has none): set start_from to 'now' or to a time.",
        )
    return Oplog(first["ts"], last["ts"])


def time_of_token(token: Mapping[str, Any], fallback: Timestamp | None) -> Timestamp | None:
    """
    The cluster time inside a resume token, which a post-batch token has nowhere else.

    Tokens are key strings: type byte 0x82, then seconds and increment. A token of another format gives
    the fallback, an earlier time: reopening there repeats changes, and loses none.
    """
    data = str(token["_data"])
    try:
        raw = bytes.fromhex(data[:18])
    except ValueError:
        return fallback
    if len(raw) != _TIME_BYTES or raw[0] != _TIMESTAMP_TYPE:
        return fallback
    return Timestamp(int.from_bytes(raw[1:5], "big"), int.from_bytes(raw[5:9], "big"))
