"""
Points between two writes at which a process ends or stops itself, exactly there, however busy the machine is.

`SCRIPTED_POINT` has them as JSON, of a process that is to have one:

| | |
|---|---|
| `at` | a step: `Class.method` |
| `behind` | whether it is behind the step, and not in front of it |
| `once` | a step that must have been done before; none if left out |
| `signal` | what the process sends itself: `SIGKILL` if left out |
| `pieces` | how many changes one copy or one removal takes; as always if left out |

It happens once, for this process and all that it forks. The file `point` among the gates is there from then on.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from mongo_celery.bridge.listener.publishing import RunPublisher
from mongo_celery.bridge.state import backlog
from mongo_celery.bridge.state.backlog import Backlog
from mongo_celery.bridge.state.claims import Claims
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.replays import Replays
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.bridge.worker.execution import Execution

_STEPPED = (Claims, Execution, Partitions, RunPublisher, Replays, Backlog, Subscriptions)
_CLASSES = {each.__name__: each for each in _STEPPED}


def arm() -> None:
    """Let this process end or stop itself as its environment says."""
    asked = json.loads(os.environ.get("SCRIPTED_POINT", "null"))
    if asked is None:
        return
    if "pieces" in asked:
        _cut(asked["pieces"])
    done = {asked.get("once", "")} - {""}
    for step in list(done):
        _around(step, behind=lambda step=step: done.discard(step))  # type: ignore[misc]

    def act() -> None:
        if not done and _is_first():
            os.kill(os.getpid(), signal.Signals[asked.get("signal", "SIGKILL")])

    _around(asked["at"], **{"behind" if asked.get("behind") else "before": act})


def _around(step: str, before: Callable[[], None] | None = None, behind: Callable[[], None] | None = None) -> None:
    kind, _, name = step.partition(".")
    original = getattr(_CLASSES[kind], name)

    @wraps(original)
    def stepped(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before()
        found = original(*arguments, **options)
        if behind is None:
            return found
        if inspect.isgenerator(found):  # steps, which run later
            return _continue(found, behind)
        behind()
        return found

    setattr(_CLASSES[kind], name, stepped)


def _continue(steps: Generator[Any, Any, Any], behind: Callable[[], None]) -> Generator[Any, Any, Any]:
    found = yield from steps
    behind()
    return found


def _is_first() -> bool:
    with suppress(FileExistsError):
        (Path(os.environ["SCRIPTED_GATES"]) / "point").touch(exist_ok=False)
        return True
    return False


def _cut(pieces: int) -> None:
    """Remove in many calls what would else take one."""
    backlog._AT_A_TIME = pieces
