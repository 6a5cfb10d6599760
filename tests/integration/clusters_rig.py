"""Clusters with accounts, and coordinators that are held before any command of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.twophase.transaction import Transaction
from tests.fixtures.mongo import empty, write_as_newer
from tests.integration.twophase_rig import Gate, advance, held_run, step

Document = dict[str, Any]
START = 1000
CLUSTERS = ("own", "east", "west")


class Clusters:
    """
    Accounts A of each cluster, and transactions over them.

    "own" is the log's, "east" is another replica set, and "west" is a standalone server. A has the same name in all.
    """

    def __init__(self, name: str, urls: Mapping[str, str]) -> None:
        self.name = name
        self.urls = dict(urls)
        self.clients = {cluster: MongoClient[Document](url) for cluster, url in urls.items()}
        for cluster in CLUSTERS:
            self.accounts(cluster).insert_one({"_id": "A", "balance": START})
        self.bank = self.coordinator(self.clients)

    def accounts(self, cluster: str, clients: Mapping[str, MongoClient[Document]] | None = None) -> Any:
        return (clients or self.clients)[cluster][self.name]["accounts"]

    @property
    def log(self) -> Any:
        return self.clients["own"][self.name]["transactions"]

    def coordinator(self, clients: Mapping[str, MongoClient[Document]], **options: Any) -> TwoPhaseCommit:
        others = {cluster: client for cluster, client in clients.items() if cluster != "own"}
        given = {"application": "bank", "clients": others, **options}
        return TwoPhaseCommit(None, clients["own"][self.name]["transactions"], **given)

    def begin(self, *clusters: str, value: int = 100, run: bool = False, **options: Any) -> Any:
        """The first pays, the others are paid."""
        shares = [-value * (len(clusters) - 1), *[value] * (len(clusters) - 1)]
        parts = [
            Participant(
                self.accounts(cluster), "A", {"$inc": {"balance": share}}, require={"balance": {"$gte": -share}}
            )
            for cluster, share in zip(clusters, shares, strict=True)
        ]
        return self.bank.begin(parts, run=run, **options)

    def advance(self, identity: Any) -> Transaction:
        return advance(self.bank, identity)

    def step(self, identity: Any) -> Transaction:
        return step(self.bank, identity)

    def balances(self) -> dict[str, int]:
        return {cluster: (self.accounts(cluster).find_one() or {}).get("balance", 0) for cluster in CLUSTERS}

    def close(self) -> None:
        for client in self.clients.values():
            empty(client, self.name)
            client.close()

    @contextmanager
    def held(self, identity: Any, gate: Gate) -> Iterator[list[BaseException]]:
        clients = {cluster: MongoClient[Document](url, event_listeners=[gate]) for cluster, url in self.urls.items()}
        with ExitStack() as closing:
            for client in clients.values():
                closing.enter_context(client)
            yield closing.enter_context(held_run(self.coordinator(clients), identity, gate.released))


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[MongoReplicaSet]:
    with MongoReplicaSet(parameters=["enableTestCommands=1"]) as started:
        write_as_newer(started)
        yield started


@pytest.fixture
def clusters(mongo_url: str, other_cluster: MongoReplicaSet, standalone_url: str) -> Iterator[Clusters]:
    made = Clusters(f"c{uuid4().hex[:10]}", {"own": mongo_url, "east": other_cluster.url, "west": standalone_url})
    yield made
    made.close()
