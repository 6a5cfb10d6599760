"""
Have customers leave, and be killed when the last one is gone: `python -m shop.customers NAME ...`.

The process ends itself by SIGKILL after that commit, and before it could send anything of what goes with it.
"""

import os
import signal
import sys
from typing import Any

from celery.signals import before_task_publish

from mongo_celery import transactional
from shop.celery import client, database, leaving
from shop.tasks import refund, say_goodbye


class OpenOrderError(Exception):
    """A customer who waits for an order cannot leave."""


@transactional(client, outbox=leaving)
def leave(name: str, *, session: Any) -> None:
    """Delete a customer and all that belongs to one. What is sent here is sent if this is committed, else never."""
    customer = database["customers"].find_one_and_delete({"_id": name}, session=session)
    database["wishes"].delete_many({"customer": name}, session=session)
    say_goodbye.delay(name)  # knows nothing of an outbox
    if database["orders"].count_documents({"customer": name, "state": "open"}, session=session):
        raise OpenOrderError(name)
    if customer and customer["credit"]:
        refund.delay(name, customer["credit"])


def die_with(last: str) -> None:
    """What a deploy, the out-of-memory killer or a power cut do: here as soon as the last customer is gone."""

    def die(*_: Any, **__: Any) -> None:
        if not database["customers"].find_one({"_id": last}):
            os.kill(os.getpid(), signal.SIGKILL)

    before_task_publish.connect(die, weak=False)


if __name__ == "__main__":
    die_with(sys.argv[-1])
    for each in sys.argv[1:]:
        try:
            leave(each)
        except OpenOrderError:
            print(f"{each} waits for an order, and stays")
            sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # at the latest: what has not been sent yet is in MongoDB
