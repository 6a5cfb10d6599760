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

from mongo_celery import Participant, TwoPhaseCommit, select_for_update, select_many_for_update, transactional
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Stopwatch
from tests.benchmarks.answers import answer, await_sign

APPLICATION = "bench"

setting = BenchSetting.from_environment()

Transfer = Callable[[int, int], object]


def _transferred() -> Stopwatch:
    return Stopwatch(setting.clock, "transferred")


def _data(url: str = setting.mongo_url) -> Database[dict[str, Any]]:
    client: MongoClient[dict[str, Any]] = MongoClient(url)
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


def _plain_across(data: Database[dict[str, Any]], other: Database[dict[str, Any]]) -> Transfer:
    """The same two updates, in two clusters."""
    payers, payees = data["accounts"], other["accounts"]

    def transfer(source: int, destination: int) -> None:
        payers.update_one({"_id": source}, {"$inc": {"balance": -1}})
        payees.update_one({"_id": destination}, {"$inc": {"balance": 1}})

    return transfer


def _across(data: Database[dict[str, Any]], other: Database[dict[str, Any]]) -> Transfer:
    bank = TwoPhaseCommit(
        None, data["transactions"], application=APPLICATION, name="across", clients={"other": other.client}
    )
    payers, payees = data["accounts"], other["accounts"]

    def transfer(source: int, destination: int) -> None:
        paid = Participant(payers, source, {"$inc": {"balance": -1}}, require={"balance": {"$gte": 1}})
        bank.begin([paid, Participant(payees, destination, {"$inc": {"balance": 1}})], run=True)

    _finishing.append(bank.flush)
    return transfer


KINDS_ACROSS: dict[str, Callable[[Database[dict[str, Any]], Database[dict[str, Any]]], Transfer]] = {
    "plain_across": _plain_across,
    "across": _across,
}
"""Over two clusters."""

_finishing: list[Callable[[], object]] = []
"""What is left to do when all were transferred, and belongs to their time."""


def transfers(kind: str, accounts: str, number: str, other: str = "") -> None:
    """
    Make so many transfers between random accounts once all processes are ready; when they began and ended.

    Args:
        kind: how.
        accounts: among how many.
        number: of transfers.
        other: address of the other cluster, if there is one.
    """
    transfer = KINDS_ACROSS[kind](_data(), _data(other)) if other else KINDS[kind](_data())
    choose, done = random.Random(), _transferred()
    transfer(0, 1)  # connections and sessions
    await_sign(setting)
    began = time.monotonic()
    for _ in range(int(number)):
        source, destination = choose.sample(range(int(accounts)), 2)
        transfer(source, destination)
        done.lap()
    for finish in _finishing:
        finish()
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
