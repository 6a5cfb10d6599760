"""Two-phase commit with real processes that are killed and paused, workers, beat and the command line."""

from __future__ import annotations

import json
import random
import signal
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import TwoPhaseCommit
from tests.acceptance.bank_project import ACCOUNTS
from tests.acceptance.crowd import Crowd
from tests.fixtures.process import Processes, ProjectProcess, wait_for
from tests.rig.project import MakeProject, Project

Document = dict[str, Any]
UNFINISHED = {"state": {"$in": ["pending", "applied", "canceling"]}}
BALANCE = 100


class Bank(Project):
    """The project's processes, and a coordinator in the test to judge by."""

    app = "tests.acceptance.bank_project"

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        super().__init__(processes, client, url, broker)
        self.log = self.data["transactions"]
        self.coordinator = TwoPhaseCommit(None, self.log, application="bank", protocol="documents")
        self.data["accounts"].insert_many(
            [{"_id": each, "balance": BALANCE, "pendingTransactions": []} for each in range(ACCOUNTS)]
        )

    def transfers(self, seed: int, count: int) -> ProjectProcess:
        return self._processes.python("bank", "-m", self.app, str(seed), str(count), environment=self.variables())

    def output(self, *arguments: str, status: int = 0) -> list[str]:
        done = self.run("transactions", *arguments)
        assert done.returncode == status, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if line]

    def state_of(self, identity: Any) -> str:
        return str(self.coordinator.read(identity).state)

    def judge(self) -> None:
        """Nothing is left, nobody is below zero, and every balance is what the transactions that are done say."""
        assert self.log.count_documents(UNFINISHED) == 0
        expected = [BALANCE] * ACCOUNTS
        for done in self.log.find({"state": "done"}):
            expected[done["source"]] -= done["value"]
            expected[done["destination"]] += done["value"]
        found = list(self.data["accounts"].find().sort("_id", 1))
        assert [each["balance"] for each in found] == expected
        assert min(expected) >= 0
        assert all(not each["pendingTransactions"] for each in found)


@pytest.fixture
def bank(make_project: MakeProject) -> Bank:
    made: Bank = make_project(Bank)
    return made


def test_eight_drivers_under_random_kills_leave_every_account_right(bank: Bank) -> None:
    """Two hundred transfers over ten accounts, with a kill every few moments and recovery all the time."""
    crowd = Crowd(lambda number: bank.transfers(number, 25), 8, random.Random(7))

    def kill_and_recover() -> bool:
        if len(crowd.started) < 14:
            crowd.fill()
            if bank.log.count_documents({}) > 10 * len(crowd.started):
                crowd.kill()
        bank.coordinator.recover(0.5)
        return not any(each.running for each in crowd.started)

    wait_for(kill_and_recover, 300)
    crowd.end()
    bank.coordinator.recover(0)

    assert sum(each.returncode == -signal.SIGKILL for each in crowd.started) > 0
    assert bank.log.count_documents({}) >= 200
    bank.judge()


def test_workers_run_what_is_queued_and_beat_recovers(bank: Bank) -> None:
    """`delay` for many, a worker's child killed in between; beat's recovery finishes what was lost with it."""
    worker = bank.worker(BANK_OLDER_THAN="1")
    bank.start("beat", "-s", "/dev/null", "--scheduler", "celery.beat:Scheduler", "-l", "INFO", BANK_OLDER_THAN="1")
    asking = TwoPhaseCommit(Celery("bank", broker=bank.environment["PROJECT_BROKER"]), bank.log)
    for number in range(20):
        asking.transfer(number % ACCOUNTS, (number + 1) % ACCOUNTS, 5, id=number, run=False)
        asking.delay(number)
        if number == 10:
            worker.send_child(signal.SIGKILL)

    wait_for(lambda: bank.log.count_documents({"state": "done"}) == 20, message=lambda: str(list(bank.log.find())))
    bank.judge()


@pytest.mark.slow
def test_the_command_line_lists_shows_recovers_and_cancels_whatever_is_stored(bank: Bank) -> None:
    """Ids of every kind are typed as they are shown; shapes of other code, and text that looks like markup."""
    stored, shape = bank.log, {"source": 0, "destination": 1, "value": 10, "state": "pending"}
    initial = {**shape, "state": "initial", "lastModified": datetime.now(UTC)}
    stored.insert_many(
        [
            {"_id": 1, **shape},
            {"_id": "two", **shape},
            {"_id": "three", **shape, "application": "App2"},
            *({"_id": each, **initial} for each in (123, "123", "[red]x", "0123456789abcdef01234567")),
            {"_id": "v", **shape, "state": "canceled", "reason": "see [/x]"},
        ]
    )
    given = bank.coordinator.transfer(0, 1, 5, run=False)

    def answer(*arguments: str) -> Document:
        found: Document = json.loads(bank.output(*arguments, "--json")[-1])
        return found

    shown = "\n".join(bank.output("list", "--state", "initial", "--state", "canceled"))
    assert all(each in shown for each in ('"123"', '"0123456789abcdef01234567"', "[red]x", "see [/x]", str(given)))
    assert json.loads("".join(bank.output("list", str(given))))["value"] == 5
    assert (answer("cancel", '"123"', "--yes")["id"], answer("cancel", "two", "--yes")["state"]) == ("123", "canceled")
    bank.output("recover", "--older-than", "0")
    assert [bank.state_of(each) for each in (1, "three", 123)] == ["done", "pending", "initial"]
    bank.output("recover", "--older-than", "0", "--all")
    assert bank.state_of("three") == "done"
    bank.output("cancel", "1", "--yes", status=1)
    for nothing in ("99", '{"$oid": "zz"}', '{"$gte": 2}', "99999999999999999999999", "[1]", '{"$regex": "."}'):
        bank.output("list", nothing, status=1)
    bank.output("recover", str(given), "--yes")
    taken_back, again = (answer("cancel", str(given), "--compensate", "--yes") for _ in range(2))
    assert (taken_back["state"], taken_back["compensates"]["$oid"]) == ("done", str(given))
    assert again["id"] == taken_back["id"]
    bank.judge()

    lasting = {"state": "canceling", "reason": "asked", "stoppedBy": "it was spent"}
    unreadable = [["a"], 5, [{"cluster": "east", "collection": "a.b", "id": 1}]]
    stored.insert_many([{"state": "pending", "participants": each} for each in unreadable])
    stored.insert_one({"_id": "s", **shape, **lasting})
    shown = "\n".join(bank.output("list"))
    assert all(each in shown for each in ("east:a.b 1", lasting["stoppedBy"]))
    assert json.loads("".join(bank.output("list", "s")))["stoppedBy"] == lasting["stoppedBy"]
