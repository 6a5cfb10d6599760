"""An outcome that MongoDB did not answer for, and what becomes of it when it is written at last."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from bson.int64 import Int64
from celery.exceptions import Ignore
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from mongo_celery import Changes
from mongo_celery.errors import HandlerCrashedError
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.rig.changes import Document
from tests.rig.worker import APP_NAME, Begin, worker_with


@pytest.fixture
def begin(mongo_client: MongoClient[Document], mongo_url: str, state_database: str) -> Iterator[Begin]:
    """Give what makes a partition with nothing done and a worker; once a test."""
    with worker_with(mongo_client, mongo_url, state_database) as begin:
        yield begin


@pytest.fixture
def unanswered(failpoint: Failpoint) -> AbstractContextManager[None]:
    """Give a block in which no write of the worker is answered."""
    return failpoint(failCommands=["update"], appName=APP_NAME, closeConnection=True)


def test_an_outcome_that_is_refused_at_last_takes_back_what_was_charged_meanwhile(
    begin: Begin, unanswered: AbstractContextManager[None]
) -> None:
    """P14: a duplicate claimed before the write could be made, and charged an owner that lives."""
    worker = begin()
    worker.patience = 0.1

    def meet_an_outage(_changes: Changes) -> None:
        raise AutoReconnect("away")

    worker.handle = meet_an_outage
    with unanswered:
        with pytest.raises(Ignore):
            worker.run(1, "a")
        worker.rig.lapse()
        assert worker.rig.claim(owner="duplicate").crashes == 1
    wait_for(lambda: worker.rig.document["retry"]["crashes"] == 0, timeout=30)
    assert worker.rig.document["claim"]["owner"] == "duplicate"


def test_an_outcome_that_is_refused_at_last_leaves_no_claim(
    begin: Begin, unanswered: AbstractContextManager[None]
) -> None:
    """P14: the key behind which a change was to wait was released before the write; the next claim counts no crash."""
    worker, key = begin(failure_policy="park_key"), 5
    worker.patience = 0.1
    worker.rig.spoil(parkedKeys=[{"key": "a", "hash": Int64(key)}])
    with unanswered:
        with pytest.raises(Ignore):
            worker.run(1, "a", hash=key, hashes=())
        assert worker.rig.document["claim"] is not None
        worker.rig.spoil(parkedKeys=[])
    wait_for(lambda: worker.rig.document["claim"] is None, timeout=30)
    assert (worker.calls, worker.rig.document["handled"]) == ([], None)
    assert worker.rig.claim(owner="next").crashes == 0


def test_a_signal_that_always_comes_is_counted_at_last(begin: Begin) -> None:
    """P9, P14: it may be that of a hard time limit whose clock began long before the handler."""
    worker = begin()

    def meet_a_signal(_changes: Changes) -> None:
        raise SystemExit(signal.SIGTERM - 256)

    worker.handle = meet_a_signal
    for ends in range(1, 12):
        with pytest.raises(SystemExit):
            worker.run(1, "a")
        retry = worker.rig.document["retry"]
        assert (worker.rig.document["claim"], retry["crashes"]) == (None, ends // 11)
        assert (retry["waiting"] or {}).get("doubts", 10) == min(ends, 10)
        worker.rig.spoil(**{"retry.notBefore": None})
    assert "SIGTERM" in worker.rig.document["retry"]["error"]
    worker.rig.spoil(**{"retry.crashes": 9})
    with pytest.raises(HandlerCrashedError, match="SIGTERM"):
        worker.run(1, "a")
    assert worker.rig.document["state"] == "halted"
