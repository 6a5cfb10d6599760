"""
Removing what was published, and letting go what cannot go on.

Removals do not wait for a majority: a fail-over that takes them back costs duplicates. They go in bulk, and so they are
late: at most by `SETTLE_SECONDS`, or by `SETTLE_DOCUMENTS`. What a document has got meanwhile is found by that, and
delivered in a turn of its own: one that somebody writes to all the time keeps nobody else waiting.
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

from mongo_celery.outbox.claims import PendingClaims, ServerClock
from mongo_celery.outbox.commands import is_about_some, limit_command, once_more, singly
from mongo_celery.outbox.delivery import HeldDocument
from mongo_celery.outbox.pending import LONG_AGO

logger = logging.getLogger("mongo_celery.outbox")

SETTLE_SECONDS = 0.1
"""How long an entry that was published may still be pending: a crash repeats at most what was published meanwhile."""

SETTLE_DOCUMENTS = 100
"""How many documents may have entries that were published and are still pending."""


@dataclass(slots=True)
class Remainder:
    """
    What removals have left.

    Attributes:
        document_ids: documents in which something is left that this process may deliver now.
        owners: of this process's claims on them.
        failed: what could not be removed, each with the reason.
    """

    document_ids: list[Any] = field(default_factory=list)
    owners: list[ObjectId] = field(default_factory=list)
    failed: list[tuple[HeldDocument, PyMongoError]] = field(default_factory=list)


class Removals:
    """
    Removes entries from the documents of one collection.

    Args:
        collection: of the outbox.
        claims: conditions and updates on the collection's field.
        clock: of the server.
        is_own: whether an emptied document is deleted.
    """

    def __init__(
        self, collection: Collection[dict[str, Any]], claims: PendingClaims, clock: ServerClock, *, is_own: bool
    ) -> None:
        self.quick = collection.with_options(write_concern=WriteConcern(1), read_concern=ReadConcern("local"))
        """The collection, with writes and reads that do not wait for a majority."""
        self._claims = claims
        self._clock = clock
        self._is_own = is_own

    def settle(self, held: Sequence[HeldDocument], left: Remainder) -> None:
        """
        Remove what was published, and let go what cannot go on.

        Args:
            held: the documents.
            left: gets those in which something is left that this process still holds, and what could not be removed.

        Raises:
            PyMongoError: MongoDB did not answer; anything of it may have been done, and all may be done again.
        """
        try:
            self._settle(held, left)
        except PyMongoError as error:
            if not is_about_some(error):
                raise
            if len(held) == 1:
                left.failed.append((held[0], error))
            else:
                left.failed += singly(held, lambda each: self._settle([each], left))

    def _settle(self, held: Sequence[HeldDocument], left: Remainder) -> None:
        whole = [each for each in held if each.is_whole]
        others = [each for each in held if each.names and not each.is_whole]
        if whole:
            where = self._claims.match_whole([(each.id, each.names) for each in whole])
            with limit_command():
                emptied = once_more(lambda: self._empty(where))
            if emptied < len(whole):
                others += whole
        if others:
            self._remove(others, left)
        self._release_alike([each for each in held if each.is_stopped])
        left.document_ids += [each.id for each in held if each.is_expired]  # they are free, to be claimed anew

    def _empty(self, where: Mapping[str, Any]) -> int:
        if self._is_own:
            return self.quick.delete_many(where).deleted_count
        return self.quick.update_many(where, {"$unset": {self._claims.field.name: 1}}).matched_count

    def _remove(self, held: Sequence[HeldDocument], left: Remainder) -> None:
        """Remove by id, of each document for itself: entries of one id may lie in many documents."""
        ids, field = [each.id for each in held], self._claims.field
        with limit_command():
            exact = [UpdateOne(*self._claims.build_removal(each.id, each.names)) for each in held]
            if self.quick.bulk_write(exact, ordered=False).matched_count < len(held):
                anyhow = [UpdateOne(*self._claims.build_any_removal(each.id, each.names)) for each in held]
                self.quick.bulk_write(anyhow, ordered=False)
                if self._is_own:
                    self.quick.delete_many({"_id": {"$in": ids}, field.name: {"$exists": False}})
            found = list(self.quick.find({"_id": {"$in": ids}}, {f"{field.claim}.owner": 1}))
        for gone in [] if self._is_own or len(found) == len(ids) else ids:
            if not any(each["_id"] == gone for each in found):
                logger.warning(
                    "document %r was deleted while its entries were delivered",
                    gone,
                    extra={"event": "document_deleted"},
                )
        going_on = [each.owner for each in held if not each.is_stopped]
        still = [document["_id"] for document in found if self._owner_in(document) in going_on]
        left.document_ids += still
        left.owners += going_on if still else []

    def _owner_in(self, document: Mapping[str, Any]) -> Any:
        stored = document.get(self._claims.field.name)
        claim = stored.get("claim") if isinstance(stored, Mapping) else None
        return claim.get("owner") if isinstance(claim, Mapping) else None

    def _release_alike(self, held: Sequence[HeldDocument]) -> None:
        """Let documents go, by one command for all that have the same pause; where an entry failed, one for each."""
        alike: dict[tuple[float, Any], list[HeldDocument]] = {}
        for number, each in enumerate(held):
            pause = each.verdict.pause if each.verdict is not None else 0.0
            alike.setdefault((pause, None if each.failed is None else number), []).append(each)
        for (pause, _), these in alike.items():
            self.release([each.id for each in these], [each.owner for each in these], pause, these[0].failed)

    def release(
        self,
        document_ids: Sequence[object],
        owners: Sequence[ObjectId],
        pause: float = 0.0,
        failed: object = None,
    ) -> None:
        """
        Let claims go that are still these owners', and hold their documents back for a while.

        A claim that cannot be let go lapses.

        Args:
            document_ids: which.
            owners: of the claims.
            pause: seconds before the next relay may take them.
            failed: id of an entry whose attempts grow by one.

        Raises:
            PyMongoError: MongoDB did not answer.
        """

        def let_go(these: Sequence[object]) -> None:
            with limit_command():
                until = self._clock.after(pause) if pause else LONG_AGO
                where, change = self._claims.build_release(these, owners, until)
                if failed is None:
                    self.quick.update_many(where, change)
                    return
                counted, array_filters = self._claims.build_count(failed)
                self.quick.update_many(where, {**change, **counted}, array_filters=array_filters)

        if not document_ids or not owners:
            return
        try:
            let_go(document_ids)
        except PyMongoError as error:
            if not is_about_some(error):
                raise
            if len(document_ids) > 1:
                singly(document_ids, lambda each: let_go([each]))
