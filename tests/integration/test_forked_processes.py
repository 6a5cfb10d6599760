"""A prefork worker: what its parent has used already works in the child, with connections of the child's own."""

from __future__ import annotations

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Outbox, TwoPhaseCommit
from mongo_celery.errors import ForkedClientError
from tests.fixtures.forking import holds_after_a_fork
from tests.integration.twophase_rig import make_accounts
from tests.rig.fenced import Document, view
from tests.rig.outbox import Rig, deliver_in_writes


@pytest.mark.parametrize("how", ["callable", "bridge"])
def test_parent_and_child_write_and_deliver_through_one_outbox(rig: Rig, mongo_url: str, how: str) -> None:
    """The driver warns, here by an error, when a client from before the fork is used; each entry arrives once."""
    name = rig.database.name
    if how == "bridge":
        bridge = Bridge(rig.app, mongo_url, name=name, autodiscover=False)
        outbox = bridge.outbox(f"{name}.orders", watch=False, sweep_every=None)
    else:
        outbox = Outbox(rig.app, lambda: MongoClient(mongo_url)[name]["orders"], sweep_every=None)
    deliver_in_writes(outbox)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])

    def close() -> None:
        outbox.runtime.close()
        outbox.collection.database.client.close()

    def writes() -> bool:
        outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])
        done = outbox.status().pending == 0
        close()
        return done

    assert holds_after_a_fork(writes)
    outbox.insert_one({"_id": 3}, tasks=[rig.add.s(3, 0)])
    assert rig.sent() == [[1, 0], [2, 0], [3, 0]]
    close()


def test_parent_and_child_drive_transactions_of_one_coordinator(database: Database[Document], mongo_url: str) -> None:
    make_accounts(database, A=100, B=0)
    bank = TwoPhaseCommit(None, lambda: MongoClient(mongo_url)[database.name]["transactions"], application="bank")
    bank.transfer("A", "B", 10)

    def transfers() -> bool:
        bank.transfer("A", "B", 20)
        bank.transactions.database.client.close()
        return True

    assert holds_after_a_fork(transfers)
    bank.transfer("A", "B", 30)
    bank.transactions.database.client.close()
    assert {each["_id"]: each["balance"] for each in database["accounts"].find()} == {"A": 40, "B": 60}


def test_a_fenced_view_from_before_a_fork_is_refused(database: Database[Document]) -> None:
    """P9: a child that shares its parent's sockets reads another's answers."""
    mine = view(database["orders"], 5)
    mine.update_one({"_id": 1}, {"$set": {"n": 1}}, upsert=True)

    def is_refused() -> bool:
        with pytest.raises(ForkedClientError):
            mine.update_one({"_id": 1}, {"$set": {"n": 2}})
        return True

    assert holds_after_a_fork(is_refused)
