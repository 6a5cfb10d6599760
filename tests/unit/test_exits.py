"""What is closed when a process ends: all of it, and all within the time of one."""

from __future__ import annotations

import atexit
import os

import pytest

from mongo_celery import exits


class Thing:
    """Notes what happens to it."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def close_soon(self) -> None:
        self.noted.append("soon")

    def close(self) -> None:
        self.noted.append("closed")


@pytest.fixture
def things(monkeypatch: pytest.MonkeyPatch) -> exits.OpenThings:
    """Those of a process in which nothing is registered."""
    for name in ("Finalize", "CeleryFinalize"):
        monkeypatch.setattr(exits, name, lambda *_, **__: None)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    return exits.OpenThings()


def test_all_begin_to_end_before_any_is_waited_for(things: exits.OpenThings) -> None:
    noted = list[str]()
    kept = [Thing(noted) for _ in range(3)]
    for thing in kept:
        things.add(thing)
    things.close_all()
    things.close_all()
    assert noted == ["soon"] * 3 + ["closed"] * 3


def test_a_forked_child_leaves_the_things_of_its_parent_alone(
    things: exits.OpenThings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits the finalizers."""
    noted = list[str]()
    thing = Thing(noted)
    things.add(thing)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 0)
        things.close_all()
    assert noted == []
