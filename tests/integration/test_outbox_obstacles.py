"""One document that MongoDB keeps closed or refuses: the others of its outbox are delivered all the same, and once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo.database import Database

from tests.fixtures.process import wait_for
from tests.rig.outbox import Rig, held_up, settled

Document = dict[str, Any]


@contextmanager
def closed(database: Database[Document], identity: Any) -> Iterator[None]:
    """Somebody's transaction has written to a document, and stays open until the block ends."""
    with database.client.start_session() as session, session.start_transaction():
        database["orders"].update_one({"_id": identity}, {"$inc": {"n": 1}}, session=session)
        yield


def delivered(database: Database[Document], *identities: Any) -> bool:
    """Whether nothing is pending in some documents."""
    field = {"_id": {"$in": list(identities)}, "pendingEvents": {"$exists": True}}
    return not database["orders"].count_documents(field)


def test_an_open_transaction_keeps_its_own_document_waiting_and_no_other(rig: Rig) -> None:
    """Its removal and its claim are made when the transaction has ended; nothing is sent twice."""
    elsewhere, outbox = rig.outbox(name="elsewhere", at_once=False), rig.outbox(at_once=True, claim_ttl=600)
    outbox.sweep()  # which makes the index: that would wait for the transaction, or end it
    elsewhere.insert_one({"_id": "look"}, tasks=[rig.add.s(7, 0)])
    elsewhere.insert_one({"_id": "free"}, tasks=[rig.add.s(8, 0)])
    with held_up(outbox) as (_asked, begun):
        outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
        assert begun.wait(120)
        opened_first = closed(rig.database, 0)
        opened_first.__enter__()
    with closed(rig.database, "look"):
        for number in range(1, 4):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
        wait_for(lambda: delivered(rig.database, 1, 2, 3))
        outbox.dispatch("look", "free")
        wait_for(lambda: delivered(rig.database, "free"))
        assert rig.pending(0)["count"] == rig.pending("look")["count"] == 1
    opened_first.__exit__(None, None, None)
    wait_for(lambda: settled(outbox))
    assert sorted(rig.sent()) == [[0, 0], [1, 0], [2, 0], [3, 0], [7, 0], [8, 0]]


def test_a_sweep_goes_on_beside_an_open_transaction(rig: Rig) -> None:
    """It says what it could not deliver."""
    outbox = rig.outbox(at_once=False)
    outbox.sweep()  # which makes the index
    for number in range(4):
        outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
    with closed(rig.database, 1):
        done = outbox.sweep(older_than=0)
    assert (done.dispatched, done.left) == (3, 1)
    assert done.error is not None
    assert outbox.sweep(older_than=0).dispatched == 1
    assert sorted(rig.sent()) == [[number, 0] for number in range(4)]


def test_a_document_that_mongodb_refuses_takes_no_other_with_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A validator that came later: its claim is refused, and those of the others are made."""
    outbox = rig.outbox(at_once=True, claim_ttl=600)
    with held_up(outbox) as (_asked, begun):
        for number in range(5):
            outbox.insert_one({"_id": number, **({"bad": 1} if number == 2 else {})}, tasks=[rig.add.s(number, 0)])
        assert begun.wait(120)
        rig.database.command("collMod", "orders", validator={"bad": {"$exists": False}})
    wait_for(lambda: delivered(rig.database, 0, 1, 3, 4))
    wait_for(lambda: "document 2 cannot be delivered" in caplog.text)
    elsewhere = rig.outbox(name="elsewhere", at_once=False)
    for number in range(5, 8):
        elsewhere.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
    outbox.dispatch(5, 2, {"$gt": ""}, 6)
    wait_for(lambda: delivered(rig.database, 5, 6))
    assert sorted(rig.sent()) == [[number, 0] for number in (0, 1, 3, 4, 5, 6)]
    assert rig.pending(7)["count"] == 1, "an operator is nobody's _id"
