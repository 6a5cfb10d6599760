"""
The calls of a runner's handlers, and the faults that a test requests.

A call is recorded when the task calls its function: after claim and envelope, inside `autoretry_for` and the
transaction. So a retry is recorded as Celery's `Retry`, and a failure as the handler's own error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args
from unittest.mock import patch

from celery.exceptions import Ignore, Retry

from mongo_celery.bridge.change import Change, describe_change
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.bridge.worker.execution import current
from mongo_celery.bridge.worker.tasks import COMMIT_TASK, NOT_AWAITED
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.mongo.transaction.scopes import refuse_coroutine

CrashPoint = Literal["claimed", "called", "handled"]
CRASH_POINTS: tuple[CrashPoint, ...] = get_args(CrashPoint)
_FAREWELLS = ("advance", "crash", "relinquish")  # writes to a claim by a process that ends


class ProcessKilledError(BaseException):
    """The worker's process was killed at this point. It runs and writes nothing more."""


@dataclass(slots=True)
class PlannedCrash:
    """
    A planned death of an execution.

    Attributes:
        point: the place in the execution.
        handler: name of the handler; None for any.
        after: number of executions that pass the point first.
    """

    point: CrashPoint
    handler: str | None
    after: int = 0


@dataclass(frozen=True, slots=True)
class HandlerCall:
    """
    One call of a handler.

    ::

        with BridgeRunner(bridge, url=url) as runner:
            orders.insert_one({"_id": 3, "total": 20})
            runner.crash("called", handler="summarise")
            calls: tuple[HandlerCall, ...] = runner.deliver().of("summarise")
        assert [call.was_killed for call in calls] == [True, False]
        assert calls[-1].is_done

    Attributes:
        handler: name of the handler.
        changes: the changes of the call. There is one, unless the handler is a bulk handler.
        error: the error with which it ended. None if it returned, or its process was killed.
        was_killed: True if its process was killed, before or after the function.
        was_stale: True if newer executions ran before the function was called.
    """

    handler: str
    changes: tuple[Change, ...]
    error: BaseException | None = None
    was_killed: bool = False
    was_stale: bool = False

    @property
    def is_retry(self) -> bool:
        """Return True if the handler requested another call."""
        return isinstance(self.error, Retry)

    @property
    def is_done(self) -> bool:
        """Return True if the handler's work counts as done."""
        return not self.was_killed and (self.error is None or isinstance(self.error, Ignore))

    @property
    def has_failed(self) -> bool:
        """Return True if the error is the handler's own."""
        excused = (Retry, Ignore, StaleFencingTokenError, ProcessKilledError)
        return self.error is not None and not isinstance(self.error, excused)

    def __repr__(self) -> str:
        changes = ", ".join(map(describe_change, self.changes))
        end = "killed" if self.was_killed else "returned" if self.error is None else repr(self.error)
        return f"<HandlerCall {self.handler}({changes}) {'stale ' * self.was_stale}{end}>"


class CallRecorder:
    """
    The calls of some bridges' handlers.

    Args:
        overtake: delivers all other work while a call hangs.

    Attributes:
        calls: the calls, in the order of their ends.
        crashes: the next executions to crash, in order.
        stalls: handlers whose next call hangs until all other work is done. None for any handler.
    """

    def __init__(self, overtake: Callable[[], None]) -> None:
        self.calls: list[HandlerCall] = []
        self.crashes: list[PlannedCrash] = []
        self.stalls: list[str | None] = []
        self._overtake = overtake

    @property
    def awaited(self) -> str | None:
        """Return the next fault that has not happened yet, as text. None if all have."""
        if self.stalls:
            return f"was frozen before {self.stalls[0] or 'its handler'}"
        return f"was killed at {self.crashes[0].point!r}" if self.crashes else None

    def forget(self) -> None:
        """Drop all faults that have not happened yet."""
        self.crashes.clear()
        self.stalls.clear()

    @contextlib.contextmanager
    def watching(self, wiring: Wiring) -> Iterator[None]:
        """Record the calls of a bridge's handlers in the block."""
        wiring.app.finalize(auto=True)
        with contextlib.ExitStack() as stack:
            for handler in wiring.handlers:
                task: Any = wiring.app.tasks[handler.task_name]
                stack.enter_context(patch.object(task, "run", functools.partial(self._call, handler, task.run)))
            commit: Any = wiring.app.tasks[COMMIT_TASK]
            stack.enter_context(patch.object(commit, "apply_async", functools.partial(self._link, commit.apply_async)))
            claims = wiring.store.claims
            for name in _FAREWELLS:
                write = functools.partial(_unless_killed, getattr(claims, name))
                stack.enter_context(patch.object(claims, name, write))
            yield

    def _call(self, handler: Handler, function: Callable[..., Any], *args: Any) -> Any:
        execution = current.get()
        if execution is None or execution.handler.name != handler.name:  # a test or another handler calls it
            return function(*args)
        given = args[-1]
        changes = (given,) if isinstance(given, Change) else tuple(given)
        was_stale = bool(self.stalls) and self.stalls[0] in (None, handler.name)
        if was_stale:
            self.stalls.pop(0)
            self._overtake()
        try:
            self._reach("claimed", handler.name)
            result = refuse_coroutine(function(*args), NOT_AWAITED)  # as the task does with the result
            self._reach("called", handler.name)
        except ProcessKilledError as error:
            self.calls.append(HandlerCall(handler.name, changes, error, was_killed=True, was_stale=was_stale))
            raise
        except BaseException as error:
            self.calls.append(HandlerCall(handler.name, changes, error, was_stale=was_stale))
            raise
        self.calls.append(HandlerCall(handler.name, changes, was_stale=was_stale))
        return result

    def _link(self, publish: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._reach("handled", self.calls[-1].handler)  # of the call that has just returned
        return publish(*args, **options)

    def _reach(self, point: CrashPoint, handler: str) -> None:
        """Crash here if the next planned crash is at this point."""
        planned = self.crashes[0] if self.crashes else None
        if planned is None or planned.point != point or planned.handler not in (None, handler):
            return
        if planned.after:
            planned.after -= 1
            return
        self.crashes.pop(0)
        raise ProcessKilledError


def handlers_part(error: BaseException) -> BaseException:
    """Return a handler's error with only the handler's part of its traceback."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals is not globals():
        found = found.tb_next
    return error if found is None else error.with_traceback(found.tb_next)


def _unless_killed(write: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return a write that does nothing if the process was killed. A regular end still allows it."""
    killed = sys.exception()
    if isinstance(killed, ProcessKilledError):
        raise killed
    return write(*args, **options)
