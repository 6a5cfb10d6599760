"""
Oversized events: their documents have an `_id` of some megabytes, and their resume tokens are too large to be used.

A token holds the `_id` in hexadecimal digits, so it is twice as long. An answer of the server holds an event and its
token, and has 16 MB at most: some of these events can only be read with less, others not at all. A partition stores the
token of its position beside that of the next one. So one bound holds for all events, whatever their operation.

An event above the bound is not read. A stream gives nothing of an event without its token, so the pipeline fails on
purpose, and the text of the error names the event. The listener gets a stand-in with operation, namespace and time,
without document and key. Its token is the beginning of the real one: it keeps the order of the stream, and opens none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import bson
from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure

from mongo_celery.bridge.change import read_namespace
from mongo_celery.bridge.existing import unread_place
from mongo_celery.mongo.oplog import time_of_token

TOKEN_MAX = 6_700_000
"""
Characters of a token, for an `_id` of up to 3 MB. An event without its documents has token and key, which is half as
long, and its token follows it in the answer: two and a half times this fits into 16 MB.
"""

_LENGTH = {"$strLenBytes": "$_id._data"}
_NAMED = re.compile(r"<(\d+) ([0-9A-F]+) (\w+) (.*)>", re.DOTALL)
_TEXT = {
    "$concat": [
        "<", {"$toString": _LENGTH}, " ", {"$substrBytes": ["$_id._data", 0, 200]}, " ", "$operationType",
        " ", {"$ifNull": ["$ns.db", ""]}, ".", {"$ifNull": ["$ns.coll", ""]}, ">",
    ],
}  # fmt: skip

WITHOUT_OVERSIZED: Mapping[str, Any] = {"$match": {"$expr": {"$lte": [_LENGTH, TOKEN_MAX]}}}
"""The stage that leaves oversized events out."""


def naming_stages(after: str, until: str) -> Sequence[Mapping[str, Any]]:
    """
    Return stages that fail on the first event of a range that is too large, and name it in the text of the error.

    They fail as well on the first event after the range, so that the server reads no further.

    Args:
        after: comparable part of a token. The events after it are asked about.
        until: that of the token where the range ends.
    """
    ends = {"$or": [{"$gt": [_LENGTH, TOKEN_MAX]}, {"$gte": ["$_id._data", until]}]}
    return [
        {"$match": {"$expr": {"$and": [{"$gt": ["$_id._data", after]}, ends]}}},
        {"$set": {"named": {"$toInt": _TEXT}}},
    ]


def find_oversized(error: OperationFailure) -> RawBSONDocument | None:
    """
    Return the stand-in of an event that is too large, from the error of `naming_stages`. None if the event fits.

    Raises:
        OperationFailure: `error` itself, if it has another reason.
    """
    found = _NAMED.search(str((error.details or {}).get("errmsg", "")))
    if found is None:
        raise error
    length, beginning, operation, namespace = found.groups()
    if int(length) <= TOKEN_MAX:
        return None
    database, _, collection = namespace.partition(".")
    ns = {"db": database, "coll": collection} if collection else {"db": database}
    return _make_stand_in(beginning, operation, ns if database else {})


def shorten(event: Mapping[str, Any], data: str) -> RawBSONDocument:
    """Return the stand-in of an event that was read and whose token `data` is too large to be kept."""
    return _make_stand_in(data, str(event.get("operationType")), dict(event.get("ns") or {}))


def _make_stand_in(data: str, operation: str, ns: Mapping[str, Any]) -> RawBSONDocument:
    time_ = time_of_token({"_data": data}, Timestamp(1, 1))
    event = {"_id": {"_data": unread_place(data)}, "operationType": operation, "clusterTime": time_, "ns": ns}
    return RawBSONDocument(bson.encode(event))


def explain_oversized(event: Mapping[str, Any]) -> str:
    """Return the sentence that names the change that was not read, and what to do."""
    written = event["clusterTime"].as_datetime().isoformat()
    return (
        f"The `_id` is too large (above 3 MB): no handler gets this {event['operationType']} in "
        f"{read_namespace(event)}, written at {written}. Later changes are handled. Repair what depends on it, then "
        "discard the dead letter. Bound the length of `_id` with a validator."
    )
