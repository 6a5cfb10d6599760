"""
A process that writes to an outbox and ends: `python outbox_exits.py WAY WHAT MONGO BROKER DATABASE`.

WAY is how it ends; WHAT is `deliver`, where the first message goes out after the end has begun, `hang`, where the
broker never takes it, or `hint`, where the driver writes and the dispatcher is only told that somebody has.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from typing import Any

import billiard
from celery import Celery
from celery.signals import worker_process_shutdown
from pymongo import MongoClient

from mongo_celery import Outbox
from mongo_celery.outbox import dispatcher as module

WAY, WHAT, MONGO, BROKER, DATABASE = sys.argv[1:]

app = Celery("ending", broker=BROKER)
outbox = Outbox(app, lambda: MongoClient(MONGO)[DATABASE]["orders"], name="ending", sweep_every=None, claim_ttl=600)


@app.task(name="add")
def add(number: int) -> None:
    """Any task."""


def write() -> None:
    """Write three documents, and hold the first message up."""
    if WHAT == "deliver":
        module.CLOSE_SECONDS = 60.0  # a machine may be busy
    publish, begun = outbox.runtime.publisher.publish, threading.Event()

    def hold(entry: Any, *document_id: Any) -> None:
        begun.set()
        if WHAT == "hang":
            threading.Event().wait()
        dispatcher = outbox.runtime.dispatcher
        with dispatcher._thread.changed:
            assert dispatcher._thread.changed.wait_for(lambda: dispatcher._thread.closing_by is not None, 60)
        publish(entry, *document_id)

    outbox.runtime.publisher.publish = hold  # type: ignore[method-assign]
    outbox.insert_one({"_id": 0}, tasks=[add.s(0)])
    assert begun.wait(60)
    for number in (1, 2):
        outbox.insert_one({"_id": number}, tasks=[add.s(number)])


def write_by_the_driver() -> None:
    """Write three documents, and end before anybody could have looked for them."""
    module.CLOSE_SECONDS = 60.0
    outbox.sweep()  # which makes the index
    documents = [outbox.with_tasks({"_id": number}, [add.s(number)]) for number in range(3)]
    dispatcher = outbox.runtime.dispatcher
    with dispatcher._thread.changed:  # the thread has no turn before the end has begun
        outbox.collection.insert_many(documents)
        outbox.dispatch()
        dispatcher._thread.close_soon()


def main() -> None:
    if WAY in ("multiprocessing", "billiard"):
        package: Any = multiprocessing if WAY == "multiprocessing" else billiard
        child = package.get_context("fork").Process(target=write)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    if WHAT == "hint":
        write_by_the_driver()
    else:
        write()
    if WAY == "worker":
        worker_process_shutdown.send(sender=None)


if __name__ == "__main__":
    main()
