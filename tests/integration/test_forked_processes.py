"""A prefork worker: what its parent has used already works in the child, with connections of the child's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Outbox, TwoPhaseCommit
from tests.fixtures.forking import holds_after_a_fork
from tests.integration.outbox_rig import Rig, opened
from tests.integration.twophase_rig import make_accounts

Document = dict[str, Any]


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


def outbox_of(rig: Rig, mongo_url: str, how: str) -> Outbox:
    name = rig.database.name
    if how == "bridge":
        bridge = Bridge(rig.app, mongo_url, name=name, autodiscover=False)
        return bridge.outbox(f"{name}.orders", watch=False, sweep_every=None, at_once="wait")
    return Outbox(rig.app, lambda: MongoClient(mongo_url)[name]["orders"], sweep_every=None, at_once="wait")


def close(outbox: Outbox) -> None:
    outbox.backing.close()
    outbox.collection.database.client.close()


@pytest.mark.parametrize("how", ["callable", "bridge"])
def test_parent_and_child_write_and_deliver_through_one_outbox(rig: Rig, mongo_url: str, how: str) -> None:
    """The driver warns, here by an error, when a client from before the fork is used; each entry arrives once."""
    outbox = outbox_of(rig, mongo_url, how)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])

    def writes() -> bool:
        outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])
        done = outbox.status().pending == 0
        close(outbox)
        return done

    assert holds_after_a_fork(writes)
    outbox.insert_one({"_id": 3}, tasks=[rig.add.s(3, 0)])
    assert rig.sent() == [[1, 0], [2, 0], [3, 0]]
    close(outbox)


def test_parent_and_child_drive_transactions_of_one_coordinator(database: Database[Document], mongo_url: str) -> None:
    """As above, for two-phase commit."""
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
