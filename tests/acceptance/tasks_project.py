"""Tasks in a worker: under `once`, with a step that dies after it has run, and with a lock in a transaction."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from celery import Celery, current_task
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery import once, select_for_update, transactional
from tests.fixtures.process import wait_for

BROKER = os.environ["PROJECT_BROKER"]

app = Celery("tasks", broker=BROKER, backend=BROKER)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
)


@functools.cache
def _client(pid: int) -> MongoClient[dict[str, Any]]:
    del pid  # one client a process
    return MongoClient(os.environ["PROJECT_MONGO"])


def collection(name: str) -> Collection[dict[str, Any]]:
    return _client(os.getpid())[f"{os.environ['PROJECT_NAMES']}_data"][name]


def note(**what: object) -> None:
    """Record that something ran, and as the how many-th retry."""
    collection("notes").insert_one({**what, "retries": current_task.request.retries})


def dies_the_first_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """SIGKILL right after the function, before Celery knows that it has ended."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        result = function(*args)
        died = collection("deaths")
        if not died.find_one({"_id": current_task.request.id}):
            died.insert_one({"_id": current_task.request.id})
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


@app.task
@dies_the_first_time
@once(lambda: collection("done"))
def charge(order: int) -> dict[str, int]:
    note(step="charge", order=order)
    return {"charge": order * 10}


@app.task
@dies_the_first_time
@once(lambda: collection("done"))
def charge_in_transaction(order: int, *, session: ClientSession) -> dict[str, int]:
    collection("notes").insert_one({"step": "charge", "order": order, "retries": 0}, session=session)
    return {"charge": order * 10}


@app.task
@once(lambda: collection("done"))
def book(charged: dict[str, int], order: int) -> None:
    note(step="book", order=order, charged=charged)


@app.task
@once(lambda: collection("done"), claim_ttl=1)
def wait_for_the_dead() -> None:
    note(step="waited")


@app.task
@once(lambda: collection("done"), claim_ttl=60)
def part(name: str) -> str:
    """One part of a chord; the slow one runs until it is told to end."""
    note(step="part", name=name)
    if name == "slow":
        wait_for(lambda: collection("signs").find_one({}))
    return name


@app.task
@once(lambda: collection("done"), claim_ttl=1)
def stand_still() -> None:
    """A run that is frozen, until it is told to end."""
    note(step="stand_still", pid=os.getpid())
    wait_for(lambda: collection("signs").find_one({}))


@app.task
@once(lambda: collection("done"), claim_ttl=1)
def stand_still_in_transaction(*, session: ClientSession) -> None:
    collection("notes").insert_one({"step": "stand_still_in_transaction"}, session=session)
    collection("standing").insert_one({"pid": os.getpid()})
    wait_for(lambda: collection("signs").find_one({}))


@app.task
@once(lambda: collection("done"))
def total(parts: list[str]) -> None:
    note(step="total", parts=parts)


@app.task(bind=True, ignore_result=True, autoretry_for=(Exception,), max_retries=5, default_retry_delay=0)
@transactional(lambda: _client(os.getpid()))
def add(self: Any, text: str, *, failures: int = 0, linger: bool = False, session: ClientSession) -> None:
    """Lock the account, add to it, and fail so many times; or stay for ever, the first time."""
    runs, accounts = collection("runs"), collection("accounts")
    runs.insert_one({"text": text, "retries": self.request.retries, "pid": os.getpid()})
    account = select_for_update(accounts, {"_id": 1}, session=session)
    accounts.update_one({"_id": 1}, {"$set": {"entries": [*account["entries"], text]}}, session=session)
    if linger and runs.count_documents({"text": text}) == 1:
        runs.update_one({"text": text}, {"$set": {"lingers": True}})
        while True:
            runs.database.command("ping")
    if self.request.retries < failures:
        raise ValueError(text)
