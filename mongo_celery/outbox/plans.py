"""An operator's commands on outboxes, as plans: sweep, and replay or discard dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.command_line import CommandLine
from mongo_celery.errors import CommandRefusedError, MongoCeleryError, OutboxRefusedError
from mongo_celery.mongo.opening import to_user_error
from mongo_celery.mongo.redaction import without_credentials
from mongo_celery.outbox.dead_letters import DeadLetter
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.registry import BaseOutbox
from mongo_celery.outbox.replay import replay
from mongo_celery.outbox.requirements import error_context, reach
from mongo_celery.outbox.sweep import OutboxSweep, take_turns
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import number

Letters = Sequence[tuple[BaseOutbox, DeadLetter]]
"""Dead letters with their outboxes."""


@contextmanager
def reach_first(outbox: BaseOutbox) -> Iterator[None]:
    """Check that the primary has answered, and let errors in the block name the outbox's needs."""
    try:
        reach(outbox)
        yield
    except OperationFailure as error:
        raise to_user_error(error, error_context(outbox)) from error


def find_letters(outboxes: Sequence[BaseOutbox], ids: Sequence[str]) -> Letters:
    """
    Return dead letters by id, or all without ids.

    Raises:
        CommandRefusedError: an id does not exist.
    """
    found: dict[str, tuple[BaseOutbox, DeadLetter]] = {}
    for each in outboxes:
        with reach_first(each):
            letters = [each.runtime.dead_letters.get(id_) for id_ in ids] if ids else each.runtime.dead_letters.find()
        for letter in letters:
            if letter is not None:
                found.setdefault(letter.id, (each, letter))
    for id_ in ids:
        if id_ not in found:
            names = ", ".join(each.name for each in outboxes)
            line = CommandLine.of(outboxes[0].app).celery("outbox", "dead-letters", "list")
            raise CommandRefusedError(f"There is no dead letter {id_!r} in {names}. To see them, run `{line}`.")
    return [found[id_] for id_ in ids] if ids else list(found.values())


def plan_sweep(outboxes: Sequence[BaseOutbox], older_than: float | None) -> Plan:
    """
    Plan to deliver pending entries, like the sweep that beat starts.

    Outboxes take turns. If MongoDB does not answer for one, the others do not wait.

    Args:
        older_than: least age of a document's oldest entry in seconds. By default the outbox's option.
    """
    waits = {each.name: OutboxSweep(each.runtime, older_than).older_than for each in outboxes}

    def run() -> PlanResult:
        swept, refused = _sweep(outboxes, older_than)
        lines = []
        for name, delivery in swept.items():
            error = f"{delivery.left} left" if delivery.left else ""
            if delivery.error is not None:
                error = f"{delivery.left} left: {without_credentials(delivery.error)}"
                refused.append(f"{name}: {error}")
            dead = number(delivery.dead, "became a dead letter", "became dead letters")
            lines.append(", ".join(filter(None, [f"{name}: {delivery.dispatched} dispatched", dead, error])))
        plain = [{"outbox": name, **delivery.plain()} for name, delivery in swept.items()]
        return PlanResult(lines=lines, fields={"outboxes": plain}, refused=refused)

    return Plan(
        command="sweep",
        lines=[
            f"{name}: the sweep would deliver entries that have waited for {seconds:g} s"
            for name, seconds in waits.items()
        ],
        fields={"outboxes": [{"outbox": name, "older_than": seconds} for name, seconds in waits.items()]},
        act=run,
    )


