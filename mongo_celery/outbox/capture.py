"""
Capturing sends: `delay` and similar calls go to a transaction's buffer instead of the broker.

All of Celery's sending (tasks, signatures, names, canvases) ends in `app.send_task`. It is replaced once per app, and
looks for the open buffer in the current context. A thread that the body starts has its own context and publishes
immediately. An asyncio task has the body's context. Without a buffer, the app's finder looks for an open transaction.

The classes of results are also replaced. For a group Celery queries the result backend when it makes the results, and a
write must not wait for that server. And a `get` must not wait for a task that is sent after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from celery import Celery
from celery.canvas import Signature
from celery.utils import uuid

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.transaction.scopes import clear_in_callbacks

Options = dict[str, Any]


class Taker(Protocol):
    """
    A receiver of messages while it is open.

    Attributes:
        gives_results: True if users get the results of its tasks, so that these listen at the result backend.
    """

    gives_results: bool

    @property
    def ids(self) -> set[Any]:
        """The ids of its tasks and of their later steps."""

    def take(self, signature: Signature) -> None:
        """Take one task."""


class Finder(Protocol):
    """Finds an open transaction."""

    def find(self) -> Taker | None:
        """Return the receiver of messages that belong to the transaction that is open here."""


@dataclass(slots=True, eq=False)
class _Open:
    """
    The receivers of a context, by app.

    Attributes:
        takers: the open receivers.
        around: the outer taker.
        is_left: True if another context ended it, and so could not remove it here.
    """

    takers: Mapping[Celery, Taker]
    around: _Open | None
    is_left: bool = False


_OPEN: ContextVar[_Open | None] = ContextVar("mongo_celery_outbox_takers", default=None)
clear_in_callbacks(_OPEN)
FINDERS: WeakKeyDictionary[Celery, Finder] = WeakKeyDictionary()
"""The apps that look for an open transaction."""

_SEND_TASK = inspect.signature(Celery.send_task)

_OF_THE_CALL = (
    "producer",
    "publisher",
    "connection",
    "router",
    "result_cls",
    "add_to_parent",
    "task_type",
    "retry",
    "retry_policy",
    "event_dispatcher",
)
"""Options of `send_task` for the sending process. They are not stored, because the publisher has its own."""

IS_MESSAGE = "is_message"
"""The mark of a captured signature. True if `apply_async` of its task has already run, False if it was sent by name."""

_NONE_COUNTS = ("expires", "time_limit", "soft_time_limit")
"""Options for which None overrides the task's own value."""


def install(app: Celery) -> None:
    """Make an app look for an open buffer before it sends. A second call changes nothing."""
    replaced = app.__dict__.get("send_task")
    if getattr(replaced, "_mongo_celery_outbox", False):
        return

    @wraps(Celery.send_task)
    def send_task(*args: Any, **kwargs: Any) -> Any:
        # Read at each call, because tracing tools may replace the class's method at any time.
        send = replaced or type(app).send_task.__get__(app)
        taker = _find_taker(app)
        if taker is None:
            return send(*args, **kwargs)
        return _take(app, taker, send, *args, **kwargs)

    send_task._mongo_celery_outbox = True  # type: ignore[attr-defined] # noqa: SLF001
    app.send_task = send_task  # type: ignore[method-assign]

    known: Any = app.AsyncResult

    def then(self: Any, callback: Any, on_error: Any = None, weak: bool = False) -> Any:
        taker = _takers_here().get(app)
        if taker is None or taker.gives_results:
            return known.then(self, callback, on_error, weak)
        return self.on_ready.then(
            callback, on_error
        )  # everything except the query to the result backend, which may be down

    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_wait(app, [self])
        return known.get(self, *args, **kwargs)

    made = {"then": then, "get": get, "wait": get, "__module__": known.__module__}
    app.AsyncResult = type("AsyncResult", (known,), made)  # type: ignore[misc]
    known_group: Any = app.GroupResult

    def get_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_wait(app, self.results)
        return known_group.get(self, *args, **kwargs)

    made = {"get": get_group, "__module__": known_group.__module__}
    app.GroupResult = type("GroupResult", (known_group,), made)  # type: ignore[misc]


