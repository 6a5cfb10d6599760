"""Entries that could not be published, set aside with their error until a person decides."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pymongo
from pymongo.collection import Collection
from pymongo.errors import DocumentTooLarge, DuplicateKeyError, OperationFailure

from mongo_celery.mongo.expressions import after, insert_if_absent, literal
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import is_too_large
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.index import OutboxIndex, OutboxIndexes
from mongo_celery.outbox.signing import UnsignedEntryError
from mongo_celery.outbox.stored_id import derived_id

COLLECTION = "outbox_dead_letters"
_TRACEBACK_CHARS = 8000
_UNSIGNED = {"unsigned": True}
_EXPIRES = {"expiresAt": {"$exists": True}}
_OLDEST_FIRST = [("at", 1), ("_id", 1)]
_WITHOUT_PAYLOADS = {"entry.payload": 0}


class OutboxDeadLetters:
    """
    The dead letters of one outbox.

    Args:
        collection: where they are kept, with majority writes.
        outbox: namespace of the documents that they come from.
        retention: seconds for which one is kept; None for ever.
    """

    def __init__(self, collection: Collection[dict[str, Any]], outbox: str, retention: float | None = None) -> None:
        self._collection = collection
        self._outbox = outbox
        self._retention = retention
        self._indexes = OutboxIndexes(
            OutboxIndex(
                collection, "oldest", [("outbox", 1), *_OLDEST_FIRST], "each look at dead letters reads all of them"
            ),
            OutboxIndex(
                collection, "unsigned", [("outbox", 1), ("unsigned", 1)], "each status reads them all", _UNSIGNED
            ),
            OutboxIndex(
                collection, "expired", [("expiresAt", 1)], "no dead letter expires", _EXPIRES, {"expireAfterSeconds": 0}
            ),
        )

    @property
    def full_name(self) -> str:
        """The namespace of the dead letters of all outboxes of a database."""
        return self._collection.full_name

    def add(self, document_id: object, entry: Entry | Mapping[str, Any], error: BaseException) -> None:
        """
        Store an entry by its id; a second time changes nothing, so that it may be repeated after a crash.

        One that lies in many documents is kept for each of them, by an id of its own. So is one whose id the letter of
        another document has already, as where one signature was written to many. What the outbox has not signed may
        say any id, and gets one of its contents.
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
            # An entry that fills its document leaves a dead letter no room for more than itself.
            self._add(dead_letter | {"error": type(error).__name__, "traceback": ""})

    def _add(self, dead_letter: dict[str, Any]) -> None:
        times = {"at": "$$NOW", **({} if self._retention is None else {"expiresAt": after(self._retention)})}
        change = insert_if_absent({"$mergeObjects": [literal(dead_letter), times]})
        with suppress(DuplicateKeyError):  # two relays at once; the other's is the same
            self._collection.update_one({"_id": dead_letter["_id"]}, change, upsert=True)

    def count(self) -> int:
        """How many there are."""
        return self._collection.count_documents({"outbox": self._outbox})

    def count_unsigned(self) -> int:
        """Return how many entries were set aside since the outbox had not signed them."""
        return self._collection.count_documents({"outbox": self._outbox, **_UNSIGNED})

    def find(self, limit: int = 0, *, skip: int = 0) -> list[dict[str, Any]]:
        """The oldest first, without their payloads: a list of them would be as large as all of these."""
        found = self._collection.find({"outbox": self._outbox}, _WITHOUT_PAYLOADS, allow_disk_use=True)
        return list(found.sort(_OLDEST_FIRST).skip(skip).limit(limit))

    def get(self, entry_id: str) -> dict[str, Any] | None:
        """One by the id of its entry."""
        return self._collection.find_one({"_id": f"{self._outbox}/{entry_id}"})

    def remove(self, entry_id: str) -> bool:
        """Forget one; False if there is none."""
        return bool(self._collection.delete_one({"_id": f"{self._outbox}/{entry_id}"}).deleted_count)


def _list_names(stored: Mapping[str, Any], document_id: object) -> list[str]:
    """The entry's id, then that of its copy in this document; a name of the contents for what has none."""
    if not stored.get("id"):
        return [_name_of_contents(stored, document_id)]
    own = derived_id(str(stored["id"]), document_id)
    return [own] if stored.get("bind") else [str(stored["id"]), own]


def _name_of_contents(stored: Mapping[str, Any], document_id: object) -> str:
    contents = repr((document_id, sorted(stored.items(), key=str)))
    return hashlib.sha256(contents.encode(errors="surrogatepass")).hexdigest()[:32]
