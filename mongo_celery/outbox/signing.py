"""
The signatures of entries: nobody but an outbox starts tasks through its documents.

An app that passes a user's fields on to `$set` lets that user write entries. So each entry carries an HMAC-SHA256 over
everything that is published of it, and over the outbox that it was written for. Only `at` and `attempts` are not
covered: they say when an entry is tried. An entry without a right signature is never published.

The key lies in the state database, in one document for each outbox::

    {_id: "outbox/shop.orders/pendingEvents", keys: [key, ...]}

The first key signs, and each of them verifies. To exchange a key, put a new one in front, and remove the old one when
nothing is pending that it has signed. A process reads the keys before its first write, once a minute while it writes or
delivers, and whenever an entry does not fit them. In an event loop a write does not read them again. A process that
finds no keys stores its own again, or a new one.
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

from mongo_celery.errors import ServerUnavailableError
from mongo_celery.mongo.keys import new_key
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import keep_commands_out_of_logs, short
from mongo_celery.mongo.verdicts import ErrorContext, explain_error
from mongo_celery.outbox.entries import Entry

COLLECTION = "keys"
KEYS_OF_OUTBOXES = {"_id": {"$regex": "^outbox/"}}
"""A filter for the documents of all outboxes."""

_REREAD_SECONDS = 60.0
"""For so long a process does not look whether the keys were exchanged."""

_NOT_COVERED = ("at", "attempts", "signature")


class UnsignedEntryError(Exception):
    """An entry has no right signature: somebody other than the outbox has written it."""


class EntrySigner:
    """
    Signs and verifies the entries of one outbox in one process. Safe for threads.

    Args:
        collection: of keys, with majority writes and majority reads.
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
        """The namespace of the keys of all outboxes of a database."""
        return self._collection.full_name

    def exists(self) -> bool:
        """Return True if keys are stored; this stores none."""
        keep_commands_out_of_logs()
        with pymongo.timeout(ANSWER_SECONDS):
            return self._collection.find_one(self._this) is not None

    def prepare(self) -> None:
        """
        Read the keys unless this process has done so.

        Raises:
            AccessError: the user may not read them, or there are none and he may not create them.
            ServerUnavailableError: an event loop runs here, and MongoDB gave no answer within some seconds.
            PyMongoError: MongoDB did not answer, as of the write that is to follow.
        """
        if self._keys:
            return
        is_bounded = _is_in_event_loop()
        try:
            with pymongo.timeout(ANSWER_SECONDS) if is_bounded else nullcontext():
                self.read()
        except PyMongoError as error:
            grant = f"find on {self.full_name}, and for the first process of all insert and update"
            known = explain_error(error, ErrorContext(f"the signing keys of outboxes, {self.full_name}", grant))
            if known is None and is_bounded and error.timeout:
                known = ServerUnavailableError(
                    f"MongoDB gave no answer within {ANSWER_SECONDS:.0f} s for the signing key of outbox "
                    f"{self._outbox}, so nothing was written. Last error: {short(error)}"
                )
            if known is None:
                raise
            raise known from error

    def sign(self, entry: Entry) -> Entry:
        """Give a new entry its signature, and return it; errors as of `prepare`."""
        if not self._keys:
            self.prepare()
        elif not _is_in_event_loop():
            self._read_again()
        entry.signature = self._signature(self._keys[0], entry)
        return entry

    def is_signed(self, entry: Entry) -> bool:
        """
        Return True if the outbox has signed an entry by a key that is still accepted.

        Raises:
            PyMongoError: MongoDB did not answer, so it cannot be told.
        """
        if self._keys:
            self._read_again()
        if self._fits(entry):
            return True
        with pymongo.timeout(ANSWER_SECONDS):
            self.read()  # another process may have made or exchanged the key
        return self._fits(entry)

    def _read_again(self) -> None:
        """Read the keys once a minute: they may have been exchanged. Without an answer the known ones stay."""
        if time.monotonic() - self._read_at > _REREAD_SECONDS:
            self._read_at = time.monotonic()  # also if there is no answer: not for each entry
            with suppress(PyMongoError), pymongo.timeout(ANSWER_SECONDS):
                self.read()

    def read(self) -> None:
        """
        Read the keys, and store one where there is none.

        Raises:
            PyMongoError: MongoDB did not answer, or the user may not.
        """
        keep_commands_out_of_logs()
        found = self._collection.find_one(self._this) or self._stored()
        keys = tuple(bytes(key) for key in found.get("keys") or () if isinstance(key, bytes) and key)
        if not keys:
            raise PyMongoError(
                f"Document {self._this['_id']!r} of {self.full_name} holds no key, so no entry can be signed or sent. "
                "Remove the document: the next process stores a new key."
            )
        self._keys, self._read_at = keys, time.monotonic()

    def _stored(self) -> dict[str, Any]:
        """Store keys unless another process has done so meanwhile; return what is stored."""
        first = {"$setOnInsert": {"keys": list(self._keys) or [new_key()]}}
        try:
            found = self._collection.find_one_and_update(
                self._this, first, upsert=True, return_document=ReturnDocument.AFTER
            )
        except DuplicateKeyError:  # at the same moment: now it is there
            found = self._collection.find_one(self._this)
        return found or {}

    def _fits(self, entry: Entry) -> bool:
        try:
            return any(hmac.compare_digest(entry.signature, self._signature(key, entry)) for key in self._keys)
        except (BSONError, OverflowError, TypeError, ValueError):  # whatever somebody has written there
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
