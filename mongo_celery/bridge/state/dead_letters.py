"""
Dead letters: changes that failed permanently, with their error, for a person.

A dead letter is written together with the position that skips its change (see `claims.set_aside`, and
`partitions.set_aside` for a command). It is never lost or duplicated, because its `_id` consists of bridge,
subscription and token. So a range of `_id` is a range of the stream, and the beginning of a token identifies a dead
letter. For an existing document the `_id` contains its key instead of a token (see `dead_letter_name`), and
`resumeToken` its place.

It stores the place of its change: `partitioningTerm`, `partition`, `seq` (its number), and `fencingToken`, the last one
of its attempts. The writer reserves the next `REPLAYS_MAX` fencing tokens for its replays, each of which gets the next
one. So a target orders them after all earlier attempts, and before every change that was handled later (see `replays`).

| field | |
|---|---|
| `cause` | the reason: `failed` (the policy `dead_letter`), `skipped` (policy or command `skip`), `parked` |
|         | (the policy `park_key`), `parked_behind` (its key was parked, and its handler never started) |
| `parked` | hash of its key, while it waits for the key: later changes of the key wait after it |
| `kept` | `event`: `change` is the whole event. `bytes`: it is in `raw`, as the server sent it, since it is too |
|        | large or no client can decode it, and `change` names it. `name`: only `change`, which names it |
| `replays` | number of times that it was started again |
| `replay` | only while a replay is requested: its progress (see `ReplayRequest`) |
| `passedOver` | earlier changes of its document that it replaces (its handler coalesces): `count`, last `tokens` |
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import bson
import pymongo
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import IndexModel
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.bridge.change import token_data, wrap_event
from mongo_celery.bridge.existing import is_unread, token_place
from mongo_celery.bridge.raw_event import EVENT_TYPES
from mongo_celery.bridge.state.backlog import pack_event, unpack_event
from mongo_celery.bridge.state.state_collection import StateCollection, to_signed, to_unsigned
from mongo_celery.mongo.expressions import remaining
from mongo_celery.mongo.steps import Session, Steps, run_sync, see_collection
from mongo_celery.mongo.table import create_indexes, reading_seconds

CHANGE_BYTES = 15 << 20
"""Largest event that is stored in readable form."""

REPLAYS_MAX = 1 << 14
"""Fencing tokens that are reserved for the replays of one dead letter."""

FAILED, SKIPPED = "failed", "skipped"
PARKED, PARKED_BEHIND = "parked", "parked_behind"
REQUESTED, STARTED = "requested", "started"
ASKED: Mapping[str, Any] = {"replay.state": {"$in": [REQUESTED, STARTED]}}
"""Query for dead letters with a requested replay. Their partial index serves it."""
_READ_AT_ONCE = 1000
_STREAM_ORDER = [
    ("resumeToken._data", 1),
    ("_id", 1),
]  # an existing document's `_id` here contains no place
_KEY = "change.documentKey._id"
_INDEXES = [
    IndexModel([("bridge", 1), ("handler", 1), *_STREAM_ORDER], name="stream"),
    IndexModel([("parked", 1), *_STREAM_ORDER], name="parked", partialFilterExpression={"parked": {"$exists": True}}),
    IndexModel(
        [("replay.state", 1), ("_id", 1)],
        name="replay",
        partialFilterExpression={"replay.state": {"$exists": True}},
    ),
    IndexModel([("bridge", 1), ("at", 1), ("_id", 1)], name="newest"),
    IndexModel([(_KEY, 1), ("_id", 1)], name="key"),
]
_DAMAGES = (AttributeError, KeyError, TypeError, ValueError)
_HEX = re.compile(r"[0-9A-Fa-f]+")
REPLAY_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("handler", "key", "replays", "replay", "parked", "resumeToken"), 1),
    "due": remaining("replay.notBefore"),
}
"""Fields of a dead letter that `parse_replay` reads."""

_FIELDS: dict[str, Any] = {
    **REPLAY_FIELDS,
    **dict.fromkeys((
        "partition", "partitioningTerm", "seq", "fencingToken", "hash", "error", "traceback", "attempts", "at", "cause",
        "kept", "passedOver",
    ), 1),
    "bytes": {
        "$switch": {
            "branches": [
                {"case": {"$eq": [{"$type": "$raw"}, "binData"]}, "then": {"$binarySize": "$raw"}},
                {"case": {"$eq": [{"$type": "$change"}, "object"]}, "then": {"$bsonSize": "$change"}},
            ],
            "default": None,
        },
    },
}  # fmt: skip
_SAID = dict.fromkeys(("cause", "error", "traceback", "attempts"), 1)
_NAMING = ("_id", "operationType", "clusterTime", "ns", "documentKey")


@dataclass(frozen=True, slots=True)
class Place:
    """
    The place of a change when it was moved to the dead letters.

    Attributes:
        term: the term of the partitioning.
        seq: number of the change in its partition.
        fencing_token: the fencing token of the last attempt.
        hash: the hash of its partition key, from 0 to 2^64 - 1.
    """

    term: int
    partition: int
    seq: int
    fencing_token: int
    hash: int


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """
    A dead letter to replay: its sub-document `replay`, and the fields that name its change.

    Attributes:
        letter: `_id` of the dead letter.
        state: `requested`, or `started` until this start has an outcome.
        term: the term of the partitioning for the replay. `partition` is its partition there.
        hash: the hash of its partition key there, from 0 to 2^64 - 1.
        key: text that names its change in logs.
        over_newer: True if it may overwrite data of newer changes.
        starts: number of times that the dead letter was started, in all its replays.
        crashes: number of starts of this replay that ended without an outcome.
        fencing_token: the fencing token of the claim for this start. None after an outcome.
        retries: attempts of this replay that requested a retry.
        waits: number of consecutive waits for MongoDB or the broker. `doubts` is the number of doubtful ones.
        due_in: seconds until it may run again. 0 or less if it may run now.
        parked: True if it waits for a parked key, whose other dead letters follow.
        order: sorts dead letters like their changes in the stream, also those of snapshot rows.
    """

    letter: str
    state: str
    subscription: str
    term: int
    partition: int
    hash: int
    key: str
    over_newer: bool
    starts: int
    crashes: int
    fencing_token: int | None
    retries: int
    waits: int
    doubts: int
    error: str | None
    due_in: float
    parked: bool
    order: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadChange:
    """
    One dead letter, without its change.

    Attributes:
        document_id: `_id` of the dead letter.
        id: comparable part of the token. Commands accept its beginning.
        token: the token of its change. None if the stored one is damaged.
        place: the place of its change. None if the stored one is damaged.
        bytes: size of the stored change. None if nothing is stored.
        kept: `event`, `bytes` or `name`.
        replays: number of times that it was started again.
        replay: the request for its replay. None if no replay is requested.
        parked: hash of its parked key, from 0 to 2^64 - 1. None for all others.
        passed_over: ids of earlier changes of its document that it replaces, the last ones. `passed` is their number.
    """

    document_id: str
    id: str
    subscription: str
    key: str = ""
    at: datetime | None = None
    cause: str = FAILED
    error: str = "damaged"
    traceback: str = ""
    attempts: int = 0
    replays: int = 0
    kept: str = "event"
    bytes: int | None = None
    token: Mapping[str, Any] | None = None
    place: Place | None = None
    replay: ReplayRequest | None = None
    parked: int | None = None
    passed: int = 0
    passed_over: Sequence[str] = ()

    @property
    def order(self) -> tuple[str, str]:
        """A key that sorts like the changes in the stream."""
        return ("" if self.token is None else str(self.token["_data"]), self.document_id)


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """
    A key whose changes wait for a person.

    Attributes:
        hash: the hash of the key, from 0 to 2^64 - 1.
        first: `_id` of the first dead letter that waits for it, in stream order.
        count: number of waiting dead letters.
    """

    subscription: str
    hash: int
    first: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """
    A selection of dead letters.

    Attributes:
        subscription: the only subscription. None for all.
        ids: only dead letters with these beginnings of tokens. Empty for all.
        keys: only those of these documents, by all possible meanings of `_id`. Empty for all.
        hash: only changes of one key, from `find_key`. None for all.
        since: only those that became dead letters at this time or later.
        until: only those that became dead letters before this time.
    """

    subscription: str | None = None
    ids: Sequence[str] = field(default=())
    keys: Sequence[Any] = field(default=())
    hash: int | None = None
    since: datetime | None = None
    until: datetime | None = None


class DeadLetters(StateCollection):
    """The dead letters of one bridge."""

    @property
    def collection(self) -> Collection[dict[str, Any]]:
        """The collection, for a writer with its own transaction."""
        return self._table.collection

    def count(self) -> dict[str, int]:
        """Return the number of dead letters by handler. Only an index is read, because events may be large."""
        stages: list[dict[str, Any]] = [{"$match": self._mine()}, {"$group": {"_id": "$handler", "count": {"$sum": 1}}}]
        return {str(row["_id"]): int(row["count"]) for row in self._table.aggregate(stages)}

    def find(
        self, selection: Selection, subscriptions: Sequence[str], limit: int, *, skip: int = 0
    ) -> list[DeadChange]:
        """
        Return the first dead letters of a selection, by subscription, then in stream order.

        Args:
            subscriptions: all known subscriptions, for finding an id.
            limit: the largest number of dead letters. 0 for all.
            skip: number of the first ones to leave out.
        """
        order = {"handler": 1, **dict(_STREAM_ORDER)}
        stages: list[dict[str, Any]] = [{"$match": self._query(selection, subscriptions)}, {"$sort": order}]
        stages += [{"$skip": skip}] if skip else []
        stages += [{"$limit": limit}] if limit else []
        return self.headers([row["_id"] for row in self._table.aggregate([*stages, {"$project": {"_id": 1}}])])

    def list_errors(self, limit: int) -> list[dict[str, Any]]:
        """Return `_id`, handler, error and time of the newest dead letters, the newest first. An index serves this."""
        fields = dict.fromkeys(("handler", "error", "at"), 1)
        with self._table.limit():
            return list(self._table.collection.find(self._mine(), fields, sort=[("at", -1), ("_id", -1)], limit=limit))

    def count_selected(self, selection: Selection, subscriptions: Sequence[str]) -> int:
        """Return the number of dead letters in a selection."""
        with self._table.limit():
            return self._table.collection.count_documents(self._query(selection, subscriptions))

    def read(self, document_id: str) -> tuple[DeadChange, bytes | None] | None:
        """
        Read one dead letter with the bytes of its event.

        Returns:
            None if it does not exist. No bytes if the event is not stored.
        """
        with self._table.limit():
            document = self._table.collection.find_one({"_id": document_id}, _FIELDS)
            raw = self._table.collection.with_options(codec_options=EVENT_TYPES).find_one(
                {"_id": document_id}, {"change": 1, "raw": 1, "zip": 1}
            )
        return None if document is None or raw is None else (_letter(document), _read_event(raw, document.get("kept")))

    def list_parked_keys(self, letters: Iterable[DeadChange]) -> dict[tuple[str, int], ParkedKey]:
        """Return the parked keys for which some dead letters wait, by handler and hash."""
        keys = {(each.subscription, each.parked) for each in letters if each.parked is not None}
        if not keys:
            return {}
        stages: list[dict[str, Any]] = [
            {"$match": {"parked": {"$in": [Int64(to_signed(hash_)) for _, hash_ in keys]}, **self._mine()}},
            {"$sort": dict(_STREAM_ORDER)},
            {
                "$group": {
                    "_id": {"handler": "$handler", "parked": "$parked"},
                    "first": {"$first": "$_id"},
                    "count": {"$sum": 1},
                }
            },
        ]
        found = {}
        for row in self._table.aggregate(stages):
            key = row["_id"]["handler"], to_unsigned(row["_id"]["parked"])
            found[key] = ParkedKey(*key, row["first"], row["count"])
        return {key: each for key, each in found.items() if key in keys}

    def first_waiting(self, subscription: str, hash_: int) -> DeadChange | None:
        """Return the first dead letter that waits for a parked key, in stream order. None if none waits."""
        return run_sync(self.find_waiting(subscription, hash_))

    def find_waiting(self, subscription: str, hash_: int, session: Session | None = None) -> Steps[DeadChange | None]:
        """Do the same inside a transaction, as steps."""
        return self._find_first({"parked": Int64(to_signed(hash_)), **self._mine(subscription)}, session)

    def header(self, document_id: str) -> DeadChange | None:
        """Return one dead letter without its change. None if it does not exist."""
        return run_sync(self.find_header(document_id))

    def find_header(self, document_id: str, session: Session | None = None) -> Steps[DeadChange | None]:
        """Do the same inside a transaction, as steps."""
        return self._find_first({"_id": document_id}, session)

    def _find_first(self, query: Mapping[str, Any], session: Session | None) -> Steps[DeadChange | None]:
        letters = see_collection(self._table.collection, session)
        with self._table.limit():
            found = yield letters.find_one(query, _FIELDS, sort=_STREAM_ORDER, session=session)
        return None if found is None else _letter(found)

    def headers(self, document_ids: Sequence[str]) -> list[DeadChange]:
        """Return some existing dead letters in this order, without their changes."""
        there: dict[str, DeadChange] = {}
        for start in range(0, len(document_ids), _READ_AT_ONCE):
            ids = [*document_ids[start : start + _READ_AT_ONCE]]
            there.update((str(each["_id"]), _letter(each)) for each in self._table.find({"_id": {"$in": ids}}, _FIELDS))
        return [there[each] for each in document_ids if each in there]

    def ensure_indexes(self, *, patiently: bool = False) -> None:
        """
        Create the indexes for finding dead letters by time, key and parked key.

        Searches also work without them.

        Args:
            patiently: wait as long as reading the collection may take.
        """
        collection = self._table.collection
        seconds = self._table.timeout + (reading_seconds(collection) if patiently else 0.0)
        with pymongo.timeout(seconds):
            run_sync(create_indexes(collection, _INDEXES))

    def _query(self, selection: Selection, subscriptions: Sequence[str]) -> dict[str, Any]:
        query = self._mine(selection.subscription)
        if selection.ids:
            names = [selection.subscription] if selection.subscription is not None else subscriptions
            ids = [id_.upper() if _HEX.fullmatch(id_) else id_ for id_ in selection.ids]
            query["$or"] = [{"_id": _range(f"{self._bridge}/{name}/{id_}")} for name in names for id_ in ids]
        if selection.keys:
            query[_KEY] = {"$in": [*selection.keys]}
        if selection.hash is not None:
            query["hash"] = to_signed(selection.hash)
        times = {"$gte": selection.since, "$lt": selection.until}
        at = {name: moment for name, moment in times.items() if moment is not None}
        return {**query, "at": at} if at else query

    def _mine(self, subscription: str | None = None) -> dict[str, Any]:
        mine: dict[str, Any] = {"bridge": self._bridge}
        return mine if subscription is None else {**mine, "handler": subscription}


def build_later_query(bridge: str, subscription: str, data: str) -> dict[str, Any]:
    """Return a query for a handler's dead letters after a place: the comparable part of its token."""
    return {"bridge": bridge, "handler": subscription, "resumeToken._data": {"$gt": data}}


