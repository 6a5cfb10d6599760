"""Real workers for users' tests that do not come; one that works is in `acceptance/test_testing_page.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.testing import BridgeWorkers

NOWHERE = "mongodb://localhost:1/?replicaSet=nowhere"


@pytest.fixture
def bridge(database: Database[Any]) -> Bridge:
    made = Bridge(
        Celery("shop", broker="memory://", set_as_current=False), NOWHERE, name=database.name, autodiscover=False
    )

    @made.on_change(database["orders"].full_name)
    def note(change: Change) -> None:
        """Of no effect."""

    return made


def test_a_worker_that_ends_is_said_with_its_words(bridge: Bridge, mongo_url: str, tmp_path: Path) -> None:
    """Nobody waits a minute for an app that cannot be imported; the bridge is as it was afterwards."""
    with BridgeWorkers([bridge], mongo_url, "memory://", tmp_path) as workers:
        assert bridge.url != NOWHERE
        with pytest.raises(ChildProcessError, match=r"(?s)status 2.*nowhere"):
            workers.start("nowhere.celery")
        assert "nowhere" in workers.output
    assert bridge.url == NOWHERE


def test_what_does_not_come_is_said(bridge: Bridge, mongo_url: str, tmp_path: Path) -> None:
    """With the handlers that are behind."""
    with (
        BridgeWorkers([bridge], mongo_url, "memory://", tmp_path) as workers,
        pytest.raises(TimeoutError, match="note behind"),
    ):
        workers.drain(timeout=0.1)
