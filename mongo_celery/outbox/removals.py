"""
Removing published entries, and releasing documents that cannot be delivered now.

Removals do not wait for a majority: if a fail-over takes them back, this causes duplicates. They go in bulk, after some
documents were published. If a document has more entries meanwhile, they get a separate turn, so a document with
continuous writes delays no other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId
from pymongo import UpdateOne, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.outbox.claims import (
    ServerClock,
    build_any_removal,
    build_count,
    build_release,
    build_removal,
    match_whole,
)
from mongo_celery.outbox.commands import do_each, is_about_some, limit_command
from mongo_celery.outbox.delivery import HeldDocument
from mongo_celery.outbox.pending import CLAIM, FIELD, LONG_AGO

logger = logging.getLogger("mongo_celery.outbox")


@dataclass(slots=True)
class Remainder:
    """
    The rest after removals.

    Attributes:
        more: `_id`s of documents with more entries that this process may deliver now.
        failed: documents with failed removals, and reasons.
    """

    more: list[Any] = field(default_factory=list)
    failed: list[tuple[HeldDocument, PyMongoError]] = field(default_factory=list)


class Removals:
    """
    Removes entries from the documents of one collection.

    Args:
        collection: the collection of the outbox.
        clock: the server's clock.
        is_own: True if empty documents are deleted.
    """

    def __init__(self, collection: Collection[dict[str, Any]], clock: ServerClock, *, is_own: bool) -> None:
        self.quick = collection.with_options(write_concern=WriteConcern(1), read_concern=ReadConcern("local"))
        """The collection with writes and reads that do not wait for a majority."""
        self._clock = clock
        self._is_own = is_own

    def settle(self, held: Sequence[HeldDocument], left: Remainder) -> None:
        """
        Remove published entries, and release stopped documents.

        Args:
            held: the documents.
            left: receives documents with more entries that this process still holds, and failed removals.

        Raises:
            PyMongoError: MongoDB did not answer. Any part may be done, and all may be repeated.
        """
        try:
            self._settle(held, left)
        except PyMongoError as error:
            if not is_about_some(error):
                raise
            if len(held) == 1:
                left.failed.append((held[0], error))
            else:
                left.failed += do_each(held, lambda each: self._settle([each], left))

    def _settle(self, held: Sequence[HeldDocument], left: Remainder) -> None:
        whole = [each for each in held if each.is_whole]
        others = [each for each in held if each.names and not each.is_whole]
        if whole:
            where = match_whole([(each.id, each.names) for each in whole])
            with limit_command():
                emptied = self._empty(where)
            if emptied < len(whole):
                others += whole
        if others:
            self._remove(others, left)
        alike: dict[tuple[float, Any], list[HeldDocument]] = {}
        for number, each in enumerate(each for each in held if each.is_stopped):
            pause = each.verdict.pause if each.verdict is not None else 0.0
            alike.setdefault((pause, None if each.failed is None else number), []).append(each)
        for (pause, _), these in alike.items():  # one command for all with the same pause
            self.release([each.id for each in these], [each.owner for each in these], pause, these[0].failed)
        left.more += [each.id for each in held if each.is_expired]  # they are free, to be claimed again

    def _empty(self, where: Mapping[str, Any]) -> int:
        if self._is_own:
            return self.quick.delete_many(where).deleted_count
        return self.quick.update_many(where, {"$unset": {FIELD: 1}}).matched_count

    def _remove(self, held: Sequence[HeldDocument], left: Remainder) -> None:
        """Remove by id, separately for each document, because many documents may contain the same id."""
        ids = [each.id for each in held]
        with limit_command():
            exact = [UpdateOne(*build_removal(each.id, each.names)) for each in held]
            if self.quick.bulk_write(exact, ordered=False).matched_count < len(held):
                anyhow = [UpdateOne(*build_any_removal(each.id, each.names)) for each in held]
                self.quick.bulk_write(anyhow, ordered=False)
                if self._is_own:
                    self.quick.delete_many({"_id": {"$in": ids}, FIELD: {"$exists": False}})
            found = list(self.quick.find({"_id": {"$in": ids}}, {f"{CLAIM}.owner": 1}))
        for gone in [] if self._is_own or len(found) == len(ids) else ids:
            if not any(each["_id"] == gone for each in found):
                logger.warning(
                    "Document %r was deleted while its entries were delivered. Entries that were not sent are lost",
                    gone,
                    extra={"event": "document_deleted"},
                )
        owners = [each.owner for each in held if not each.is_stopped]
        left.more += [document["_id"] for document in found if _read_owner(document) in owners]

    def release(
        self,
        document_ids: Sequence[object],
        owners: Sequence[ObjectId],
        pause: float = 0.0,
        failed: object = None,
    ) -> None:
        """
        Release these owners' claims, and hold their documents back for a while.

        A claim that cannot be released lapses.

        Args:
            document_ids: the documents.
            owners: the owners of the claims.
            pause: seconds before another relay may take them.
            failed: id of an entry whose attempts increase by one.

        Raises:
            PyMongoError: MongoDB did not answer.
        """

        def release(these: Sequence[object]) -> None:
            with limit_command():
                until = self._clock.after(pause) if pause else LONG_AGO
                where, change = build_release(these, owners, until)
                if failed is None:
                    self.quick.update_many(where, change)
                    return
                counted, array_filters = build_count(failed)
                self.quick.update_many(where, {**change, **counted}, array_filters=array_filters)

        if not document_ids or not owners:
            return
        try:
            release(document_ids)
        except PyMongoError as error:
            if not is_about_some(error):
                raise
            if len(document_ids) > 1:
                do_each(document_ids, lambda each: release([each]))


def _read_owner(document: Mapping[str, Any]) -> Any:
    stored = document.get(FIELD)
    claim = stored.get("claim") if isinstance(stored, Mapping) else None
    return claim.get("owner") if isinstance(claim, Mapping) else None
