"""Storing where refused changes stand: paced where it fails, and no subscription waits for another's failure."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.bridge.listener.noting import Noting
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.refusal import Refusal
from mongo_celery.bridge.window import PendingChange
from mongo_celery.mongo.verdicts import Concern
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.samples import mark
from tests.integration.term_rig import TermRig, begin_term

Document = dict[str, Any]
APP = "noting"
NAMES = ("audit", "mail", "record")


@pytest.fixture
def rig(make_client: MakeClient, state_database: str) -> TermRig:
    return begin_term(make_client(appName=APP), state_database, 2, NAMES)


@pytest.fixture
def led(rig: TermRig) -> list[Subscription]:
    """Give subscriptions with one refused change each."""
    led = rig.led(rig.take_over(), {})
    for subscription in led:
        subscription.admission.note(PendingChange(mark(1), 0, b"", Refusal("no key")))
    return led


@pytest.fixture
def noting(rig: TermRig) -> Noting:
    return Noting(rig.store.subscriptions, Concern("the state database", "readWrite"))


def test_what_cannot_be_noted_is_tried_again_after_a_pause(
    led: list[Subscription], noting: Noting, failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """P15, P16: one call a round, however many wait; the leading thread neither spins nor stands still."""
    caplog.set_level(logging.WARNING)
    assert noting.due(led) <= time.monotonic()
    with failpoint(failCommands=["update"], errorCode=50, appName=APP):
        for _ in range(5):
            noting.note(led, time.monotonic())
        assert noting.due(led) > time.monotonic()
        assert [record.__dict__["event"] for record in caplog.records].count("refusals_unrecorded") == 1
    assert [subscription.next_due() for subscription in led] == [math.inf] * len(led)
    wait_for(lambda: time.monotonic() > noting.due(led))
    noting.note(led, time.monotonic())
    assert noting.due(led) == math.inf


def test_one_that_fails_keeps_no_other_waiting(
    led: list[Subscription], noting: Noting, mongo_client: MongoClient[Document], rig: TermRig
) -> None:
    """P12: a transaction that nobody ends has written its document."""
    stored = mongo_client[rig.options.database]["subscriptions"]
    with mongo_client.start_session() as session, session.start_transaction():
        stored.update_one({"_id": "shop/audit"}, {"$set": {"note": 1}}, session=session)
        noting.note(led, noting.due(led))
        noting.note(led, noting.due(led))
        assert [each.admission.is_noted for each in led] == [False, True, True]
        session.abort_transaction()
    noting.note(led, noting.due(led))
    assert noting.due(led) == math.inf
