"""
A bank both ways side by side: two-phase commit, and a transaction with locked documents.

    python examples/bank/run.py

Eight threads move money between accounts, first between many (low contention), then between two (high). The sum is
checked at the end; afterwards one transfer is left half done on purpose, and recovered.
"""

import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pymongo import MongoClient

from mongo_celery import Participant, TwoPhaseCommit, select_many_for_update, transactional
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import TransactionCanceledError

THREADS, TRANSFERS, BALANCE = 8, 15, 1000
ACCOUNTS = {"low": 50, "high": 2}


def main() -> int:
    """Measure both, then recover one."""
    with MongoReplicaSet() as mongo, MongoClient[dict[str, Any]](mongo.url) as client:
        database = client["bank"]
        bank = TwoPhaseCommit(None, database["transactions"], application="bank")

        @transactional(client)
        def move(source: int, destination: int, value: int, *, session: Any) -> None:
            accounts = database["accounts"]
            ids = {"_id": {"$in": [source, destination]}}
            found = {each["_id"]: each for each in select_many_for_update(accounts, ids, session=session)}
            if found[source]["balance"] < value:
                raise TransactionCanceledError(f"account {source} cannot pay {value}")
            for account, change in ((source, -value), (destination, value)):
                accounts.update_one({"_id": account}, {"$inc": {"balance": change}}, session=session)

        ways: dict[str, Callable[[int, int, int], object]] = {"two-phase commit": bank.transfer, "transaction": move}
        right = True
        for contention, count in ACCOUNTS.items():
            for way, transfer in ways.items():
                database["accounts"].drop()
                database["accounts"].insert_many([{"_id": each, "balance": BALANCE} for each in range(count)])
                seconds = run(transfer, count)
                balances = [each["balance"] for each in database["accounts"].find()]
                right = right and sum(balances) == count * BALANCE and min(balances) >= 0
                rate = THREADS * TRANSFERS / seconds
                print(f"{contention} contention, {way}: {rate:.0f} transfers/s, sum {sum(balances)}")
        right = recover(bank, database) and right
        print("every sum is right" if right else "WRONG")
        return 0 if right else 1


def run(transfer: Callable[[int, int, int], object], count: int) -> float:
    """Seconds that all transfers take."""

    def work(seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - no secret
        for _ in range(TRANSFERS):
            source, destination = chance.sample(range(count), 2)
            try:
                transfer(source, destination, chance.randint(1, 50))
            except TransactionCanceledError:
                continue

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - begun


def recover(bank: TwoPhaseCommit, database: Any) -> bool:
    """A transaction over three collections whose coordinator has died after the first change."""
    database["stock"].insert_one({"_id": "lamp", "left": 5})
    database["orders"].insert_one({"_id": 1, "state": "new"})
    sold = bank.begin(
        [
            Participant(database["stock"], "lamp", {"$inc": {"left": -1}}, require={"left": {"$gte": 1}}),
            Participant(database["accounts"], 0, {"$inc": {"balance": 0}}),
            Participant(database["orders"], 1, {"$set": {"state": "sold"}}, {"$set": {"state": "new"}}),
        ],
    )
    database["transactions"].update_one({"_id": sold}, {"$set": {"state": "pending"}})
    database["stock"].update_one({"_id": "lamp"}, {"$inc": {"left": -1}, "$push": {"pendingTransactions": sold}})
    report = bank.recover(0)
    print(f"recovered: {[(each.before, each.after) for each in report]}")
    lamp, order = database["stock"].find_one({"_id": "lamp"}), database["orders"].find_one({"_id": 1})
    return bool(lamp["left"] == 4 and order["state"] == "sold")  # noqa: PLR2004


if __name__ == "__main__":
    sys.exit(main())
