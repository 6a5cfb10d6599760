"""
The removals of one term against a real server, step by step.

P17: whatever comes between two steps, what is done is removed in the end, and what is stored is measured.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.bridge.listener import removal as module
from mongo_celery.bridge.listener.removal import Removal
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.backlog import Backlog, StoredChange
from mongo_celery.bridge.state.store import Store
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.samples import image, raw_event, token_data

APP = "removing"
TERM = 100
BOUND = 100_000
_SOME = 3


def partition_id(index: int = 0, bridge: str = "shop") -> str:
    return f"{bridge}/record/7/{index}"


def store_some(backlog: Backlog, *numbers: int, index: int = 0, bridge: str = "shop", padding: int = 0) -> int:
    noise = random.Random(1).randbytes(padding)  # which cannot be compressed
    raws = [raw_event(_id={"_data": token_data(number)}, padding=noise) for number in numbers]
    changes = [StoredChange(token_data(number), raw, 1) for number, raw in zip(numbers, raws, strict=True)]
    backlog.insert(partition_id(index, bridge), changes, TERM)
    return sum(map(len, raws))


def stored(backlog: Backlog, index: int = 0) -> int:
    return backlog.count(partition_id(index), "", token_data(9999))


def ask(removal: Removal, done: int, *, index: int = 0) -> None:
    """Have removed what a partition has committed, up to this change, where the watermark is far beyond."""
    images = {partition_id(index): image(index=index, data=token_data(done))}
    removal.ask(images, {"record": token_data(9999)})


@pytest.fixture
def make_backlog(make_client: MakeClient, state_database: str) -> Callable[..., Backlog]:
    client: MongoClient[dict[str, Any]] = make_client(appName=APP)

    def made(bridge: str = "shop") -> Backlog:
        return Store(client, BridgeOptions(name=bridge, database=state_database)).backlog

    return made


@pytest.fixture
def backlog(make_backlog: Callable[..., Backlog]) -> Backlog:
    return make_backlog()


def test_what_is_done_while_a_partition_is_removed_is_removed_next(backlog: Backlog) -> None:
    """P17: a partition that has ended its backlog goes on, and is swept again between two steps of its removal."""
    store_some(backlog, *range(1, _SOME + 1))
    removal = Removal(backlog, TERM, BOUND)
    removal.note(partition_id(), token_data(_SOME))
    ask(removal, _SOME)
    removal.work()
    ask(removal, _SOME + 1)
    for number in range(1, _SOME + 1):
        store_some(backlog, number, index=1)
        removal.note(partition_id(1), token_data(number))
        ask(removal, number, index=1)
        wait_for(lambda: removal.work() >= 0 and not stored(backlog, 1))
    assert not stored(backlog)


def test_removal_goes_on_where_it_cannot_be_measured(
    backlog: Backlog, failpoint: Failpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P17: collStats may be refused, by rights or by an outage; that is logged now and then, and not each second."""
    monkeypatch.setattr(module, "_MEASURED_SECONDS", 0.0)
    store_some(backlog, *range(1, _SOME + 1))
    removal = Removal(backlog, TERM, BOUND)
    removal.note(partition_id(), token_data(_SOME), 10)
    with failpoint(failCommands=["collStats", "aggregate"], errorCode=13, appName=APP):
        ask(removal, _SOME)
        wait_for(lambda: removal.work() >= 0 and not backlog.read(partition_id(), "", token_data(9999), 10))
        for _ in range(_SOME):
            removal.work()
    events = [record.__dict__.get("event") for record in caplog.records if record.levelno >= logging.WARNING]
    assert events == ["removal_failed"]
    wait_for(lambda: removal.work() >= 0 and removal.size == 0, message="measured again")


def test_what_another_bridge_has_stored_stops_nobody_else(make_backlog: Callable[..., Backlog]) -> None:
    """P12: bridges share a state database by default; near the bound each counts its own bytes."""
    mine, others = make_backlog(), make_backlog("shop-2")
    size = store_some(mine, 1, padding=1000)
    store_some(others, 1, 2, 3, bridge="shop-2", padding=BOUND // 2)
    sizes = []
    for backlog in (mine, others):
        removal = Removal(backlog, TERM, BOUND)
        removal.work()
        sizes.append(removal.size)
    assert sizes[0] < size + 1000
    assert sizes[1] > BOUND
    assert mine.size(10 * BOUND) > sum(sizes) - 1000, "further from the bound it is not worth the reading"
