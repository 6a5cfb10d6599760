"""
The one way by which commands change the state of a bridge: each leaves an audit record, and errors say what to do.

A command that cannot leave a record is refused before it changes anything. The record of a move of positions is part of
its transaction. All others follow the change, before anything is printed, also where the command ends halfway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.audit import make_record, user_at_host
from mongo_celery.bridge.state.store import Store
from mongo_celery.errors import DeploymentError
from mongo_celery.mongo.opening import to_user_error

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

HISTORY_LIMIT = 50
"""Number of audit records that are shown by default."""

_WORDS = 20


@dataclass(slots=True)
class Act:
    """
    A command that changes the state, while it runs.

    Attributes:
        name: of the command.
        words: its arguments, as they are typed.
        effect: what it has changed so far, in numbers.
    """

    name: str
    words: list[str]
    reason: str | None
    by: str
    handlers: set[str] = field(default_factory=set)
    effect: dict[str, Any] = field(default_factory=dict)

    def count(self, what: str, handler: str | None = None, number: int = 1) -> None:
        """Count something that was changed."""
        self.effect[what] = self.effect.get(what, 0) + number
        if handler is not None:
            self.handlers.add(handler)

    def record(self, *handlers: str, **effect: Any) -> dict[str, Any]:
        """Return the record for the transaction that makes the change; or of what was counted."""
        named = {*self.handlers, *handlers}
        return make_record(self.name, self.words, self.reason, self.by, named, {**self.effect, **effect})


_CURRENT: ContextVar[Act | None] = ContextVar("audited", default=None)
_CALLER: ContextVar[tuple[str | None, str | None]] = ContextVar("caller", default=(None, None))


@contextmanager
def on_behalf_of(by: str, reason: str | None) -> Iterator[None]:
    """Have the audit records of all commands inside name somebody else than this process's user, and a reason."""
    token = _CALLER.set((by, reason))
    try:
        yield
    finally:
        _CALLER.reset(token)


@contextmanager
def reached(wiring: Wiring) -> Iterator[Store]:
    """The store, after the primary has answered once; errors name what the state needs."""
    try:
        wiring.reach()
        yield wiring.store
    except PyMongoError as error:
        raise to_user_error(error, wiring.state_concern) from error


@contextmanager
def audited(
    wiring: Wiring, name: str, *words: object, reason: str | None = None, dry_run: bool = False, **options: object
) -> Iterator[Act]:
    """
    Carry out a command that changes the state of a bridge, and store its audit record; inside another one, join that.

    Nothing is stored if nothing is counted. Inside, the primary has answered, and errors name what the state needs.

    Args:
        name: of the command.
        words: its arguments; None is left out.
        reason: why, for people.
        dry_run: it changes nothing, and leaves no record.
        options: of the command line; None and False are left out.

    Raises:
        DeploymentError: the record cannot be stored. If the message does not say otherwise, nothing was changed.
    """
    if (current := _CURRENT.get()) is not None:
        yield current
        return
    by, given = _CALLER.get()
    act = Act(name, [*_words(words, options)], given if reason is None else reason, by or user_at_host())
    with reached(wiring) as store:
        if not dry_run:
            store.audit.prepare()
        token = _CURRENT.set(act)
        try:
            yield act
        finally:
            _CURRENT.reset(token)
            if act.effect and not dry_run:
                _store(wiring, store, act)


def _store(wiring: Wiring, store: Store, act: Act) -> None:
    record = act.record()
    try:
        store.audit.add(record)
    except PyMongoError as error:
        raise DeploymentError(
            f"`{record['command']}` was carried out ({effect_text(act.effect)}), but its audit record could not be "
            f"stored: {to_user_error(error, wiring.state_concern)} "
            "Write down who did it and why, and do not repeat it.",
        ) from error


def _words(words: tuple[object, ...], options: dict[str, object]) -> Iterator[str]:
    yield from (str(word) for word in words if word is not None)
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        for each in values[:_WORDS]:
            if each is not None and each is not False:
                yield f"--{name.rstrip('_').replace('_', '-')}"
                yield from () if each is True else (str(each),)
        if len(values) > _WORDS:
            yield "..."


def effect_text(effect: dict[str, Any]) -> str:
    """Return an effect for people."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in effect.items() if value not in (None, 0))


def read_history(wiring: Wiring, handler: str | None = None, limit: int = HISTORY_LIMIT) -> list[dict[str, Any]]:
    """
    Return the last audit records of a bridge, the latest last, as JSON has them.

    Args:
        handler: only what concerns this one.
    """
    with reached(wiring) as store:
        return [{**each, "at": iso(each["at"])} for each in store.audit.read(handler, limit)]
