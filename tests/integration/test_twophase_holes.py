"""Coordinators that are paused at any command, overtaken, and wake up: nothing is applied a second time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import WriteError

from mongo_celery import TwoPhaseCommit
from mongo_celery.errors import TransactionCanceledError, TransactionStateError
from mongo_celery.twophase import documents
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION, Part
from tests.fixtures.process import wait_for
from tests.integration.twophase_rig import (
    Gate,
    balances,
    coordinator,
    held_coordinator,
    make_accounts,
    markers,
)
from tests.rig.commands import CommandRecorder

Document = dict[str, Any]

COMMANDS = 13
"""Of one coordinator: read, look at both and give each a version, claim, apply both, applied, settle, done."""

COMMANDS_WITH_VERSIONS = 9
"""The same once the documents have their versions: a look is then a read and nothing else."""

CLAIM, FIRST_APPLY, SECOND_APPLY = 8, 9, 10


@pytest.fixture
def accounts(database: Database[Document]) -> Database[Document]:
    make_accounts(database, A=1000, B=1000)
    return database


@pytest.fixture
def rescuer(accounts: Database[Document], mongo_client: MongoClient[Document]) -> TwoPhaseCommit:
    """Give the coordinator of another process, which recovers and cancels."""
    return coordinator(mongo_client, accounts.name)


def test_a_driver_sends_as_many_commands_as_these_tests_hold(
    rescuer: TwoPhaseCommit, accounts: Database[Document], mongo_url: str
) -> None:
    """Else a hole could open between commands that no test looks at."""
    for commands in (COMMANDS, COMMANDS_WITH_VERSIONS):
        gate = Gate()
        identity = rescuer.transfer("A", "B", 100, run=False)
        with held_coordinator(mongo_url, accounts.name, identity, gate):
            pass
        assert gate.count == commands


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, COMMANDS + 1))
def test_a_driver_that_was_overtaken_by_recovery_applies_nothing_again(
    rescuer: TwoPhaseCommit, accounts: Database[Document], mongo_url: str, number: int, when: str
) -> None:
    """Paused at every command, before it is sent and after its answer; recovery finishes; the coordinator wakes up."""
    gate = Gate(**{f"hold_{when}": number})
    identity = rescuer.transfer("A", "B", 100, run=False)

    with held_coordinator(mongo_url, accounts.name, identity, gate) as errors:
        assert gate.held.wait(60)
        rescuer.recover(0)

    assert errors == []
    assert rescuer.read(identity).state == "done"
    assert balances(accounts) == {"A": 900, "B": 1100}
    assert markers(accounts) == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, COMMANDS + 1))
def test_a_driver_whose_transaction_was_canceled_leaves_nothing_half_applied(
    rescuer: TwoPhaseCommit, accounts: Database[Document], mongo_url: str, number: int, when: str
) -> None:
    """Canceled means both undone, done means both applied, wherever the coordinator stood."""
    gate = Gate(**{f"hold_{when}": number})
    identity = rescuer.transfer("A", "B", 100, run=False)
    refused = None

    with held_coordinator(mongo_url, accounts.name, identity, gate) as errors:
        assert gate.held.wait(60)
        try:
            rescuer.cancel(identity)
        except TransactionStateError as error:
            refused = error

    if refused is None:
        assert [type(error) for error in errors] == [TransactionCanceledError]
        assert rescuer.read(identity).state == "canceled"
        assert balances(accounts) == {"A": 1000, "B": 1000}
    else:
        assert errors == []
        assert rescuer.read(identity).state == "done"
        assert balances(accounts) == {"A": 900, "B": 1100}
    assert markers(accounts) == []


@pytest.mark.parametrize("number", [FIRST_APPLY, SECOND_APPLY])
def test_without_the_fence_the_same_schedule_applies_twice(
    rescuer: TwoPhaseCommit,
    accounts: Database[Document],
    mongo_url: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests above can fail: a change that is guarded by the marker alone goes through."""

    def marker_alone(collection: Any, part: Any, transaction_id: Any, _participant_version: Any) -> bool:
        guard = {"_id": part.id, MARKERS: {"$ne": transaction_id}}
        change = {**part.apply, "$push": {MARKERS: transaction_id}}
        return bool(collection.update_one(guard, change).matched_count)

    monkeypatch.setattr(documents, "apply", marker_alone)
    gate = Gate(hold_before=number)
    identity = rescuer.transfer("A", "B", 100, run=False)

    with held_coordinator(mongo_url, accounts.name, identity, gate):
        assert gate.held.wait(60)
        rescuer.recover(0)

    assert balances(accounts) != {"A": 900, "B": 1100}


