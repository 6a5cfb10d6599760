"""
Money between two clusters: processes killed and frozen, sessions ended, primaries deposed. On three members also
primaries killed, frozen, and killed with what no other has. `integration/test_twophase_holes.py` and
`test_twophase_across.py` replace participants.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from bson import json_util
from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

from mongo_celery import TwoPhaseCommit
from mongo_celery.embedded import MongoReplicaSet, MongoServer
from mongo_celery.errors import MongoCeleryError
from tests.acceptance.clusters_project import ACCOUNTS, bank_of
from tests.acceptance.crowd import Crowd
from tests.fixtures.election import Elections, common, newest
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]
BALANCE = 100
SEED = int(os.environ.get("MONGO_CELERY_CLUSTERS_SEED", "1"))
TRANSFERS = int(os.environ.get("MONGO_CELERY_CLUSTERS_TRANSFERS", "150"))
PROCESSES = 4
SELDOM = 0.3
"""How often a primary is lost where that was drawn: it takes a second or two until there is one again."""
OPEN = {"$in": ["pending", "applied", "canceling"]}
KINDS = ("kill", "freeze", "thaw", "cancel_one", "recover", "depose", "end_sessions")
KINDS_OF_MEMBERS = ("kill_primary", "freeze_primary", "mend", "mend", "mend", "take_back")


class TwoBanks:
    """
    Accounts in two clusters, the processes that move money between them, what befalls all of them, and the judgement.

    Each kind of misfortune is a method, which returns True if it had an effect.
    """

    def __init__(self, processes: Processes, make_replica_set: MakeReplicaSet, answers: Path, members: int) -> None:
        self._processes = processes
        self._answers = answers
        self.happened = Counter[str]()
        self.kinds = (*KINDS, *KINDS_OF_MEMBERS) if members > 1 else KINDS
        self.chance = random.Random(SEED)
        self.crowd = Crowd(self.start, PROCESSES, self.chance)
        self._broken: dict[MongoReplicaSet, MongoServer] = {}
        # What a dead process has locked is free again after a moment.
        self.sets = [make_replica_set(members, parameters=["transactionLifetimeLimitSeconds=3"]) for _ in range(2)]
        self.clients = [MongoClient[Document](each.url, timeoutMS=10_000) for each in self.sets]
        self.name = f"clusters_{uuid4().hex[:8]}"
        for client in self.clients:
            client[self.name]["accounts"].insert_many([{"_id": each, "balance": BALANCE} for each in range(ACCOUNTS)])
        self.bank: TwoPhaseCommit = bank_of(self.clients[0], self.clients[1], self.name)
        self.log = self.clients[0][self.name]["transactions"]

    def start(self, number: int) -> ProjectProcess:
        environment = {
            "CLUSTERS_OWN": self.sets[0].url,
            "CLUSTERS_EAST": self.sets[1].url,
            "CLUSTERS_NAME": self.name,
            "CLUSTERS_ANSWERS": str(self._answers),
        }
        arguments = ("-m", "tests.acceptance.clusters_project", str(SEED * 1000 + number), "60")
        return self._processes.python("transfers", *arguments, environment=environment)

    # -- transactions and servers ----------------------------------------------------------------------

    def cancel_one(self) -> bool:
        found = list(self.log.find({"state": OPEN}, {"_id": 1}).limit(5))
        if found:
            self.bank.cancel(self.chance.choice(found)["_id"])
        return bool(found)

    def recover(self) -> bool:
        return any(not each.error for each in self.bank.recover(self.chance.choice([0, 1, 5])))

    def depose(self) -> bool:
        """Have a cluster without a primary for a moment; all that is open there is aborted."""
        is_drawn = self._is_drawn("depose")
        if is_drawn:
            self.chance.choice(self.clients).admin.command("replSetStepDown", 1, force=True)
        return is_drawn

    def end_sessions(self) -> bool:
        """As one does who frees what a holder has locked; also in the middle of a commit."""
        self.chance.choice(self.clients).admin.command("killAllSessions", [])
        return True

    def kill_primary(self) -> bool:
        """As a machine that loses its power; the others elect another."""
        member = self._whole_primary("kill_primary")
        if member is not None:
            member.kill()
        return member is not None

    def freeze_primary(self) -> bool:
        """One that answers nobody, and when it wakes up takes itself for the primary for a moment."""
        member = self._whole_primary("freeze_primary")
        if member is not None:
            member.pause()
        return member is not None

    def _is_drawn(self, kind: str) -> bool:
        """Return True if a primary is to be lost: seldom, but for the first time."""
        return self.chance.random() < SELDOM or not self.happened[kind]

    def _whole_primary(self, kind: str) -> MongoServer | None:
        """That of a set of which all members are well, and one will not be any more; two of three go on."""
        chosen = self.chance.choice(self.sets)
        if chosen in self._broken or not self._is_drawn(kind):
            return None
        self._broken[chosen] = chosen.primary
        return self._broken[chosen]

    def mend(self) -> bool:
        if self._broken:
            member = self._broken.pop(self.chance.choice(list(self._broken)))
            if member.running:
                member.resume()
            else:
                member.restart()
        return True

    def take_back(self) -> bool:
        """Have a primary die with what it alone has; it comes back and takes that back."""
        chosen = self.chance.choice(self.sets)
        if chosen in self._broken or not self._is_drawn("take_back"):
            return False
        with Elections(chosen).held_back() as primary, MongoClient[Document](primary.url) as client:
            self._broken[chosen] = primary
            client[self.name].get_collection("own", write_concern=WriteConcern(1)).insert_one({})
            wait_for(lambda: newest(client, self.name) > common(client), message="writes that are taken back")
        del self._broken[chosen]
        return True

    def befall(self) -> bool:
        """One misfortune more. True if there were enough transfers, and all kinds have had an effect."""
        self.crowd.fill()
        missing = [kind for kind in self.kinds if not self.happened[kind]]
        is_enough = False
        with suppress(PyMongoError):  # no primary may answer now
            is_enough = self.log.count_documents({"state": "done"}) >= TRANSFERS
        if is_enough and not missing:
            return True
        # Once there are enough transfers, other faults would only delay those that had no effect yet. But recovery has
        # an effect only on what the dead have left: the living finish their own faster.
        rest = [*missing, "mend", "thaw", *(["kill"] if "recover" in missing else [])]
        kind = self.chance.choice(rest if is_enough else self.kinds)
        with suppress(MongoCeleryError, PyMongoError):  # it may befall itself: its own session, its own connection
            self.happened[kind] += (getattr(self, kind, None) or getattr(self.crowd, kind))()
        return False

    def end(self) -> None:
        while self._broken:
            self.mend()
        self.crowd.end()

    def so_far(self) -> str:
        return f"{self.log.count_documents({'state': 'done'})} done, and {dict(self.happened)}"

    def is_settled(self) -> bool:
        with suppress(PyMongoError):  # no primary may answer now
            self.bank.recover(0)
            return self.log.count_documents({"state": OPEN}) == 0
        return False

    def judge(self) -> None:
        """Each transaction that is done counts once, all others not at all; and that is what callers were told."""
        expected = [dict.fromkeys(range(ACCOUNTS), BALANCE) for _ in self.clients]
        for done in self.log.find({"state": "done"}):
            for part in done["participants"]:
                cluster = 0 if part["cluster"] is None else 1
                expected[cluster][part["id"]] += json_util.loads(part["apply"])["$inc"]["balance"]
        found = [
            {each["_id"]: each["balance"] for each in client[self.name]["accounts"].find()} for client in self.clients
        ]
        pairs = [(cluster, number) for cluster in range(len(found)) for number in range(ACCOUNTS)]
        wrong = {each: found[each[0]][each[1]] - expected[each[0]][each[1]] for each in pairs}
        assert {each: amount for each, amount in wrong.items() if amount} == {}
        # An account may be below zero: it has spent what was taken back, and nothing here forbids that.
        assert sum(sum(each.values()) for each in found) == 2 * BALANCE * ACCOUNTS
        states = {each["_id"]: each["state"] for each in self.log.find({}, {"state": 1})}
        told = dict(line.split() for path in self._answers.iterdir() for line in path.read_text().splitlines())
        false = {each: (said, states.get(each)) for each, said in told.items() if said != states.get(each)}
        assert {each: both for each, both in false.items() if both[0] != "unknown"} == {}
        assert Counter(told.values())["done"] > TRANSFERS // 2


@pytest.fixture(params=[1, 3], ids=["one_member", "three_members"])
def banks(
    request: pytest.FixtureRequest, processes: Processes, make_replica_set: MakeReplicaSet, tmp_path: Path
) -> Iterator[TwoBanks]:
    (tmp_path / "answers").mkdir()
    made = TwoBanks(processes, make_replica_set, tmp_path / "answers", request.param)
    yield made
    for client in made.clients:
        client.close()


@pytest.mark.slow
def test_each_transfer_counts_once_or_not_at_all_whatever_befalls_it(banks: TwoBanks) -> None:
    """A run in which one kind of misfortune had no effect is none, and goes on."""
    wait_for(banks.befall, 300 + TRANSFERS * len(banks.sets[0].members), banks.so_far)
    banks.end()
    wait_for(banks.is_settled, 90)
    banks.judge()
