"""What belongs to a Celery app: names that are known late, tasks that are registered once, beat entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery

from mongo_celery.app import Registry, add_task, list_periods, schedule
from mongo_celery.errors import ConfigurationError


@dataclass
class Thing:
    """Something with a name, which it may only know when it is asked for it."""

    known: str | None

    @property
    def name(self) -> str:
        assert self.known is not None, "asked too early"
        return self.known


THINGS: Registry[Thing] = Registry("thing", create="Thing(app) anywhere", rename="give this one another")


@pytest.fixture
def app() -> Celery:
    """Give an app of this test's own."""
    return Celery("things", broker="memory://", set_as_current=False)


def test_a_thing_is_not_asked_for_its_name_before_a_command_gives_one(app: Celery) -> None:
    """Its collection may not be open yet, and opening it may connect."""
    late, early = Thing(None), Thing("early")
    assert [THINGS.add(app, late, None), THINGS.add(app, early, "early")] == [True, False]
    with pytest.raises(ConfigurationError, match="already has a thing named 'early'"):
        THINGS.add(app, Thing("early"), "early")
    assert THINGS.select(app, []) == [late, early]
    late.known = "late"
    assert THINGS.select(app, ["late"]) == [late]
    assert THINGS.find(app, "late") is late
    with pytest.raises(ConfigurationError, match=r"This app has no thing 'lte'\. It has early, late\."):
        THINGS.select(app, ["lte"])


def test_an_app_without_things_is_told_how_to_make_one(app: Celery) -> None:
    """Things of another kind, or of another app, are none."""
    Registry[Thing]("other", create="", rename="").add(app, Thing("other"), "other")
    THINGS.add(Celery("another", set_as_current=False), Thing("one"), "one")
    assert THINGS.of(app) == []
    assert THINGS.find(app, "other") is None
    with pytest.raises(ConfigurationError, match=r"has no thing. Create one with Thing\(app\) anywhere, and name"):
        THINGS.select(app, [])


def test_a_task_is_registered_once_and_sent_as_often_as_the_most_impatient_asks(app: Celery) -> None:
    """Messages outlive the pause until the next, but at least a minute: busy workers would never run one."""

    def work(*args: Any) -> tuple[Any, ...]:
        return args

    for every in (120.0, 7.0, 30.0):
        add_task(app, "things.work", work)
        schedule(app, "things.work", every)
    schedule(app, "things.work", 300.0, "one")
    app.finalize()
    assert app.tasks["things.work"](1) == (1,)
    assert app.tasks["things.work"].ignore_result is True
    entries = {
        name: (entry["schedule"], tuple(entry["args"]), entry["options"]["expires"])
        for name, entry in app.conf.beat_schedule.items()
    }
    assert entries == {"things.work": (7.0, (), 60.0), "things.work one": (300.0, ("one",), 300.0)}


def test_beat_is_asked_at_most_once_a_second(app: Celery) -> None:
    """A scheduler that keeps whole seconds in a database makes zero of half a second, and sends without a pause."""
    schedule(app, "things.work", 0.5)
    app.finalize()
    assert app.conf.beat_schedule["things.work"]["schedule"] == 1.0
    assert list_periods(app) == {("things.work",): 0.5}
