"""
The writer: several threads that write orders and customers, in a process of its own.

It knows nothing of the bridge. Each write is acknowledged by a majority, then recorded.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.demo import plan, record
from mongo_celery.demo.setting import from_environment

_ANSWER_MILLISECONDS_MAX = 20_000


def main(arguments: Sequence[str] | None = None) -> None:
    """
    Write a part of the plan, spread over a time.

    Args:
        arguments: number of orders, part, seconds, and the path of the record, to which is added.
    """
    parser = argparse.ArgumentParser(description="The demo's writer.")
    parser.add_argument("orders", type=int)
    parser.add_argument("part", choices=plan.PARTS)
    parser.add_argument("seconds", type=float)
    parser.add_argument("record", type=Path)
    given = parser.parse_args(arguments)
    setting = from_environment()
    client: MongoClient[dict[str, Any]] = MongoClient(
        setting.mongo_url, serverSelectionTimeoutMS=_ANSWER_MILLISECONDS_MAX
    )
    with client, given.record.open("ab", buffering=0) as file:
        database = client.get_database(setting.database, write_concern=WriteConcern("majority"))
        pause = given.seconds * plan.THREADS / plan.total(given.orders, [given.part])
        with ThreadPoolExecutor(plan.THREADS) as pool:
            threads = [
                pool.submit(_write_all, database, list(plan.plan(given.orders, given.part, thread)), pause, file)
                for thread in range(plan.THREADS)
            ]
        for thread in threads:
            thread.result()


def _write_all(
    database: Database[dict[str, Any]], writes: Sequence[plan.PlannedWrite], pause: float, file: IO[bytes]
) -> None:
    started = time.monotonic()
    idle = threading.Event()
    for place, write in enumerate(writes):
        ahead = started + place * pause - time.monotonic()
        if ahead > 0:
            idle.wait(ahead)
        _write(database, write)
        file.write(record.line(write))  # unbuffered: one system call, so lines of threads do not mix


def _write(database: Database[dict[str, Any]], write: plan.PlannedWrite) -> None:
    if write.customer is None:
        name = plan.name_of(write.key, write.number)
        _put(database["customers"], write.key, {"name": name, "version": write.number}, first=write.number == 1)
    else:
        fields: dict[str, Any] = {"n": write.number, "amount": 10 * write.number}
        if write.number == 0:
            fields |= {"customer": write.customer}
        _put(database["orders"], write.key, fields, first=write.number == 0)


def _put(collection: Collection[dict[str, Any]], key: str, fields: dict[str, Any], *, first: bool) -> None:
    if first:
        collection.insert_one({"_id": key, **fields})
    else:
        collection.update_one({"_id": key}, {"$set": fields})


if __name__ == "__main__":
    main()
