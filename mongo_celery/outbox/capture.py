"""
What a body sends with `delay` and its like, taken for its transaction's box instead of being published.

All of Celery's ways to send (tasks, signatures, names, canvases) end in `app.send_task`. It is replaced on the app,
once, and looks for the box that is open in the current context: a thread that is started in the body has a context of
its own and publishes at once, a task of asyncio has the body's. So is `app.AsyncResult`: for a group Celery asks the
result backend as soon as it makes the results, and a write must not wait for that server.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

from celery import Celery
from celery.canvas import Signature
from celery.utils import uuid

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.transaction.scopes import clear_in_callbacks

Options = dict[str, Any]


class Taker(Protocol):
    """
    Who takes what is sent while it is open.

    Attributes:
        gives_results: whether the results of what it takes go to a user, so that they listen at the result backend.
    """

    gives_results: bool

    def take(self, signature: Signature) -> None:
        """Keep one task."""


@dataclass(slots=True, eq=False)
class _Open:
    """
    Who takes what is sent in a context, by its app.

    Attributes:
        takers: the open ones.
        around: what was there before.
        is_left: whether it ended in another context. This one could not be reached from there, and still has it.
    """

    takers: Mapping[Celery, Taker]
    around: _Open | None
    is_left: bool = False


_OPEN: ContextVar[_Open | None] = ContextVar("mongo_celery_outbox_takers", default=None)
clear_in_callbacks(_OPEN)
_SEND_TASK = inspect.signature(Celery.send_task)

_OF_THE_CALL = (
    "producer",
    "publisher",
    "connection",
    "router",
    "result_cls",
    "add_to_parent",
    "task_type",
    "route_name",
)
"""Arguments of `send_task` that say how to send now, and are no options of the task."""

_NONE_COUNTS = ("expires", "time_limit", "soft_time_limit")
"""Options where None is no omission: it takes back what the task itself says."""


def install(app: Celery) -> None:
    """Have an app ask for an open box before it sends; a second time changes nothing."""
    replaced = app.__dict__.get("send_task")
    if getattr(replaced, "_mongo_celery_outbox", False):
        return

    @wraps(Celery.send_task)
    def send_task(*args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: tracing tools replace the method of the class, at any time.
        send = replaced or type(app).send_task.__get__(app)
        taker = _takers_here().get(app)
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
        return self.on_ready.then(callback, on_error)  # all but the question to the result backend, which may be down

    app.AsyncResult = type("AsyncResult", (known,), {"then": then, "__module__": known.__module__})  # type: ignore[misc]


@contextmanager
def capture_sends(app: Celery, taker: Taker | None) -> Iterator[None]:
    """
    Inside, what an app sends goes to a taker; with None it is published, whatever box is open around.

    It may be left in another context than it was entered in, as a block of `transactional` may be.
    """
    around = _takers_here()
    if taker is None and app not in around:
        yield
        return
    others = {each: takes for each, takes in around.items() if each is not app}
    inside = _Open(others if taker is None else {**others, app: taker}, _OPEN.get())
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


def _take(app: Celery, taker: Taker, send: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    given = dict(_SEND_TASK.bind(app, *args, **kwargs).arguments)
    del given["self"]
    more = given.pop("options", {})
    options: Options = {**given, **more}
    name, task_args, task_kwargs = options.pop("name"), options.pop("args", None), options.pop("kwargs", None)
    running = app.current_worker_task
    if running and running.request.id in _ids(options):
        # The running task goes on in it (`retry`, `replace`): what it raises next aborts the transaction.
        return send(*args, **kwargs)
    call = {argument: options.pop(argument, None) for argument in _OF_THE_CALL}
    _refuse(name, call, options)
    kept = {option: value for option, value in options.items() if value is not None or option in _NONE_COUNTS}
    kept.setdefault("task_id", uuid())
    taker.take(Signature(name, tuple(task_args or ()), dict(task_kwargs or {}), kept, app=app))
    result = (call["result_cls"] or app.AsyncResult)(kept["task_id"])
    result.ignored = kept.get("ignore_result")
    if running and call["add_to_parent"] is not False:
        running.add_trail(result)
    return result


def _ids(options: Mapping[str, Any]) -> Iterator[Any]:
    """The ids of a message's task and of all that is to follow it."""
    yield options.get("task_id")
    for option in ("chain", "chord"):
        found = options.get(option) or ()
        for follower in [found] if isinstance(found, Mapping) else found:
            yield from _ids_of(follower)


def _ids_of(follower: Mapping[str, Any]) -> Iterator[Any]:
    yield from _ids(follower.get("options") or {})
    kwargs = follower.get("kwargs") or {}
    parts = [*(kwargs.get("tasks") or ()), kwargs.get("body")] if follower.get("subtask_type") else []
    for part in parts:
        if isinstance(part, Mapping):
            yield from _ids_of(part)


def _refuse(name: str, call: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse what a box cannot hold."""
    if call["connection"] is not None or call["router"] is not None:
        raise OutboxRefusedError(
            f"{name} is sent with a connection or router of its own, which an outbox cannot keep; send it "
            "after the commit.",
            task=name,
        )
    if options.get("chord") is not None:
        raise OutboxRefusedError(
            f"{name} is part of a chord, for which Celery asks the result backend when it is sent; have a task start "
            "the chord.",
            task=name,
        )
