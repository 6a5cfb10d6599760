"""
The one way by which commands change the state of a bridge: each leaves an audit record, and errors say what to do.

A command that cannot leave a record is refused before it changes anything. The record of a move of positions is part of
its transaction. All others follow the change, before anything is printed, also where the command ends halfway.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.audit import make_record
from mongo_celery.bridge.state.store import Store
from mongo_celery.errors import CommandRefusedError, DeploymentError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.opening import to_user_error

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine
    from mongo_celery.plan import PlanResult

HISTORY_LIMIT = 50
"""Number of audit records that are shown by default."""

_WORDS = 20
_QUOTED_CHARS = 100
_LOCKED = (
    "A partition is locked by an open transaction, most often of a worker that died. Repeat the command when the "
    "server has ended the transaction, which takes a minute at most."
)


@dataclass(slots=True)
class Act:
    """
    A command that changes the state of a bridge.

    Attributes:
        line: the beginning of the commands that are shown.
        name: of the command.
        words: its arguments, as they are typed; None is left out.
        options: of the command line; None and False are left out.
        by: who acts.
        effect: what it has changed so far, in numbers.
    """

    wiring: Wiring
    line: CommandLine
    name: str
    words: tuple[object, ...]
    options: dict[str, object]
    reason: str | None
    by: str
    handlers: set[str] = field(default_factory=set)
    effect: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command without its options, for people."""
        return shlex.join([*self.name.split(), *self.list_words()])

    def list_words(self) -> list[str]:
        """Return its arguments, as they are typed."""
        return [str(word) for word in self.words if word is not None]

    def count(self, what: str, handler: str | None = None, number: int = 1) -> None:
        """Count something that was changed."""
        self.effect[what] = self.effect.get(what, 0) + number
        if handler is not None:
            self.handlers.add(handler)

    def record(self, *handlers: str, **effect: Any) -> dict[str, Any]:
        """Return the record for the transaction that makes the change; or of what was counted."""
        named = {*self.handlers, *handlers}
        words = [*self.list_words(), *_list_options(self.options)]
        return make_record(self.name, words, self.reason, self.by, named, {**self.effect, **effect})

    def run(self, body: Callable[[Act], PlanResult]) -> PlanResult:
        """
        Change the state and store the audit record. If nothing is counted, the body has stored it, or changed nothing.

        Raises:
            CommandRefusedError: the body refuses, or a partition is locked.
            ServerUnavailableError: MongoDB did not answer.
            DeploymentError: the record cannot be stored. If the message does not say otherwise, nothing was changed.
        """
        act = replace(self, handlers=set(), effect={})
        with reached(self.wiring) as store:
            store.audit.prepare()
            try:
                return body(act)
            finally:
                if act.effect:
                    _store_record(self.wiring, store, act)


def _store_record(wiring: Wiring, store: Store, act: Act) -> None:
    record = act.record()
    try:
        store.audit.add(record)
    except PyMongoError as error:
        raise DeploymentError(
            f"`{record['command']}` was carried out ({effect_text(act.effect)}), but its audit record could not be "
            f"stored: {to_user_error(error, wiring.state_concern)} "
            "Write down who did it and why, and do not repeat it.",
        ) from error


@contextmanager
def reached(wiring: Wiring) -> Iterator[Store]:
    """The store, after the primary has answered once; errors name what the state needs."""
    try:
        wiring.reach()
        yield wiring.store
    except PyMongoError as error:
        if is_lock(error):
            raise CommandRefusedError(_LOCKED) from error
        raise to_user_error(error, wiring.state_concern) from error


def refuse_unknown(wiring: Wiring, handler: str, known: Collection[str]) -> CommandRefusedError:
    """Return the refusal of a handler of which nothing is stored."""
    if not known:
        return CommandRefusedError(f"Bridge {wiring.name} has never been led: start a listener first.")
    names = sorted(known)
    return CommandRefusedError(
        f"Bridge {wiring.name} has no handler {handler[:_QUOTED_CHARS]!r}{nearest(handler, names)}; it has "
        f"{', '.join(names)}.",
    )


def _list_options(options: dict[str, object]) -> Iterator[str]:
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        for each in values[:_WORDS]:
            if each is not None and each is not False:
                yield f"--{name.replace('_', '-')}"
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
