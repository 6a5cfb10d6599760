"""
The common form of commands that change a bridge's state: an audit record, and errors with the fix.

A command that cannot store a record is refused before it changes anything. The record of a position move is part of its
transaction. Other records follow the change before anything is printed, even if the command ends halfway.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pymongo.errors import PyMongoError

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.audit import make_record
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import Layout, parse_name
from mongo_celery.errors import CommandRefusedError, DeploymentError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.opening import to_user_error
from mongo_celery.plan import Plan, PlanResult

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

HISTORY_LIMIT = 50
"""Default number of displayed audit records."""

_WORDS = 20
_QUOTED_CHARS = 100
_LOCKED = (
    "An open transaction locks a partition, most often that of a worker that died. By default the server ends it "
    "within a minute. Then repeat the command."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """
    The effect of a command on one partition, or on one dead letter.

    Attributes:
        result: `planned` before the run, `done`, `unchanged` if nothing had to change, `unfit` if its state does not
            allow the command, `refused` if something forbids it or has changed meanwhile.
        reason: why it was not done. Empty if it was done.
    """

    handler: str
    result: Literal["planned", "done", "unchanged", "unfit", "refused"]
    reason: str = ""


Step = tuple[PartResult, Callable[[], PartResult] | None]
"""A command's planned effect on a part, and the function that performs it. None if there is nothing to do."""


@dataclass(slots=True)
class Act:
    """
    A command that changes the state of a bridge.

    Attributes:
        line: the beginning of displayed commands.
        name: the name of the command.
        words: the arguments, as typed. None is omitted.
        options: the command line options. None and False are omitted.
        by: the person or program that runs the command.
        effect: the numbers of changes so far, by kind.
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

    def list_words(self) -> list[str]:
        """Return its arguments, as typed."""
        return [str(word) for word in self.words if word is not None]

    def count(self, what: str, handler: str | None = None, number: int = 1) -> None:
        """Count a change."""
        self.effect[what] = self.effect.get(what, 0) + number
        if handler is not None:
            self.handlers.add(handler)

    def record(self, *handlers: str, **effect: Any) -> dict[str, Any]:
        """Return the record for the transaction of the change, or for the counted changes."""
        named = {*self.handlers, *handlers}
        words = [*self.list_words(), *_list_options(self.options)]
        return make_record(self.name, words, self.reason, self.by, named, {**self.effect, **effect})

    def plan(
        self, lines: Sequence[str], body: Callable[[Act], PlanResult] | None, fields: Mapping[str, Any], **given: Any
    ) -> Plan:
        """
        Return the plan of this command.

        Args:
            body: makes the change, and counts it in the running act. None if there is nothing to do.
            fields: the plan's JSON fields, without the bridge.
            given: other fields of the plan.
        """
        return Plan(
            command=shlex.join([*self.name.split(), *self.list_words()]),
            lines=lines,
            fields={"bridge": self.wiring.name, **fields},
            act=None if body is None else partial(self._run, body),
            **given,
        )

    def plan_parts(
        self,
        kind: str,
        steps: Callable[[], Iterable[Step]],
        describe: Callable[[Sequence[Any]], Sequence[str]],
        **given: Any,
    ) -> Plan:
        """
        Return the plan of this command for several partitions or dead letters. A refusal does not stop the others.

        Args:
            kind: the kind of parts, for the audit record.
            steps: returns the steps in order, for the plan and for the run. Each is done before the next is taken.
            describe: returns lines about the planned or finished effect.
            given: other fields of the plan. `lines` come first.
        """

        def report(parts: Sequence[PartResult]) -> PlanResult:
            return PlanResult(
                lines=describe(parts),
                fields={
                    "done": sum(each.result == "done" for each in parts),
                    "parts": [asdict(each) for each in parts],
                },
                refused=[each.reason for each in parts if each.result == "refused"],
            )

        def run(running: Act) -> PlanResult:
            parts = []
            for planned, write in steps():
                part = planned if write is None else write()
                parts.append(part)
                if part.result == "done":
                    running.count(kind, part.handler)
            return report(parts)

        planned = [part for part, _ in steps()]
        ahead, is_any = report(planned), any(each.result == "planned" for each in planned)
        lines, fields = [*given.pop("lines", ()), *ahead.lines], {**given.pop("fields", {}), **ahead.fields}
        return self.plan(lines, run if is_any else None, fields, refused=ahead.refused, **given)

    def _run(self, body: Callable[[Act], PlanResult]) -> PlanResult:
        """
        Change the state and store the audit record. Without counted changes, the body has stored it, or changed
        nothing.

        Raises:
            CommandRefusedError: the body refuses, or a partition is locked.
            ServerUnavailableError: MongoDB did not answer.
            DeploymentError: the record cannot be stored. Unless the message says otherwise, nothing was changed.
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
            f"`{record['command']}` has done its work ({effect_text(act.effect)}), but its audit record could not be "
            f"stored: {to_user_error(error, wiring.state_concern)} "
            "Do not repeat the command. Note elsewhere who ran it and why.",
        ) from error


@contextmanager
def reached(wiring: Wiring) -> Iterator[Store]:
    """Yield the store after the primary has answered once. Errors name the missing right or state."""
    try:
        wiring.reach()
        yield wiring.store
    except PyMongoError as error:
        if is_lock(error):
            raise CommandRefusedError(_LOCKED) from error
        raise to_user_error(error, wiring.state_concern) from error


def refuse_unknown(wiring: Wiring, handler: str, known: Collection[str]) -> CommandRefusedError:
    """Return the refusal of a handler without stored state."""
    if not known:
        return CommandRefusedError(
            f"Bridge {wiring.name} has never had a listener, so it has no handlers yet. Start one: "
            f"{wiring.line.celery('listener')}"
        )
    names = sorted(known)
    return CommandRefusedError(
        f"Bridge {wiring.name} has no handler {handler[:_QUOTED_CHARS]!r}{nearest(handler, names)}. Its handlers: "
        f"{', '.join(names)}.",
    )


def refuse_partition(handler: str, partition: int, layout: Layout) -> CommandRefusedError:
    """Return the refusal of a partition that a handler does not have."""
    return CommandRefusedError(
        f"Handler {handler} has no partition {partition}. Its partitions are 0 to {layout.partitions - 1}."
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
    """Return an effect as text."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in effect.items() if value not in (None, 0))


def read_history(wiring: Wiring, handler: str | None = None, limit: int = HISTORY_LIMIT) -> list[dict[str, Any]]:
    """
    Return the last audit records of a bridge in JSON form, the latest last.

    Args:
        handler: only records about this handler.

    Raises:
        CommandRefusedError: the name is unknown to the app, the state and the records.
    """
    with reached(wiring) as store:
        found = store.audit.read(handler, limit)
        if handler is not None and not found:
            known = {*(parse_name(each) for each in store.subscriptions.read_all()), *(h.name for h in wiring.handlers)}
            if handler not in known:
                raise refuse_unknown(wiring, handler, known)
        return [{**each, "at": iso(each["at"])} for each in found]
