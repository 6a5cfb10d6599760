"""
Removing what was published, and letting go what cannot go on.

Removals do not wait for a majority: a fail-over that takes them back costs duplicates. They go in bulk, and so they are
late: at most by `SETTLE_SECONDS`, or by `SETTLE_DOCUMENTS`. What a document has got meanwhile is found by that, and
delivered in a turn of its own: one that somebody writes to all the time keeps nobody else waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bson import ObjectId
from pymongo import UpdateOne, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.outbox.claims import PendingClaims
from mongo_celery.outbox.commands import bounded, is_about_some, once_more, singly
from mongo_celery.outbox.delivery import HeldDocument, PublishedPart, Remainder

logger = logging.getLogger("mongo_celery.outbox")

SETTLE_SECONDS = 0.1
"""How long an entry that was published may still be pending: a crash repeats at most what was published meanwhile."""

SETTLE_DOCUMENTS = 100
"""How many documents may have entries that were published and are still pending."""


class Removals:
    """
    Removes entries from the documents of one collection.

    Args:
        collection: of the outbox.
        claims: conditions and updates on the collection's field.
        claim_ttl: seconds of a claim.
    """

    def __init__(self, collection: Collection[dict[str, Any]], claims: PendingClaims, claim_ttl: float) -> None:
        self.quick = collection.with_options(write_concern=WriteConcern(1), read_concern=ReadConcern("local"))
        """The collection, with writes and reads that do not wait for a majority."""
        self._claims = claims
        self._field = claims.field
        self._claim_ttl = claim_ttl

    def settle(self, parts: Sequence[PublishedPart]) -> Remainder:
        """
        Remove what was published, and let go what cannot go on.

        Returns:
            Documents in which something is left that this process still holds, and what could not be removed.

        Raises:
            PyMongoError: MongoDB did not answer; anything of it may have been done, and all may be done again.
        """
        if not parts:
            return Remainder()
        try:
            return self._settle(parts)
        except PyMongoError as error:
            if not is_about_some(error):
                raise
            if len(parts) == 1:
                return Remainder(failed=[(parts[0], error)])
        total = Remainder()

        def settle_one(part: PublishedPart) -> None:
            nonlocal total
            total = total.and_(self._settle([part]))

        return Remainder(failed=singly(parts, settle_one)).and_(total)

    def _settle(self, parts: Sequence[PublishedPart]) -> Remainder:
        whole = [part for part in parts if part.is_whole]
        others = [part for part in parts if part.names and not part.is_whole]
        if whole:
            published = [(part.held.document_id, part.names) for part in whole]
            with bounded():
                emptied = once_more(lambda: self.quick.update_many(*self._claims.emptied(published))).matched_count
            if emptied < len(whole):
                others += whole
        remainder = self._remove(others) if others else Remainder()
        self._release_alike([part for part in parts if part.lets_go])
        return remainder

    def _release_alike(self, parts: Sequence[PublishedPart]) -> None:
        """Let documents go, by one command for all that have the same pause; where an entry failed, one for each."""
        alike: dict[tuple[float, Any], list[HeldDocument]] = {}
        for number, part in enumerate(parts):
            pause = part.verdict.pause if part.verdict is not None else 0.0
            alike.setdefault((pause, None if part.failed is None else number), []).append(part.held)
        for (pause, number), held in alike.items():
            failed = None if number is None else parts[number].failed
            self.release([each.document_id for each in held], [each.owner for each in held], pause, failed)

    def _remove(self, parts: Sequence[PublishedPart]) -> Remainder:
        ids = [part.held.document_id for part in parts]
        removals = [
            UpdateOne(*self._claims.removed(part.held.document_id, part.names, part.held.owner, self._claim_ttl))
            for part in parts  # each for itself: entries of one name may lie in many documents
        ]
        with bounded():
            self.quick.bulk_write(removals, ordered=False)
            found = list(self.quick.find({"_id": {"$in": ids}}, {f"{self._field.claim}.owner": 1}))
        for gone in [] if len(found) == len(ids) else [each for each in ids if not _is_among(each, found)]:
            logger.warning(
                "document %r was deleted while its entries were delivered", gone, extra={"event": "document_deleted"}
            )
        going_on = [part.held.owner for part in parts if not part.lets_go]
        left = [document["_id"] for document in found if self._owner_in(document) in going_on]
        return Remainder(left, going_on if left else ())

    def _owner_in(self, document: Mapping[str, Any]) -> Any:
        stored = document.get(self._field.name)
        claim = stored.get("claim") if isinstance(stored, Mapping) else None
        return claim.get("owner") if isinstance(claim, Mapping) else None

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

        Raises:
            PyMongoError: MongoDB did not answer.
        """

        def let_go(these: Sequence[object]) -> None:
            with bounded():
                self.quick.update_many(*self._claims.released(these, owners, pause, failed))

        if not document_ids or not owners:
            return
        try:
            let_go(document_ids)
        except PyMongoError as error:
            if not is_about_some(error):
                raise
            if len(document_ids) > 1:
                singly(document_ids, lambda each: let_go([each]))


def _is_among(document_id: object, documents: Sequence[Mapping[str, Any]]) -> bool:
    return any(document["_id"] == document_id for document in documents)
