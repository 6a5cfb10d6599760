"""Receivers of signals: one records what it was sent, and one never returns."""

from __future__ import annotations

import threading
from typing import Any

import tests.rig.scripted.handlers  # noqa: F401 - the handlers of the app
from mongo_celery.signals import change_halted, leader_changed
from tests.rig.scripted.recording import record, take_time


@change_halted.connect
def note(sender: str, handler: str, **_: Any) -> None:
    """Record a signal, as slowly as a pager's server."""
    take_time(1.0)
    record("signal", sender=sender, handler=handler)


@leader_changed.connect
def block(**_: Any) -> None:
    threading.Event().wait()
