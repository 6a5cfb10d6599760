"""Handlers that copy what changes, each document to one of its own, and record when they begin and end."""

from __future__ import annotations

import os
from typing import Any

from mongo_celery import Change
from tests.acceptance.chain_project.acts import WantedError, perform
from tests.acceptance.chain_project.application import DATA, bridge
from tests.acceptance.chain_project.recording import record, record_start

_CHOSEN = set(filter(None, os.environ.get("CHAIN_HANDLERS", "").split(",")))


def _handler(name: str, **options: Any) -> None:
    if name not in _CHOSEN:
        return

    def handle(task: Any, change: Change) -> None:
        document = change.full_document
        assert document is not None
        fact = {
            "handler": name,
            "key": document["_id"],
            "n": document["n"],
            "partition": change.partition,
            "seq": change.seq,
            "fence": change.fencing_token,
        }
        start = record_start(fact, retries=task.request.retries, replayed=change.replayed)
        perform(task, document, start, after=False)
        _copy(change, name, document)
        perform(task, document, start, after=True)
        record("end", **fact, replayed=change.replayed)

    handle.__name__ = handle.__qualname__ = name
    bridge.on_change(f"{DATA}.{name}", name=name, bind=True, **options)(handle)


def _copy(change: Change, name: str, document: dict[str, Any]) -> None:
    key, copied = {"_id": f"{name}/{document['_id']}"}, {"$set": {"n": document["n"]}}
    if change.session is not None:
        counted = copied | {"$inc": {"times": 1}}
        bridge.client[DATA]["copies"].update_one(key, counted, upsert=True, session=change.session)
    else:
        change.fenced(f"{DATA}.copies").update_one(key, copied, upsert=True)


_handler("copied", failure_policy="dead_letter", autoretry_for=(ConnectionError,), max_retries=0)
_handler("retried", failure_policy="dead_letter", autoretry_for=(WantedError,), retry_kwargs={"countdown": 0.1})
_handler("halted", failure_policy="halt")
_handler("copied_once", failure_policy="dead_letter", transactional=True)
_handler("parked", failure_policy="park_key")
