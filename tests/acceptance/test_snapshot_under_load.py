"""
A snapshot of documents that are written all the while, by processes that are killed.

P1: each document comes, as a row or as its change. P2, P3: no key goes back. P6: once more a fault.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient

from tests.fixtures.mongo import MakeClient, MakeReplicaSet
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Make = Callable[..., "Snapshotting"]

_DOCUMENTS = 300
SHARES = {"plain": 1.0, "together": 0.05}
"""How many documents a handler has, in relation to the first: a transactional handler handles each in a transaction."""
_LEAST = 50
_LOCK_SECONDS = 3
"""How long the server keeps the transaction of a worker that was killed."""
_WRITTEN_AT_ONCE = 20
_DELETED = 0.2
"""How many of the written documents are deleted again, until the next write."""


class Snapshotting(Deployment):
    """
    A bridge whose handlers begin with a snapshot, and what is written to their documents meanwhile.

    Attributes:
        kills: how many processes were killed.
    """

    kills = 0
    chance = random.Random(1)

    def populate(self, documents: int) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._batch: list[Due] = []
        for handler, share in SHARES.items():
            keys = [f"key{number}" for number in range(max(int(documents * share), _LEAST))]
            self.data[handler].insert_many([{"_id": key, "n": 1} for key in keys])
            self._numbers |= dict.fromkeys([(handler, key) for key in keys], 1)
        self.written += [Due(handler, key, 1) for handler, key in self._numbers]

    def write_some(self) -> None:
        """Write to some documents, once what was written before has begun: no faster than it is handled."""
        if len({start.due for start in self.starts(*self._batch)} & {*self._batch}) < len(self._batch):
            return
        self._batch = []
        for handler, key in self.chance.sample(sorted(self._numbers), _WRITTEN_AT_ONCE):
            n = self._numbers[handler, key] = self._numbers[handler, key] + 1
            self.give_up(Due(handler, key, 1))  # the snapshot may no longer meet it
            self._batch.append(self.write(handler, key, n))
            if self.chance.random() < _DELETED:  # nothing of it may come back
                self.data[handler].delete_one({"_id": key})

    @property
    def snapshots(self) -> list[dict[str, Any]]:
        return list(self.state["snapshots"].find())

    @property
    def rows(self) -> int:
        return sum(each.get("done", 0) for each in self.snapshots)

    @property
    def all_done(self) -> bool:
        return [each["state"] for each in self.snapshots] == ["done"] * len(SHARES)

    def wait_rows(self, more: int) -> None:
        """Go on writing until so many rows more are delivered, or all."""
        until = self.rows + more

        def delivered() -> bool:
            self.write_some()
            return self.rows >= until or self.all_done

        wait_for(delivered, message=lambda: f"the snapshots go on: {self.snapshots}")

    def begin(self) -> None:
        self._listener, self._worker = self.both()

    def kill_listener(self) -> None:
        self.kills += 1
        self._listener.send_group(signal.SIGKILL)
        self._listener = self.listener(f"listener{self.kills}")

    def kill_worker(self) -> None:
        self.kills += 1
        self._worker.send_group(signal.SIGKILL)
        self._worker = self.worker(name=f"worker{self.kills}")

    def finish(self) -> None:
        wait_for(lambda: self.all_done, message=lambda: str(self.snapshots))
        self.wait_effects()
        self.judge(spare=1 + self.kills)  # a row may show what has come as a change before
        rows = [each["done"] for each in self.snapshots]
        assert sum(rows) > len(self._numbers) / 2, "most of them were read, not written meanwhile"


@pytest.fixture
def make(deployment: MakeDeployment, make_replica_set: MakeReplicaSet, make_client: MakeClient) -> Make:
    """Give what makes such a bridge with so many documents, on a set of its own."""

    def make(documents: int) -> Snapshotting:
        server = make_replica_set(parameters=[f"transactionLifetimeLimitSeconds={_LOCK_SECONDS}"], oplog_mb=4000)
        client: MongoClient[Any] = make_client(server.url)
        options = {"start_from": "snapshot", "run_size": 20, "max_crashes": 1000}
        made: Snapshotting = deployment(*SHARES, kind=Snapshotting, client=client, url=server.url, options=options)
        made.populate(documents)
        return made

    return make


@pytest.mark.slow
def test_a_snapshot_is_exact_beside_writes_and_a_kill_of_each_kind(make: Make) -> None:
    """P1-P3, P6: some hundred documents. A listener and a worker die in the middle."""
    chain = make(_DOCUMENTS)
    chain.begin()
    chain.wait_rows(1)  # immediately: what the record calls delivered must not be on its way
    chain.kill_listener()
    chain.wait_rows(1)
    chain.kill_worker()
    chain.finish()
