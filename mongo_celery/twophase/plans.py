"""An operator's commands on two-phase transactions, as plans: recover, cancel, compensate, purge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from bson import ObjectId, json_util
from bson.binary import UuidRepresentation
from pymongo.errors import OperationFailure

from mongo_celery.command_line import CommandLine
from mongo_celery.errors import CommandRefusedError, ConfigurationError
from mongo_celery.mongo.opening import to_user_error
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import number
from mongo_celery.twophase.final import FinalTransactions
from mongo_celery.twophase.purge import Purge
from mongo_celery.twophase.states import Transaction
from mongo_celery.twophase.twophase import TwoPhaseCommit
from mongo_celery.twophase.values import plain_id, readings

_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)


def find_transaction(commit: TwoPhaseCommit, text: str) -> Mapping[str, Any]:
    """
    Return the transaction whose id somebody has typed: as Extended JSON, as an ObjectId, or as plain text.

    Raises:
        CommandRefusedError: there is none.
    """
    with _explained(lambda: commit.log.concern):
        for reading in (*readings(text), text):
            try:
                identity = plain_id("id", reading, commit.transactions.codec_options)
            except ConfigurationError:
                continue  # no document can have it
            found = commit.stored(identity)
            if found is not None:
                return found
    line = CommandLine.of(commit.app).celery("transactions", "list")
    raise CommandRefusedError(f"There is no transaction {text}; `{line}` shows ids as they can be typed.")


def plan_recover(commit: TwoPhaseCommit, older_than: float | None, *, any_application: bool, limit: int) -> Plan:
    """Plan to finish what was left pending, applied or canceling, as the recovery that beat starts."""
    with _explained(lambda: commit.log.concern):
        found = commit.abandoned(older_than, all=any_application, limit=limit)

    def run() -> PlanResult:
        with _explained(lambda: commit.log.concern):
            report = commit.recover(older_than, all=any_application, limit=limit)
        lines: list[str] = []
        refused: list[str] = []
        for each in report:
            became = f"stays {each.after}" if each.before == each.after else f"{each.before}, now {each.after}"
            (refused if each.error else lines).append(
                f"{format_id(each.id)}: {became}{f': {each.error}' if each.error else ''}"
            )
        plain = [
            {"id": plain_value(each.id), "before": str(each.before), "after": str(each.after), "error": each.error}
            for each in report
        ]
        return PlanResult(lines=lines or ["Nothing to recover."], fields={"transactions": plain}, refused=refused)

    return Plan(
        command="recover",
        lines=[*map(_describe, found)] or ["Nothing to recover."],
        fields={"transactions": [plain_value(each) for each in found]},
        act=run if found else None,
    )


def plan_run(commit: TwoPhaseCommit, id_: str) -> Plan:
    """Plan to advance one transaction to its end, here: one that was only stored, or left."""
    return _plan_one(commit, "recover", id_, "Run this transaction?", commit.run)


def plan_cancel(commit: TwoPhaseCommit, id_: str, reason: str, *, any_application: bool = False) -> Plan:
    """Plan to roll a transaction back that is not applied yet. The reason is kept with it."""
    cancel = partial(commit.cancel, reason=reason, all=any_application)
    return _plan_one(commit, "cancel", id_, "Roll this transaction back?", cancel, reason=reason)


def plan_compensate(commit: TwoPhaseCommit, id_: str) -> Plan:
    """Plan to take a transaction back that is done: the opposite one is stored and run."""

    def compensate(identity: Any) -> Transaction:
        return commit.read(commit.compensate(identity))

    compensated = plain_value(find_transaction(commit, id_)["_id"])
    return _plan_one(commit, "compensate", id_, "Take this transaction back?", compensate, compensates=compensated)


def _plan_one(
    commit: TwoPhaseCommit, name: str, id_: str, question: str, do: Callable[[Any], Transaction], **more: Any
) -> Plan:
    document = find_transaction(commit, id_)
    given = {"id": plain_value(document["_id"]), "state": document.get("state"), **more}

    def run() -> PlanResult:
        with _explained(lambda: commit.log.concern):
            after = do(document["_id"])
        fields = {**given, "id": plain_value(after.id), "state": str(after.state)}
        return PlanResult(lines=[f"{format_id(after.id)}: {after.state}"], fields=fields)

    return Plan(
        command=f"{name} {id_}",
        lines=[_describe(document)],
        contents=to_json(document, indent=2).split("\n"),
        fields=given,
        question=question,
        seen=str(document.get("state")),
        act=run,
    )


def plan_purge(commit: TwoPhaseCommit, older_than: float, *, any_application: bool) -> Plan:
    """Plan to remove transactions that have ended or never begun."""

    def concern() -> ErrorContext:
        return FinalTransactions.concern_of(commit.log)

    with _explained(concern):
        found = commit.purge(older_than, all=any_application, dry_run=True)

    def run() -> PlanResult:
        with _explained(concern):
            removed = commit.purge(older_than, all=any_application)
        return PlanResult(lines=[_describe_purge(removed, "Removed")], fields=asdict(removed))

    is_any = found.done + found.canceled + found.initial > 0
    return Plan(
        command="purge",
        lines=[_describe_purge(found, "Would remove")],
        fields=asdict(found),
        question="Remove them permanently?",
        act=run if is_any else None,
    )


def _describe_purge(found: Purge, verb: str) -> str:
    what = f"{number(found.done, 'transaction', 'transactions')} done, {found.canceled} canceled"
    what += f", {found.initial} never begun" if found.initial else ""
    kept = number(found.kept, "compensation stays", "compensations stay")
    return f"{verb} {what}.{f' {kept}, since what is taken back is there.' if found.kept else ''}"


def _describe(document: Mapping[str, Any]) -> str:
    application = document.get("application")
    return f"{format_id(document['_id'])}: {document.get('state')}, of {application or 'no application'}"


@contextmanager
def _explained(concern: Callable[[], ErrorContext]) -> Iterator[None]:
    """Errors name what the transactions need."""
    try:
        yield
    except OperationFailure as error:
        raise to_user_error(error, concern()) from error


def format_id(value: object) -> str:
    """Return an id as it can be typed; a text that would be read as something else is quoted."""
    if isinstance(value, ObjectId) or (isinstance(value, str) and not readings(value)):
        return str(value)
    return to_json(value)


def plain_value(value: object) -> Any:
    """Return a stored value as relaxed Extended JSON has it."""
    return json.loads(json_util.dumps(value, json_options=_JSON))


def to_json(value: object, indent: int | None = None) -> str:
    """Return a stored value as a text in Extended JSON."""
    return json.dumps(plain_value(value), indent=indent, ensure_ascii=False)
