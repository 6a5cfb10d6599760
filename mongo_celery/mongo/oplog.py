"""
The oplog and the cluster's logical clock, as a client can read them: where a change stream can begin.

`operation_time` is now, `read_oplog` how far back a stream reaches, `time_of_token` where a position lies between.
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
_NO_OPLOG = "There is no oplog to read here (a mongos has none): set start_from to 'now' or to a time."
_LARGE = ("locks", "metrics", "repl", "tcmalloc", "transactions", "wiredTiger")
_STATUS: Mapping[str, Any] = {"serverStatus": 1, "oplog": 1, **dict.fromkeys(_LARGE, 0)}
_WITHOUT_FIND: WeakValueDictionary[int, MongoClient[dict[str, Any]]] = WeakValueDictionary()
"""Clients whose user may not read the oplog's entries, by their `id`: clients of one cluster are equal."""

NEARLY_FULL = 0.9
"""Share of its size from which on an oplog is about to remove its oldest entries, or does so already."""


@dataclass(frozen=True, slots=True)
class Oplog:
    """
    The reach of the oplog.

    Attributes:
        first: time of its oldest entry.
        last: time of its latest one.
        is_whole: whether it begins with the set's initiation, so that nothing was ever removed from it.
    """

    first: Timestamp
    last: Timestamp
    is_whole: bool = False

    @property
    def window_seconds(self) -> int:
        """The seconds from the oplog's oldest entry to its last one."""
        return self.last.time - self.first.time

    def holds(self, place: Timestamp) -> bool:
        """Return True if all entries from this time on can still be read; the server judges by the same rule."""
        return self.is_whole or place >= self.first

    def removes(self, fill: float | None) -> bool:
        """Return True if it removes its oldest entries, or soon will; `fill` is the used share of its size."""
        return not self.is_whole and (fill is None or fill >= NEARLY_FULL)

    def lag_share(self, place: Timestamp) -> float:
        """Return the share of the window that has passed since a position: from 1 on the position can be lost."""
        share = max(0.0, (self.last.time - place.time) / max(self.window_seconds, 1))
        return max(1.0, share) if place < self.first else share


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
    Return the first and last times of the oplog.

    They are read from the oplog itself where that is allowed, else from `serverStatus`, which shows no write of any
    database. Then nobody knows whether the oplog is whole, and it counts as one that is not.

    Raises:
        AccessError: the user may do neither; the message names the right and the alternatives.
        DeploymentError: there is none, as behind a mongos.
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
                "The MongoDB user may not see how far the oplog reaches back, which start_from='oldest' needs: grant "
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
    """As `read_oplog`; None where it cannot be seen: no right, a mongos, no answer in time."""
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            return read_oplog(client)
    except (DeploymentError, PyMongoError):
        return None


def oplog_fill(client: MongoClient[dict[str, Any]]) -> float | None:
    """Share of the oplog's size that is in use, or None where it cannot be seen."""
    stats = _stats(client)
    return float(stats["size"]) / float(stats["maxSize"]) if stats.get("maxSize") else None


def _stats(client: MongoClient[dict[str, Any]]) -> Mapping[str, Any]:
    """Return the server's statistics of the oplog; an empty mapping if it gives none."""
    try:
        stats: dict[str, Any] = client.get_database("local").command("collStats", "oplog.rs")
    except PyMongoError:
        return {}
    return stats


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


def earliest_token(time: Timestamp) -> dict[str, Any]:
    """
    Return the place before every change of a cluster time, as a token.

    It compares with the tokens of a stream as they do with each other, and opens none: the server does not know it.
    """
    return {"_data": f"{_TIMESTAMP_TYPE:02X}{time.time:08X}{time.inc:08X}"}
