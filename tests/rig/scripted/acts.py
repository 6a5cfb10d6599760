"""
What a document can ask of its handler, under `do`.

`act` is one of the functions below; it happens at the starts `from` to `times` (by default the first),
before the effect or, with `after: true`, after it. `gate` waits for the test before the effect, `late_gate`
after it, `seconds` makes the handler slow.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from celery.exceptions import Ignore, Reject

from tests.rig.scripted.recording import take_time, wait_at

Asked = Mapping[str, Any]


class WantedError(Exception):
    """What a handler raises when its document asks for it."""


def perform(task: Any, document: Mapping[str, Any], start: int, *, after: bool) -> None:
    """Do what the document asks for at this place of the handler's `start`-th start."""
    asked: Asked = document.get("do") or {}
    gate = asked.get("late_gate" if after else "gate")
    if gate:
        wait_at(gate)
    if not after and "seconds" in asked:
        take_time(asked["seconds"])
    if "act" not in asked or bool(asked.get("after")) is not after:
        return
    if asked.get("from", 1) <= start <= asked.get("times", 1):
        _ACTS[asked["act"]](task, asked)


def _raise(_task: Any, asked: Asked) -> NoReturn:
    raise WantedError(asked.get("text", "as asked"))


def _exhaust(_task: Any, _asked: Asked) -> NoReturn:
    raise MemoryError


def _retry(task: Any, asked: Asked) -> None:
    options = dict(asked.get("options", {}))
    if "eta_in" in asked:
        options["eta"] = datetime.now(UTC) + timedelta(seconds=asked["eta_in"])
    task.retry(exc=WantedError("retried") if asked.get("exc") else None, **options)


def _ignore(_task: Any, _asked: Asked) -> NoReturn:
    raise Ignore


def _reject(_task: Any, _asked: Asked) -> NoReturn:
    raise Reject(WantedError("rejected"), requeue=True)


def _signal(_task: Any, asked: Asked) -> None:
    os.kill(os.getpid(), signal.Signals[asked["signal"]])
    take_time(30)


_ACTS: dict[str, Callable[[Any, Asked], None]] = {
    "raise": _raise,
    "exhaust": _exhaust,
    "retry": _retry,
    "ignore": _ignore,
    "reject": _reject,
    "replace": lambda task, _: task.replace(task.app.signature("some.other.task")),
    "join_chord": lambda task, _: task.add_to_chord(task.app.signature("some.other.task")),
    "leave": lambda _, asked: sys.exit(asked.get("status", 3)),
    "die": lambda _, asked: os._exit(asked.get("status", 7)),
    "signal": _signal,
    "linger": lambda _, asked: take_time(asked["linger"]),
}
