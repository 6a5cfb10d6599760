"""
A bank: an app whose two-phase transactions are driven by workers.

`python -m tests.acceptance.bank_project SEED COUNT` makes transfers between the accounts 0 to 9.
"""

from __future__ import annotations

import os
import random
import sys
from functools import cache
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import TwoPhaseCommit
from mongo_celery.errors import TransactionCanceledError

NAMES = os.environ.get("PROJECT_NAMES", "bank")
URL = os.environ.get("PROJECT_MONGO", "mongodb://localhost/")
ACCOUNTS = 10

app = Celery("bank", broker=os.environ.get("PROJECT_BROKER", "memory://"))
app.conf.update(worker_hijack_root_logger=False, worker_prefetch_multiplier=1)


@cache
def client_of(_pid: int) -> MongoClient[dict[str, Any]]:
    """One client a process, made after the fork."""
    return MongoClient(URL)


bank = TwoPhaseCommit(
    app,
    lambda: client_of(os.getpid())[f"{NAMES}_data"]["transactions"],
    older_than=float(os.environ.get("BANK_OLDER_THAN", "1800")),
    recover_every=1.0,
    protocol="documents",
)


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
    transfers(int(sys.argv[1]), int(sys.argv[2]))
