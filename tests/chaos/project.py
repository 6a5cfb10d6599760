"""
The app of a run: `celery -A tests.chaos.project listener` and `... worker`.

One handler for each flow, with the same body: it records its start, is slow, takes its effect through the fence, or in
its transaction, and does whatever the poison in its document is. One that gets lists takes the effects of each by one
fenced bulk write, and says which change has failed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from pymongo import MongoClient, UpdateOne

from mongo_celery import Bridge, Change, Changes
from mongo_celery.forking import PerProcess
from tests.chaos import broken
from tests.chaos.setting import BRIDGE, DATA, FACTS, FLOWS, OPTIONS, SINK, Flow, order_of
from tests.rig.scripted.recording import take_time

GATES = Path(os.environ["CHAOS_GATES"])
"""A file here that is named like a key, or `all`, cures its poison."""

broken.apply(os.environ.get("CHAOS_BROKEN", ""))
_AT_TIMES = 0.7
app = Celery(BRIDGE, broker=os.environ["CHAOS_BROKER"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 60, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
    worker_hijack_root_logger=True,
    worker_prefetch_multiplier=4,
)
bridge = Bridge(app, os.environ["CHAOS_MONGO"], **OPTIONS)
facts: PerProcess[MongoClient[dict[str, Any]]] = PerProcess(
    lambda: MongoClient(os.environ["CHAOS_FACTS"], appname="chaos-facts", connect=False)
)


def owner(event: Mapping[str, Any]) -> Any:
    """A partition rule that fails where there is no owner."""
    return event["fullDocument"]["owner"]


def _register(flow: Flow) -> None:
    def handle(task: Any, given: Any) -> None:
        (_handle if flow.batch is None else _handle_list)(task, flow, given)

    handle.__name__ = handle.__qualname__ = flow.name
    register = bridge.on_change if flow.batch is None else partial(bridge.on_changes, batch_size=flow.batch)
    register(
        f"{DATA}.{flow.name}",
        name=flow.name,
        bind=True,
        max_retries=3,
        partition_by=owner if flow.owned else None,
        failure_policy=flow.policy,
        transactional=flow.transactional,
        group=flow.group,
        commit=flow.commit,
        max_running=flow.max_running,
        delay=flow.delay,
    )(handle)


def _handle(task: Any, flow: Flow, change: Change) -> None:
    fact = _start(task, flow, change)
    _act(task, _document_of(change))
    take_time(flow.seconds)
    _take_effect(change, f"{flow.name}-{fact['partition']}", fact)
    take_time(_document_of(change).get("lingers", 0.0))


def _handle_list(task: Any, flow: Flow, changes: Changes) -> None:
    """What fails leaves everything before it done, and everything behind it unstarted."""
    effects: list[UpdateOne] = []
    for change in changes:
        try:
            fact = _start(task, flow, change)
            _act(task, _document_of(change))
        except Exception as error:
            _take_effects(changes, effects)
            raise changes.failed_at(change) from error
        effects.append(UpdateOne({"_id": f"{flow.name}-{fact['partition']}"}, {"$set": {"last": fact}}, upsert=True))
    _take_effects(changes, effects)
    take_time(max(_document_of(change).get("lingers", 0.0) for change in changes))


def _document_of(change: Change) -> dict[str, Any]:
    assert change.full_document is not None, "inserts, replaces and snapshots carry their document"
    return change.full_document


def _start(task: Any, flow: Flow, change: Change) -> dict[str, Any]:
    """Record a start; what is known of the change, which its effect carries too."""
    document = _document_of(change)
    order = order_of(flow.name, str(document["_id"]), change.partition)
    fact = {
        "handler": flow.name,
        "key": str(document["_id"]),
        "n": document["n"],
        "partition": order,
        "seq": None if flow.parks else change.seq,
        "fence": change.fencing_token,
    }
    start = {**fact, "retries": task.request.retries, "pid": os.getpid()}
    if change.operation_type == "snapshot":
        facts.get()[FACTS]["brought"].insert_one({"fact": start, "place": change.resume_token["_data"]})
    facts.get()[FACTS]["start"].insert_one({"fact": start})
    return fact


def _take_effect(change: Change, sink: str, fact: Mapping[str, Any]) -> None:
    """One document for each order has the last effect; the oplog has them all, in the order of their acceptance."""
    last = {"$set": {"last": fact}}
    if change.session is not None:
        bridge.client[DATA][SINK].update_one({"_id": sink}, last, upsert=True, session=change.session)
    else:
        change.fenced(f"{DATA}.{SINK}").update_one({"_id": sink}, last, upsert=True)


def _take_effects(changes: Changes, effects: Sequence[UpdateOne]) -> None:
    if effects:
        changes.fenced(f"{DATA}.{SINK}").bulk_write(effects)


def _act(task: Any, document: Mapping[str, Any]) -> None:
    poison = document.get("poison")
    if poison is None or (GATES / "all").exists() or (GATES / str(document["_id"])).exists():
        return
    if poison == "raises" or (poison == "raises at times" and random.random() < _AT_TIMES):
        raise RuntimeError("poisoned")
    if poison == "kills its process":
        os._exit(7)
    if poison == "retries in 30 000 years":
        task.retry(countdown=1e12)


for each in FLOWS.values():
    _register(each)
