"""
Coordinators that are paused at any command, overtaken, and wake up: nothing is applied a second time.

Nor is it where an application writes a participant back as a whole in the middle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery import TwoPhaseCommit
from mongo_celery.errors import TransactionCanceledError, TransactionStateError
from mongo_celery.twophase import documents
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION, Part
from mongo_celery.twophase.twophase import get_engine
from tests.fixtures.process import wait_for
from tests.integration.twophase_rig import (
    HELD_SECONDS_MAX,
    Db,
    Document,
    Gate,
    advance,
    balances,
    coordinator,
    held_coordinator,
    make_accounts,
    markers,
)
from tests.rig.commands import CommandRecorder

COMMANDS = 13
"""Of one coordinator: read, look at both and give each a version, claim, apply both, applied, settle, done."""

COMMANDS_WITH_VERSIONS = 9
"""The same once the documents have their versions: a look is then a read and nothing else."""

FIRST_APPLY, SECOND_APPLY, APPLIED = 9, 10, 11


@pytest.fixture
def accounts(database: Db) -> Db:
    make_accounts(database, A=1000, B=1000)
    return database


@pytest.fixture
def rescuer(accounts: Db, mongo_client: MongoClient[Document]) -> TwoPhaseCommit:
    return coordinator(mongo_client, accounts.name)


@contextmanager
def held(rescuer: TwoPhaseCommit, url: str, **hold: int) -> Iterator[tuple[Any, list[BaseException]]]:
    """Inside, the coordinator of a transfer of 100 is held at a command: the transfer's id, and the errors of it."""
    gate, identity = Gate(**hold), rescuer.transfer("A", "B", 100, run=False)
    with held_coordinator(url, rescuer.transactions.database.name, identity, gate) as errors:
        assert gate.held.wait(60)
        yield identity, errors


def test_a_driver_sends_as_many_commands_as_these_tests_hold(
    rescuer: TwoPhaseCommit, accounts: Db, mongo_url: str
) -> None:
    """Else a hole could open between commands that no test looks at."""
    for commands in (COMMANDS, COMMANDS_WITH_VERSIONS):
        gate = Gate()
        identity = rescuer.transfer("A", "B", 100, run=False)
        with held_coordinator(mongo_url, accounts.name, identity, gate):
            pass
        assert gate.count == commands


@pytest.mark.parametrize("call", ["recover", "cancel"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, COMMANDS + 1))
def test_a_driver_that_was_overtaken_applies_nothing_again_and_leaves_nothing_half_applied(
    rescuer: TwoPhaseCommit, accounts: Db, mongo_url: str, number: int, when: str, call: str
) -> None:
    """Paused at every command, before it is sent and after its answer. Another finishes or cancels; it wakes up."""
    is_canceled = call == "cancel"

    with held(rescuer, mongo_url, **{f"hold_{when}": number}) as (identity, errors):
        if is_canceled:
            try:
                rescuer.cancel(identity)
            except TransactionStateError:
                is_canceled = False
        else:
            rescuer.recover(0)

    assert [type(error) for error in errors] == [TransactionCanceledError] * is_canceled
    assert rescuer.read(identity).state == ("canceled" if is_canceled else "done")
    assert balances(accounts) == ({"A": 1000, "B": 1000} if is_canceled else {"A": 900, "B": 1100})
    assert markers(accounts) == []


def test_a_version_that_is_given_between_two_statements_leaves_no_marker(accounts: Db, mongo_url: str) -> None:
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


def test_a_participant_that_has_lost_its_version_is_not_changed(accounts: Db) -> None:
    """P17: whoever saw none of it would apply twice, since nothing that is settled there renews it."""
    part = Part(None, accounts["accounts"].full_name, "A", {"$inc": {"balance": -100}}, {}, {}, {})
    write_back(accounts, "A")
    seen = documents.look(accounts["accounts"], part, "late", give=False)
    assert seen.exists
    assert not documents.apply(accounts["accounts"], part, "late", seen.participant_version)
    assert balances(accounts) == {"A": 1000, "B": 1000}
    assert markers(accounts) == []


def test_changes_that_arrive_twice_and_late_count_once(rescuer: TwoPhaseCommit, accounts: Db) -> None:
    """P18: two transfers share a participant. The network repeats each change, also after both have ended."""
    make_accounts(accounts, C=1000)
    seen = [advance(rescuer, rescuer.transfer(*sides, run=False)) for sides in (("A", "B", 100), ("B", "C", 30))]
    collection, log = accounts["accounts"], get_engine(rescuer).log
    changes = [(each, part, documents.look(collection, part, each.id)) for each in seen for part in each.parts]

    def deliver() -> list[bool]:
        return [documents.apply(collection, part, each.id, view.participant_version) for each, part, view in changes]

    for each in seen:
        log.prove(each)
    assert deliver() == [True] * 4
    assert deliver() == [False] * 4
    assert [each.after for each in rescuer.recover(0)] == ["done"] * 2
    assert deliver() == [False] * 4
    assert balances(accounts) == {"A": 900, "B": 1070, "C": 1030}
    assert markers(accounts) == []


