"""The collection behind an `OutboxCollection`: its index, what is due in it, and how it stands."""

from __future__ import annotations

from collections.abc import Collection as Some
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DocumentTooLarge, DuplicateKeyError, OperationFailure
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.verdicts import is_too_large
from mongo_celery.outbox.claims import PendingClaims
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.index import OutboxIndex
from mongo_celery.outbox.parcels import FIELD_OF_PARCELS, ORDER, ParcelHead, head_of, new_parcels

Document = dict[str, Any]

INDEX = "parcels"
_PAGE = 200
"""Number of due parcels that are searched at a time for the heads of their keys."""

_KEYS = [("key", 1), *ORDER]
_DUE = [("key", 1), (FIELD_OF_PARCELS.until, 1)]
_AT = [("at", 1)]
_OF_KEYS = {"transactions": {"$exists": True}}
_KEY_SECONDS = 86_400
"""How long the document of a key is kept after the last transaction that was serialized by it."""


class ParcelStore:
    """
    The parcels of one collection, and the keys by which transactions are serialized in the one beside it.

    Args:
        collection: opened with majority writes, for plain dicts.
        claims: conditions on what is pending.
    """

    def __init__(self, collection: Collection[Document], claims: PendingClaims) -> None:
        self.collection = collection
        self.keys = collection.database[f"{collection.name}_keys"].with_options(write_concern=collection.write_concern)
        self._local = collection.with_options(read_concern=ReadConcern("local"))
        self.claims = claims
        self._after = ""  # threads of a process share the turns, and a race between them costs nothing but fairness
        self._is_singles_turn = False

    @property
    def index(self) -> OutboxIndex:
        """The index by which heads are found."""
        return OutboxIndex(self.collection, INDEX, _KEYS, "each sweep reads the whole collection")

    @property
    def due_index(self) -> OutboxIndex:
        """The index by which parcels are found that are due, and no others."""
        return OutboxIndex(self.collection, "due", _DUE, "each sweep reads the whole collection")

    @property
    def key_index(self) -> OutboxIndex:
        """The index by which keys expire, and nothing else that somebody may have in a collection of that name."""
        expiry = {"expireAfterSeconds": _KEY_SECONDS}
        return OutboxIndex(self.keys, "expiry", _AT, "keys of serialize=True stay for ever", _OF_KEYS, expiry)

    # -- write -------------------------------------------------------------------------------------

    def insert(
        self, entries: Mapping[str | None, Sequence[Entry]], serialized: set[str], session: ClientSession | None
    ) -> list[ParcelHead]:
        """
        Insert what a transaction is to send; the new parcels.

        Args:
            entries: by key.
            serialized: keys whose transactions follow each other: all of them write the key's document.
            session: of the transaction.

        Raises:
            OutboxRefusedError: an entry is too large for a document; the transaction cannot be committed.
            PyMongoError: as of any write.
        """
        parcels = [parcel for key, each in entries.items() for parcel in new_parcels(key, each)]
        if not parcels:
            return []
        for key in sorted(serialized):  # in one order, so that two transactions do not wait for each other
            change = {"$inc": {"transactions": 1}, "$currentDate": {"at": True}}
            self.keys.update_one({"_id": key}, change, upsert=True, session=session)
        try:
            self.collection.insert_many(parcels, session=session)
        except (DocumentTooLarge, OperationFailure) as error:
            if not is_too_large(error):
                raise
            raise OutboxRefusedError(
                "a task or event is too large for a document of MongoDB, which holds 16 MB; pass an id instead of data."
            ) from error
        return [head_of(parcel) for parcel in parcels]

    def put_back(self, key: str | None, entry: Entry) -> bool:
        """Insert one entry as a parcel named after it; False if that is there already."""
        (parcel,) = new_parcels(key, [entry])
        try:
            self.collection.insert_one({**parcel, "_id": entry.id})
        except DuplicateKeyError:
            return False
        return True

    # -- what is due -------------------------------------------------------------------------------

    def due(self, older_than: float, limit: int, passing_over: Sequence[Any] = ()) -> list[ParcelHead]:
        """
        Heads of keys that have waited so many seconds, and parcels without a key. Of both kinds there are half as many
        as asked for, if there are enough, and more where the other kind has fewer.

        Keys have their turn one after the other, from where the last call ended: those that cannot be sent keep no
        others waiting, however many parcels stand behind them. Parcels without one have theirs in the order of the
        index: those that were never claimed first.

        Args:
            older_than: the seconds.
            limit: how many at most.
            passing_over: `_id`s of parcels that are not wanted; those behind them in their keys wait for them.
        """
        wanted = {"_id": {"$nin": list(passing_over)}} if passing_over else {}
        found = self._local.find(self.claimable(older_than, key=None, **wanted), {"_id": 1}, limit=limit)
        single = [ParcelHead(parcel["_id"], None) for parcel in found]
        self._is_singles_turn = not self._is_singles_turn
        share = limit // 2 or int(self._is_singles_turn)
        room = limit - min(len(single), share)
        keyed: list[ParcelHead] = []
        for begin in dict.fromkeys((self._after, "")):
            seen = {head.key for head in keyed}
            behind = (head for head in self._behind(begin, older_than, wanted) if head.key not in seen)
            keyed += islice(behind, room - len(keyed))
        if room:
            self._after = next((head.key for head in reversed(keyed) if head.key is not None), "")
        return [*single[: limit - len(keyed)], *keyed]

    def still_due(self, ids: Sequence[Any], older_than: float | None = None) -> list[Any]:
        """Return those of some parcels that a relay may claim."""
        these = self.claimable(older_than, _id={"$in": list(ids)})
        return [parcel["_id"] for parcel in self._local.find(these, {"_id": 1})]

    def claimable(self, older_than: float | None, **where: Any) -> Document:
        """
        Return a filter for parcels that a relay may claim, also where somebody has written over what was pending.

        Args:
            older_than: seconds that the oldest entry must have waited.
            where: more conditions; each branch has them, since each is a range of the index.
        """
        field = FIELD_OF_PARCELS
        written_over = {field.until: {"$exists": False}, field.name: {"$not": {"$type": "object"}}}
        return {"$or": [{**where, **each} for each in (*self.claims.claimable(older_than)["$or"], written_over)]}

    def heads(self, keys: Some[str]) -> list[ParcelHead]:
        """The first parcels of keys, as this process sees them."""
        if not keys:
            return []
        first = {"$group": {"_id": "$key", "id": {"$first": "$_id"}}}
        order = {"key": 1, **dict(ORDER)}
        stages: list[Document] = [{"$match": {"key": {"$in": list(keys)}}}, {"$sort": order}, first]
        return [ParcelHead(found["id"], found["_id"]) for found in self._local.aggregate(stages)]

    def _behind(self, key: str, older_than: float, wanted: Document) -> Iterator[ParcelHead]:
        """Yield the due heads behind a key, in the order of keys."""
        while True:
            due = self.claimable(older_than, key={"$gt": key})
            parcels = list(self._local.find(due, {"key": 1}).sort(_DUE).limit(_PAGE))
            heads = self.heads({parcel["key"] for parcel in parcels})
            free = self.still_due([head.id for head in heads], older_than)
            unwanted = wanted.get("_id", {}).get("$nin", ())
            found = [head for head in heads if head.id in free and head.id not in unwanted]
            yield from sorted(found, key=lambda head: str(head.key))
            if len(parcels) < _PAGE:
                return
            key = parcels[-1]["key"]  # the rest of this key stands behind its head
