"""
Dead letters: changes that were set aside with their error, for a person to look at.

A dead letter is written together with the position that passes over its change (see `claims.set_aside`, and
`partitions.set_aside` for a command). It is never lost and never there twice, since its `_id` is made of bridge,
subscription and token. So a range of `_id` is a range of the stream, and the beginning of a token names a letter. That
of an existing document has its key there instead of its token (see `dead_letter_name`): its place is `resumeToken`.

It keeps the place of its change: `partitioningTerm`, `partition`, `seq` (its number), and `fencingToken`, the last one
under which it was tried. Whoever sets a change aside leaves `REPLAYS_MAX` fencing tokens free behind that one. They are
for its replays, each of which gets the next: a target orders them behind all earlier attempts, and before every change
that was handled after it was set aside (see `replays`).

| field | |
|---|---|
| `cause` | who set it aside: `failed` (the policy `dead_letter`), `skipped` (policy or command `skip`), `parked` |
|         | (the policy `park_key`), `parked_behind` (its key was parked, and its handler never started) |
| `parked` | hash of its key, for as long as it waits for that: later changes of the key wait behind it |
| `kept` | `event`: `change` is all of it. `bytes`: it is in `raw`, as the server sent it, since it is too large or no |
|        | client can decode it, and `change` names it. `name`: that alone |
| `replays` | how often it was started again |
| `replay` | only while it is to be replayed: how far that is (see `ReplayRequest`) |
| `passedOver` | earlier changes of its document for which it stood (its handler coalesces): `count`, last `tokens` |
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
from bson import ObjectId
from bson.errors import InvalidId
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import IndexModel
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.bridge.change import token_data, wrap_event
from mongo_celery.bridge.existing import END, is_unread, token_place
from mongo_celery.bridge.raw_event import EVENT_TYPES
from mongo_celery.bridge.state.backlog import pack_event, unpack_event
from mongo_celery.bridge.state.state_collection import StateCollection, ids_under, to_signed, to_unsigned
from mongo_celery.mongo.expressions import remaining
from mongo_celery.mongo.table import create_indexes, reading_seconds

CHANGE_BYTES = 15 << 20
"""Up to here an event is kept readable."""

REPLAYS_MAX = 1 << 14
"""Fencing tokens that are kept free for the replays of one dead letter."""

FAILED, SKIPPED = "failed", "skipped"
PARKED, PARKED_BEHIND = "parked", "parked_behind"
REQUESTED, STARTED, REPLAY_FAILED = "requested", "started", "failed"
ASKED: Mapping[str, Any] = {"replay.state": {"$in": [REQUESTED, STARTED, REPLAY_FAILED]}}
"""A query for those whose replay was asked for, which their partial index serves."""
_READ_AT_ONCE = 1000
_STREAM_ORDER = [("resumeToken._data", 1), ("_id", 1)]  # the `_id` of an existing document's letter has no place
_KEY = "change.documentKey._id"
_INDEXES = [
    IndexModel([("bridge", 1), ("handler", 1), *_STREAM_ORDER], name="stream"),
    IndexModel([("parked", 1), *_STREAM_ORDER], name="parked", partialFilterExpression={"parked": {"$exists": True}}),
    IndexModel(
        [("replay.state", 1), ("_id", 1)],
        name="replay",
        partialFilterExpression={"replay.state": {"$exists": True}},
    ),
    IndexModel([("at", 1), ("_id", 1)], name="at"),
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
        term: of the partitioning.
        seq: number of the change in its partition.
        fencing_token: the last one under which it was tried.
        hash: of its partition key, from 0 to 2^64 - 1.
    """

    term: int
    partition: int
    seq: int
    fencing_token: int
    hash: int


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """
    A dead letter that is to be replayed: the sub-document `replay` of it, and the fields that name its change.

    Attributes:
        letter: its `_id`.
        asking: `id` of the request, which changes whenever somebody asks for it.
        state: `requested`, `started` (until that start has an outcome), or `failed`, until the listener has withdrawn
            the requests after it.
        term: of the partitioning in which it is to run, `partition` its partition there.
        hash: of its partition key there, from 0 to 2^64 - 1.
        key: names its change in logs.
        over_newer: whether it may write over what newer changes have written.
        starts: how often the dead letter was started, all its replays together.
        crashes: how many of these ended without an outcome, in this replay.
        fencing_token: fencing token of the claim under which it was started. None after an outcome.
        retries: attempts of this replay that asked for a retry.
        waits: how often in a row it has waited for MongoDB or the broker, `doubts` of these in doubt.
        due_in: seconds until it may run again; 0 or less when it may.
        parked: whether it waits for a parked key: those behind it follow.
        order: compares as the changes do in the stream. The name of an existing document's dead letter does not.
    """

    letter: str
    asking: ObjectId
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

    @property
    def failed(self) -> bool:
        """Return True if it has failed for good, and the listener has yet to take notice."""
        return self.state == REPLAY_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """
    One dead letter, without its change.

    Attributes:
        document_id: its `_id`.
        id: comparable part of its token. Its beginning is what commands take.
        token: of its change. None where the stored one is damaged.
        place: None where the stored one is damaged.
        bytes: of what is kept of the change. None where there is nothing.
        kept: `event`, `bytes` or `name`.
        replays: how often it was started again.
        replay: its request. None while nobody has asked for its replay.
        parked: hash of its key, from 0 to 2^64 - 1, where it waits for that. None for all others.
        passed_over: ids of earlier changes of its document for which it stood, the last ones. `passed` is how many.
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
        """A key that compares as their changes do in the stream."""
        return ("" if self.token is None else str(self.token["_data"]), self.document_id)


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """
    A key whose changes wait for a person.

    Attributes:
        hash: of the key, from 0 to 2^64 - 1.
        first: `_id` of the first dead letter that waits for it, in the order of the stream.
        count: how many wait.
    """

    subscription: str
    hash: int
    first: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """
    A choice of dead letters.

    Attributes:
        subscription: of these only. None for all.
        ids: of these only: beginnings of tokens. Empty for all.
        keys: of these documents only: values of `_id`, any of which may be meant. Empty for all.
        hash: of the changes of one key only, as `hash_of_key` gives it. None for all.
        since: set aside at this time or later.
        until: set aside before this time.
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
        """Their collection, for a writer with its own transaction."""
        return self._table.collection

    def count(self) -> dict[str, int]:
        """Return the number of dead letters by handler. An index gives it, since events may be large."""
        stages: list[dict[str, Any]] = [{"$match": self._mine()}, {"$group": {"_id": "$handler", "count": {"$sum": 1}}}]
        return {str(row["_id"]): int(row["count"]) for row in self._table.aggregate(stages)}

    def read_oversized_error(self) -> str | None:
        """Return the error of one whose change was too large to be read. None where there is none."""
        place = {**ids_under(self._bridge), "$regex": f"{END}$"}
        found = self._table.find_one({"_id": place}, {"error": 1}, sort=[("_id", 1)])
        return None if found is None else str(found.get("error"))

    def find(self, selection: Selection, subscriptions: Sequence[str], limit: int, *, skip: int = 0) -> list[Letter]:
        """
        The first dead letters of a selection, by subscription, then in the order of the stream.

        Args:
            subscriptions: all that are known, in which an id is looked for.
            limit: how many; 0 for all.
            skip: how many of the first ones are left out.
        """
        order = {"handler": 1, **dict(_STREAM_ORDER)}
        stages: list[dict[str, Any]] = [{"$match": self._query(selection, subscriptions)}, {"$sort": order}]
        stages += [{"$skip": skip}] if skip else []
        stages += [{"$limit": limit}] if limit else []
        return self.headers([row["_id"] for row in self._table.aggregate([*stages, {"$project": {"_id": 1}}])])

    def list_errors(self, limit: int) -> list[dict[str, Any]]:
        """Return handler, error, time and token of the newest dead letters, the newest first. By an index."""
        fields = dict.fromkeys(("handler", "error", "at", "resumeToken"), 1)
        with self._table.limit():
            keys = [("at", -1), ("_id", -1)]
            return list(
                self._table.collection.find({"_id": _range(f"{self._bridge}/")}, fields, sort=keys, limit=limit)
            )

    def count_selected(self, selection: Selection, subscriptions: Sequence[str]) -> int:
        """Return the number of dead letters in a selection."""
        with self._table.limit():
            return self._table.collection.count_documents(self._query(selection, subscriptions))

    def read(self, document_id: str) -> tuple[Letter, bytes | None] | None:
        """
        One dead letter, with the bytes of its event.

        Returns:
            None where there is none. No bytes where the event is not kept.
        """
        with self._table.limit():
            document = self._table.collection.find_one({"_id": document_id}, _FIELDS)
            raw = self._table.collection.with_options(codec_options=EVENT_TYPES).find_one(
                {"_id": document_id}, {"change": 1, "raw": 1, "zip": 1}
            )
        return None if document is None or raw is None else (_letter(document), _read_event(raw, document.get("kept")))

    def list_parked_keys(self, letters: Iterable[Letter]) -> dict[tuple[str, int], ParkedKey]:
        """Return the parked keys of some dead letters, by handler and hash."""
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

    def first_waiting(self, subscription: str, hash_: int, session: ClientSession | None = None) -> Letter | None:
        """The first letter that waits for a parked key, in the order of the stream. None where none does."""
        query = {"parked": Int64(to_signed(hash_)), **self._mine(subscription)}
        with self._table.limit():
            found = self._table.collection.find_one(query, _FIELDS, sort=_STREAM_ORDER, session=session)
        return None if found is None else _letter(found)

    def header(self, document_id: str, session: ClientSession | None = None) -> Letter | None:
        """One dead letter, without its change. None where there is none."""
        with self._table.limit():
            found = self._table.collection.find_one({"_id": document_id}, _FIELDS, session=session)
        return None if found is None else _letter(found)

    def headers(self, document_ids: Sequence[str]) -> list[Letter]:
        """Those of some dead letters that are there, in this order, without their changes."""
        there: dict[str, Letter] = {}
        for start in range(0, len(document_ids), _READ_AT_ONCE):
            ids = [*document_ids[start : start + _READ_AT_ONCE]]
            there.update((str(each["_id"]), _letter(each)) for each in self._table.find({"_id": {"$in": ids}}, _FIELDS))
        return [there[each] for each in document_ids if each in there]

    def ensure_indexes(self, *, patiently: bool = False) -> None:
        """
        Create the indexes by which dead letters are found by time, by key and by parked key, however many there are.

        Without them they are found all the same.

        Args:
            patiently: wait as long as it may take to read the collection.
        """
        collection = self._table.collection
        seconds = self._table.timeout + (reading_seconds(collection) if patiently else 0.0)
        with pymongo.timeout(seconds):
            create_indexes(collection, _INDEXES)

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
    """Return a query for the dead letters of a handler that lie after a place: the comparable part of its token."""
    return {"bridge": bridge, "handler": subscription, "resumeToken._data": {"$gt": data}}