def _range(prefix: str) -> dict[str, str]:
    return {"$gte": prefix, "$lt": prefix + chr(0x10FFFF)}


def _letter(document: Mapping[str, Any]) -> DeadChange:
    """Return a dead letter. A damaged field does not affect the others."""
    document_id = str(document["_id"])
    _, subscription, id_ = document_id.split("/", 2)
    found: dict[str, Any] = {}
    for name, read in _LETTER_FIELDS.items():
        with suppress(*_DAMAGES):
            found[name] = read(document)
    return DeadChange(document_id=document_id, id=id_, subscription=subscription, **found)


def read_starts(document: Mapping[str, Any]) -> int:
    """Return the number of starts of a dead letter. 0 if the field is damaged."""
    starts = document.get("replays")
    return int(starts) if isinstance(starts, (int, float)) else 0


def _read_text(name: str, document: Mapping[str, Any]) -> str:
    return str(document[name])


def _read_time(document: Mapping[str, Any]) -> datetime | None:
    at = document.get("at")
    return None if at is None else at.replace(tzinfo=at.tzinfo or UTC)


def _read_token(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**document["resumeToken"], "_data": token_data(document["resumeToken"])}


def _read_order(document: Mapping[str, Any]) -> str:
    with suppress(*_DAMAGES):
        return token_data(document["resumeToken"])
    return ""


