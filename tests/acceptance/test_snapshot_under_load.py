"""
A snapshot of documents that are written and deleted all the while, by processes that are killed again and again.

P1, every document is delivered; P2 and P3, nothing that is written through a fence or in the handler's transaction goes
back; P6, a document comes at most once more a fault. In the end the copies equal their sources. Of a handler that uses
looked-up documents only that: what was looked up may be newer than what a snapshot brings next, for a moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.snapshot_rig import FENCED, PLAIN, TRANSACTIONAL, CopiesRig
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes

Make = Callable[..., CopiesRig]

DOCUMENTS_VARIABLE = "MONGO_CELERY_SNAPSHOT_DOCUMENTS"
DOCUMENTS = 1_000_000
FEW_DOCUMENTS = 400
KILLS = 120
_LOCK_SECONDS = 3
"""How long the server keeps the transaction of a worker that was killed."""


@pytest.fixture
def make(make_replica_set: MakeReplicaSet, redis_url: str, processes: Processes) -> Iterator[Make]:
    """Give what makes a bridge with so many documents, on a set of its own."""
    with ExitStack() as stack:

        def make(documents: int, run_size: int) -> CopiesRig:
            lifetime = f"transactionLifetimeLimitSeconds={_LOCK_SECONDS}"
            server = make_replica_set(parameters=[lifetime], oplog_mb=4000)
            client: MongoClient[Any] = stack.enter_context(MongoClient(server.url))
            return stack.enter_context(
                CopiesRig(client, server.url, redis_url, processes, documents=documents, run_size=run_size)
            )

        yield make


def test_a_snapshot_is_exact_beside_writes_and_a_kill_of_each_kind(make: Make) -> None:
    """P1-P3, P6: some hundred documents; a listener and a worker die in the middle."""
    rig = make(FEW_DOCUMENTS, run_size=20)
    rig.start()
    for writer in rig.writers.values():
        writer.start()
    rig.changes("snapshot", "start", TRANSACTIONAL, "--yes")
    rig.wait_progress(PLAIN)  # at once: what the record calls delivered must not be on its way
    rig.kill_leader()
    rig.wait_progress()
    rig.kill_worker()
    finish(rig)


@pytest.mark.slow
def test_a_snapshot_of_a_million_documents_is_exact_while_everything_is_killed(make: Make) -> None:
    """P1-P3, P6: somebody dies again and again, from the first chunk to the last."""
    rig = make(int(os.environ.get(DOCUMENTS_VARIABLE, DOCUMENTS)), run_size=200)
    rig.start(listeners=2, workers=2)
    for writer in rig.writers.values():
        writer.start()
    rig.changes("snapshot", "start", TRANSACTIONAL, "--yes")
    between = 2 * sum(rig.counts.values()) / KILLS
    while not rig.all_done:
        wanted = rig.progress() + rig.chance.uniform(0, between)
        rig.wait_progress()
        while rig.progress() < wanted and not rig.all_done:
            rig.wait_progress()
        rig.kill_any()
    assert rig.kills > 1
    finish(rig)


def finish(rig: CopiesRig) -> None:
    """Wait until the snapshots are done, stop writing, and judge."""
    while not rig.all_done:
        rig.wait_progress()
    rig.settle()
    rig.judge()
    assert all(writer.written for writer in rig.writers.values())
    assert rig.writers[FENCED].deleted
    found = rig.snapshots
    assert found[PLAIN]["done"] > rig.counts[PLAIN] / 2, "most of them were read, not written meanwhile"
