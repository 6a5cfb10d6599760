"""What an outbox and a coordinator bring to their app: one task each, one beat entry, names used once."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Outbox, OutboxCollection, TwoPhaseCommit
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.twophase.tasks import RECOVER_TASK, RUN_TASK


@pytest.fixture
def client() -> MongoClient[dict[str, object]]:
    return MongoClient(connect=False)


def test_outboxes_of_an_app_share_one_task_and_the_most_impatient_beat_entry(
    client: MongoClient[dict[str, object]],
) -> None:
    """Registered as a task that a worker finds, and due as often as any of them asks."""
    app = Celery("shop", broker="memory://")
    for name, every in (("orders", 7.0), ("carts", 3.0), ("notes", None)):
        Outbox(app, client["shop"][name], sweep_every=every)
    app.finalize()

    assert SWEEP_TASK in app.tasks
    assert [outbox.name for outbox in OUTBOXES.of(app)] == ["shop.orders", "shop.carts", "shop.notes"]
    entry = app.conf.beat_schedule[SWEEP_TASK]
    assert entry["schedule"] == 3.0
    assert entry["options"]["expires"] >= 3.0
    with pytest.raises(ConfigurationError, match="already"):
        Outbox(app, client["shop"]["orders"])


def test_coordinators_bring_their_tasks_and_a_beat_entry_each(client: MongoClient[dict[str, object]]) -> None:
    app = Celery("bank", broker="memory://")
    TwoPhaseCommit(app, client["bank"]["transactions"])
    TwoPhaseCommit(app, client["bank"]["others"], name="others", recover_every=None)
    app.finalize()

    assert {RUN_TASK, RECOVER_TASK} <= set(app.tasks)
    (entry,) = (value for key, value in app.conf.beat_schedule.items() if key.startswith(RECOVER_TASK))
    assert (entry["schedule"], entry["args"]) == (60, ("default",))
    with pytest.raises(ConfigurationError, match="already"):
        TwoPhaseCommit(app, client["bank"]["transactions"])


@pytest.mark.parametrize(
    "options",
    [
        {"sweep_after": 0},
        {"sweep_every": -1},
        {"claim_ttl": 4000},
        {"max_attempts": True},
        {"at_once": "later"},
        {"at_once": 1},
        {"failure_policy": "skip"},
    ],
)
def test_options_of_an_outbox_that_cannot_work_are_refused(
    client: MongoClient[dict[str, object]], options: dict[str, object]
) -> None:
    """When it is made, not when the first order is lost."""
    with pytest.raises(ConfigurationError):
        Outbox(Celery("shop", broker="memory://"), client["shop"]["orders"], **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="collection"):
        Outbox(Celery("shop", broker="memory://"), "shop.orders")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Outbox, {"sweep_afer": 1}, "option 'sweep_afer' is unknown (did you mean 'sweep_after'?)."),
        (OutboxCollection, {"field": "pending"}, "option 'field' is unknown."),
    ],
)
def test_an_option_that_an_outbox_does_not_have_is_refused(
    client: MongoClient[dict[str, object]], kind: Any, options: dict[str, object], words: str
) -> None:
    """By one sentence, and the app has no such outbox."""
    app = Celery("shop", broker="memory://")
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        kind(app, client["shop"]["orders"], **options)
    assert OUTBOXES.of(app) == []
