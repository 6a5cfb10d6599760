"""What an outbox and a coordinator bring to their app: one task each, one beat entry, names used once."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Outbox, OutboxCollection, TwoPhaseCommit
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.twophase.tasks import RECOVER_TASK, RUN_TASK

Client = MongoClient[dict[str, object]]


@pytest.fixture
def client() -> Client:
    return MongoClient(connect=False)


def test_outboxes_of_an_app_share_one_task_and_the_most_impatient_beat_entry(client: Client) -> None:
    """Due as often as any of them asks. Messages outlive the pause until the next, but at least a minute."""
    app = Celery("shop", broker="memory://")
    for name, every in (("orders", 7.0), ("carts", 3.0), ("notes", None)):
        Outbox(app, client["shop"][name], sweep_every=every)
    app.finalize()

    assert SWEEP_TASK in app.tasks
    assert [outbox.name for outbox in OUTBOXES.of(app)] == ["shop.orders", "shop.carts", "shop.notes"]
    entry = app.conf.beat_schedule[SWEEP_TASK]
    assert (entry["schedule"], entry["options"]["expires"]) == (3.0, 60.0)
    with pytest.raises(ConfigurationError):
        Outbox(app, client["shop"]["orders"])
    quick = Celery("quick", broker="memory://")
    Outbox(quick, client["shop"]["orders"], sweep_every=0.5)
    quick.finalize()
    assert quick.conf.beat_schedule[SWEEP_TASK]["schedule"] == 1.0, "a database scheduler would make zero of it"


def test_coordinators_bring_their_tasks_and_a_beat_entry_each(client: Client) -> None:
    app = Celery("bank", broker="memory://")
    TwoPhaseCommit(app, client["bank"]["transactions"])
    TwoPhaseCommit(app, client["bank"]["others"], name="others", recover_every=None)
    app.finalize()

    assert {RUN_TASK, RECOVER_TASK} <= set(app.tasks)
    (entry,) = (value for key, value in app.conf.beat_schedule.items() if key.startswith(RECOVER_TASK))
    assert (entry["schedule"], entry["args"]) == (60, ("default",))
    with pytest.raises(ConfigurationError):
        TwoPhaseCommit(app, client["bank"]["transactions"])


@pytest.mark.parametrize("kind", [Outbox, OutboxCollection])
def test_an_outbox_that_cannot_work_is_refused_and_its_app_has_none(client: Client, kind: Any) -> None:
    """When it is made, not when the first order is lost."""
    app = Celery("shop", broker="memory://")
    with pytest.raises(ConfigurationError, match="sweep_after"):
        kind(app, client["shop"]["orders"], sweep_afer=1)
    for wrong in ("shop.orders", 42, Celery):  # a class, such as a Django model, is callable
        with pytest.raises(ConfigurationError):
            kind(app, wrong)
    assert OUTBOXES.of(app) == []
