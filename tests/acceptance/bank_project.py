"""
A bank: an app whose two-phase transactions are driven by workers, and processes that drive them and die.

`python -m tests.acceptance.bank_project transfers SEED COUNT` makes transfers between the accounts 0 to 9;
`... run ID STOP NUMBER` drives one and stops itself by SIGKILL before (`before`) or after (`after`) its n-th command.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from functools import cache
from typing import Any

from celery import Celery
from pymongo import MongoClient, monitoring

from mongo_celery import TwoPhaseCommit
from mongo_celery.errors import TransactionCanceledError

NAME = os.environ.get("BANK_NAME", "bank")
URL = os.environ.get("BANK_MONGO", "mongodb://localhost/")
ACCOUNTS = 10

app = Celery("bank", broker=os.environ.get("BANK_BROKER", "memory://"))
app.conf.update(worker_hijack_root_logger=False, worker_prefetch_multiplier=1)


@cache
def client_of(_pid: int) -> MongoClient[dict[str, Any]]:
    """One client a process, made after the fork."""
    return MongoClient(URL, event_listeners=_listeners)


_listeners: list[Any] = []
bank = TwoPhaseCommit(
    app,
    lambda: client_of(os.getpid())[NAME]["transactions"],
    older_than=float(os.environ.get("BANK_OLDER_THAN", "1800")),
    recover_every=1.0,
    protocol="documents",
)


class Stop(monitoring.CommandListener):
    """Ends its own process at the n-th command; nothing of it gets a chance to clean up."""

    def __init__(self, when: str, number: int) -> None:
        self.when = when
        self.number = number
        self.count = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Before a command is sent."""
        if event.command_name in {"find", "update", "findAndModify"}:
            self.count += 1
            self._stop("before")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """After its answer."""
        if event.command_name in {"find", "update", "findAndModify"}:
            self._stop("after")

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing."""

    def _stop(self, when: str) -> None:
        if when == self.when and self.count == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


def transfers(seed: int, count: int) -> None:
    """Random transfers; those that an account cannot pay are canceled."""
    chance = random.Random(seed)
    for number in range(count):
        source, destination = chance.sample(range(ACCOUNTS), 2)
        try:
            bank.transfer(source, destination, chance.randint(1, 60), id=f"{seed}.{os.getpid()}.{number}")
        except TransactionCanceledError:
            continue


if __name__ == "__main__":
    if sys.argv[1] == "transfers":
        transfers(int(sys.argv[2]), int(sys.argv[3]))
    else:
        _listeners.append(Stop(sys.argv[3], int(sys.argv[4])))
        bank.run(sys.argv[2])
