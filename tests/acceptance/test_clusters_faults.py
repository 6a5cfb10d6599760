"""
Money between two clusters: processes killed and frozen, sessions ended, primaries deposed, participants written back as
wholes, deleted and made anew; on three members also primaries killed, frozen, and killed with what no other has.

A participant that is replaced in the middle of a transaction stops that loudly. Then somebody does what the error says:
here that is the test, which knows which markers were lost with a document whose balance stayed.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from bson import ObjectId, json_util
from pymongo import MongoClient, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery import TwoPhaseCommit
from mongo_celery.embedded import MongoReplicaSet, MongoServer
from mongo_celery.errors import MongoCeleryError
from tests.acceptance.clusters_project import ACCOUNTS, bank_of
from tests.fixtures.election import Elections, common, newest
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]
MARKERS, VERSION = "pendingTransactions", "transactionFence"
BALANCE = 100
SEED = int(os.environ.get("MONGO_CELERY_CLUSTERS_SEED", "1"))
TRANSFERS = int(os.environ.get("MONGO_CELERY_CLUSTERS_TRANSFERS", "150"))
PROCESSES = 4
SELDOM = 0.3
"""How often a primary is lost where that was drawn: it takes a second or two until there is one again."""
OPEN = {"$in": ["pending", "applied", "canceling"]}
KINDS = (
    *("kill", "freeze", "thaw", "write_back", "write_back", "make_anew", "cancel_one", "recover", "depose"),
    "end_sessions",
)
KINDS_OF_MEMBERS = ("kill_primary", "freeze_primary", "mend", "mend", "mend", "take_back")


def majority(collection: Any) -> Any:
    return collection.with_options(write_concern=WriteConcern("majority"), read_concern=ReadConcern("majority"))


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
        self.running: list[ProjectProcess] = []
        self.frozen: list[ProjectProcess] = []
        self._broken: dict[MongoReplicaSet, MongoServer] = {}
        self._lost: set[tuple[int, int, str]] = set()
        # What a dead process has locked is free again after a moment.
        self.sets = [make_replica_set(members, parameters=["transactionLifetimeLimitSeconds=3"]) for _ in range(2)]
        self.clients = [MongoClient[Document](each.url, timeoutMS=10_000) for each in self.sets]
        self.name = f"clusters_{uuid4().hex[:8]}"
        for client in self.clients:
            client[self.name]["accounts"].insert_many(
                [{"_id": each, "balance": BALANCE, "owner": "x"} for each in range(ACCOUNTS)]
            )
        self.bank: TwoPhaseCommit = bank_of(self.clients[0], self.clients[1], self.name)
        self.log = self.clients[0][self.name]["transactions"]

    # -- processes: others take the place of those that die ---------------------------------------------

    def start_missing(self) -> list[ProjectProcess]:
        """Those that are alive."""
        alive = [process for process in self.running if process.running]
        environment = {
            "CLUSTERS_OWN": self.sets[0].url,
            "CLUSTERS_EAST": self.sets[1].url,
            "CLUSTERS_NAME": self.name,
            "CLUSTERS_ANSWERS": str(self._answers),
        }
        while len(alive) < PROCESSES:
            arguments = ("-m", "tests.acceptance.clusters_project", str(SEED * 1000 + len(self.running)), "60")
            self.running.append(self._processes.python("transfers", *arguments, environment=environment))
            alive.append(self.running[-1])
        return alive

    def kill(self) -> bool:
        self.chance.choice(self.start_missing()).kill()
        return True

    def freeze(self) -> bool:
        if len(self.frozen) >= PROCESSES // 2:
            return False
        self.frozen.append(self.chance.choice(self.start_missing()))
        self.frozen[-1].pause()
        return True

    def thaw(self) -> bool:
        if self.frozen:
            self.frozen.pop().resume()
        return True

    # -- participants that are replaced ------------------------------------------------------------------

    def write_back(self) -> bool:
        """Save an account as a program does whose model knows its balance alone, if nobody was faster."""
        cluster, number = self.chance.randrange(len(self.clients)), self.chance.randrange(ACCOUNTS)
        accounts = majority(self.clients[cluster][self.name]["accounts"])
        found = accounts.find_one({"_id": number})
        assert found is not None
        successor = {"balance": found["balance"], "saved": ObjectId()}
        with suppress(PyMongoError):
            accounts.replace_one(found, successor)
        return self._note_lost(cluster, found, successor)

    def make_anew(self) -> bool:
        """Delete an account, and insert its successor with the same balance."""
        cluster, number = self.chance.randrange(len(self.clients)), self.chance.randrange(ACCOUNTS)
        accounts = self.clients[cluster][self.name]["accounts"]
        found: Document = {}
        successor: Document = {"_id": number, "saved": ObjectId()}

        def body(session: ClientSession) -> None:
            deleted = accounts.find_one_and_delete({"_id": number}, session=session) or {}
            if deleted.get("saved") != successor["saved"]:  # else an attempt before was committed, and told otherwise
                found.clear()
                found.update(deleted)
            accounts.insert_one({**successor, "balance": deleted["balance"]}, session=session)

        with suppress(PyMongoError), self.clients[cluster].start_session() as session:
            session.with_transaction(body, write_concern=WriteConcern("majority"))
        return bool(found) and self._note_lost(cluster, found, successor)

    def _note_lost(self, cluster: int, found: Document, successor: Document) -> bool:
        """Note the markers that were lost with an account, if it was replaced: an answer may have been lost, too."""
        accounts = majority(self.clients[cluster][self.name]["accounts"])

        def is_ordered() -> bool:  # what was sent before this majority write is there now, or never
            with suppress(PyMongoError):
                return bool(accounts.update_one({"_id": found["_id"]}, {"$set": {"seen": ObjectId()}}).matched_count)
            return False

        wait_for(is_ordered, 60)
        now = accounts.find_one({"_id": found["_id"]})
        is_replaced = now is not None and now.get("saved") == successor["saved"]
        if is_replaced:
            self._lost.update((cluster, found["_id"], each) for each in found.get(MARKERS, ()))
        return is_replaced

    def put_right(self) -> None:
        """Do what the errors of stopped transactions say."""
        for stopped in self.log.find(
            {"state": OPEN, "stoppedBy": {"$exists": True}, "incarnations": {"$exists": True}}
        ):
            for index, (part, recorded) in enumerate(
                zip(stopped["participants"], stopped["incarnations"], strict=True)
            ):
                cluster = 0 if part["cluster"] is None else 1
                accounts = majority(self.clients[cluster][self.name]["accounts"])
                found = accounts.find_one({"_id": part["id"]}) or {}
                if stopped["_id"] in found.get(MARKERS, ()) or found.get(VERSION, {}).get("of") == recorded:
                    continue
                if (cluster, part["id"], stopped["_id"]) in self._lost:
                    self._lost.remove((cluster, part["id"], stopped["_id"]))
                    accounts.update_one({"_id": part["id"]}, {"$push": {MARKERS: stopped["_id"]}})
                else:
                    self.log.update_one({"_id": stopped["_id"]}, {"$set": {f"incarnations.{index}": None}})
            with suppress(MongoCeleryError):
                self.bank.run(stopped["_id"])

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
        """Have a member that was killed or frozen back."""
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
        self.start_missing()
        missing = [kind for kind in self.kinds if not self.happened[kind]]
        is_enough = False
        with suppress(PyMongoError):  # no primary may answer now
            is_enough = self.log.count_documents({"state": "done"}) >= TRANSFERS
        if is_enough and not missing:
            return True
        # Once there are enough transfers, other faults would only delay those that had no effect yet.
        kind = self.chance.choice([*missing, "mend", "thaw"] if is_enough else self.kinds)
        with suppress(MongoCeleryError, PyMongoError):  # it may befall itself: its own session, its own connection
            self.happened[kind] += getattr(self, kind)()
        return False

    def end(self) -> None:
        """Let all who live go on to their end; nobody has ended by an error that is none of ours."""
        while self._broken:
            self.mend()
        for process in self.frozen:
            process.resume()
        wait_for(lambda: not any(process.running for process in self.running), 120)
        assert {process.returncode for process in self.running} <= {0, -signal.SIGKILL}

    def so_far(self) -> str:
        return f"{self.log.count_documents({'state': 'done'})} done, and {dict(self.happened)}"

    def is_settled(self) -> bool:
        self.bank.recover(0)
        self.put_right()
        return self.log.count_documents({"state": OPEN}) == 0

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
    """
    Processes killed and frozen, recovery and cancels all the time, accounts written back and made anew, elections.

    With three members primaries are killed and frozen as well, and take back what they alone had written. A run in
    which one of these had no effect is none, and goes on.
    """
    wait_for(banks.befall, 120 + TRANSFERS * len(banks.sets[0].members), banks.so_far)
    banks.end()
    wait_for(banks.is_settled, 90)
    banks.judge()
