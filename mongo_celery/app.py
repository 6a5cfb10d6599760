"""What belongs to a Celery app: things of some kind by their names, and tasks with their beat entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import PerProcess

if TYPE_CHECKING:
    from celery import Celery

_ATTRIBUTE = "_mongo_celery"
_EXPIRES_SECONDS = 60.0
"""Beat's messages must not pile up without workers; but busy workers must find one that still counts."""


class Named(Protocol):
    """A thing with a name, which it may not know before it is asked for it."""

    @property
    def name(self) -> str:
        """What commands call it."""


T = TypeVar("T", bound=Named)


@dataclass(slots=True)
class _Held:
    """State of one app: things and their known names by kind, tasks, seconds by periodic call, shared things."""

    things: dict[str, list[tuple[str | None, Any]]] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    periods: dict[tuple[str, ...], float] = field(default_factory=dict)
    shared: dict[Any, PerProcess[Any]] = field(default_factory=dict)


def check_app(app: object) -> None:
    """
    Refuse what is no Celery app, or does not stand for one: the app of a web framework, a URL, a collection.

    Raises:
        ConfigurationError: it is not.
    """
    from celery import Celery

    if not isinstance(app, Celery):
        raise ConfigurationError(
            f"the app has to be a Celery app, not {type(app).__name__}: that of a Flask app is what "
            "celery_init_app(app) returns; a URL is given as url='...'.",
        )


def _held_by(app: Celery) -> _Held:
    check_app(app)
    held: _Held = app.__dict__.setdefault(_ATTRIBUTE, _Held())
    return held


def app_name(app: Celery) -> str | None:
    """What an app is called wherever it runs; None for one without a name, or made in a script of its own."""
    name = app.main
    return str(name) if name and name != "__main__" else None


def shared(app: Celery, make: Callable[[Celery], Any]) -> PerProcess[Any]:
    """
    Return the one thing of a kind that everything of an app uses in a process.

    Args:
        app: the Celery app.
        make: makes it; a module's function or a class, by which the thing is known.
    """
    return _held_by(app).shared.setdefault(make, PerProcess(partial(make, app)))


@dataclass(frozen=True)  # without slots: Python 3.11 cannot make a Registry[...] that is frozen and has them
class Registry(Generic[T]):
    """
    The things of one kind that belong to apps.

    Attributes:
        kind: the word for it in messages.
        create: how and where one is made, for an app without.
        rename: what to do about a name that is taken.
    """

    kind: str
    create: str
    rename: str

    def add(self, app: Celery, thing: T, name: str | None) -> bool:
        """
        Note a thing of an app.

        Args:
            app: the Celery app.
            thing: what belongs to it.
            name: its name, if that is known already.

        Returns:
            Whether it is the app's first.

        Raises:
            ConfigurationError: the app already has another one that is known by this name.
        """
        self.refuse(app, name)
        known = _held_by(app).things.setdefault(self.kind, [])
        known.append((name, thing))
        return len(known) == 1

    def refuse(self, app: Celery, name: str | None) -> None:
        """
        Say what would keep a thing of this name from being added.

        Raises:
            ConfigurationError: see `add`.
        """
        if name is not None and name in {other for other, _ in _held_by(app).things.get(self.kind, ())}:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise ConfigurationError(f"the app already has {article} {self.kind} named {name!r}; {self.rename}.")

    def of(self, app: Celery) -> list[T]:
        """All of an app, in the order in which they were made."""
        return [thing for _, thing in _held_by(app).things.get(self.kind, ())]

    def find(self, app: Celery, name: str) -> T | None:
        """The one of that name; asks things for their names."""
        return next((thing for thing in self.of(app) if thing.name == name), None)

    def named(self, app: Celery, names: Sequence[str]) -> list[T]:
        """
        Those that a command names, or all of them.

        Raises:
            ConfigurationError: there is none, or one of the names is unknown.
        """
        found = self.of(app)
        if not found:
            raise ConfigurationError(
                f"this app has no {self.kind}: create one with {self.create}, and name the app with -A."
            )
        if not names:
            return found
        by_name = {thing.name: thing for thing in found}
        for name in names:
            if name not in by_name:
                raise ConfigurationError(
                    f"there is no {self.kind} {name!r}; this app has {', '.join(sorted(by_name))}."
                )
        return [by_name[name] for name in names]


def add_task(app: Celery, name: str, function: Callable[..., Any], **options: Any) -> None:
    """
    Register a task without a result, once for each app.

    Args:
        app: the Celery app.
        name: of the task.
        function: a plain function: Celery is silent about other callables, and does not register them.
        options: of the task.
    """
    held = _held_by(app)
    if name not in held.tasks:
        held.tasks.add(name)
        register: Any = app.task
        register(name=name, shared=False, ignore_result=True, **options)(function)


def expiry(every: float) -> float:
    """Seconds after which a message expires that is sent ever again: not at once, or busy workers never run one."""
    return max(every, _EXPIRES_SECONDS)


def schedule(app: Celery, task: str, every: float, *args: str) -> None:
    """
    Have beat send a task with these arguments: one entry, as often as the most impatient asks, at most once a second.

    Messages expire; see `expiry`.
    """
    call = (task, *args)
    periods = _held_by(app).periods
    if every < periods.get(call, math.inf):
        periods[call] = every
        signature = app.signature(task, args=args)
        # A scheduler that keeps whole seconds, as django-celery-beat does, would send without a pause.
        app.add_periodic_task(max(every, 1.0), signature, name=" ".join(call), expires=expiry(every))


def periods_of(app: Celery) -> dict[tuple[str, ...], float]:
    """What beat is to send for us: seconds by task and arguments."""
    return dict(_held_by(app).periods)
