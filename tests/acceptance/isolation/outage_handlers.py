"""
Handlers that an outage hits: one of each kind with each failure policy, and README's example as it stands.

Each takes its effect in MongoDB, or starts a task, where the outage is; what happened to it is recorded elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pymongo.errors import AutoReconnect, DuplicateKeyError

from mongo_celery import Change
from mongo_celery.bridge.worker import subject, tasks
from mongo_celery.bridge.worker.execution import current
from mongo_celery.mongo.repeating import Pauses
from tests.acceptance.chain_project.acts import perform
from tests.acceptance.chain_project.application import DATA, app, bridge
from tests.acceptance.chain_project.recording import record, record_start

POLICIES = ("halt", "dead_letter", "skip")
KINDS = ("plain", "fenced", "retrying", "transactional")
_CHOSEN = set(filter(None, os.environ.get("CHAIN_HANDLERS", "").split(",")))

if "OUTAGE_PATIENCE" in os.environ:
    vars(tasks)["ANSWER_SECONDS"] = float(os.environ["OUTAGE_PATIENCE"])
if "OUTAGE_PAUSE" in os.environ:
    vars(subject)["WAITS"] = Pauses(first=float(os.environ["OUTAGE_PAUSE"]), longest=float(os.environ["OUTAGE_PAUSE"]))


class TranslatedError(Exception):
    """What a handler makes of an error of its database."""


def _write_plainly(name: str, change: Change, fact: dict[str, Any]) -> None:
    sink = bridge.client[DATA]["sink"]
    sink.update_one({"_id": f"{name}-{change.partition}"}, {"$push": {"effects": fact}}, upsert=True)


def _write_fenced(name: str, change: Change, fact: dict[str, Any]) -> None:
    sink = change.fenced(f"{DATA}.sink")
    sink.update_one({"_id": f"{name}-{change.partition}"}, {"$push": {"effects": fact}}, upsert=True)


def _write_together(name: str, change: Change, fact: dict[str, Any]) -> None:
    assert change.session is not None
    sink = bridge.client[DATA]["sink"]
    where = {"_id": f"{name}-{change.partition}"}
    sink.update_one(where, {"$push": {"effects": fact}}, upsert=True, session=change.session)


def _wait_for_itself(name: str, change: Change, fact: dict[str, Any]) -> None:
    _write_together(name, change, fact)
    _write_plainly(name, change, fact)  # without the session


def _conflict_with_itself(name: str, change: Change, fact: dict[str, Any]) -> None:
    bridge.client[DATA]["sink"].find_one({}, session=change.session)
    _write_plainly(name, change, {"start": fact["fence"]})
    _write_together(name, change, fact)


def _write_translated(name: str, change: Change, fact: dict[str, Any]) -> None:
    try:
        _write_plainly(name, change, fact)
    except AutoReconnect as error:
        raise TranslatedError("the database is away") from error


def _start_a_task(_name: str, _change: Change, _fact: dict[str, Any]) -> None:
    app.send_task("some.task", queue="elsewhere", ignore_result=True)


def _write_a_duplicate(_name: str, change: Change, _fact: dict[str, Any]) -> None:
    documents = bridge.client[DATA]["unique"]
    try:
        documents.insert_one({"_id": change.document_key["_id"]})
    except AutoReconnect as error:
        raise DuplicateKeyError("a mistake while it handled the outage") from error
    documents.insert_one({"_id": change.document_key["_id"]})


def _handler(name: str, effect: Callable[[str, Change, dict[str, Any]], None], **options: Any) -> None:
    if name not in _CHOSEN:
        return

    def handle(task: Any, change: Change) -> None:
        document = change.full_document
        assert document is not None
        claim = current.get().claim  # type: ignore[union-attr]
        fact = {
            "handler": name,
            "key": document["_id"],
            "n": document["n"],
            "partition": change.partition,
            "seq": change.seq,
            "fence": change.fencing_token,
        }
        start = record_start(fact, retries=task.request.retries, crashes=claim.crashes)
        perform(task, document, start, after=False)
        effect(name, change, fact)
        perform(task, document, start, after=True)
        record("end", **fact)

    handle.__name__ = handle.__qualname__ = name
    bridge.on_change(f"{DATA}.{name}", name=name, bind=True, **options)(handle)


_README = {"autoretry_for": (ConnectionError,), "retry_backoff": True, "max_retries": 8}
_handler("readme", _write_fenced, **_README)
for _policy in POLICIES:
    _handler(f"plain_{_policy}", _write_plainly, failure_policy=_policy)
    _handler(f"fenced_{_policy}", _write_fenced, failure_policy=_policy)
    _handler(
        f"retrying_{_policy}",
        _write_fenced,
        failure_policy=_policy,
        autoretry_for=(Exception,),
        retry_kwargs={"countdown": 0.1},
        max_retries=1,
    )
    _handler(f"transactional_{_policy}", _write_together, failure_policy=_policy, transactional=True)
_handler("waiting_for_itself", _wait_for_itself, failure_policy="dead_letter", transactional=True)
_handler("conflicting_with_itself", _conflict_with_itself, failure_policy="dead_letter", transactional=True)
_handler("translating", _write_translated, failure_policy="skip")
_handler("starting", _start_a_task, failure_policy="dead_letter")
_handler("duplicating", _write_a_duplicate, failure_policy="dead_letter")
_handler(
    "naming",
    _write_plainly,
    failure_policy="dead_letter",
    autoretry_for=(AutoReconnect,),
    retry_kwargs={"countdown": 0.1},
    max_retries=1,
)
