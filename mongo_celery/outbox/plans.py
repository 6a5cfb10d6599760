"""An operator's commands on outboxes, as plans: sweep, and replay or discard dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.command_line import CommandLine
from mongo_celery.errors import CommandRefusedError, MongoCeleryError, OutboxRefusedError
from mongo_celery.mongo.opening import to_user_error
from mongo_celery.mongo.redaction import without_credentials
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.health import concern_of, reach
from mongo_celery.outbox.registry import AnyOutbox
from mongo_celery.outbox.replay import DeadLetter, dead_letter, dead_letters, discard, replay
from mongo_celery.outbox.sweep import OutboxSweep, take_turns
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import number

Letters = Sequence[tuple[AnyOutbox, DeadLetter]]
"""Dead letters with their outboxes."""


@contextmanager
def reached(outbox: AnyOutbox) -> Iterator[None]:
    """Inside, the primary has answered once, and errors name what the outbox needs."""
    try:
        reach(outbox)
        yield
    except OperationFailure as error:
        raise to_user_error(error, concern_of(outbox)) from error


def find_letters(outboxes: Sequence[AnyOutbox], ids: Sequence[str]) -> Letters:
    """
    Return dead letters by their ids; all without any.

    Raises:
        CommandRefusedError: there is none of an id.
    """
    found: dict[str, tuple[AnyOutbox, DeadLetter]] = {}
    for each in outboxes:
        with reached(each):
            letters = [dead_letter(each, id_) for id_ in ids] if ids else dead_letters(each, 0)
        for letter in letters:
            if letter is not None:
                found.setdefault(letter.id, (each, letter))
    for id_ in ids:
        if id_ not in found:
            names = ", ".join(each.name for each in outboxes)
            line = CommandLine.of(outboxes[0].app).celery("outbox", "dead-letters", "list")
            raise CommandRefusedError(f"There is no dead letter {id_!r} in {names}; see `{line}`.")
    return [found[id_] for id_ in ids] if ids else list(found.values())


def plan_sweep(outboxes: Sequence[AnyOutbox], older_than: float | None, limit: int) -> Plan:
    """
    Plan to deliver what was left behind, as the sweep that beat starts.

    Outboxes have their turns one after the other. One that MongoDB does not answer for keeps no other waiting.

    Args:
        older_than: seconds for which the oldest entry of a document has waited; by default what the outbox says.
        limit: documents of each outbox at most, not counting turns in which nothing was delivered.
    """
    waits = {each.name: each.sweep_after if older_than is None else older_than for each in outboxes}

    def run() -> PlanResult:
        swept, refused = _sweep(outboxes, older_than, limit)
        lines = []
        for outbox, delivery in swept:
            error = ""
            if delivery.error is not None:
                error = f", {delivery.left} left: {without_credentials(delivery.error)}"
                refused.append(f"{outbox.name}: {delivery.left} left: {without_credentials(delivery.error)}")
            dead = number(delivery.dead, "became a dead letter", "became dead letters")
            lines.append(f"{outbox.name}: {delivery.dispatched} dispatched, {dead}{error}")
        plain = [{"outbox": outbox.name, **delivery.plain()} for outbox, delivery in swept]
        return PlanResult(lines=lines, fields={"outboxes": plain}, refused=refused)

    return Plan(
        command="sweep",
        lines=[
            f"{name}: entries that have waited for {seconds:g} s would be delivered" for name, seconds in waits.items()
        ],
        fields={"outboxes": [{"outbox": name, "older_than": seconds} for name, seconds in waits.items()]},
        act=run,
    )


def _sweep(
    outboxes: Sequence[AnyOutbox], older_than: float | None, limit: int
) -> tuple[list[tuple[AnyOutbox, Delivery]], list[str]]:
    """Return what was delivered, and a sentence for each outbox that MongoDB does not answer for, or refuses."""
    sweeps: dict[OutboxSweep, AnyOutbox] = {}
    sentences: dict[str, None] = {}  # once, where several have the same to say

    def fail(each: AnyOutbox, error: Exception) -> None:
        known = to_user_error(error, concern_of(each)) if isinstance(error, PyMongoError) else error
        sentences[without_credentials(str(known))] = None

    for each in outboxes:
        try:
            reach(each)
        except (PyMongoError, MongoCeleryError) as error:
            fail(each, error)
        else:
            sweeps[OutboxSweep(each.sweep_target, each.sweep_after if older_than is None else older_than, limit)] = each
    take_turns(list(sweeps), lambda sweep, error: fail(sweeps.pop(sweep), error))
    down = next((sweep.total for sweep in sweeps if sweep.total.broker_down), None)
    unserved = None if down is None else replace(down, dispatched=0, dead=0, left=0)
    found = []
    for sweep, each in sweeps.items():
        total = sweep.total
        found.append((each, total if unserved is None or total.broker_down else total.and_(unserved)))
    return found, list(sentences)


def plan_replay(letters: Letters, *, without_document: bool = False, sign: bool = False) -> Plan:
    """
    Plan to put dead letters back into their documents. They come last there, and the next sweep delivers them.

    Args:
        without_document: if the document is gone, publish all the same.
        sign: vouch for entries that the outbox has not signed.
    """

    def do(outbox: AnyOutbox, letter: DeadLetter) -> tuple[str, dict[str, Any]]:
        done = replay(outbox, letter.id, without_document=without_document, sign=sign)
        if done.result == "pending":
            return f"{letter.id}: pending again as {done.entry}; the next sweep delivers it.", asdict(done)
        return f"{letter.id}: published without its document.", asdict(done)

    return _plan("replay", letters, do, None)


def plan_discard(letters: Letters) -> Plan:
    """Plan to throw dead letters away. Their tasks and events will never be published."""

    def do(outbox: AnyOutbox, letter: DeadLetter) -> tuple[str, dict[str, Any]]:
        gone = discard(outbox, letter.id)
        said = "discarded" if gone else "somebody else has replayed or discarded it"
        return f"{letter.id}: {said}", {"id": letter.id, "result": "discarded" if gone else "gone"}

    return _plan("discard", letters, do, f"Throw {number(len(letters), 'dead letter', 'dead letters')} away?")


def _plan(
    name: str,
    letters: Letters,
    do: Callable[[AnyOutbox, DeadLetter], tuple[str, dict[str, Any]]],
    question: str | None,
) -> Plan:
    def run() -> PlanResult:
        lines: list[str] = []
        fields: list[dict[str, Any]] = []
        refused: list[str] = []
        for outbox, letter in letters:
            try:
                with reached(outbox):
                    line, plain = do(outbox, letter)
                lines.append(line)
            except (CommandRefusedError, OutboxRefusedError) as error:  # it does not keep the others
                refused.append(without_credentials(str(error)))
                plain = {"id": letter.id, "result": "refused", "error": refused[-1]}
            fields.append({"outbox": outbox.name, **plain})
        return PlanResult(lines=lines, fields={"letters": fields}, refused=refused)

    lines = [line for outbox, letter in letters for line in _describe(outbox, letter)]
    return Plan(
        command=f"dead-letters {name}",
        lines=lines or ["There are no dead letters."],
        fields={
            "letters": [{"outbox": outbox.name, "id": letter.id, "result": "planned"} for outbox, letter in letters]
        },
        question=question,
        seen=" ".join(letter.id for _, letter in letters),
        act=run if letters else None,
    )


def _describe(outbox: AnyOutbox, letter: DeadLetter) -> list[str]:
    return [
        f"{letter.id}: {letter.entry.get('name')} {letter.entry.get('argsrepr', '')}",
        f"  of document {letter.document!r} in {outbox.name}",
        f"  failed with {letter.error}",
    ]
