"""Accounts, coordinators that can be held at any command, and the tutorial's own code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from pymongo import MongoClient, monitoring
from pymongo.database import Database

from mongo_celery import TwoPhaseCommit
from mongo_celery.twophase.transaction import Transaction
from mongo_celery.twophase.twophase import get_engine

Document = dict[str, Any]
Db = Database[Document]
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
HELD_SECONDS_MAX = 120.0


class Gate(monitoring.CommandListener):
    """
    Counts a client's writes and reads on the test's data, and holds its thread before or after one of them.

    Args:
        hold_before: number of the command, from 1, before which the thread waits; 0 for none.
        hold_after: number of the command after whose answer the thread waits; 0 for none.
    """

    def __init__(self, *, hold_before: int = 0, hold_after: int = 0) -> None:
        self._before = hold_before
        self._after = hold_after
        self.count = 0
        self.held = threading.Event()
        self.released = threading.Event()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name in {"find", "update", "findAndModify"}:
            self.count += 1
            if self.count == self._before:
                self._hold()

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if event.command_name in {"find", "update", "findAndModify"} and self.count == self._after:
            self._after = 0
            self._hold()

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing."""

    def _hold(self) -> None:
        self.held.set()
        assert self.released.wait(HELD_SECONDS_MAX), "nobody let the held coordinator go on"


def make_accounts(database: Db, **balances: int) -> None:
    database["accounts"].insert_many(
        [{"_id": name, "balance": balance, "pendingTransactions": []} for name, balance in balances.items()]
    )


def balances(database: Db) -> dict[str, int]:
    return {each["_id"]: each["balance"] for each in database["accounts"].find()}


def markers(database: Db) -> list[Any]:
    return [marker for each in database["accounts"].find() for marker in each["pendingTransactions"]]


def coordinator(client: MongoClient[Document], name: str, **options: Any) -> TwoPhaseCommit:
    """A coordinator that uses markers, whatever the server can do."""
    return TwoPhaseCommit(
        None, client[name]["transactions"], **{"application": "bank", "protocol": "documents", **options}
    )


def advance(bank: TwoPhaseCommit, identity: Any) -> Transaction:
    """Begin a transaction and no more: it is pending."""
    engine = get_engine(bank)
    with engine.limit_calls():
        return engine.make_coordinator().begin(engine.log.get(identity))[0]


def step(bank: TwoPhaseCommit, identity: Any) -> Transaction:
    engine = get_engine(bank)
    coordinator = engine.make_coordinator()
    with engine.limit_calls():
        taken = engine.log.take_over(engine.log.get(identity), coordinator.identity)
        assert taken is not None
        return coordinator.step(taken)


@contextmanager
def held_coordinator(url: str, name: str, transaction_id: Any, gate: Gate) -> Iterator[list[BaseException]]:
    """Hold a coordinator of one cluster at its gate, as `held_run` does."""
    with (
        MongoClient[Document](url, event_listeners=[gate]) as client,
        held_run(coordinator(client, name), transaction_id, gate.released) as errors,
    ):
        yield errors


@contextmanager
def held_run(bank: TwoPhaseCommit, transaction_id: Any, released: threading.Event) -> Iterator[list[BaseException]]:
    """Run a transaction in a thread that waits at a gate. Release it at the end, and wait until it has ended."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            bank.run(transaction_id)
        except BaseException as error:  # noqa: BLE001 - the test judges it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        released.set()
        thread.join(HELD_SECONDS_MAX)
        assert not thread.is_alive()


class Tutorial:
    """MongoDB's tutorial as it stands, for one application: no version of a transaction or a participant."""

    def __init__(self, database: Db) -> None:
        self.accounts = database["accounts"]
        self.transactions = database["transactions"]

    def begin(self, identity: Any, source: Any, destination: Any, value: int) -> None:
        fields = {"_id": identity, "source": source, "destination": destination, "value": value, "state": "initial"}
        self.transactions.insert_one(fields)
        self._touch(identity, {"state": "initial"}, "initial")

    def start(self, identity: Any) -> None:
        self._touch(identity, {"state": "initial"}, "pending")

    def apply(self, identity: Any, account: Any, value: int) -> None:
        self.accounts.update_one(
            {"_id": account, "pendingTransactions": {"$ne": identity}},
            {"$inc": {"balance": value}, "$push": {"pendingTransactions": identity}},
        )

    def applied(self, identity: Any) -> None:
        self._touch(identity, {"state": "pending"}, "applied")

    def pull(self, identity: Any, account: Any) -> None:
        self.accounts.update_one(
            {"_id": account, "pendingTransactions": identity}, {"$pull": {"pendingTransactions": identity}}
        )

    def done(self, identity: Any) -> None:
        self._touch(identity, {"state": "applied"}, "done")

    def _touch(self, identity: Any, guard: Document, state: str) -> None:
        self.transactions.update_one(
            {"_id": identity, **guard}, {"$set": {"state": state}, "$currentDate": {"lastModified": True}}
        )
