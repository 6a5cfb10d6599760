"""Processes that move money: `python -m tests.benchmarks.transfer_programs NAME ARGUMENT...`."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from pymongo import MongoClient, UpdateOne, WriteConcern
from pymongo.database import Database

from mongo_celery import TwoPhaseCommit, select_for_update, select_many_for_update, transactional
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch
from tests.benchmarks.answers import answer, await_sign

APPLICATION = "bench"

setting = BenchSetting.from_environment()

Transfer = Callable[[int, int], object]


def _transferred() -> Stopwatch:
    return Stopwatch(setting.clock, "transferred")


def _data() -> Database[dict[str, Any]]:
    client: MongoClient[dict[str, Any]] = MongoClient(setting.mongo_url)
    return client.get_database(setting.database, write_concern=WriteConcern("majority"))


def _plain(data: Database[dict[str, Any]]) -> Transfer:
    """Two updates and nothing that holds them together: what a transfer costs at the least."""
    accounts = data["accounts"]

    def transfer(source: int, destination: int) -> None:
        accounts.update_one({"_id": source}, {"$inc": {"balance": -1}})
        accounts.update_one({"_id": destination}, {"$inc": {"balance": 1}})

    return transfer


def _two_phase(data: Database[dict[str, Any]], protocol: str = "auto") -> Transfer:
    bank = TwoPhaseCommit(None, data["transactions"], application=APPLICATION, protocol=protocol)
    return lambda source, destination: bank.transfer(source, destination, 1)


def _locked(data: Database[dict[str, Any]]) -> Transfer:
    """Both accounts locked and read before either is changed."""
    accounts = data["accounts"]

    @transactional(data.client)
    def transfer(source: int, destination: int, *, session: Any) -> None:
        select_many_for_update(accounts, {"_id": {"$in": [source, destination]}}, session=session)
        pay = UpdateOne({"_id": source}, {"$inc": {"balance": -1}})
        receive = UpdateOne({"_id": destination}, {"$inc": {"balance": 1}})
        accounts.bulk_write([pay, receive], session=session)

    return transfer


KINDS: dict[str, Callable[[Database[dict[str, Any]]], Transfer]] = {
    "plain": _plain,
    "two_phase": _two_phase,
    "locked": _locked,
}


def transfers(kind: str, accounts: str, number: str) -> None:
    """Make so many transfers between random accounts once all processes are ready; when they began and ended."""
    transfer, choose, done = KINDS[kind](_data()), random.Random(), _transferred()
    transfer(0, 1)  # connections and sessions
    await_sign(setting)
    began = time.monotonic()
    for _ in range(int(number)):
        source, destination = choose.sample(range(int(accounts)), 2)
        transfer(source, destination)
        done.lap()
    answer(setting, {"began": began, "ended": time.monotonic()})


def transfer_on(accounts: str) -> None:
    """Transfer by two-phase commits with markers, which leave something to recover, until somebody ends it."""
    transfer, choose, done = _two_phase(_data(), "documents"), random.Random(), _transferred()
    for _ in count():
        source, destination = choose.sample(range(int(accounts)), 2)
        transfer(source, destination)
        done.lap()


def hold() -> None:
    """Lock an account and keep it until somebody ends it."""
    data = _data()
    held = Stopwatch(setting.clock, "held")

    @transactional(data.client)
    def forever(*, session: Any) -> None:
        select_for_update(data["accounts"], {"_id": 0}, session=session)
        held.lap()
        while True:
            signal.pause()

    forever()


PROGRAMS: dict[str, Callable[..., None]] = {program.__name__: program for program in (transfers, transfer_on, hold)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
