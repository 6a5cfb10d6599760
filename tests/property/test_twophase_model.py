"""Two-phase commit against a model of ten lines: coordinators whose acts are interleaved in any way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from bson import ObjectId
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from pymongo import MongoClient

from mongo_celery import TwoPhaseCommit
from mongo_celery.errors import TransactionStateError
from mongo_celery.twophase import documents
from mongo_celery.twophase.clusters import open_collection
from mongo_celery.twophase.log import OvertakenError
from mongo_celery.twophase.protocol import StuckError
from mongo_celery.twophase.transaction import State, Transaction
from mongo_celery.twophase.twophase import get_engine
from tests.fixtures.mongo import empty

Document = dict[str, Any]
ACCOUNTS = ("A", "B", "C")
START = 20


class Banking(RuleBasedStateMachine):
    """
    Coordinators act on what they have seen, however long ago: look, prove, apply, settle, advance, each on its own.

    The model: what is done counts, what is not does not.
    """

    clients: list[MongoClient[Document]]
    """In a list: Hypothesis asks every attribute of the class whether it is a rule, and a client says yes."""

    coordinators = Bundle("coordinators")
    held = Bundle("held")
    ids = Bundle("ids")

    @initialize(target=ids)
    def open_bank(self) -> Any:
        self.name = f"model_{uuid4().hex[:10]}"
        self.database = self.clients[0][self.name]
        self.bank = TwoPhaseCommit(None, self.database["transactions"], application="bank", protocol="documents")
        self.accounts = open_collection(self.database["accounts"])
        self.database["accounts"].insert_many([{"_id": each, "balance": START} for each in ACCOUNTS])
        self.model = dict.fromkeys(ACCOUNTS, START)
        return multiple(*(self.begin_between(*sides) for sides in (("A", "B", 7), ("B", "C", 15), ("C", "A", 20))))

    def begin_between(self, source: str, destination: str, value: int) -> Any:
        return self.bank.transfer(source, destination, value, run=False)

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.bank.recover(0)
            self.judge_the_end()
            empty(self.clients[0], self.name)

    @rule(target=ids, sides=st.permutations(ACCOUNTS), value=st.integers(1, 15))
    def begin(self, sides: list[str], value: int) -> Any:
        return self.begin_between(sides[0], sides[1], value)

    @rule(target=coordinators, identity=ids)
    def take(self, identity: Any) -> Any:
        """A coordinator takes a transaction over, whoever has it, and then waits."""
        seen = self.bank.read(identity)
        if seen.state is State.INITIAL:
            return get_engine(self.bank).make_coordinator().begin(seen)[0]
        return multiple() if seen.state.is_final else get_engine(self.bank).log.take_over(seen, ObjectId())

    @rule(target=held, seen=coordinators, index=st.integers(0, 1))
    def look_and_prove(self, seen: Transaction, index: int) -> Any:
        if seen.state is not State.PENDING:
            return multiple()
        view = documents.look(self.accounts, seen.parts[index], seen.id)
        try:
            get_engine(self.bank).log.prove(seen)
        except OvertakenError:
            return multiple()
        return (seen, index, view) if view.exists and not view.marked else multiple()

    @rule(paused=held)
    def wake(self, paused: tuple[Transaction, int, documents.View]) -> None:
        """It wakes up, whatever has happened since; the network may even deliver its change twice."""
        seen, index, view = paused
        documents.apply(self.accounts, seen.parts[index], seen.id, view.participant_version)

    @rule(target=coordinators, seen=consumes(coordinators))
    def step(self, seen: Transaction) -> Any:
        try:
            after = get_engine(self.bank).make_coordinator().step(seen)
        except OvertakenError:
            return multiple()
        except StuckError:  # what was spent cannot be taken back yet
            return seen
        return multiple() if after.state.is_final else after

    @rule(identity=ids)
    def cancel_or_finish(self, identity: Any) -> None:
        """An operator cancels; what is too far on is finished by recovery."""
        try:
            self.bank.cancel(identity)
        except TransactionStateError:
            self.bank.recover(0)

    @rule()
    def make_anew(self) -> None:
        """Everything is finished; then somebody deletes the accounts in which nothing is pending, and inserts them."""
        self.bank.recover(0)
        idle: Document = {"pendingTransactions": {"$in": [None, []]}}
        self.database["accounts"].update_many(idle, {"$unset": {"pendingTransactions": "", "transactionFence": ""}})

    @rule()
    def recover(self) -> None:
        self.bank.recover(0)

    @invariant()
    def nobody_is_below_zero(self) -> None:
        if hasattr(self, "database"):
            assert self.database["accounts"].count_documents({"balance": {"$lt": 0}}) == 0

    def judge_the_end(self) -> None:
        """Every transaction that is done counts once, all others not at all."""
        stuck = self.database["transactions"].count_documents({"state": {"$in": ["pending", "applied"]}})
        assert stuck == 0
        for done in self.database["transactions"].find({"state": {"$in": ["done"]}}):
            self.model[done["source"]] -= done["value"]
            self.model[done["destination"]] += done["value"]
        found = {each["_id"]: each["balance"] for each in self.database["accounts"].find()}
        canceling = list(self.database["transactions"].find({"state": "canceling"}))
        if canceling:  # what was spent cannot be taken back: nothing is lost, and it says so
            assert sum(found.values()) + sum(each["value"] for each in canceling) >= START * len(ACCOUNTS)
        else:
            assert found == self.model
            assert sum(found.values()) == START * len(ACCOUNTS)


@pytest.fixture
def machine(mongo_client: MongoClient[Document]) -> Iterator[type[Banking]]:
    Banking.clients = [mongo_client]
    yield Banking
    del Banking.clients


def test_drivers_interleaved_in_any_way_keep_to_the_model(machine: type[Banking]) -> None:
    """Suspended between any two acts, overtaken, canceled, recovered."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
