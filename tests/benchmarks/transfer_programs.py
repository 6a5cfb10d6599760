"""Processes that move money: `python -m tests.benchmarks.transfer_programs KIND ARGUMENT...`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from pymongo import MongoClient, UpdateOne, WriteConcern
from pymongo.database import Database

from mongo_celery import Participant, TwoPhaseCommit, select_many_for_update, transactional
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch
from tests.benchmarks.answers import answer, await_sign

setting = BenchSetting.from_environment()

Data = Database[dict[str, Any]]
Transfer = Callable[[int, int], object]


def _data(url: str = setting.mongo_url) -> Data:
    client: MongoClient[dict[str, Any]] = MongoClient(url)
    return client.get_database(setting.database, write_concern=WriteConcern("majority"))


def _plain(data: Data, other: Data) -> Transfer:
    """Two updates and nothing that holds them together: what a transfer costs at the least."""
    payers, payees = data["accounts"], other["accounts"]

    def transfer(source: int, destination: int) -> None:
        payers.update_one({"_id": source}, {"$inc": {"balance": -1}})
        payees.update_one({"_id": destination}, {"$inc": {"balance": 1}})

    return transfer


def _two_phase(data: Data, _: Data) -> Transfer:
    bank = TwoPhaseCommit(None, data["transactions"], application="bench")
    return lambda source, destination: bank.transfer(source, destination, 1)


def _locked(data: Data, _: Data) -> Transfer:
    """Both accounts locked and read before either is changed."""
    accounts = data["accounts"]

    @transactional(data.client)
    def transfer(source: int, destination: int, *, session: Any) -> None:
        select_many_for_update(accounts, {"_id": {"$in": [source, destination]}}, session=session)
        pay = UpdateOne({"_id": source}, {"$inc": {"balance": -1}})
        receive = UpdateOne({"_id": destination}, {"$inc": {"balance": 1}})
        accounts.bulk_write([pay, receive], session=session)

    return transfer


def _across(data: Data, other: Data) -> Transfer:
    bank = TwoPhaseCommit(
        None, data["transactions"], application="bench", name="across", clients={"other": other.client}
    )
    payers, payees = data["accounts"], other["accounts"]

    def transfer(source: int, destination: int) -> None:
        paid = Participant(payers, source, {"$inc": {"balance": -1}}, require={"balance": {"$gte": 1}})
        bank.begin([paid, Participant(payees, destination, {"$inc": {"balance": 1}})], run=True)

    return transfer


KINDS: dict[str, Callable[[Data, Data], Transfer]] = {
    "plain": _plain,
    "two_phase": _two_phase,
    "locked": _locked,
    "plain_across": _plain,
    "across": _across,
}
"""From the databases with the accounts that pay and that receive, which are mostly one."""


def transfers(kind: str, accounts: str, number: str, other: str = "") -> None:
    """
    Make so many transfers between random accounts once all processes are ready; when they began and ended.

    Args:
        kind: how.
        accounts: among how many.
        number: of transfers.
        other: address of the other cluster, if there is one.
    """
    data = _data()
    transfer = KINDS[kind](data, _data(other) if other else data)
    choose, done = random.Random(), Stopwatch(setting.clock, "transferred")
    transfer(0, 1)  # connections and sessions
    await_sign(setting)
    began = time.monotonic()
    for _ in range(int(number)):
        source, destination = choose.sample(range(int(accounts)), 2)
        transfer(source, destination)
        done.lap()
    answer(setting, {"began": began, "ended": time.monotonic()})


if __name__ == "__main__":
    transfers(*sys.argv[1:])
