"""
The outbox project with parcels: each write is a transaction, and its tasks are sent by `delay` in its body.

`python -m tests.acceptance.parcel_project PROGRAM ...`: the programs of `outbox_project`, which write, sweep and die at
a stated point, with an `OutboxCollection` in place of the outbox.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any

from pymongo.errors import PyMongoError

from mongo_celery import OutboxCollection, transactional
from mongo_celery.errors import TransactionTimeoutError
from tests.acceptance import outbox_project as project
from tests.acceptance.outbox_project import NAME, OPTIONS, app, client, effect

PARCELS = "parcels"

boxes = OutboxCollection(
    app, lambda: client()[NAME][PARCELS], name="boxes", database=f"{NAME}_state", **{**OPTIONS, "sweep_every": None}
)


def both(key: str) -> None:
    """A new document with two numbers, and its tasks; then all that this process has to deliver."""

    def body(session: Any) -> None:
        with boxes.collect(session, key=key):
            client()[NAME]["items"].insert_one({"_id": key, "ns": [1, 2]}, session=session)
            effect.delay(key, 1)
            effect.delay(key, 2)

    transactional(client).run(body)
    boxes.backing.close()


def write(key: str, n: object, seconds: float = 40.0) -> None:
    """Write a number once, whatever it takes: the filter keeps a repetition from writing it again."""
    deadline = time.monotonic() + seconds

    def body(session: Any) -> None:
        mine = {"_id": key, "ns": {"$ne": n}}
        with boxes.collect(session, key=key):
            if client()[NAME]["items"].update_one(mine, {"$push": {"ns": n}}, session=session).modified_count:
                effect.delay(key, n)

    while True:
        try:
            transactional(client, timeout=10).run(body)
        except (PyMongoError, TransactionTimeoutError):
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.05)
        else:
            return


def deliver(key: str) -> None:
    """Deliver what waits under a key."""
    with suppress(PyMongoError):  # of a command whose time was over when the process woke up
        boxes.backing.relay.deliver_all([key])


vars(project).update(items=boxes, write=write, deliver=deliver, KINDS={"both": both})
project.COMMANDS.add("delete")

if __name__ == "__main__":
    project.import_all()
    project.PROGRAMS[sys.argv[1]](*sys.argv[2:])
