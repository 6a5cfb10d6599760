"""One partition on a real replica set, as tests of its updates see and spoil it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.claims import Claim, Claims
from mongo_celery.bridge.state.partitions import Image, Partitions
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.worker.envelope import Run
from tests.fixtures.mongo import sparse
from tests.fixtures.samples import first_token
from tests.rig.changes import BRIDGE, HANDLER, TERM, Document, token

TTL = 30.0
"""Seconds. A call may take a part of it, and a busy machine stalls for some seconds."""
NASTY = ("$committed", "$$NOW", "$", "$.x", "a.b", "")
"""Strings of users that a pipeline would read as expressions, and others that look odd."""


def layouts(*names: str, partitioning: int = 0, partitions: int = 1) -> dict[str, Layout]:
    return {name: Layout(partitioning, partitions, "blake2b-64:_id") for name in names}


@dataclass(frozen=True, slots=True)
class PartitionRig:
    store: Store
    where: str
    documents: Collection[Document]
    letters: Collection[Document]

    @property
    def claims(self) -> Claims:
        return self.store.claims

    @property
    def partitions(self) -> Partitions:
        return self.store.partitions

    @property
    def document(self) -> Document:
        found = self.documents.find_one({"_id": self.where})
        assert found is not None, "the partition exists"
        return found

    @property
    def image(self) -> Image:
        self.partitions.flush()  # a success is written with w:1
        return self.partitions.look([self.where])[0]

    def spoil(self, **changes: Any) -> None:
        """Set fields as no update of the library would; None removes one."""
        found = {name: value for name, value in changes.items() if value is not None}
        gone = dict.fromkeys(changes.keys() - found.keys(), "")
        update = {"$set": found, "$unset": gone}
        self.documents.update_one({"_id": self.where}, {name: fields for name, fields in update.items() if fields})

    def lapse(self) -> None:
        self.documents.update_one({"_id": self.where}, [{"$set": {"claim.until": {"$subtract": ["$$NOW", 1]}}}])

    def try_claim(self, first: int = 1, last: int | None = None, *, owner: str = "me", **options: Any) -> Claim | None:
        given = {"term": TERM, "token": token(first)["_data"], **options}
        return self.claims.take(self.where, owner=owner, first=first, last=last or first, **given)

    def claim(self, first: int = 1, last: int | None = None, *, owner: str = "me", **options: Any) -> Claim:
        """Claim a run that must be free."""
        found = self.try_claim(first, last, owner=owner, **options)
        assert found is not None, f"the run of {first} is free: {self.document}"
        return found

    def take_over(self, version: int) -> Image:
        """A take-over; returns the partition's image."""
        (image,) = self.partitions.take_over({HANDLER: 0}, version)
        return image


def make_partition(client: MongoClient[Document], database: str, ttl: float = TTL) -> PartitionRig:
    """Make a partition that was just taken over with `TERM`."""
    store = Store(client, BridgeOptions(name=BRIDGE, database=database, lease_ttl=ttl, claim_ttl=ttl))
    store.partitions.prepare({HANDLER: None}, layouts(HANDLER), TERM)
    store.partitions.take_over({HANDLER: 0}, TERM)
    majority = client.get_database(database, write_concern=WriteConcern("majority"))
    where = store.partitions.partition_id(HANDLER, 0, 0)
    return PartitionRig(store, where, sparse(majority["partitions"]), majority["dead_letters"])


def claim_run(store: Store, run: Run) -> Claim | None:
    """Claim a run as a worker does; None where it is refused."""
    return store.claims.take(
        run.partition_id,
        owner=uuid4().hex,
        term=run.term,
        first=run.first,
        last=run.last,
        token=first_token(run),
        expected=run.fencing_token,
    )
