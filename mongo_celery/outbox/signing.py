"""
The signatures of entries. Only an outbox can start tasks through its documents.

If an app passes a user's fields to `$set`, that user could write entries. So each entry has an HMAC-SHA256 over its
published parts and its outbox. Three fields are not covered: `at` and `attempts` determine when an entry is tried, and
`elsewhere` only what is reported. An entry without a valid signature is never published.

The keys are in the state database, in one document per outbox::

    {_id: "outbox/shop.orders/pendingEvents", keys: [key, ...]}

The first key signs, and all verify. To replace a key, put a new one first, and remove the old one when none of its
entries are pending. A process reads the keys before its first write, once a minute while it writes or delivers, and
when an entry does not match. In an event loop a write does not read them again. A process that finds no keys stores its
own again, or a new one.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from contextlib import nullcontext, suppress
from typing import Any

import bson
import pymongo
from bson.errors import BSONError
from pymongo import ReturnDocument
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, PyMongoError

from mongo_celery.mongo.keys import new_key
from mongo_celery.mongo.opening import ANSWER_SECONDS, to_user_error
from mongo_celery.mongo.redaction import keep_commands_out_of_logs
from mongo_celery.mongo.verdicts import ErrorContext, explain_error
from mongo_celery.outbox.entries import Entry

COLLECTION = "keys"
KEYS_OF_OUTBOXES = {"_id": {"$regex": "^outbox/"}}
"""Filter for the key documents of all outboxes."""

_REREAD_SECONDS = 60.0
"""Seconds between two checks for replaced keys."""

_NOT_COVERED = ("at", "attempts", "elsewhere", "signature")


class UnsignedEntryError(Exception):
    """An entry that another program has written: it has no valid signature."""


class EntrySigner:
    """
    Signs and verifies the entries of one outbox in one process. Safe for threads.

    Args:
        collection: the collection of the keys, with majority writes and majority reads.
        outbox: namespace and field of the entries.
    """

    def __init__(self, collection: Collection[dict[str, Any]], outbox: str) -> None:
        self._collection = collection
        self._outbox = outbox
        self._this = {"_id": f"outbox/{outbox}"}
        self._keys: tuple[bytes, ...] = ()
        self._read_at = -math.inf

    @property
    def full_name(self) -> str:
        """The namespace of all outboxes' keys in a database."""
        return self._collection.full_name

    def prepare(self) -> None:
        """
        Read the keys unless this process has already done so.

        Raises:
            AccessError: there is no right to read them, or they do not exist and cannot be created.
            ServerUnavailableError: an event loop runs here, and MongoDB gave no answer within some seconds.
            PyMongoError: MongoDB did not answer, as for the following write.
        """
        if self._keys:
            return
        is_bounded = _is_in_event_loop()
        try:
            with pymongo.timeout(ANSWER_SECONDS) if is_bounded else nullcontext():
                self.read()
        except PyMongoError as error:
            grant = f"find on {self.full_name}, and insert and update for the first process that uses it"
            context = ErrorContext(f"the signing keys of outboxes, {self.full_name}", grant)
            known = to_user_error(error, context) if is_bounded else explain_error(error, context)
            if known in (None, error):
                raise
            raise known from error

    def sign(self, entry: Entry) -> Entry:
        """Sign a new entry, and return it. Errors as in `prepare`."""
        if not self._keys:
            self.prepare()
        elif not _is_in_event_loop():
            self._read_again()
        entry.signature = self._signature(self._keys[0], entry)
        return entry

    def is_signed(self, entry: Entry) -> bool:
        """
        Return True if the outbox has signed an entry with a key that is still accepted.

        Raises:
            PyMongoError: MongoDB did not answer, so this is unknown.
        """
        if self._keys:
            self._read_again()
        if self._fits(entry):
            return True
        with pymongo.timeout(ANSWER_SECONDS):
            self.read()  # another process may have created or replaced the key
        return self._fits(entry)

    def _read_again(self) -> None:
        """Read the keys once a minute, because they may change. If MongoDB does not answer, keep the known keys."""
        if time.monotonic() - self._read_at > _REREAD_SECONDS:
            self._read_at = time.monotonic()  # also without an answer, so not for each entry
            with suppress(PyMongoError), pymongo.timeout(ANSWER_SECONDS):
                self.read()

    def read(self) -> None:
        """
        Read the keys, and store one if there are none.

        Raises:
            PyMongoError: MongoDB did not answer, or a right is missing.
        """
        keep_commands_out_of_logs()
        found = self._collection.find_one(self._this) or self._store_keys()
        keys = tuple(bytes(key) for key in found.get("keys") or () if isinstance(key, bytes) and key)
        if not keys:
            raise PyMongoError(
                f"Document {self._this['_id']!r} of {self.full_name} has no key, so no entry can be signed or "
                "sent. Remove the document. The next process stores a new key."
            )
        self._keys, self._read_at = keys, time.monotonic()

    def _store_keys(self) -> dict[str, Any]:
        """Store keys unless another process has already done so. Return the stored ones."""
        first = {"$setOnInsert": {"keys": list(self._keys) or [new_key()]}}
        try:
            found = self._collection.find_one_and_update(
                self._this, first, upsert=True, return_document=ReturnDocument.AFTER
            )
        except DuplicateKeyError:  # stored by another process at the same moment
            found = self._collection.find_one(self._this)
        return found or {}

    def _fits(self, entry: Entry) -> bool:
        try:
            return any(hmac.compare_digest(entry.signature, self._signature(key, entry)) for key in self._keys)
        except (BSONError, OverflowError, TypeError, ValueError):  # another program may have written anything there
            return False

    def _signature(self, key: bytes, entry: Entry) -> bytes:
        covered: dict[str, Any] = {"outbox": self._outbox, **entry.to_document()}
        for name in _NOT_COVERED:
            covered.pop(name, None)
        return hmac.digest(key, bson.encode(covered), "sha256")


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
