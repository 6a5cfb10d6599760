"""Money between two clusters: processes killed and frozen, primaries deposed, participants written back as wholes."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from bson import json_util
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery import MongoCeleryError, TwoPhaseCommit
from tests.acceptance.clusters_project import ACCOUNTS, bank_of
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]
BALANCE = 100
SEED = int(os.environ.get("MONGO_CELERY_CLUSTERS_SEED", "1"))
TRANSFERS = int(os.environ.get("MONGO_CELERY_CLUSTERS_TRANSFERS", "150"))
PROCESSES = 4
SELDOM = 0.3
"""How often a primary is deposed where that was drawn: it takes a second or two to be elected again."""
OPEN = {"$in": ["pending", "applied", "canceling"]}


class TwoBanks:
    """Accounts in two clusters, the processes that move money between them, and the judgement."""

    def __init__(self, processes: Processes, make_replica_set: MakeReplicaSet) -> None:
        self._processes = processes
        # What a dead process has locked is free again after a moment.
        self.sets = [make_replica_set(parameters=["transactionLifetimeLimitSeconds=3"]) for _ in range(2)]
        self.clients = [MongoClient[Document](each.url) for each in self.sets]
        self.name = f"clusters_{uuid4().hex[:8]}"
        for client in self.clients:
            client[self.name]["accounts"].insert_many(
                [{"_id": each, "balance": BALANCE, "owner": "x"} for each in range(ACCOUNTS)]
            )
        self.bank: TwoPhaseCommit = bank_of(self.clients[0], self.clients[1], self.name)
        self.log = self.clients[0][self.name]["transactions"]

    def transfers(self, seed: int, count: int) -> ProjectProcess:
        environment = {
            "CLUSTERS_OWN": self.sets[0].url,
            "CLUSTERS_EAST": self.sets[1].url,
            "CLUSTERS_NAME": self.name,
        }
        arguments = ("-m", "tests.acceptance.clusters_project", str(seed), str(count))
        return self._processes.python("transfers", *arguments, environment=environment)

    def write_back(self, chance: random.Random) -> None:
        """Save an account as a program does whose model knows its balance alone, if nobody was faster."""
        accounts = chance.choice(self.clients)[self.name]["accounts"]
        found = accounts.find_one({"_id": chance.randrange(ACCOUNTS)})
        assert found is not None
        accounts.replace_one(found, {"balance": found["balance"]})

    def cancel_one(self, chance: random.Random) -> None:
        found = list(self.log.find({"state": OPEN}, {"_id": 1}).limit(5))
        if found:
            with suppress(MongoCeleryError):
                self.bank.cancel(chance.choice(found)["_id"])

    def depose(self, chance: random.Random) -> None:
        """Have a cluster without a primary for a moment; all that is open there is aborted."""
        with suppress(PyMongoError):  # its own connection breaks, too
            chance.choice(self.clients).admin.command("replSetStepDown", 1, force=True)

    def befall(self, kind: str, chance: random.Random) -> None:
        if kind == "replace":
            self.write_back(chance)
        elif kind == "cancel":
            self.cancel_one(chance)
        elif kind == "recover":
            with suppress(MongoCeleryError):
                self.bank.recover(chance.choice([0, 1, 5]))
        elif chance.random() < SELDOM:
            self.depose(chance)

    def is_settled(self) -> bool:
        self.bank.recover(0)
        return self.log.count_documents({"state": OPEN}) == 0

    def judge(self) -> None:
        """Each transaction that is done counts once, all others not at all."""
        expected = [dict.fromkeys(range(ACCOUNTS), BALANCE) for _ in self.clients]
        for done in self.log.find({"state": "done"}):
            for part in done.get("changes") or done["participants"]:
                cluster = 0 if part["cluster"] is None else 1
                expected[cluster][part["id"]] += json_util.loads(part["apply"])["$inc"]["balance"]
        found = [
            {each["_id"]: each["balance"] for each in client[self.name]["accounts"].find()} for client in self.clients
        ]
        assert found == expected
        assert sum(sum(each.values()) for each in found) == 2 * BALANCE * ACCOUNTS
        assert min(min(each.values()) for each in found) >= 0


def befall(kind: str, process: ProjectProcess, frozen: list[ProjectProcess]) -> None:
    if kind == "kill":
        process.kill()
    elif kind == "freeze" and len(frozen) < PROCESSES // 2:
        process.pause()
        frozen.append(process)
    elif kind == "thaw" and frozen:
        frozen.pop().resume()


@pytest.fixture
def banks(processes: Processes, make_replica_set: MakeReplicaSet) -> Iterator[TwoBanks]:
    made = TwoBanks(processes, make_replica_set)
    yield made
    for client in made.clients:
        client.close()


@pytest.mark.slow
def test_each_transfer_counts_once_or_not_at_all_whatever_befalls_it(banks: TwoBanks) -> None:
    """Processes that are killed and frozen, recovery and cancels all the time, accounts written back, elections."""
    chance, happened = random.Random(SEED), Counter[str]()
    running: list[ProjectProcess] = []
    frozen: list[ProjectProcess] = []

    def misfortune() -> bool:
        alive = [process for process in running if process.running]
        while len(alive) < PROCESSES:
            running.append(banks.transfers(SEED * 1000 + len(running), 60))
            alive.append(running[-1])
        kind = chance.choice(["kill", "freeze", "thaw", "replace", "replace", "cancel", "recover", "depose"])
        happened[kind] += 1
        if kind in {"kill", "freeze", "thaw"}:
            befall(kind, chance.choice(alive), frozen)
        else:
            banks.befall(kind, chance)
        return bool(banks.log.count_documents({"state": "done"}) >= TRANSFERS)

    wait_for(misfortune, 120 + TRANSFERS)
    for process in frozen:
        process.resume()
    wait_for(lambda: not any(process.running for process in running), 120)
    wait_for(banks.is_settled, 90)

    assert {"kill", "freeze", "replace", "depose"} <= set(happened)
    banks.judge()
