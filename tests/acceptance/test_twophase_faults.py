"""Two-phase commit with real processes that are killed and paused, workers, beat and the command line."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import TwoPhaseCommit
from tests.acceptance.bank_project import ACCOUNTS
from tests.acceptance.bank_rig import Bank
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, wait_for
from tests.rig.project import QUIET

Document = dict[str, Any]


@pytest.fixture
def bank(processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str) -> Iterator[Bank]:
    made = Bank(processes, mongo_client, mongo_url, redis_url)
    yield made
    empty(mongo_client, made.name)


@pytest.mark.parametrize("number", [1, 3, 8, 9, 10, 11, 12, 13])
def test_a_driver_that_is_killed_after_any_write_is_recovered_by_another_process(bank: Bank, number: int) -> None:
    """The eight points: read, first version, claim, both changes, applied, settled, done."""
    bank.coordinator.transfer(0, 1, 30, id="t", run=False)
    assert bank.python("run", "t", "after", number).wait(60) == -signal.SIGKILL
    reached = bank.state("t")

    bank.coordinator.recover(0)
    if reached == "initial":  # nobody has begun it: that is no recovery
        bank.coordinator.run("t")

    assert bank.state("t") == "done"
    assert bank.balances()[:2] == [70, 130]
    bank.judge()


def test_eight_drivers_under_random_kills_leave_every_account_right(bank: Bank) -> None:
    """Two hundred transfers over ten accounts, with a kill every few moments and recovery all the time."""
    chance = random.Random(7)
    processes = [bank.python("transfers", seed, 25) for seed in range(8)]

    def kill_and_recover() -> bool:
        running = [process for process in processes if process.running]
        if running and chance.random() < 0.2 and len(processes) < 14:
            victim = chance.choice(running)
            victim.kill()
            processes.append(bank.python("transfers", 100 + len(processes), 25))
        bank.coordinator.recover(0.5)
        return not running

    wait_for(kill_and_recover, 120)
    bank.coordinator.recover(0)

    assert sum(process.returncode == -signal.SIGKILL for process in processes) > 0
    assert bank.database["transactions"].count_documents({}) >= 200
    bank.judge()


def test_workers_run_what_is_queued_and_beat_recovers(bank: Bank) -> None:
    """`delay` for many, a worker's child killed in between; beat's recovery finishes what was lost with it."""
    environment = {"BANK_OLDER_THAN": "1"}
    worker = bank.celery("worker", *QUIET, "-c", "2", "-l", "INFO", **environment)
    bank.celery("beat", "-s", "/dev/null", "--scheduler", "celery.beat:Scheduler", "-l", "INFO", **environment)
    worker.wait_for_output("ready")
    asking = TwoPhaseCommit(Celery("bank", broker=bank.environment["BANK_BROKER"]), bank.database["transactions"])
    for number in range(20):
        asking.transfer(number % ACCOUNTS, (number + 1) % ACCOUNTS, 5, id=number, run=False)
        asking.delay(number)
        if number == 10:
            worker.send_child(signal.SIGKILL)

    done = bank.database["transactions"]
    wait_for(
        lambda: done.count_documents({"state": "done"}) == 20, message=lambda: str(list(done.find({}, {"state": 1})))
    )
    bank.judge()


@pytest.mark.slow
def test_the_command_line_lists_shows_recovers_and_cancels(bank: Bank) -> None:
    """Ids of every kind are typed as they are shown."""
    shape = {"source": 0, "destination": 1, "value": 10, "state": "pending"}
    bank.database["transactions"].insert_many(
        [{"_id": 1, **shape}, {"_id": "two", **shape}, {"_id": "three", **shape, "application": "App2"}]
    )
    given = bank.coordinator.transfer(0, 1, 5, run=False)

    listed = {json.dumps(each["_id"]): each for each in map(json.loads, bank.output("transactions", "list", "--json"))}
    assert {each["state"] for each in listed.values()} == {"pending", "initial"}
    assert len(listed) == 4
    assert json.loads("".join(bank.output("transactions", "list", str(given))))["value"] == 5
    assert json.loads(bank.output("transactions", "cancel", "two", "--yes", "--json")[-1])["state"] == "canceled"
    assert bank.output("transactions", "recover", "--older-than", "0")[-1] == "1: pending, now done"
    assert bank.state("three") == "pending"
    assert bank.output("transactions", "recover", "--older-than", "0", "--all")[-1] == "three: pending, now done"
    assert "can no longer be canceled" in " ".join(bank.output("transactions", "cancel", "1", "--yes", status=1))
    assert "There is no transaction" in " ".join(bank.output("transactions", "list", "99", status=1))
    assert bank.output("transactions", "recover", str(given), "--yes")[-1] == f"{given}: done"
    taken_back = json.loads(bank.output("transactions", "cancel", str(given), "--compensate", "--yes", "--json")[-1])
    assert (taken_back["state"], taken_back["compensates"]["$oid"]) == ("done", str(given))
    again = json.loads(bank.output("transactions", "cancel", str(given), "--compensate", "--yes", "--json")[-1])
    assert again["id"] == taken_back["id"]
    bank.judge()


@pytest.mark.slow
def test_the_command_line_bears_whatever_is_stored(bank: Bank) -> None:
    """Shapes of other code, text that looks like markup, ids that look like other ids."""
    stored = bank.database["transactions"]
    shape = {"source": 0, "destination": 1, "value": 10, "state": "initial"}
    stored.insert_many(
        [
            {"_id": 123, **shape},
            {"_id": "123", **shape},
            {"_id": "[red]x", **shape},
            {"_id": "0123456789abcdef01234567", **shape},
            {"_id": "t", "state": "pending", "participants": ["a"]},
            {"_id": "u", "state": "pending", "participants": 5},
            {"_id": "w", "state": "pending", "participants": [{"cluster": "east", "collection": "a.b", "id": 1}]},
            {"_id": "v", **shape, "state": "canceled", "reason": "see [/x]"},
            {"_id": "s", **shape, "state": "canceling", "reason": "asked", "stoppedBy": "it was spent"},
        ]
    )

    listed = "\n".join(bank.output("transactions", "list"))
    assert [line.split()[0] for line in listed.splitlines()].count('"123"') == 1
    assert '"0123456789abcdef01234567"' in listed
    assert "[red]x" in listed
    assert "  east:a.b 1" in listed
    assert "asked; stopped: it was spent" in listed
    assert '"stoppedBy": "it was spent"' in "\n".join(bank.output("transactions", "list", "s"))
    assert "see [/x]" in "\n".join(bank.output("transactions", "list", "--state", "canceled"))
    assert json.loads(bank.output("transactions", "cancel", '"123"', "--yes", "--json")[-1])["id"] == "123"
    assert stored.count_documents({"state": "canceled"}) == 2
    for nothing in ('{"$oid": "zz"}', '{"$gte": 2}', "99999999999999999999999", "[1]", '{"$regex": "."}'):
        said = bank.output("transactions", "list", nothing, status=1)
        assert "There is no transaction" in said[-1], said
