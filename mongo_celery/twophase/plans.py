"""An operator's commands on two-phase transactions, as plans: recover, cancel, compensate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from bson import ObjectId, json_util
from bson.binary import UuidRepresentation
from pymongo.errors import OperationFailure

from mongo_celery.command_line import CommandLine
from mongo_celery.errors import CommandRefusedError, ConfigurationError
from mongo_celery.mongo.opening import to_user_error
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.twophase.transaction import Transaction
from mongo_celery.twophase.twophase import TwoPhaseCommit, get_engine
from mongo_celery.twophase.values import interpret_id, plain_id

_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)


def find_transaction(commit: TwoPhaseCommit, text: str) -> Mapping[str, Any]:
    """
    Return the transaction for a typed id: Extended JSON, an ObjectId, or plain text.

    Raises:
        CommandRefusedError: the transaction does not exist.
    """
    with _explaining(commit):
        for reading in (*interpret_id(text), text):
            try:
                identity = plain_id("id", reading, commit.transactions.codec_options)
            except ConfigurationError:
                continue  # no document can have this id
            found = get_engine(commit).call(lambda: get_engine(commit).log.find_one(identity))  # noqa: B023
            if found is not None:
                return found
    line = CommandLine.of(commit.app).celery("transactions", "list")
    raise CommandRefusedError(f"There is no transaction {text}. To see the ids, run `{line}`.")


def plan_recover(commit: TwoPhaseCommit, older_than: float | None, *, any_application: bool, limit: int) -> Plan:
    """Plan to finish abandoned transactions, like the recovery that beat starts."""
    engine = get_engine(commit)
    age = engine.log.older_than if older_than is None else older_than
    with _explaining(commit), engine.limit_calls():
        found = list(engine.log.find_abandoned(age, any_application=any_application).limit(limit))

    def run() -> PlanResult:
        with _explaining(commit):
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
    """Plan to advance one transaction to its end, here. It may be only stored, or abandoned."""
    return _plan_one(commit, "recover", id_, "Run this transaction?", commit.run)


def plan_cancel(commit: TwoPhaseCommit, id_: str, reason: str, *, any_application: bool = False) -> Plan:
    """Plan to roll back a transaction that is not applied yet. It stores the reason."""
    cancel = partial(commit.cancel, reason=reason, all=any_application)
    return _plan_one(commit, "cancel", id_, "Roll this transaction back?", cancel, reason=reason)


def plan_compensate(commit: TwoPhaseCommit, id_: str) -> Plan:
    """Plan to take back a finished transaction by storing and running the opposite one."""

    def compensate(identity: Any) -> Transaction:
        return commit.read(commit.compensate(identity))

    compensated = plain_value(find_transaction(commit, id_)["_id"])
    return _plan_one(commit, "compensate", id_, "Compensate this transaction?", compensate, compensates=compensated)


def _plan_one(
    commit: TwoPhaseCommit, name: str, id_: str, question: str, do: Callable[[Any], Transaction], **more: Any
) -> Plan:
    document = find_transaction(commit, id_)
    given = {"id": plain_value(document["_id"]), "state": document.get("state"), **more}

    def run() -> PlanResult:
        with _explaining(commit):
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


def _describe(document: Mapping[str, Any]) -> str:
    application = document.get("application")
    return f"{format_id(document['_id'])}: {document.get('state')}, of {application or 'no application'}"


@contextmanager
def _explaining(commit: TwoPhaseCommit) -> Iterator[None]:
    """Let errors name the rights for transactions."""
    try:
        yield
    except OperationFailure as error:
        raise to_user_error(error, get_engine(commit).log.error_context) from error


def format_id(value: object) -> str:
    """Return an id in the form to type. A text with another meaning is quoted."""
    if isinstance(value, ObjectId) or (isinstance(value, str) and not interpret_id(value)):
        return str(value)
    return to_json(value)


def plain_value(value: object) -> Any:
    """Return a stored value as relaxed Extended JSON."""
    return json.loads(json_util.dumps(value, json_options=_JSON))


def to_json(value: object, indent: int | None = None) -> str:
    """Return a stored value as Extended JSON text."""
    return json.dumps(plain_value(value), indent=indent, ensure_ascii=False)
