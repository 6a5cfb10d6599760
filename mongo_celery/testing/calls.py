"""
What the handlers of a runner were called with, and what is to happen to a call.

A call is looked at where the task calls its function: behind claim and envelope, in front of `autoretry_for` and
the transaction. So a retry shows as Celery's `Retry`, and a failure as the handler's own error.
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
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.errors import HandlerUsageError, StaleFencingTokenError

CrashPoint = Literal["claimed", "called", "handled"]
CRASH_POINTS: tuple[CrashPoint, ...] = get_args(CrashPoint)
_FAREWELLS = ("advance", "crash", "relinquish")  # what a process that ends still writes of a claim


class ProcessKilledError(BaseException):
    """The worker's process was killed here: no code of it runs any more, and nothing more is written."""


@dataclass(slots=True)
class PlannedCrash:
    """
    An execution that is to die.

    Attributes:
        point: where.
        handler: that it is about; None for any.
        after: how many executions are to go well before.
    """

    point: CrashPoint
    handler: str | None
    after: int = 0

    def concerns(self, handler: str) -> bool:
        """Whether it is about this one."""
        return self.handler in (None, handler)


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
        handler: its name.
        changes: that it was given; one, unless it is a bulk handler.
        error: that it ended with; None where it returned, or its process was killed.
        was_killed: whether its process was killed, before or after the function.
        was_stale: whether newer executions had been there before the function was called.
    """

    handler: str
    changes: tuple[Change, ...]
    error: BaseException | None = None
    was_killed: bool = False
    was_stale: bool = False

    @property
    def is_retry(self) -> bool:
        """Whether the handler asked to be called again."""
        return isinstance(self.error, Retry)

    @property
    def is_done(self) -> bool:
        """Whether the handler's work counts as done."""
        return not self.was_killed and (self.error is None or isinstance(self.error, Ignore))

    @property
    def has_failed(self) -> bool:
        """Whether the error is one of the handler's own."""
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
        overtake: delivers all else while a call stands still.

    Attributes:
        calls: in the order of their ends.
        crashes: the next executions that die, in their order.
        stalls: the next calls that stand still until all else is done, each by its handler; None for any.
    """

    def __init__(self, overtake: Callable[[], None]) -> None:
        self.calls: list[HandlerCall] = []
        self.crashes: list[PlannedCrash] = []
        self.stalls: list[str | None] = []
        self._overtake = overtake

    @property
    def awaited(self) -> str | None:
        """In words, what was to happen and has not; None where all of it has."""
        if self.stalls:
            return f"stands still before {self.stalls[0] or 'its handler'}"
        return f"is killed at {self.crashes[0].point!r}" if self.crashes else None

    def forget(self) -> None:
        """Nothing more is to happen."""
        self.crashes.clear()
        self.stalls.clear()

    @contextlib.contextmanager
    def watching(self, wiring: Wiring) -> Iterator[None]:
        """Inside, the handlers of a bridge are watched."""
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
        if current.get() is None:  # somebody calls the handler himself
            return function(*args)
        given = args[-1]
        changes = (given,) if isinstance(given, Change) else tuple(given)
        was_stale = bool(self.stalls) and self.stalls[0] in (None, handler.name)
        if was_stale:
            self.stalls.pop(0)
            self._overtake()
        try:
            self._reach("claimed", handler.name)
            function(*args)
            self._reach("called", handler.name)
        except ProcessKilledError as error:
            self.calls.append(HandlerCall(handler.name, changes, error, was_killed=True, was_stale=was_stale))
            raise
        except BaseException as error:
            self.calls.append(HandlerCall(handler.name, changes, error, was_stale=was_stale))
            raise
        self.calls.append(HandlerCall(handler.name, changes, was_stale=was_stale))
        return None

    def _link(self, publish: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._reach("handled", self.calls[-1].handler)  # that has just returned
        return publish(*args, **options)

    def _reach(self, point: CrashPoint, handler: str) -> None:
        """Die here, if that is to happen next."""
        planned = self.crashes[0] if self.crashes else None
        if planned is None or planned.point != point or not planned.concerns(handler):
            return
        if planned.after:
            planned.after -= 1
            return
        self.crashes.pop(0)
        raise ProcessKilledError


def handlers_part(error: BaseException) -> BaseException:
    """An error of a handler, with that part of its traceback that is the handler's own."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals is not globals():
        found = found.tb_next
    return error if found is None else error.with_traceback(found.tb_next)


def checked_point(point: str) -> CrashPoint:
    """
    A crash point by its name.

    Raises:
        HandlerUsageError: there is none of it.
    """
    for known in CRASH_POINTS:
        if point == known:
            return known
    raise HandlerUsageError(f"crash({point!r}): a process dies at one of {', '.join(map(repr, CRASH_POINTS))}.")


def _unless_killed(write: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Who is told to end has time for a last write; who is killed has not."""
    killed = sys.exception()
    if isinstance(killed, ProcessKilledError):
        raise killed
    return write(*args, **options)
