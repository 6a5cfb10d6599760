"""Dead letters of an outbox: entries that could not be published, with their error, for a person."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pymongo
from bson import json_util
from bson.binary import UuidRepresentation
from pymongo import IndexModel
from pymongo.collection import Collection
from pymongo.errors import DocumentTooLarge, DuplicateKeyError, OperationFailure

from mongo_celery.mongo.expressions import after, insert_if_absent, literal
from mongo_celery.mongo.indexes import Indexes
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import is_too_large
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.signing import UnsignedEntryError
from mongo_celery.outbox.stored_id import derive_id

COLLECTION = "outbox_dead_letters"
_TRACEBACK_CHARS = 8000
_UNSIGNED = {"unsigned": True}
_EXPIRES = {"expiresAt": {"$exists": True}}
_OLDEST_FIRST = [("at", 1), ("_id", 1)]
_INDEXES = (
    IndexModel([("outbox", 1), *_OLDEST_FIRST], name="oldest"),
    IndexModel([("outbox", 1), ("unsigned", 1)], name="unsigned", partialFilterExpression=_UNSIGNED),
    IndexModel([("expiresAt", 1)], name="expired", partialFilterExpression=_EXPIRES, expireAfterSeconds=0),
)
_WITHOUT_PAYLOADS = {"entry.payload": 0}
_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """
    One dead letter. A value with another type than relays write counts as missing.

    Attributes:
        id: id of the entry, for commands.
        document: `_id` of the entry's document.
        at: time when it was moved to the dead letters, by the server's clock.
        entry: the entry, as stored.
        error: the last attempt's error.
        traceback: the error's traceback.
    """

    id: str
    document: Any
    at: datetime | None
    entry: Mapping[str, Any]
    error: str
    traceback: str

    def plain(self, *, payload: bool = True) -> dict[str, Any]:
        """Return the dead letter as JSON. Other values become extended JSON."""
        found = asdict(self)
        if not payload:  # it may contain secrets
            found["entry"] = {name: value for name, value in self.entry.items() if name != "payload"}
        plain: dict[str, Any] = json.loads(json_util.dumps(found, json_options=_JSON))
        return plain | {"at": None if self.at is None else self.at.isoformat()}


class OutboxDeadLetters:
    """
    The dead letters of one outbox.

    Args:
        collection: the collection of the dead letters, with majority writes.
        outbox: namespace of the original documents.
        retention: seconds for which a dead letter is kept. None for ever.
    """

    def __init__(self, collection: Collection[dict[str, Any]], outbox: str, retention: float | None = None) -> None:
        self._collection = collection
        self._outbox = outbox
        self._retention = retention
        self._indexes = Indexes(collection, _INDEXES, "each list of dead letters reads all of them, and none expires")

    @property
    def full_name(self) -> str:
        """The namespace of all outboxes' dead letters in a database."""
        return self._collection.full_name

    def add(self, document_id: object, entry: Entry | Mapping[str, Any], error: BaseException) -> None:
        """
        Store an entry by its id. A second call changes nothing, so it can be repeated after a crash.

        An entry in many documents is stored for each of them, with separate ids. The same applies if another document's
        dead letter has the id, for example if one signature was written to many documents. An unsigned entry may
        contain any id, so its id comes from its contents.
        """
        self._indexes.ensure(patiently=False)
        stored = entry.to_document() if isinstance(entry, Entry) else dict(entry)
        is_unsigned = isinstance(error, UnsignedEntryError)
        names = [_name_of_contents(stored, document_id)] if is_unsigned else _list_names(stored, document_id)
        ids = [f"{self._outbox}/{name}" for name in names]
        with pymongo.timeout(ANSWER_SECONDS):
            for id in ids:  # noqa: A001
                if self._collection.find_one({"_id": {"$in": ids}, "document": {"$eq": document_id}}, {"_id": 1}):
                    return
                self._store(id, stored, document_id, error)

    def _store(self, id: str, stored: Mapping[str, Any], document_id: object, error: BaseException) -> None:  # noqa: A002
        dead_letter = {
            "_id": id,
            "outbox": self._outbox,
            "document": document_id,
            "entry": stored,
            "error": f"{type(error).__name__}: {short(error)}",
            "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:],
            **(_UNSIGNED if isinstance(error, UnsignedEntryError) else {}),
        }
        try:
            self._add(dead_letter)
        except (DocumentTooLarge, OperationFailure) as refusal:
            if not is_too_large(refusal):
                raise
            # An entry that fills its document leaves a dead letter no room for additional fields.
            self._add(dead_letter | {"error": type(error).__name__, "traceback": ""})

    def _add(self, dead_letter: dict[str, Any]) -> None:
        times = {"at": "$$NOW", **({} if self._retention is None else {"expiresAt": after(self._retention)})}
        change = insert_if_absent({"$mergeObjects": [literal(dead_letter), times]})
        with suppress(DuplicateKeyError):  # two relays at the same time: the other one's is the same
            self._collection.update_one({"_id": dead_letter["_id"]}, change, upsert=True)

    def count(self) -> int:
        """Return the number of dead letters."""
        return self._collection.count_documents({"outbox": self._outbox})

    def count_unsigned(self) -> int:
        """Return the number of entries that became dead letters because the outbox had not signed them."""
        return self._collection.count_documents({"outbox": self._outbox, **_UNSIGNED})

    def find(self, limit: int = 0, *, skip: int = 0) -> list[DeadLetter]:
        """Return dead letters, the oldest first, without payloads, which would make a list too large."""
        found = self._collection.find({"outbox": self._outbox}, _WITHOUT_PAYLOADS, allow_disk_use=True)
        return [self._read(each) for each in found.sort(_OLDEST_FIRST).skip(skip).limit(limit)]

    def get(self, entry_id: str) -> DeadLetter | None:
        """Return the dead letter with this entry id."""
        found = self._collection.find_one({"_id": f"{self._outbox}/{entry_id}"})
        return None if found is None else self._read(found)

    def remove(self, entry_id: str) -> bool:
        """Remove a dead letter. Return False if it does not exist."""
        return bool(self._collection.delete_one({"_id": f"{self._outbox}/{entry_id}"}).deleted_count)

    def _read(self, stored: Mapping[str, Any]) -> DeadLetter:
        at, entry = stored.get("at"), stored.get("entry")
        return DeadLetter(
            id=str(stored["_id"]).removeprefix(f"{self._outbox}/"),
            document=stored.get("document"),
            at=at if isinstance(at, datetime) else None,
            entry=entry if isinstance(entry, Mapping) else {},
            error=str(stored.get("error", "")),
            traceback=str(stored.get("traceback", "")),
        )


def _list_names(stored: Mapping[str, Any], document_id: object) -> list[str]:
    """Return the entry's id, then its copy's id in this document. If the entry has no id, hash its contents."""
    if not stored.get("id"):
        return [_name_of_contents(stored, document_id)]
    own = derive_id(str(stored["id"]), document_id)
    return [own] if stored.get("bind") else [str(stored["id"]), own]


def _name_of_contents(stored: Mapping[str, Any], document_id: object) -> str:
    contents = repr((document_id, sorted(stored.items(), key=str)))
    return hashlib.sha256(contents.encode(errors="surrogatepass")).hexdigest()[:32]