@contextmanager
def capture_sends(app: Celery, taker: Taker) -> Iterator[None]:
    """
    In the block, a taker gets the app's messages.

    Another context may leave it than entered it, as in a block of `transactional`.
    """
    inside = _Open({**_takers_here(), app: taker}, _OPEN.get())
    token = _OPEN.set(inside)
    try:
        yield
    finally:
        try:
            _OPEN.reset(token)
        except ValueError:  # another context
            inside.is_left = True


def _takers_here() -> Mapping[Celery, Taker]:
    found = _OPEN.get()
    while found is not None and found.is_left:
        found = found.around
    return {} if found is None else found.takers


def _find_taker(app: Celery) -> Taker | None:
    taker, finder = _takers_here().get(app), FINDERS.get(app)
    return finder.find() if taker is None and finder is not None else taker


def _refuse_wait(app: Celery, results: Sequence[Any]) -> None:
    taker = _find_taker(app)
    held = [result.id for result in results if taker is not None and result.id in taker.ids]
    if held:
        raise OutboxRefusedError(
            f"get() would wait forever for task {held[0]}, because it is sent after the commit of the transaction that "
            "is open here. Call get() after the commit."
        )


def _take(app: Celery, taker: Taker, send: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    given = dict(_SEND_TASK.bind(app, *args, **kwargs).arguments)
    del given["self"]
    more = given.pop("options", {})
    options: Options = {**given, **more}
    name, task_args, task_kwargs = options.pop("name"), options.pop("args", None), options.pop("kwargs", None)
    running = app.current_worker_task
    if running and running.request.id in _ids(options):
        # The running task continues in it (`retry`, `replace`), and its next exception aborts the transaction.
        return send(*args, **kwargs)
    call = {argument: options.pop(argument, None) for argument in _OF_THE_CALL}
    _refuse(name, call, options)
    kept = {option: value for option, value in options.items() if value is not None or option in _NONE_COUNTS}
    kept.setdefault("task_id", uuid())
    signature = Signature(name, tuple(task_args or ()), dict(task_kwargs or {}), kept, app=app)
    signature[IS_MESSAGE] = call["task_type"] is not None
    taker.take(signature)
    taker.ids.update(_ids(kept))
    result = (call["result_cls"] or app.AsyncResult)(kept["task_id"])
    result.ignored = kept.get("ignore_result")
    if running and call["add_to_parent"] is not False:
        running.add_trail(result)
    return result


def _ids(options: Mapping[str, Any]) -> Iterator[Any]:
    """Return the ids of a message's task and of all following tasks."""
    yield options.get("task_id")
    for option in ("chain", "chord"):
        found = options.get(option) or ()
        for follower in [found] if isinstance(found, Mapping) else found:
            yield from _list_follower_ids(follower)


def _list_follower_ids(follower: Mapping[str, Any]) -> Iterator[Any]:
    yield from _ids(follower.get("options") or {})
    kwargs = follower.get("kwargs") or {}
    parts = [*(kwargs.get("tasks") or ()), kwargs.get("body")] if follower.get("subtask_type") else []
    for part in parts:
        if isinstance(part, Mapping):
            yield from _list_follower_ids(part)


def _refuse(name: str, call: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse a message that a buffer cannot hold."""
    if call["connection"] is not None or call["router"] is not None:
        raise OutboxRefusedError(
            f"{name} is sent with a custom connection or router, which an outbox cannot store. Send it after the "
            "commit.",
            task=name,
        )
    if options.get("chord") is not None:
        raise OutboxRefusedError(
            f"{name} is part of a chord, which needs the result backend when it is sent. Let a task start the chord.",
            task=name,
        )