def test_a_value_that_somebody_left_in_the_versions_place_is_replaced(
    rescuer: TwoPhaseCommit, accounts: Database[Document], mongo_url: str
) -> None:
    accounts["accounts"].update_many({}, {"$set": {PARTICIPANT_VERSION: 1}})
    gate = Gate(hold_before=FIRST_APPLY)
    identity = rescuer.transfer("A", "B", 100, run=False)

    with held_coordinator(mongo_url, accounts.name, identity, gate) as errors:
        assert gate.held.wait(60)
        rescuer.recover(0)

    assert errors == []
    assert balances(accounts) == {"A": 900, "B": 1100}
    assert all(list(each[PARTICIPANT_VERSION]) == ["of", "at"] for each in accounts["accounts"].find())


def test_a_version_that_is_given_between_two_statements_leaves_no_marker(
    accounts: Database[Document], mongo_url: str
) -> None:
    """A participant of the tutorial's own code has none, and may be given one at any moment while it is settled."""
    part = Part(None, accounts["accounts"].full_name, "A", {}, {}, {}, {})
    recorder = CommandRecorder()
    with MongoClient[Document](mongo_url, event_listeners=[recorder]) as client:
        documents.settle(client[accounts.name]["accounts"], [part], "ours")

    statements = [each for update in recorder.named("update") for each in update["updates"]]
    for count in range(len(statements) + 1):
        accounts["accounts"].update_one({"_id": "A"}, {"$set": {MARKERS: ["ours"]}, "$unset": {PARTICIPANT_VERSION: 1}})
        for number, each in enumerate(statements):
            if number == count:
                documents.look(accounts["accounts"], part, "other")
            accounts.command({"update": "accounts", "updates": [each]})
        assert markers(accounts) == [], f"{count} of {len(statements)} statements had been executed"


@pytest.mark.parametrize("version", [{}, {PARTICIPANT_VERSION: {"of": 1, "at": 1}}], ids=["without", "with"])
def test_markers_that_are_no_list_are_not_settled_in_silence(accounts: Database[Document], version: Document) -> None:
    """P9: the server cannot take a marker out of them."""
    accounts["accounts"].update_one({"_id": "A"}, {"$set": {MARKERS: "ours", **version}})
    part = Part(None, accounts["accounts"].full_name, "A", {}, {}, {}, {})
    with pytest.raises(WriteError):
        documents.settle(accounts["accounts"], [part], "ours")


def test_a_driver_that_applies_in_the_middle_of_an_undo_is_undone_too(
    rescuer: TwoPhaseCommit, accounts: Database[Document], mongo_url: str
) -> None:
    """The undo finds no marker, is paused, and then finds one: it begins again, and says nothing of a refusal."""
    late = Gate(hold_before=SECOND_APPLY)
    undoing = Gate(hold_before=4)  # read, canceling, the undo where there is a marker
    outcome: list[str] = []
    identity = rescuer.transfer("A", "B", 100, run=False)

    with (
        held_coordinator(mongo_url, accounts.name, identity, late),
        MongoClient[Document](mongo_url, event_listeners=[undoing]) as client,
    ):
        assert late.held.wait(60)
        canceling = coordinator(client, accounts.name)
        thread = threading.Thread(target=lambda: outcome.append(str(canceling.cancel(identity).state)), daemon=True)
        thread.start()
        assert undoing.held.wait(60)
        late.released.set()
        wait_for(lambda: balances(accounts)["B"] == 1100)
        undoing.released.set()
        thread.join(20)

    assert outcome == ["canceled"]
    assert balances(accounts) == {"A": 1000, "B": 1000}
    assert markers(accounts) == []


def test_other_transactions_that_move_the_fence_only_make_a_driver_look_again(
    rescuer: TwoPhaseCommit, accounts: Database[Document], mongo_url: str
) -> None:
    """A busy account: both its version and its balance change between the look and the change."""
    gate = Gate(hold_before=FIRST_APPLY)
    identity = rescuer.transfer("A", "B", 100, run=False)

    with held_coordinator(mongo_url, accounts.name, identity, gate) as errors:
        assert gate.held.wait(60)
        rescuer.transfer("B", "A", 1)
        rescuer.transfer("A", "B", 5)

    assert errors == []
    assert balances(accounts) == {"A": 896, "B": 1104}