def _range(prefix: str) -> dict[str, str]:
    return {"$gte": prefix, "$lt": prefix + chr(0x10FFFF)}


def _letter(document: Mapping[str, Any]) -> Letter:
    """Return a dead letter. A field that somebody has damaged takes none of the others with it."""
    document_id = str(document["_id"])
    _, subscription, id_ = document_id.split("/", 2)
    found: dict[str, Any] = {}
    for name, read in _LETTER_FIELDS.items():
        with suppress(*_DAMAGES):
            found[name] = read(document)
    return Letter(document_id=document_id, id=id_, subscription=subscription, **found)


def read_starts(document: Mapping[str, Any]) -> int:
    """Return how often a dead letter was started. 0 where somebody has damaged that."""
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
    Return the request for the replay of a dead letter, read with `REPLAY_FIELDS`.

    None also for a damaged one: nothing is replayed by it, and asking once more replaces it.
    """
    try:
        return None if document is None or "replay" not in document else _parse_replay(document, document["replay"])
    except (*_DAMAGES, InvalidId):
        return None


def _parse_replay(document: Mapping[str, Any], replay: Mapping[str, Any]) -> ReplayRequest:
    document_id, state, fencing_token = str(document["_id"]), replay["state"], replay.get("fencingToken")
    if state not in (REQUESTED, STARTED, REPLAY_FAILED):
        raise ValueError(state)
    return ReplayRequest(
        letter=document_id,
        asking=ObjectId(replay["id"]),
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
"""How each attribute of a `Letter` is read."""


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
    The document of a dead letter. `at`, the server's time, is added when it is written.

    One with the cause `parked` or `parked_behind` waits for its key.

    Args:
        name: of `dead_letter_name`. The place of the token by default.
        passed_over: as the claim has it: changes for which it stands.
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
    Write a dead letter, in a transaction, in the place of one of the same change that was there before.

    Where that one says why its key is parked, and this one only waits for the key, it goes on saying so. A request for
    its replay stays, and counts one more start: a message that was sent for the earlier place does not start it.
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
    """The part of an event that a dead letter keeps. `kind` is `event`, `bytes` (in `raw`) or `name`."""

    change: Mapping[str, Any]
    kind: str
    raw: bytes | None = None


def iterate_forms(change: bytes) -> Iterator[Callable[[], KeptChange]]:
    """Yield how a dead letter may hold its change, the fullest first: an event may be too large, too deep or broken."""
    yield lambda: keep_change(change)
    yield lambda: KeptChange(_try_naming(change, "documentKey"), "bytes", change)
    yield lambda: KeptChange({}, "name")  # the letter has the token, which may be of some megabytes


def keep_change(change: bytes) -> KeptChange:
    """
    Return all of an event, as the server sent it.

    Whoever lists dead letters must be able to read each of them: of an event that is too large for that, or that
    clients could not decode, the bytes are kept beside what names it.
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
    """Return True if an event only stands for one that was too large to be read."""
    token = wrap_event(change).token
    return token is not None and is_unread(token_data(token))


def _try_naming(change: bytes, *without: str) -> Mapping[str, Any]:
    """As `naming_fields`, or nothing where that could not be decoded either."""
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
