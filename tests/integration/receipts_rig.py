"""Two clusters with accounts, and coordinators that are held between any two steps of theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient, monitoring

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.twophase.states import Transaction
from tests.fixtures.mongo import empty
from tests.integration.twophase_rig import HELD_SECONDS_MAX

Document = dict[str, Any]
START = 1000
CLUSTERS = ("own", "east", "west")
_OTHERS = {"hello", "ismaster", "endSessions", "createIndexes", "abortTransaction", "getMore"}


class StepGate(monitoring.CommandListener):
    """
    Holds a coordinator before one of its steps, or after its answer.

    A step is a command of its own, or a MongoDB transaction: held before its first statement or after its commit it
    keeps no document locked. One listener serves the clients of all clusters.

    Args:
        hold_before: number of the step, from 1, before which the thread waits; 0 for none.
        hold_after: number of the step after which it waits; 0 for none.
    """

    def __init__(self, *, hold_before: int = 0, hold_after: int = 0) -> None:
        self._before = hold_before
        self._after = hold_after
        self._inside: set[int] = set()
        self.count = 0
        self.held = threading.Event()
        self.released = threading.Event()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        begins = bool(event.command.get("startTransaction"))
        if event.command_name in _OTHERS or ("autocommit" in event.command and not begins):
            return
        self.count += 1
        if begins:
            self._inside.add(self.count)
        if self.count == self._before:
            self._before = 0
            self._hold()

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        ended = event.command_name == "commitTransaction" or self.count not in self._inside
        if event.command_name not in _OTHERS and self.count == self._after and ended:
            self._after = 0
            self._hold()

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing."""

    def _hold(self) -> None:
        self.held.set()
        assert self.released.wait(HELD_SECONDS_MAX), "nobody let the held coordinator go on"


class Clusters:
    """
    Accounts A of each cluster, and transactions over them; "own" is the log's.

    `east` and `west` are two aliases with databases of their own: they may be one server, and are two branches.
    """

    def __init__(self, name: str, urls: Mapping[str, str]) -> None:
        self.name = name
        self.urls = dict(urls)
        self.clients = {cluster: MongoClient[Document](url) for cluster, url in urls.items()}
        for cluster in CLUSTERS:
            self.accounts(cluster).insert_one({"_id": "A", "balance": START})
        self.bank = self.coordinator(self.clients)

    def accounts(self, cluster: str, clients: Mapping[str, MongoClient[Document]] | None = None) -> Any:
        return (clients or self.clients)[cluster][f"{self.name}_{cluster}"]["accounts"]

    def receipts(self, cluster: str) -> list[Document]:
        return list(self.clients[cluster][f"{self.name}_{cluster}"]["transactionReceipts"].find())

    @property
    def log(self) -> Any:
        return self.clients["own"][f"{self.name}_own"]["transactions"]

    def coordinator(self, clients: Mapping[str, MongoClient[Document]], **options: Any) -> TwoPhaseCommit:
        others = {cluster: client for cluster, client in clients.items() if cluster != "own"}
        given = {"application": "bank", "clients": others, **options}
        return TwoPhaseCommit(None, clients["own"][f"{self.name}_own"]["transactions"], **given)

    def begin(self, *clusters: str, value: int = 100, run: bool = False, **options: Any) -> Any:
        """The first pays, the others are paid."""
        shares = [-value * (len(clusters) - 1), *[value] * (len(clusters) - 1)]
        parts = [
            Participant(
                self.accounts(cluster), "A", {"$inc": {"balance": share}}, require={"balance": {"$gte": -share}}
            )
            for cluster, share in zip(clusters, shares, strict=True)
        ]
        identity = self.bank.begin(parts, run=run, **options)
        assert self.bank.flush()
        return identity

    def stepped(self, identity: Any, times: int) -> Transaction:
        """After so many steps of a transaction that nobody has begun."""
        after = self.bank.step(identity, None)
        for _ in range(times - 1):
            assert after is not None
            after = self.bank.step(identity, after.version)
        assert after is not None
        return after

    def balances(self) -> dict[str, int]:
        return {cluster: (self.accounts(cluster).find_one() or {}).get("balance", 0) for cluster in CLUSTERS}

    def close(self) -> None:
        for cluster, client in self.clients.items():
            empty(client, f"{self.name}_{cluster}")
            client.close()

    @contextmanager
    def held(self, identity: Any, gate: StepGate) -> Iterator[list[BaseException]]:
        """A coordinator in a thread, waiting at its gate; afterwards it has gone on and ended."""
        errors: list[BaseException] = []
        clients = {cluster: MongoClient[Document](url, event_listeners=[gate]) for cluster, url in self.urls.items()}
        coordinator = self.coordinator(clients)

        def run() -> None:
            try:
                coordinator.run(identity)
            except BaseException as error:  # noqa: BLE001 - the test judges it
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield errors
        finally:
            gate.released.set()
            thread.join(HELD_SECONDS_MAX)
            for client in clients.values():
                client.close()
            assert not thread.is_alive()