def test_a_driver_that_applies_in_the_middle_of_an_undo_is_undone_too(
    rescuer: TwoPhaseCommit, accounts: Db, mongo_url: str
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
        thread.join(HELD_SECONDS_MAX)

    assert outcome == ["canceled"]
    assert balances(accounts) == {"A": 1000, "B": 1000}
    assert markers(accounts) == []


@pytest.mark.parametrize("left", [None, 1], ids=["no version", "somebody's value in its place"])
def test_other_transactions_that_move_the_fence_only_make_a_driver_look_again(
    rescuer: TwoPhaseCommit, accounts: Db, mongo_url: str, left: object
) -> None:
    """A busy account: both its version and its balance change between the look and the change."""
    if left is not None:
        accounts["accounts"].update_many({}, {"$set": {PARTICIPANT_VERSION: left}})
    with held(rescuer, mongo_url, hold_before=FIRST_APPLY) as (_, errors):
        rescuer.transfer("B", "A", 1)
        rescuer.transfer("A", "B", 5)

    assert errors == []
    assert balances(accounts) == {"A": 896, "B": 1104}
    assert all(list(each[PARTICIPANT_VERSION]) == ["of", "at"] for each in accounts["accounts"].find())


def write_back(accounts: Db, identity: str) -> None:
    """Save a document as an ODM does whose model has `balance` alone: read, then written whole."""
    found = accounts["accounts"].find_one({"_id": identity})
    assert found is not None
    accounts["accounts"].replace_one({"_id": identity}, {"balance": found["balance"], "pendingTransactions": []})


def let_go(accounts: Db, identity: Any, stopped: list[Any]) -> None:
    """End what stands, for those who wait for it."""
    if stopped:
        accounts["transactions"].update_one({"_id": identity}, {"$set": {"state": "canceled"}})


@pytest.mark.parametrize("number", range(2, COMMANDS + 1))
@pytest.mark.parametrize("who", ["A", "B"])
def test_a_participant_that_is_written_back_whole_is_changed_once_or_stops_it_loudly(
    rescuer: TwoPhaseCommit, accounts: Db, mongo_url: str, number: int, who: str
) -> None:
    """At every command of a coordinator: it sums to 2000, or a person is told and nothing doubles."""
    with held(rescuer, mongo_url, hold_before=number) as (identity, errors):
        write_back(accounts, who)
        stopped: list[Any] = [each for each in rescuer.recover(0) if each.stopped]
        let_go(accounts, identity, stopped)

    for error in errors:
        if isinstance(error, TransactionStateError):
            assert vars(error)["state"] != "initial"
            stopped.append(error)
    state, found = rescuer.read(identity).state, balances(accounts)
    if stopped:
        assert found["A"] in {900, 1000}
        assert found["B"] in {1000, 1100}
    else:
        assert found == ({"A": 900, "B": 1100} if state == "done" else {"A": 1000, "B": 1000})


@pytest.mark.parametrize("has_change", [True, False])
def test_what_a_person_puts_right_goes_on_and_nothing_else_does(
    rescuer: TwoPhaseCommit, accounts: Db, caplog: pytest.LogCaptureFixture, has_change: bool
) -> None:
    """The error says what to write. Another transaction that was stopped there stays stopped."""
    first, other = (rescuer.transfer("A", "B", 100, run=False) for _ in range(2))
    for identity in (first, other):
        advance(rescuer, identity)
        if has_change:
            accounts["accounts"].update_one({"_id": "A"}, {"$inc": {"balance": -100}, "$push": {MARKERS: identity}})
    write_back(accounts, "A")
    for act, identity in ((rescuer.run, first), (rescuer.cancel, first), (rescuer.run, other)):
        caplog.clear()
        with pytest.raises(TransactionStateError) as stopped:
            act(identity)
        assert "participant_replaced" in {each.__dict__["event"] for each in caplog.records}
        found = accounts["transactions"].find_one({"_id": identity}) or {}
        assert vars(stopped.value)["state"] == found["state"]
        assert found["stoppedBy"]

    if has_change:
        accounts["accounts"].update_one({"_id": "A"}, {"$push": {MARKERS: first}})
    else:
        accounts["transactions"].update_one({"_id": first}, {"$set": {"incarnations.0": None}})

    report = {each.id: (each.after, each.stopped) for each in rescuer.recover(0)}
    assert report == {first: ("canceled", False), other: ("pending", True)}
    assert balances(accounts) == {"A": 900 if has_change else 1000, "B": 1000}


def test_the_look_of_another_transaction_does_not_reopen_the_hole(
    rescuer: TwoPhaseCommit, accounts: Db, mongo_url: str
) -> None:
    """It gives the participant a version again, but not the one that was recorded."""
    with held(rescuer, mongo_url, hold_before=APPLIED) as (identity, errors):
        write_back(accounts, "A")
        rescuer.transfer("A", "B", 1)
        stopped = [each for each in rescuer.recover(0) if each.stopped]
        let_go(accounts, identity, stopped)

    assert [each.id for each in stopped] == [identity]
    assert [type(error) for error in errors] == [TransactionCanceledError]
    assert balances(accounts) == {"A": 899, "B": 1101}
