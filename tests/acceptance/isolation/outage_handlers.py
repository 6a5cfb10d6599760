"""
Handlers that an outage hits: one of each kind with each failure policy, and README's example as it stands.

Each takes its effect in MongoDB, or starts a task, where the outage is; what happened to it is recorded elsewhere.
"""

from __future__ import annotations

import os

from pymongo.errors import AutoReconnect

from mongo_celery import Change
from mongo_celery.bridge.worker import limits, subject
from mongo_celery.mongo.repeating import Pauses
from tests.rig.scripted.application import DATA, app, bridge
from tests.rig.scripted.handlers import Fact, add_handler

POLICIES = ("halt", "dead_letter", "skip")

if "OUTAGE_PATIENCE" in os.environ:
    vars(limits)["ANSWER_SECONDS"] = float(os.environ["OUTAGE_PATIENCE"])
if "OUTAGE_PAUSE" in os.environ:
    vars(subject)["WAITS"] = Pauses(first=float(os.environ["OUTAGE_PAUSE"]), longest=float(os.environ["OUTAGE_PAUSE"]))


class TranslatedError(Exception):
    """What a handler makes of an error of its database."""


def _sink_of(fact: Fact) -> str:
    return f"{fact['handler']}-{fact['partition']}"


def _write_plainly(_change: Change, fact: Fact) -> None:
    sink = bridge.client[DATA]["sink"]
    sink.update_one({"_id": _sink_of(fact)}, {"$push": {"effects": fact}}, upsert=True)


def _write_fenced(change: Change, fact: Fact) -> None:
    change.fenced(f"{DATA}.sink").update_one({"_id": _sink_of(fact)}, {"$push": {"effects": fact}}, upsert=True)


def _write_together(change: Change, fact: Fact) -> None:
    sink, where = bridge.client[DATA]["sink"], {"_id": _sink_of(fact)}
    sink.update_one(where, {"$push": {"effects": fact}}, upsert=True, session=change.session)


def _wait_for_itself(change: Change, fact: Fact) -> None:
    _write_together(change, fact)
    _write_plainly(change, fact)  # without the session


def _write_translated(change: Change, fact: Fact) -> None:
    try:
        _write_plainly(change, fact)
    except AutoReconnect as error:
        raise TranslatedError("the database is away") from error


def _start_a_task(_change: Change, _fact: Fact) -> None:
    app.send_task("some.task", queue="elsewhere", ignore_result=True)


def _write_a_duplicate(change: Change, _fact: Fact) -> None:
    for _ in range(2):
        bridge.client[DATA]["unique"].insert_one({"_id": change.document_key["_id"]})


_README = {"autoretry_for": (ConnectionError,), "retry_backoff": True, "max_retries": 8}
add_handler("readme", _write_fenced, **_README)
for _policy in POLICIES:
    add_handler(f"plain_{_policy}", _write_plainly, failure_policy=_policy)
    add_handler(f"fenced_{_policy}", _write_fenced, failure_policy=_policy)
    add_handler(
        f"retrying_{_policy}",
        _write_fenced,
        failure_policy=_policy,
        autoretry_for=(Exception,),
        retry_kwargs={"countdown": 0.1},
        max_retries=1,
    )
    add_handler(f"transactional_{_policy}", _write_together, failure_policy=_policy, transactional=True)
add_handler("waiting_for_itself", _wait_for_itself, failure_policy="dead_letter", transactional=True)
add_handler("translating", _write_translated, failure_policy="skip")
add_handler("starting", _start_a_task, failure_policy="dead_letter")
add_handler("duplicating", _write_a_duplicate, failure_policy="dead_letter")
add_handler(
    "naming",
    _write_plainly,
    failure_policy="dead_letter",
    autoretry_for=(AutoReconnect,),
    retry_kwargs={"countdown": 0.1},
    max_retries=1,
)
