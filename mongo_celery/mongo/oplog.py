"""
The oplog and the cluster's logical clock. They determine the positions from which a change stream can start.

`operation_time` returns the current time, `read_oplog` a stream's reach, and `time_of_token` a position's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import pymongo
from bson import Timestamp
from pymongo import MongoClient, ReadPreference
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import AccessError, DeploymentError, TopologyError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.verdicts import Verdict, judge_error

_TIME_BYTES = 9
_TIMESTAMP_TYPE = 0x82
_INITIATION = "initiating set"
_NO_OPLOG = "This deployment has no readable oplog (a mongos has none). Set start_from to 'now' or to a time."
_LARGE = ("locks", "metrics", "repl", "tcmalloc", "transactions", "wiredTiger")
_STATUS: Mapping[str, Any] = {"serverStatus": 1, "oplog": 1, **dict.fromkeys(_LARGE, 0)}
_WITHOUT_FIND: WeakValueDictionary[int, MongoClient[dict[str, Any]]] = WeakValueDictionary()
"""Clients without the right to read oplog entries, by `id`, because clients of one cluster compare equal."""

NEARLY_FULL = 0.9
"""Share of its size above which an oplog removes its oldest entries, or soon will."""


@dataclass(frozen=True, slots=True)
class Oplog:
    """
    The reach of the oplog.

    Attributes:
        first: time of the oldest entry.
        last: time of the latest entry.
        is_whole: True if it begins with the set's initiation, so nothing was ever removed.
    """

    first: Timestamp
    last: Timestamp
    is_whole: bool = False

    @property
    def window_seconds(self) -> int:
        """Seconds from the oldest entry to the latest one."""
        return self.last.time - self.first.time

    def holds(self, place: Timestamp) -> bool:
        """Return True if all entries from this time can still be read. The server uses the same rule."""
        return self.is_whole or place >= self.first

    def removes(self, fill: float | None) -> bool:
        """Return True if the oplog removes its oldest entries, or soon will. `fill` is the used share of its size."""
        return not self.is_whole and (fill is None or fill >= NEARLY_FULL)

    def lag_share(self, place: Timestamp) -> float:
        """Return the share of the window since a position. From 1 the position can be lost."""
        share = max(0.0, (self.last.time - place.time) / max(self.window_seconds, 1))
        return max(1.0, share) if place < self.first else share


def last_operation_time(client: MongoClient[dict[str, Any]]) -> Timestamp | None:
    """
    Return the cluster time of the primary's last applied operation. None on a standalone server.

    A set with authentication reports no `operationTime` until its signing keys exist, shortly after its start. The time
    of its last write exists from the beginning. A mongos has only `operationTime`.
    """
    answer = client.admin.command("hello")
    applied = answer.get("lastWrite", {}).get("opTime", {}).get("ts")
    time = answer.get("operationTime") or applied
    return None if time is None else Timestamp(time.time, time.inc)


def operation_time(client: MongoClient[dict[str, Any]]) -> Timestamp:
    """
    Return the same as `last_operation_time`, or raise an error.

    Raises:
        TopologyError: the server is a standalone.
    """
    time = last_operation_time(client)
    if time is None:
        raise TopologyError
    return time


def check_topology(client: MongoClient[dict[str, Any]]) -> None:
    """Raise `TopologyError` unless the client uses a replica set or a sharded cluster."""
    hello = client.admin.command("hello")
    if hello.get("msg") != "isdbgrid" and "setName" not in hello:
        raise TopologyError


def read_oplog(client: MongoClient[dict[str, Any]]) -> Oplog:
    """
    Return the first and last time in the oplog.

    It reads the oplog if allowed, otherwise `serverStatus`, which shows no database's writes. Then it is unknown
    whether the oplog is whole, so it counts as not whole.

    Raises:
        AccessError: the user has neither right. The message names the right and the alternatives.
        DeploymentError: there is no oplog, as behind a mongos.
    """
    if id(client) not in _WITHOUT_FIND:
        try:
            return _by_entries(client)
        except OperationFailure as error:
            if judge_error(error) is not Verdict.ACCESS:
                raise
            _WITHOUT_FIND[id(client)] = client  # a server logs each refusal
    try:
        found = client.admin.command(dict(_STATUS)).get("oplog") or {}
    except OperationFailure as error:
        if judge_error(error) is Verdict.ACCESS:
            raise AccessError(
                "start_from='oldest' needs the start of the oplog, which the MongoDB user may not read. Grant "
                "the action serverStatus on the cluster, or set start_from to 'now' or to a time.",
            ) from error
        raise
    first, last = found.get("earliestOptime"), found.get("latestOptime")
    if not first or not last:
        raise DeploymentError(_NO_OPLOG)
    return Oplog(first, last)


def _by_entries(client: MongoClient[dict[str, Any]]) -> Oplog:
    oplog = client["local"]["oplog.rs"].with_options(
        read_concern=ReadConcern("local"), read_preference=ReadPreference.PRIMARY
    )
    first = oplog.find_one({}, {"ts": 1, "op": 1, "o.msg": 1}, sort=[("$natural", 1)])
    last = oplog.find_one({}, {"ts": 1}, sort=[("$natural", -1)])
    if first is None or last is None:
        raise DeploymentError(_NO_OPLOG)
    is_whole = first["op"] == "n" and first.get("o", {}).get("msg") == _INITIATION
    return Oplog(first["ts"], last["ts"], is_whole)


def oplog_or_none(client: MongoClient[dict[str, Any]]) -> Oplog | None:
    """Do the same as `read_oplog`. Return None if it cannot be read: no right, a mongos, no answer in time."""
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            return read_oplog(client)
    except (DeploymentError, PyMongoError):
        return None


def oplog_fill(client: MongoClient[dict[str, Any]]) -> float | None:
    """Return the used share of the oplog's size, or None if unknown."""
    try:
        stats: dict[str, Any] = client.get_database("local").command("collStats", "oplog.rs")
    except PyMongoError:
        return None
    return float(stats["size"]) / float(stats["maxSize"]) if stats.get("maxSize") else None


def time_of_token(token: Mapping[str, Any], fallback: Timestamp | None) -> Timestamp | None:
    """
    Return the cluster time in a resume token. A post-batch token has it nowhere else.

    Tokens are key strings: type byte 0x82, then seconds and increment. For another format it returns the fallback, an
    earlier time. Reopening there repeats changes but loses none.
    """
    data = str(token["_data"])
    try:
        raw = bytes.fromhex(data[:18])
    except ValueError:
        return fallback
    if len(raw) != _TIME_BYTES or raw[0] != _TIMESTAMP_TYPE:
        return fallback
    return Timestamp(int.from_bytes(raw[1:5], "big"), int.from_bytes(raw[5:9], "big"))


def earliest_token(time: Timestamp) -> dict[str, Any]:
    """
    Return the place before all changes of a cluster time, as a token.

    It sorts among a stream's tokens, but opens no stream, because the server does not know it.
    """
    return {"_data": f"{_TIMESTAMP_TYPE:02X}{time.time:08X}{time.inc:08X}"}
