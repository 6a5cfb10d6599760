"""A Celery app whose tasks lock documents in transactions; what each run has met is noted outside of them."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery import select_for_update, transactional

app = Celery("locking", broker=os.environ["PROJECT_BROKER"])
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
)


@cache
def data() -> Database[dict[str, Any]]:
    client = MongoClient[dict[str, Any]](os.environ["PROJECT_MONGO"])
    return client[f"{os.environ['PROJECT_NAMES']}_data"]


@app.task(bind=True, autoretry_for=(Exception,), max_retries=5, default_retry_delay=0)
@transactional(lambda: data().client)
def add(self: Any, text: str, *, failures: int = 0, linger: bool = False, session: ClientSession) -> None:
    """Lock the account, add to it, and fail so many times; or stay for ever, the first time."""
    data()["runs"].insert_one({"text": text, "retries": self.request.retries, "pid": os.getpid()})
    account = select_for_update(data()["accounts"], {"_id": 1}, session=session)
    entries = [*account["entries"], text]
    data()["accounts"].update_one({"_id": 1}, {"$set": {"entries": entries}}, session=session)
    if linger and data()["runs"].count_documents({"text": text}) == 1:
        data()["runs"].update_one({"text": text}, {"$set": {"lingers": True}})
        while True:
            data().command("ping")
    if self.request.retries < failures:
        raise ValueError(text)
