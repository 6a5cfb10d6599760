"""
The handlers: one collection each, all with the same body, registered with different options.

With `SCRIPTED_ASYNC` they are coroutine functions, which act in threads and write by the bridge's asyncio client. Then
a document can also ask them to act `on_loop`, or to await for seconds (`awaits`), and a cancel is recorded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from mongo_celery import Change, Changes
from mongo_celery.bridge.worker.execution import current
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.mongo.steps import Steps, run_async, run_sync
from tests.rig.scripted.acts import WantedError, perform
from tests.rig.scripted.application import DATA, bridge
from tests.rig.scripted.recording import record, record_start

_CHOSEN = set(filter(None, os.environ.get("SCRIPTED_HANDLERS", "").split(",")))
"""The handlers of this test; a bridge leads each of them, so fewer are quicker."""

_IS_ASYNC = bool(os.environ.get("SCRIPTED_ASYNC"))

Fact = dict[str, Any]
Effect = Callable[[Change, Fact], Any]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that blocks; for a coroutine, return the awaitable of a thread that does."""
    return asyncio.to_thread(function, *arguments) if _IS_ASYNC else function(*arguments)


def _take_effect(change: Change, fact: Fact) -> Steps[None]:
    """Keep one document for each handler, partition and partitioning, with the effects in the order of acceptance."""
    sink = f"{fact['handler']}-{fact['partition']}-{fact['partitioning']}"
    push = {"$push": {"effects": fact}}
    client: Any = bridge.async_client if _IS_ASYNC else bridge.client
    if change.session is not None:
        yield client[DATA]["sink"].update_one({"_id": sink}, push, upsert=True, session=change.session)
        return
    try:
        yield change.fenced(client[DATA]["sink"]).update_one({"_id": sink}, push, upsert=True)
    except StaleFencingTokenError:
        record("refused", **fact)
        raise


def add_handler(name: str, effect: Effect | None = None, **options: Any) -> None:
    if not _CHOSEN or name in _CHOSEN:
        register = bridge.on_change(f"{DATA}.{name}", name=name, bind=True, **options)
        _register(name, register, lambda task, change: _handle(task, name, change, effect))


def _register(name: str, register: Any, call: Callable[[Any, Any], Steps[None]]) -> None:
    def handle(task: Any, given: Any) -> None:
        run_sync(call(task, given))

    async def handle_async(task: Any, given: Any) -> None:
        await run_async(call(task, given))

    chosen: Any = handle_async if _IS_ASYNC else handle
    chosen.__name__ = chosen.__qualname__ = name
    register(chosen)


def _handle(task: Any, name: str, change: Change, effect: Effect | None = None) -> Steps[None]:
    document = change.full_document
    if document is None:  # a delete is of no interest here
        return
    execution = current.get()
    assert execution is not None, "a handler runs in an execution"
    fact = {
        "handler": name,
        "key": document["_id"],
        "n": document["n"],
        "partition": change.partition,
        "partitioning": execution.subject.run.partitioning,
        "seq": change.seq,
        "fence": change.fencing_token,
    }
    more = {"retries": task.request.retries, "crashes": execution.claim.crashes, "replayed": change.replayed}
    start = record_start(fact, **more)
    act, asked = partial(perform, task, document, start, after=False), document.get("do") or {}
    try:
        yield act() or asyncio.sleep(0) if "on_loop" in asked else _call(act)
        if "awaits" in asked:
            yield asyncio.sleep(asked["awaits"])
    except asyncio.CancelledError:
        record("canceled", **fact)
        raise
    if effect is None:
        yield from _take_effect(change, fact)
    else:
        yield _call(effect, change, fact)
    yield _call(partial(perform, task, document, start, after=True))
    record("end", **fact, replayed=change.replayed)


def _handle_list(task: Any, changes: Changes) -> Steps[None]:
    """Handle each change of a list like those of the others, and say which has failed."""
    record("list", count=len(changes))
    for change in changes:
        try:
            yield from _handle(task, "listed", change)
        except WantedError as error:
            raise changes.failed_at(change) from error


if not _CHOSEN or "listed" in _CHOSEN:
    _options: dict[str, Any] = {"name": "listed", "batch_size": 8, "failure_policy": "dead_letter"}
    _register("listed", bridge.on_changes(f"{DATA}.listed", bind=True, **_options), _handle_list)
add_handler("plain")
add_handler("other")
add_handler("limited", rate_limit="4/s")
add_handler("few", max_running=3)
add_handler("rated", rate="5/s")
add_handler("auto", autoretry_for=(WantedError,), retry_backoff=True, retry_jitter=True, max_retries=2)
add_handler("letters", failure_policy="dead_letter", max_retries=2, default_retry_delay=0.2)
add_handler("halting", failure_policy="halt", max_retries=1)
add_handler("skipping", failure_policy="skip")
add_handler("discarding", failure_policy="discard")
# Longer than a busy machine holds up a change that takes no time.
add_handler("soft", soft_time_limit=3, failure_policy="dead_letter")
add_handler("hard", time_limit=3, failure_policy="dead_letter")
add_handler("together", transactional=True, failure_policy="dead_letter")
