"""
Take orders, and be killed between write and dispatch: `python -m shop.writer naive|outbox FIRST COUNT`.

The process ends itself by SIGKILL when the last order has been written and nothing has been sent for it yet.
"""

import os
import signal
import sys
from typing import Any

from celery.signals import before_task_publish

from shop.celery import database, orders
from shop.tasks import reserve, send_receipt

ARTICLE = "lamp"


def take(how: str, number: int) -> None:
    """Save one order and see to its receipt and its reservation."""
    order = {"_id": number, "article": ARTICLE, "how": how}
    if how == "outbox":
        orders.insert_one(order, tasks=[send_receipt.s(number), reserve.s(ARTICLE)])
    else:
        database["orders"].insert_one(order)
        send_receipt.delay(number)
        reserve.delay(ARTICLE)


def die_with(last: int) -> None:
    """What a deploy, the out-of-memory killer or a power cut do: here as soon as the last order has been written."""

    def die(*_: Any, **__: Any) -> None:
        if database["orders"].find_one({"_id": last}):
            os.kill(os.getpid(), signal.SIGKILL)

    before_task_publish.connect(die, weak=False)


if __name__ == "__main__":
    how, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    die_with(first + count - 1)
    for number in range(first, first + count):
        take(how, number)
    os.kill(os.getpid(), signal.SIGKILL)  # at the latest: what has not been sent yet is in MongoDB
