"""The handlers: one collection each, all with the same body, registered with different options."""

from __future__ import annotations

import os
from typing import Any

from mongo_celery import Change, Changes
from mongo_celery.bridge.worker.execution import current
from mongo_celery.errors import StaleFencingTokenError
from tests.acceptance.chain_project.acts import WantedError, perform
from tests.acceptance.chain_project.application import DATA, bridge
from tests.acceptance.chain_project.recording import record, record_start

_CHOSEN = set(filter(None, os.environ.get("CHAIN_HANDLERS", "").split(",")))
"""The handlers of this test; a bridge leads each of them, so fewer are quicker."""


def _handler(name: str, **options: Any) -> None:
    if _CHOSEN and name not in _CHOSEN:
        return

    def handle(task: Any, change: Change) -> None:
        _handle(task, name, change)

    handle.__name__ = name
    handle.__qualname__ = name
    bridge.on_change(f"{DATA}.{name}", name=name, bind=True, **options)(handle)


def _handle(task: Any, name: str, change: Change) -> None:
    document = change.full_document
    if document is None:  # a delete is of no interest here
        return
    execution = current.get()
    assert execution is not None, "a handler runs in an execution"
    generation = execution.subject.run.generation
    fact = {
        "handler": name,
        "key": document["_id"],
        "n": document["n"],
        "partition": change.partition,
        "generation": generation,
        "seq": change.seq,
        "fence": change.fencing_token,
    }
    start = record_start(fact, retries=task.request.retries)
    perform(task, document, start, after=False)
    _take_effect(change, f"{name}-{change.partition}-{generation}", fact)
    perform(task, document, start, after=True)
    record("end", **fact)


def _list_handler(name: str, *, tells: bool, **options: Any) -> None:
    """A handler of lists, each of whose changes is handled like those of the others; it may say which has failed."""
    if _CHOSEN and name not in _CHOSEN:
        return

    def handle(task: Any, changes: Changes) -> None:
        record("list", handler=name, count=len(changes), retries=task.request.retries)
        for change in changes:
            try:
                _handle(task, name, change)
            except WantedError as error:
                if tells:
                    raise changes.failed_at(change) from error
                raise

    handle.__name__ = name
    handle.__qualname__ = name
    bridge.on_changes(f"{DATA}.{name}", name=name, bind=True, batch_size=8, **options)(handle)


def _take_effect(change: Change, sink: str, fact: dict[str, Any]) -> None:
    """One document for each handler, partition and generation: its list is the order in which effects were accepted."""
    push = {"$push": {"effects": fact}}
    if change.session is not None:
        bridge.client[DATA]["sink"].update_one({"_id": sink}, push, upsert=True, session=change.session)
        return
    try:
        change.fenced(f"{DATA}.sink").update_one({"_id": sink}, push, upsert=True)
    except StaleFencingTokenError:
        record("refused", **fact)
        raise


_handler("plain")
_handler("other")
_handler("limited", rate_limit="4/s")
_handler("auto", autoretry_for=(WantedError,), retry_backoff=True, retry_jitter=True, max_retries=2)
_handler("letters", failure_policy="dead_letter", max_retries=2, default_retry_delay=0.2)
_handler("halting", failure_policy="halt", max_retries=1)
_handler("skipping", failure_policy="skip")
_handler("discarding", failure_policy="discard")
# Longer than a busy machine holds up a change that takes no time.
_handler("soft", soft_time_limit=3, failure_policy="dead_letter")
_handler("hard", time_limit=3, failure_policy="dead_letter")
_handler("together", transactional=True, failure_policy="dead_letter")
_handler(
    "together_auto",
    transactional=True,
    autoretry_for=(Exception,),
    retry_kwargs={"countdown": 0.1},
    max_retries=3,
)
_list_handler(
    "listed",
    tells=True,
    failure_policy="dead_letter",
    autoretry_for=(WantedError,),
    retry_kwargs={"countdown": 0.1},
    max_retries=1,
)
_list_handler("listed_together", tells=False, transactional=True, failure_policy="dead_letter")
for _number in range(int(os.environ.get("CHAIN_MANY", "0"))):
    _handler(f"many_{_number}")
