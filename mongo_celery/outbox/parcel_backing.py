"""What stands behind an `OutboxCollection`: as behind an outbox, with parcels for documents."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pymongo
from pymongo.client_session import ClientSession

from mongo_celery.errors import DeploymentError
from mongo_celery.forking import per_process
from mongo_celery.outbox.backing import Backing
from mongo_celery.outbox.box import Contents
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.failures import FailurePolicy
from mongo_celery.outbox.index import OutboxIndexes
from mongo_celery.outbox.parcel_relay import ParcelRelay
from mongo_celery.outbox.parcel_store import INDEX, ParcelStore
from mongo_celery.outbox.parcels import ParcelHead

_ANSWER_SECONDS = 5.0
_OLDEST = (5, 0)
"""The first MongoDB that reads at a time of one's choice outside of a transaction (read concern `snapshot`)."""


class ParcelBacking(Backing):
    """The parts of one `OutboxCollection`; each process makes each of them when it first needs it."""

    _is_new_enough = False

    @property
    def index_name(self) -> str:
        """Of the index on what is pending."""
        return INDEX

    @property
    def full_names(self) -> Sequence[str]:
        """The namespaces that are written to, dead letters apart."""
        return [self.collection.full_name, self.store.keys.full_name]

    @per_process
    def store(self) -> ParcelStore:
        """The parcels."""
        return ParcelStore(self.plain, self.claims)

    @per_process
    def _here(self) -> threading.local:
        return threading.local()

    @per_process
    def indexes(self) -> OutboxIndexes:
        """The indexes, which come with the first use."""
        return OutboxIndexes(self.store.index, self.store.due_index, self.store.key_index)

    def prepare(self) -> None:
        """
        Have the indexes before a transaction writes: one that is created later waits for it, and others behind.

        Raises:
            DeploymentError: the server is too old to say in which order transactions were committed: what would be
                stored now could never be delivered.
        """
        if not self._is_new_enough:
            with pymongo.timeout(_ANSWER_SECONDS):
                found = self.plain.database.client.server_info()["version"]
            self._is_new_enough = tuple(map(int, found.split(".")[:2])) >= _OLDEST
            if not self._is_new_enough:
                raise DeploymentError(
                    f"An OutboxCollection needs MongoDB {_OLDEST[0]}.{_OLDEST[1]} or newer, and this is {found}: "
                    "upgrade it, or use an Outbox, which keeps entries in the documents themselves."
                )
        self.indexes.ensure(patiently=False)

    @per_process
    def _relay(self) -> ParcelRelay:
        return ParcelRelay(
            self.store,
            self.publisher,
            lambda: self.dead_letters,
            signer=self.signer,
            claim_ttl=self._options.claim_ttl,
            policy=FailurePolicy(self._options.failure_policy, self._options.max_attempts),
            counters=self.counters,
        )

    def due(
        self,
        older_than: float,
        limit: int,
        *,
        passing_over: Sequence[Any] = (),
        by_lot: bool = False,  # noqa: ARG002 - they have their turn one after the other in any case
        seconds: float | None = None,
    ) -> list[Any]:
        """The `_id`s of heads that have waited so many seconds, and that this process may claim."""
        with nullcontext() if seconds is None else pymongo.timeout(seconds):
            self._here.looked_at = self.store.due(older_than, limit, passing_over)
        return [head.id for head in self._here.looked_at]

    def still_due(self, document_ids: Sequence[Any]) -> list[Any]:
        """Those of some parcels that this process may claim at once, and the heads that their keys have now."""
        looked_at: Sequence[ParcelHead] = getattr(self._here, "looked_at", ())  # by this thread
        keys = {head.key for head in looked_at if head.key is not None and head.id in document_ids}
        return self.store.still_due([*document_ids, *(head.id for head in self.store.heads(keys))])

    def is_indexed(self) -> bool | None:
        """Whether the index is there; None where the user may not look."""
        return self.store.index.exists()

    def insert(self, contents: Contents, session: ClientSession | None) -> list[Any]:
        """Insert what a transaction is to send; the `_id`s of the new parcels."""
        self.watch.needed()
        return [head.id for head in self.store.insert(contents.entries, contents.serialized, session)]

    def put_back(self, place: object, entry: Entry) -> None:
        """Insert an entry that was set aside, at the end of what waits under its key; a second time changes nothing."""
        self.store.put_back(place if isinstance(place, str) else None, entry)

    def dispatch_parcels(self, parcel_ids: Sequence[Any]) -> None:
        """Hand parcels that were committed to the dispatcher: never blocks (but with `"wait"`), and never fails."""
        if not self.at_once or not parcel_ids:
            return
        if self.at_once == "wait":
            self.dispatcher.wait_all(parcel_ids, self._wait_seconds)
        else:
            self.dispatcher.hint(*parcel_ids)
