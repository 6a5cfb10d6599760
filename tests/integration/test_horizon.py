"""
Warning before history is lost: whom the oplog is about to pass, who holds it, and what frees it.

The oplogs are given, and so is what is read; P12 to P16 are the invariants of the isolation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from bson import Timestamp
from celery import Celery
from pymongo import MongoClient

from mongo_celery.bridge.listener.horizon import THRESHOLDS, Horizon, judge_risk, remedy
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.window import PendingChange
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.command_line import CommandLine
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.mongo.oplog import Oplog
from tests.fixtures.rights import UrlOf
from tests.rig.term import begin_term, mark_at

Document = dict[str, Any]

BEGIN, END = 1_000_000, 1_001_000
RECORD = "mongo_celery.listener"


def oplog(first: int = BEGIN) -> Oplog:
    return Oplog(Timestamp(first, 1), Timestamp(END, 1))


MakeWiring = Callable[[str], Wiring]


@pytest.fixture
def wiring_of(state_database: str) -> Iterator[MakeWiring]:
    made = []

    def make(url: str) -> Wiring:
        wiring = Wiring("shop", url, {"name": "shop", "database": state_database})
        wiring.bound = Celery("horizon", set_as_current=False)
        made.append(wiring)
        return wiring

    yield make
    for wiring in made:
        wiring.client.close()


@pytest.fixture
def led(mongo_client: MongoClient[Document], state_database: str) -> Subscription:
    """Give a subscription whose change at half of the oplog is not done."""
    rig = begin_term(mongo_client, state_database, 2)
    (led,) = rig.led(rig.take_over(), {"record": mark_at(Timestamp(BEGIN + 500, 1))})
    led.window.add(PendingChange(mark_at(Timestamp(BEGIN + 501, 1)), 1, b"change"), led.partitions[1].queue)
    return led


def test_each_threshold_is_named_once_as_the_oplog_comes_nearer(
    led: Subscription, mongo_url: str, wiring_of: MakeWiring, caplog: pytest.LogCaptureFixture
) -> None:
    """
    P16: 50, 75, 90 and 100 %, with the command that frees the place.

    Oplogs are truncated in pieces, so a share goes up and down. Once the place is freed, the next fall is a new one.
    """
    caplog.set_level(logging.WARNING, RECORD)
    horizon, partition = Horizon(wiring_of(mongo_url)), led.partitions[1]
    partition.image = replace(partition.image, state="halted")

    def judge(read: Oplog | None) -> None:
        horizon._read = read
        horizon.judge([led])

    for first in range(BEGIN - 400, BEGIN + 520, 5):
        for tremble in (0, -10, 0):
            judge(oplog(first + tremble))
    shares = [record.__dict__["share"] for record in caplog.records]
    assert [max(limit for limit in THRESHOLDS if limit <= share) for share in shares] == list(THRESHOLDS)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR", "ERROR"]
    for record in caplog.records:
        assert (record.__dict__["event"], record.__dict__["subscription"]) == ("history_at_risk", "record")
        assert "changes retry record 1" in record.getMessage()
    judge(oplog(BEGIN - 4000))
    judge(oplog())
    assert len(caplog.records) == len(THRESHOLDS) + 1
    judge(None)
    assert len(caplog.records) == len(THRESHOLDS) + 1, "there is room again"


_HELD: list[tuple[Document, str, str]] = [
    ({"state": "halted"}, "halted", "celery -A shop changes skip record 1"),
    ({"state": "paused"}, "paused", "celery -A shop changes resume record 1"),
    ({"due_in": 9.0}, "retrying", "celery -A shop changes retry record 1"),
    ({"due_in": 9.0, "waiting": {"cause": "AutoReconnect: away"}}, "waiting", "server"),
    ({}, "unclaimed", "workers"),
    ({}, "limited", "rate"),
]


def test_the_remedy_fits_what_holds_it(led: Subscription) -> None:
    """P16: who is told to retry what is paused learns nothing. Where nothing is left to do, no partition is named."""
    partition, untouched = led.partitions[1], led.partitions[1].image
    for changes, state, command in _HELD:
        partition.image = replace(untouched, **changes)
        led.limit.waiting = int(state == "limited")
        led.candidates[partition] = None
        risk = judge_risk(led, oplog())
        assert (risk.partition, risk.state) == (1, state)
        assert command in remedy(CommandLine("shop"), risk.subscription, risk.partition, risk.state)
    led.window.complete(partition.queue, led.window.seen)
    risk = judge_risk(led, oplog(BEGIN + 2))
    assert (risk.partition, risk.state) == (None, None)
    assert "changes status" in remedy(CommandLine("shop"), risk.subscription, risk.partition, risk.state)


def test_a_whole_oplog_endangers_nobody(
    make_replica_set: Callable[..., MongoReplicaSet], wiring_of: MakeWiring
) -> None:
    """P16: it has never removed an entry, however far back somebody stands. The session's set may have rolled."""
    horizon = Horizon(wiring_of(make_replica_set().url))
    assert horizon.read_oplog() < math.inf
    assert horizon._read is None


def test_without_the_right_to_see_the_oplog_it_is_said_once(
    guarded_url: UrlOf, wiring_of: MakeWiring, caplog: pytest.LogCaptureFixture
) -> None:
    """P16: a mongos has none, either. Once in a term: the oplog is not asked for again."""
    caplog.set_level(logging.INFO, RECORD)
    wiring = wiring_of(guarded_url("without_oplog"))
    assert Horizon(wiring).read_oplog() == math.inf
    said = [record.__dict__["event"] for record in caplog.records if record.name == "mongo_celery.listener"]
    assert said == ["horizon_unseen"]
