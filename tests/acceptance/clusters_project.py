"""
Processes that move money between two clusters, and die: `python -m tests.acceptance.clusters_project SEED COUNT`.

Each account of each cluster is `{_id, balance}`. `CLUSTERS_OWN` and `CLUSTERS_EAST` are the clusters' addresses,
`CLUSTERS_NAME` is the database in both. `CLUSTERS_ANSWERS` is a directory: a process notes there, in a file of its own,
what it was told of each transaction.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.errors import MongoCeleryError, TransactionCanceledError

ACCOUNTS = 6


def bank_of(own: MongoClient[dict[str, Any]], east: MongoClient[dict[str, Any]], name: str) -> TwoPhaseCommit:
    """The coordinator of a process, patient for a few seconds."""
    return TwoPhaseCommit(
        None, own[name]["transactions"], application="bank", clients={"east": east}, timeout=10, deadline=8
    )


def moved(source: Any, destination: Any, accounts: tuple[int, int], value: int) -> list[Participant]:
    """From one cluster's account to another's."""
    return [
        Participant(source, accounts[0], {"$inc": {"balance": -value}}, require={"balance": {"$gte": value}}),
        Participant(destination, accounts[1], {"$inc": {"balance": value}}),
    ]


def transfers(seed: int, count: int) -> None:
    """Random ones, in either direction and within either cluster; some are canceled by those who ask for it."""
    name, chance = os.environ["CLUSTERS_NAME"], random.Random(seed)
    own, east = (MongoClient[dict[str, Any]](os.environ[each]) for each in ("CLUSTERS_OWN", "CLUSTERS_EAST"))
    bank = bank_of(own, east, name)
    answers = (Path(os.environ["CLUSTERS_ANSWERS"]) / str(seed)).open("a", buffering=1)
    for number in range(count):
        source, destination = chance.choice([(own, east), (east, own), (own, own), (east, east)])
        accounts = chance.sample(range(ACCOUNTS), 2)
        parts = moved(
            source[name]["accounts"], destination[name]["accounts"], (accounts[0], accounts[1]), chance.randint(1, 40)
        )
        identity, told = f"{seed}-{number}", "done"
        try:
            bank.begin(parts, id=identity, run=True)
        except TransactionCanceledError:
            told = "canceled"
        except MongoCeleryError:
            told = "unknown"
        answers.write(f"{identity} {told}\n")


if __name__ == "__main__":
    transfers(int(sys.argv[1]), int(sys.argv[2]))
