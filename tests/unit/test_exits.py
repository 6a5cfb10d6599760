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


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of which nothing is registered yet, and nothing will be."""
    monkeypatch.setattr(exits, "_REGISTERED", set())
    monkeypatch.setattr(exits, "_OPEN", set())
    for name in ("Finalize", "CeleryFinalize"):
        monkeypatch.setattr(exits, name, lambda *_, **__: None)
    monkeypatch.setattr(atexit, "register", lambda *_: None)


def test_all_begin_to_end_before_any_is_waited_for() -> None:
    noted = list[str]()
    things = [Thing(noted) for _ in range(3)]
    for thing in things:
        exits.close_at_exit(thing)
    exits._close_all(os.getpid())
    assert noted == ["soon"] * 3 + ["closed"] * 3


def test_one_thread_at_a_time_prepares_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would clear what the first has added."""
    alone = list[bool]()
    monkeypatch.setattr(atexit, "register", lambda *_: alone.append(not exits._lock.acquire(blocking=False)))
    things = [Thing([]) for _ in range(2)]
    for thing in things:
        exits.close_at_exit(thing)
    assert (alone, len(exits._OPEN)) == ([True], 2)
