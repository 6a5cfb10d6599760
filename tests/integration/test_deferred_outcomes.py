"""An outcome that MongoDB did not answer for, and what becomes of it when it is written at last."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, closing

import bson
import pytest
from bson.int64 import Int64
from celery import Celery
from celery.exceptions import Ignore
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from mongo_celery import Bridge, Change
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.bridge.worker.execution import Execution
from tests.fixtures.process import wait_for
from tests.fixtures.samples import event
from tests.integration.partition_rig import BRIDGE, SUBSCRIPTION, VERSION, Document, rig_of

Failpoint = Callable[..., AbstractContextManager[None]]


def test_an_outcome_that_is_refused_at_last_takes_back_what_was_charged_meanwhile(
    mongo_url: str, make_client: Callable[..., MongoClient[Document]], state_database: str, failpoint: Failpoint
) -> None:
    """P14: a duplicate claimed before the write could be made, and charged an owner that lives."""
    rig = rig_of(make_client(), state_database)
    appname = "deferred_outcome"
    url = f"{mongo_url}{'&' if '?' in mongo_url else '?'}appName={appname}"
    bridge = Bridge(Celery(broker="memory://"), url, name=BRIDGE, database=state_database, autodiscover=False)

    @bridge.on_change("shop.orders", name=SUBSCRIPTION)
    def record(_change: Change) -> None:
        """Is not called."""

    def meet_an_outage(_change: Change, _retries: int) -> None:
        raise AutoReconnect("away")

    run = Run(BRIDGE, SUBSCRIPTION, 0, 0, VERSION, 1, 1, (bson.encode(event()),))
    (handler,) = bridge.wiring.handlers
    execution = Execution(bridge.wiring, handler, run, patience=0.1)
    with closing(bridge.client):
        with failpoint(failCommands=["update"], appName=appname, closeConnection=True):
            with pytest.raises(Ignore):
                execution.execute(meet_an_outage)
            rig.lapse()
            assert rig.claim(owner="duplicate").crashes == 1
        wait_for(lambda: rig.document["retry"]["crashes"] == 0, timeout=30)
        assert rig.document["claim"]["owner"] == "duplicate"


def test_an_outcome_that_is_refused_at_last_leaves_no_claim(
    mongo_url: str, make_client: Callable[..., MongoClient[Document]], state_database: str, failpoint: Failpoint
) -> None:
    """P14: the key behind which a change was to wait was released before the write; the next claim counts no crash."""
    rig = rig_of(make_client(), state_database)
    key = 5
    rig.spoil(parkedKeys=[{"key": "a", "hash": Int64(key)}])
    appname = "deferred_letter"
    url = f"{mongo_url}{'&' if '?' in mongo_url else '?'}appName={appname}"
    bridge = Bridge(Celery(broker="memory://"), url, name=BRIDGE, database=state_database, autodiscover=False)

    @bridge.on_change("shop.orders", name=SUBSCRIPTION, failure_policy="park_key")
    def record(_change: Change) -> None:
        """Is not called."""

    run = Run(BRIDGE, SUBSCRIPTION, 0, 0, VERSION, 1, 1, (bson.encode(event()),), hash=key)
    (handler,) = bridge.wiring.handlers
    with closing(bridge.client):
        with failpoint(failCommands=["update"], appName=appname, closeConnection=True):
            with pytest.raises(Ignore):
                Execution(bridge.wiring, handler, run, patience=0.1).execute(lambda *_: pytest.fail("called"))
            assert rig.document["claim"] is not None
            rig.spoil(parkedKeys=[])
        wait_for(lambda: rig.document["claim"] is None, timeout=30)
    assert rig.document["handled"] is None
    assert rig.claim(owner="next").crashes == 0


def test_a_signal_that_always_comes_is_counted_at_last(
    mongo_url: str, mongo_client: MongoClient[Document], state_database: str
) -> None:
    """P9, P14: it may be that of a hard time limit whose clock began long before the handler."""
    rig = rig_of(mongo_client, state_database)
    bridge = Bridge(Celery(broker="memory://"), mongo_url, name=BRIDGE, database=state_database, autodiscover=False)

    @bridge.on_change("shop.orders", name=SUBSCRIPTION)
    def record(_change: Change) -> None:
        """Is not called."""

    def meet_a_signal(_change: Change, _retries: int) -> None:
        raise SystemExit(signal.SIGTERM - 256)

    run = Run(BRIDGE, SUBSCRIPTION, 0, 0, VERSION, 1, 1, (bson.encode(event()),))
    (handler,) = bridge.wiring.handlers
    with closing(bridge.client):
        for ends in range(1, 12):
            with pytest.raises(SystemExit):
                Execution(bridge.wiring, handler, run).execute(meet_a_signal)
            retry = rig.document["retry"]
            assert (rig.document["claim"], retry["crashes"]) == (None, ends // 11)
            assert (retry["waiting"] or {}).get("timeOuts", 10) == min(ends, 10)
            rig.spoil(**{"retry.notBefore": None})
