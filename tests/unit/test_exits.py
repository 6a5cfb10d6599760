"""What is closed when a process ends: all of it, and all within the time of one."""

from __future__ import annotations

import atexit
import os

import pytest

from mongo_celery import exits


def test_all_begin_to_end_before_any_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child inherits the finalizers, and leaves the things of its parent alone."""
    for owner, name in ((exits, "Finalize"), (exits, "CeleryFinalize"), (atexit, "register")):
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    things, noted = exits.OpenThings(), list[str]()

    class Thing:
        def close_soon(self) -> None:
            noted.append("soon")

        def close(self) -> None:
            noted.append("closed")

    kept = [Thing() for _ in range(3)]
    for thing in kept:
        things.add(thing)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 0)
        things.close_all()
    assert noted == []
    things.close_all()
    things.close_all()
    assert noted == ["soon"] * 3 + ["closed"] * 3
