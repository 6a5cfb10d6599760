"""
The event loop of a process, on which coroutine handlers run.

There is one for all handlers and bridges, so that they can share clients that belong to a loop (`AsyncMongoClient`,
httpx). It runs in a daemon thread, which starts at the first call, after the fork. The task's own thread waits for the
coroutine, so Celery's time limits, signals, shutdowns and pools see a plain function.

| while the task's thread waits | effect |
|---|---|
| the coroutine returns or raises | the same in the task's thread |
| the soft time limit, or a signal that ends the process | the coroutine is canceled, and has some seconds to end |
| the canceled coroutine returns after the soft time limit | success, as when a plain function catches the limit |
| the canceled coroutine raises another error | that error |
| the canceled coroutine does not end in time | canceled again, then logged. The limit is raised, it may continue |
| the coroutine is canceled by its own code | an error of the handler |

The coroutine, its tasks and its threads have the context variables of the task's thread (traces, Flask's context).
Celery's current task belongs to a thread, so it is set in each step of the coroutine itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from functools import partial
from types import coroutine
from typing import Any, TypeVar

from celery import _state

from mongo_celery.errors import HandlerUsageError
from mongo_celery.forking import PerProcess

logger = logging.getLogger("mongo_celery.worker")

Result = TypeVar("Result")
Function = Callable[[], Awaitable[Any]]

_ENDING_SECONDS = 5.0
_CANCELED = (
    "The coroutine was canceled by its own code, not by the worker. Catch asyncio.CancelledError where the handler "
    "cancels its task."
)


class EventLoop:
    """A running event loop in a daemon thread. Thread-safe."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="mongo_celery-event-loop", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Return True if the calling code runs on this loop."""
        return threading.current_thread() is self._thread

    def run(self, function: Callable[[], Awaitable[Result]]) -> Result:
        """
        Call a coroutine function on the loop, and wait for its end.

        Raises:
            HandlerUsageError: its own code has canceled it.
            BaseException: its error. Or the exception of a signal that arrived meanwhile, raised from the cancellation.
        """
        call = _CoroutineCall(function)
        try:
            self._loop.call_soon_threadsafe(call.begin)
            result: Result = call.ended.result()
        except BaseException as error:
            if call.ended.done():
                raise
            result = self._cancel(call, error)
        return result

    async def call(self, function: Callable[[], Awaitable[Result]]) -> Result:
        """Call a coroutine function on this loop, and await its end on another one."""
        call = _CoroutineCall(function)
        self._loop.call_soon_threadsafe(call.begin)
        try:
            result: Result = await asyncio.wrap_future(call.ended)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(call.cancel)
            raise
        return result

    def begin(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Call a coroutine function on the loop, and do not wait."""
        asyncio.run_coroutine_threadsafe(function(), self._loop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _cancel(self, call: _CoroutineCall, reason: BaseException) -> Any:
        for _ in range(2):  # Python 3.11's `wait_for`, which PyMongo calls, can lose one
            self._loop.call_soon_threadsafe(call.cancel)
            wait([call.ended], _ENDING_SECONDS / 2)
            if call.ended.done():
                break
        else:
            logger.error(
                "a coroutine has not ended %g s after its cancellation (%s). It may still run, and later handlers of "
                "this process wait if it blocks the event loop. Find blocking calls, or set a time_limit",
                _ENDING_SECONDS,
                type(reason).__name__,
                extra={"event": "coroutine_not_ended"},
            )
            raise reason
        try:
            result = call.ended.result()
        except asyncio.CancelledError as canceled:
            raise reason from canceled
        if not isinstance(reason, Exception):  # the process ends
            raise reason
        return result


EVENT_LOOP: PerProcess[EventLoop] = PerProcess(EventLoop)
"""The event loop of this process."""


class _CoroutineCall:
    """
    One call of a coroutine function. Its methods run on the loop.

    Attributes:
        ended: its result.
    """

    def __init__(self, function: Function) -> None:
        self.ended: Future[Any] = Future()
        self.ended.set_running_or_notify_cancel()  # only the task ends it
        self._function = function
        self._celery_task = _state.get_current_task()
        self._task: asyncio.Task[None] | None = None
        self._is_canceled = False

    def begin(self) -> None:
        """Begin the call."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel the call."""
        self._is_canceled = True
        if self._task is None:
            self.ended.set_exception(asyncio.CancelledError())
        else:
            self._task.cancel()

    def _end(self, _: object) -> None:
        if not self.ended.done():  # canceled before its first step
            self.ended.set_exception(asyncio.CancelledError())

    async def _run(self) -> None:
        try:
            result = await _step(self._await(), self._celery_task)
        except asyncio.CancelledError as error:
            if self._is_canceled:
                self.ended.set_exception(error)
            else:
                canceled = HandlerUsageError(_CANCELED)
                canceled.__cause__ = error
                self.ended.set_exception(canceled)
        except BaseException as error:  # noqa: BLE001 - the task's thread raises it, and the loop continues
            self.ended.set_exception(error)
        else:
            self.ended.set_result(result)

    async def _await(self) -> Any:
        return await self._function()


@coroutine
def _step(awaited: Coroutine[Any, Any, Any], task: Any) -> Generator[Any, Any, Any]:
    """Await a coroutine. In each of its steps, Celery's current task is this one."""
    push_task, pop_task = _state.push_current_task, _state.pop_current_task  # type: ignore[attr-defined]
    go_on: Callable[[], Any] = partial(awaited.send, None)
    while True:
        push_task(task)
        try:
            waits_for = go_on()
        except StopIteration as ended:
            return ended.value
        finally:
            pop_task()
        try:
            go_on = partial(awaited.send, (yield waits_for))
        except BaseException as error:  # noqa: BLE001 - raised in the coroutine
            go_on = partial(awaited.throw, error)