def _read_place(document: Mapping[str, Any]) -> Place:
    return Place(
        int(document["partitioningTerm"]),
        int(document["partition"]),
        int(document["seq"]),
        int(document["fencingToken"]),
        to_unsigned(document["hash"]),
    )


def parse_replay(document: Mapping[str, Any] | None) -> ReplayRequest | None:
    """
    Return a dead letter's replay request, read with `REPLAY_FIELDS`.

    Return None also for a damaged one: it replays nothing, and another request replaces it.
    """
    try:
        return None if document is None or "replay" not in document else _parse_replay(document, document["replay"])
    except _DAMAGES:
        return None


def _parse_replay(document: Mapping[str, Any], replay: Mapping[str, Any]) -> ReplayRequest:
    document_id, state, fencing_token = str(document["_id"]), replay["state"], replay.get("fencingToken")
    if state not in (REQUESTED, STARTED):
        raise ValueError(state)
    return ReplayRequest(
        letter=document_id,
        state=state,
        subscription=str(document["handler"]),
        term=int(replay["partitioningTerm"]),
        partition=int(replay["partition"]),
        hash=to_unsigned(replay["hash"]),
        key=str(document.get("key", "")),
        over_newer=bool(replay["overNewer"]),
        starts=int(document["replays"]),
        crashes=int(replay.get("crashes", 0)),
        fencing_token=None if fencing_token is None else int(fencing_token),
        retries=int(replay.get("retries", 0)),
        waits=int(replay.get("waits", 0)),
        doubts=int(replay.get("doubts", 0)),
        error=replay.get("error"),
        due_in=(document["due"] or 0) / 1000,
        parked="parked" in document,
        order=(_read_order(document), document_id),
    )


