"""Participants that an application writes back as a whole in the middle of a transaction: nothing is applied twice."""

from __future__ import annotations

from typing import Any

import pytest
from bson import ObjectId
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import TwoPhaseCommit
from mongo_celery.errors import TransactionCanceledError, TransactionStateError
from mongo_celery.twophase import documents
from mongo_celery.twophase.participants import MARKERS
from tests.integration.twophase_rig import Gate, advance, balances, coordinator, held_coordinator, make_accounts

Document = dict[str, Any]
COMMANDS = 13
FIRST_APPLY, APPLIED = 9, 11


@pytest.fixture
def accounts(database: Database[Document]) -> Database[Document]:
    make_accounts(database, A=1000, B=1000)
    return database


def write_back(accounts: Database[Document], identity: str) -> None:
    """Save a document as an ODM does whose model has `balance` alone: read, then written whole."""
    found = accounts["accounts"].find_one({"_id": identity})
    assert found is not None
    accounts["accounts"].replace_one({"_id": identity}, {"balance": found["balance"], "pendingTransactions": []})


@pytest.mark.parametrize("number", range(2, COMMANDS + 1))
@pytest.mark.parametrize("who", ["A", "B"])
def test_a_participant_that_is_written_back_whole_is_changed_once_or_stops_it_loudly(
    accounts: Database[Document], mongo_client: MongoClient[Document], mongo_url: str, number: int, who: str
) -> None:
    """At every command of a coordinator that uses markers; it sums to 2000, or a person is told and nothing doubles."""
    rescuer = coordinator(mongo_client, accounts.name)
    gate = Gate(hold_before=number)
    identity = rescuer.transfer("A", "B", 100, run=False)

    with held_coordinator(mongo_url, accounts.name, identity, gate) as errors:
        assert gate.held.wait(60)
        write_back(accounts, who)
        stopped = [each.error for each in rescuer.recover(0) if each.error is not None]
        let_go(accounts, identity, stopped)

    for error in errors:
        if isinstance(error, TransactionStateError):
            assert vars(error)["state"] != "initial"
            stopped.append(str(error))
    state, found = rescuer.read(identity).state, balances(accounts)
    if stopped:
        assert "was replaced, or deleted" in stopped[0]
        assert found["A"] in {900, 1000}
        assert found["B"] in {1000, 1100}
    else:
        assert found == ({"A": 900, "B": 1100} if state == "done" else {"A": 1000, "B": 1000})


def let_go(accounts: Database[Document], identity: Any, stopped: list[str]) -> None:
    """End what stands, for those who wait for it."""
    if stopped:
        accounts["transactions"].update_one({"_id": identity}, {"$set": {"state": "canceled"}})


@pytest.mark.parametrize("has_change", [True, False])
def test_what_a_person_puts_right_goes_on_and_nothing_else_does(
    accounts: Database[Document], mongo_client: MongoClient[Document], has_change: bool
) -> None:
    """The error says what to write. Another transaction that was stopped there stays stopped."""
    rescuer = coordinator(mongo_client, accounts.name)
    first, other = (rescuer.transfer("A", "B", 100, run=False) for _ in range(2))
    for identity in (first, other):
        advance(rescuer, identity)
    if has_change:
        for identity in (first, other):
            accounts["accounts"].update_one({"_id": "A"}, {"$inc": {"balance": -100}, "$push": {MARKERS: identity}})
    write_back(accounts, "A")
    for act in (rescuer.run, rescuer.cancel):
        with pytest.raises(TransactionStateError, match="was replaced, or deleted"):
            act(first)
    with pytest.raises(TransactionStateError, match="was replaced, or deleted"):
        rescuer.run(other)

    if has_change:
        accounts["accounts"].update_one({"_id": "A"}, {"$push": {MARKERS: first}})
    else:
        accounts["transactions"].update_one({"_id": first}, {"$set": {"incarnations.0": None}})

    report = {each.id: (each.after, each.stopped) for each in rescuer.recover(0)}
    assert report == {first: ("canceled", False), other: ("pending", True)}
    assert balances(accounts) == {"A": 900 if has_change else 1000, "B": 1000}


def test_the_look_of_another_transaction_does_not_reopen_the_hole(
    accounts: Database[Document], mongo_client: MongoClient[Document], mongo_url: str
) -> None:
    """It gives the participant a version again, but not the one that was recorded."""
    rescuer = coordinator(mongo_client, accounts.name)
    gate = Gate(hold_before=APPLIED)
    identity = rescuer.transfer("A", "B", 100, run=False)

    with held_coordinator(mongo_url, accounts.name, identity, gate) as errors:
        assert gate.held.wait(60)
        write_back(accounts, "A")
        rescuer.transfer("A", "B", 1)
        stopped = [each.error or "" for each in rescuer.recover(0)]
        let_go(accounts, identity, stopped)

    assert "was replaced, or deleted" in stopped[0]
    assert [type(error) for error in errors] == [TransactionCanceledError]
    assert balances(accounts) == {"A": 899, "B": 1101}


def test_transactions_of_the_tutorials_own_code_are_finished_as_they_were_begun(accounts: Database[Document]) -> None:
    """They have recorded nothing, and their participants have no versions."""
    shape = {
        "source": "A",
        "destination": "B",
        "value": 100,
        "version": 1,
        "coordinator": ObjectId(),
        "application": "bank",
    }
    accounts["transactions"].insert_many(
        [{"_id": state, "state": state, **shape} for state in ("pending", "applied", "canceling")]
    )
    accounts["accounts"].update_one(
        {"_id": "A"}, {"$inc": {"balance": -200}, "$set": {MARKERS: ["applied", "canceling"]}}
    )
    accounts["accounts"].update_one({"_id": "B"}, {"$inc": {"balance": 100}, "$set": {MARKERS: ["applied"]}})

    became = {
        each.id: each.after for each in TwoPhaseCommit(None, accounts["transactions"], application="bank").recover(0)
    }

    assert became == {"pending": "done", "applied": "done", "canceling": "canceled"}
    assert balances(accounts) == {"A": 800, "B": 1200}
    assert [each.get(MARKERS) for each in accounts["accounts"].find()] == [[], []]


def test_a_transaction_that_stops_when_it_is_begun_says_so_at_once(
    accounts: Database[Document], mongo_client: MongoClient[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error has the state that is stored, and `stoppedBy` is there before any recovery."""
    bank = coordinator(mongo_client, accounts.name)
    apply = documents.apply

    def replace(*given: Any) -> bool:
        write_back(accounts, "B")
        return apply(*given)

    monkeypatch.setattr(documents, "apply", replace)
    with pytest.raises(TransactionStateError, match="was replaced, or deleted") as stopped:
        bank.transfer("A", "B", 100, id="pay")
    found = accounts["transactions"].find_one({"_id": "pay"}) or {}
    assert vars(stopped.value)["state"] == found["state"] == "pending"
    assert "was replaced, or deleted" in found["stoppedBy"]