def _sweep(outboxes: Sequence[BaseOutbox], older_than: float | None) -> tuple[dict[str, Delivery], list[str]]:
    """Return the deliveries, and a sentence for each outbox for which MongoDB did not answer or refused."""
    sweeps, sentences = dict[OutboxSweep, BaseOutbox](), dict[str, None]()  # each sentence once

    def fail(outbox: BaseOutbox, error: Exception) -> None:
        known = to_user_error(error, error_context(outbox)) if isinstance(error, PyMongoError) else error
        sentences[without_credentials(str(known))] = None

    for each in outboxes:
        try:
            reach(each)
        except (PyMongoError, MongoCeleryError) as error:
            fail(each, error)
        else:
            sweeps[OutboxSweep(each.runtime, older_than)] = each
    take_turns(list(sweeps))
    for sweep in list(sweeps):
        if sweep.failure is not None:
            fail(sweeps.pop(sweep), sweep.failure)
    down = next((sweep.total.error for sweep in sweeps if sweep.total.broker_down), None)
    for sweep in sweeps if down is not None else ():  # the others have had no turn
        sweep.total = sweep.total.and_(Delivery(broker_down=True, error=sweep.total.error or down))
    return {outbox.name: sweep.total for sweep, outbox in sweeps.items()}, list(sentences)


def plan_replay(letters: Letters, *, without_document: bool = False, sign: bool = False) -> Plan:
    """
    Plan to put dead letters back into their documents. They come last there, and the next sweep delivers them.

    Args:
        without_document: True to publish it if the document no longer exists.
        sign: True to vouch for entries that the outbox has not signed.
    """

    def do(outbox: BaseOutbox, letter: DeadLetter) -> tuple[str, dict[str, Any]]:
        entry = replay(outbox, letter.id, without_document=without_document, sign=sign)
        if entry is None:
            line, result = f"{letter.id}: published without its document.", "published"
        else:
            line, result = f"{letter.id}: pending again as {entry}. The next sweep delivers it.", "pending"
        return line, {"id": letter.id, "result": result, "entry": entry}

    return _plan("replay", letters, do, None)


def plan_discard(letters: Letters) -> Plan:
    """Plan to discard dead letters. Their tasks and events will never be published."""

    def do(outbox: BaseOutbox, letter: DeadLetter) -> tuple[str, dict[str, Any]]:
        gone = outbox.runtime.dead_letters.remove(letter.id)
        said = "discarded" if gone else "already replayed or discarded by another command"
        return f"{letter.id}: {said}", {"id": letter.id, "result": "discarded" if gone else "gone"}

    return _plan("discard", letters, do, f"Discard {number(len(letters), 'dead letter', 'dead letters')}?")


def _plan(
    name: str,
    letters: Letters,
    do: Callable[[BaseOutbox, DeadLetter], tuple[str, dict[str, Any]]],
    question: str | None,
) -> Plan:
    def run() -> PlanResult:
        lines: list[str] = []
        fields: list[dict[str, Any]] = []
        refused: list[str] = []
        for outbox, letter in letters:
            try:
                with reach_first(outbox):
                    line, plain = do(outbox, letter)
                lines.append(line)
            except (CommandRefusedError, OutboxRefusedError) as error:  # the others continue
                refused.append(without_credentials(str(error)))
                plain = {"id": letter.id, "result": "refused", "error": refused[-1]}
            fields.append({"outbox": outbox.name, **plain})
        return PlanResult(lines=lines, fields={"dead_letters": fields}, refused=refused)

    lines = [line for outbox, letter in letters for line in _describe(outbox, letter)]
    return Plan(
        command=f"dead-letters {name}",
        lines=lines or ["There are no dead letters."],
        fields={
            "dead_letters": [
                {"outbox": outbox.name, "id": letter.id, "result": "planned"} for outbox, letter in letters
            ]
        },
        question=question,
        seen=" ".join(letter.id for _, letter in letters),
        act=run if letters else None,
    )


def _describe(outbox: BaseOutbox, letter: DeadLetter) -> list[str]:
    return [
        f"{letter.id}: {letter.entry.get('name')} {letter.entry.get('argsrepr', '')}",
        f"  of document {letter.document!r} in {outbox.name}",
        f"  failed with {letter.error}",
    ]