_LETTER_FIELDS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    **{name: partial(_read_text, name) for name in ("key", "cause", "error", "traceback", "kept")},
    "at": _read_time,
    "attempts": lambda document: int(document["attempts"]),
    "replays": read_starts,
    "bytes": lambda document: document["bytes"],
    "token": _read_token,
    "place": _read_place,
    "replay": parse_replay,
    "parked": lambda document: to_unsigned(document["parked"]),
    "passed": lambda document: int(document["passedOver"]["count"]),
    "passed_over": lambda document: [str(each) for each in document["passedOver"]["tokens"]],
}
"""How each attribute of a `DeadChange` is read."""


def _read_event(document: Mapping[str, Any], kept: object) -> bytes | None:
    if kept == "bytes":
        try:
            return unpack_event(document)
        except (KeyError, TypeError, zlib.error):
            return None
    change = document.get("change")
    return bytes(change.raw) if isinstance(change, RawBSONDocument) and kept != "name" else None


def dead_letter(
    *,
    bridge: str,
    subscription: str,
    token: Mapping[str, Any],
    key: str,
    kept: KeptChange,
    error: str,
    traceback: str,
    attempts: int,
    place: Place,
    cause: str,
    name: str | None = None,
    passed_over: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Return the document of a dead letter. `at`, the server's time, is added by the write.

    A dead letter with the cause `parked` or `parked_behind` waits for its key.

    Args:
        name: the result of `dead_letter_name`. By default the place of the token.
        passed_over: changes that it replaces, in the claim's form.
    """
    hash_ = Int64(to_signed(place.hash))
    waits = {"parked": hash_} if cause in (PARKED, PARKED_BEHIND) else {}
    return {
        "_id": f"{bridge}/{subscription}/{name or token_place(token_data(token))}",
        "bridge": bridge,
        "handler": subscription,
        "partition": place.partition,
        "partitioningTerm": Int64(place.term),
        "seq": Int64(place.seq),
        "fencingToken": Int64(place.fencing_token),
        "hash": hash_,
        "resumeToken": dict(token),
        "key": key,
        "change": kept.change,
        "error": error,
        "traceback": traceback,
        "attempts": attempts,
        "cause": cause,
        "kept": kept.kind,
        **({} if kept.raw is None else pack_event(kept.raw)),
        "replays": Int64(0),
        **waits,
        **({"passedOver": dict(passed_over)} if passed_over else {}),
    }


def store(letters: Collection[dict[str, Any]], dead_letter: Mapping[str, Any], session: ClientSession) -> None:
    """
    Write a dead letter in a transaction. It replaces an earlier one of the same change.

    If the earlier one holds the reason why its key is parked, and this one only waits for the key, the reason is kept.
    A replay request is kept and counts one more start, so a message for the earlier place does not start it.
    """
    key = {"_id": dead_letter["_id"]}
    found = letters.find_one(key, {**_SAID, "parked": 1, "replay": 1, "replays": 1}, session=session) or {}
    kept: dict[str, Any] = {}
    is_cause = found.get("cause") == PARKED and found.get("parked") == dead_letter.get("parked")
    if dead_letter["cause"] == PARKED_BEHIND and is_cause:
        kept = {name: found[name] for name in _SAID if name in found}
    if "replay" in found:
        kept |= {"replay": found["replay"], "replays": Int64(read_starts(found) + 1)}
    letters.replace_one(key, {**dead_letter, **kept}, upsert=True, session=session)
    letters.update_one(key, {"$currentDate": {"at": True}}, session=session)


@dataclass(frozen=True, slots=True)
class KeptChange:
    """The part of an event that a dead letter stores. `kind` is `event`, `bytes` (in `raw`) or `name`."""

    change: Mapping[str, Any]
    kind: str
    raw: bytes | None = None


def iterate_forms(change: bytes) -> Iterator[Callable[[], KeptChange]]:
    """
    Yield the possible forms of a dead letter's change, the fullest first. An event may be too large, too deep or
    broken.
    """
    yield lambda: keep_change(change)
    yield lambda: KeptChange(_try_naming(change, "documentKey"), "bytes", change)
    yield lambda: KeptChange({}, "name")  # the dead letter has the token, which may have some megabytes


def keep_change(change: bytes) -> KeptChange:
    """
    Return a whole event, as the server sent it.

    Every dead letter in a list must be readable. So if an event is too large, or clients cannot decode it, its bytes
    are stored beside the fields that name it.
    """
    try:
        bson.decode(change)
        if _is_unread(change):
            return KeptChange(naming_fields(change), "name")
        if len(change) <= CHANGE_BYTES:
            return KeptChange(RawBSONDocument(change), "event")
    except Exception:  # noqa: BLE001 - whatever broken bytes do to a decoder
        return KeptChange(_try_naming(change, "documentKey"), "bytes", change)
    return KeptChange(_try_naming(change), "bytes", change)


def _is_unread(change: bytes) -> bool:
    """Return True if an event replaces one that was too large to read."""
    token = wrap_event(change).token
    return token is not None and is_unread(token_data(token))


def _try_naming(change: bytes, *without: str) -> Mapping[str, Any]:
    """Return the result of `naming_fields`, or nothing if that cannot be decoded."""
    try:
        found = naming_fields(change, *without)
        bson.decode(bson.encode(found))
        return found
    except Exception:  # noqa: BLE001 - as above
        return {}


def naming_fields(change: bytes, *without: str) -> dict[str, Any]:
    """Return the fields of an event that name its change."""
    event = wrap_event(change)
    return {name: event[name] for name in _NAMING if name in event and name not in without}
