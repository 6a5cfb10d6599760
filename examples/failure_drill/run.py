"""
Kill a worker in the middle of a change and the listener that leads, poison a change, and count: everything is right.

    python examples/failure_drill/run.py

The exit status is 1 if an order was lost, or booked twice.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
LOG, LOG_BYTES_MAX = tempfile.TemporaryFile(), 1_000_000  # noqa: SIM115 - until the end
CUSTOMERS, PRICE, ATTEMPTS = 3, 10, 3
DEADLINE_SECONDS = 180


def main() -> int:
    """One accident after the other, in a shop that goes on."""
    with (
        MongoReplicaSet() as mongo,
        RedisServer() as redis,
        MongoClient[dict[str, Any]](mongo.url) as client,
        Shop({"MONGO_URL": mongo.url, "REDIS_URL": redis.url, "PYTHONPATH": str(HERE)}, client["shop"]) as shop,
    ):
        kill_a_worker(shop)
        kill_the_listener(shop)
        poison_a_change(shop)
        deploy_and_replay(shop)
        return judge(shop.database)


class Shop(AbstractContextManager["Shop"]):
    """Two listeners and two workers; a worker is one process here, so that one signal ends it as a power cut does."""

    def __init__(self, addresses: dict[str, str], database: Any) -> None:
        self.environment = {**os.environ, **addresses}
        self.database = database
        self.orders = 0
        self.listeners = [self.start("listener") for _ in range(2)]
        self.workers = [self.start("worker", "--pool", "solo") for _ in range(2)]

    def __exit__(self, *_: object) -> None:
        self.end([*self.listeners, *self.workers])

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a process of the shop; its log is shown if something does not come."""
        command = [sys.executable, "-m", "celery", "-A", "shop", *arguments, "--loglevel", "CRITICAL"]
        return subprocess.Popen(command, env=self.environment | environment, stdout=LOG, stderr=LOG)

    def end(self, processes: "list[subprocess.Popen[bytes]]") -> None:
        """As a deploy does: nobody is interrupted."""
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()

    def changes(self, *arguments: str) -> dict[str, Any]:
        """What `celery -A shop changes ... --json` says."""
        command = [sys.executable, "-m", "celery", "-A", "shop", "changes", *arguments, "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return dict(json.loads(done.stdout)) if done.stdout else {}

    def leader(self) -> "subprocess.Popen[bytes] | None":
        """The listener that leads, if one does."""
        status = self.changes("status")
        pid = status["leader"]["pid"] if status.get("state") == "leading" else None
        return next((each for each in self.listeners if each.pid == pid), None)

    def order(self, count: int, **more: Any) -> int:
        """So many new orders; the number of the last one."""
        for _ in range(count):
            self.orders += 1
            order = {"_id": self.orders, "customer": f"customer-{self.orders % CUSTOMERS}", "price": PRICE}
            self.database["orders"].insert_one({**order, **more})
        return self.orders

    def starts(self, order: int) -> list[int]:
        """The processes that have begun to book an order."""
        return [each["pid"] for each in self.database["starts"].find({"order": order})]

    def booked(self) -> int:
        """How many orders there are in all accounts."""
        return sum(each["orders"] for each in self.database["accounts"].find())

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Until it is so; the drill ends where it does not come."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                failed(f"did not come: {what}")
            time.sleep(0.1)


def kill_a_worker(shop: Shop) -> None:
    """In the middle of a change, whose transaction is open."""
    hanging = shop.order(1, hangs=True)
    shop.wait("a worker has begun", lambda: bool(shop.starts(hanging)))
    (victim,) = (each for each in shop.workers if each.pid == shop.starts(hanging)[0])
    victim.kill()
    shop.workers.remove(victim)
    print(f"the worker that was booking order {hanging} ended by {signal.Signals(-victim.wait()).name}")
    shop.order(3)
    shop.wait("the other worker has booked it", lambda: shop.booked() == shop.orders)
    print(f"order {hanging} was begun {len(shop.starts(hanging))} times; {shop.booked()} of {shop.orders} are booked")


def kill_the_listener(shop: Shop) -> None:
    """The one that leads, with orders behind it that nobody has read."""
    shop.wait("a listener leads", lambda: shop.leader() is not None)
    victim = shop.leader()
    assert victim is not None
    victim.kill()
    shop.listeners.remove(victim)
    print(f"the listener that led ended by {signal.Signals(-victim.wait()).name}")
    shop.order(4)
    shop.wait("the other listener has found them", lambda: shop.booked() == shop.orders)
    print(f"another one leads; {shop.booked()} of {shop.orders} are booked")


def poison_a_change(shop: Shop) -> None:
    """One that the handler cannot understand; those behind it are none the worse."""
    poisoned = shop.order(1, price="ten")
    shop.order(3)
    shop.wait("all others are booked", lambda: shop.booked() == shop.orders - 1)
    shop.wait("it has had all attempts", lambda: len(shop.starts(poisoned)) == ATTEMPTS)
    shop.wait("it is a dead letter", lambda: shop.changes("dead-letters", "list").get("count") == 1)
    (letter,) = shop.changes("dead-letters", "list")["dead_letters"]
    print(f"order {poisoned} is a dead letter after {len(shop.starts(poisoned))} attempts: {letter['error']}")
    print(f"those behind it went on; {shop.booked()} of {shop.orders} are booked")


def deploy_and_replay(shop: Shop) -> None:
    """Workers with a handler that is mended, and the dead letter once more."""
    shop.end(shop.workers)
    shop.workers = [shop.start("worker", "--pool", "solo", RELEASE="2")]
    asked = shop.changes("dead-letters", "replay", "book", "--yes")["done"]
    shop.wait("it is booked", lambda: shop.booked() == shop.orders)
    shop.wait("it is a dead letter no more", lambda: shop.changes("dead-letters", "list").get("count") == 0)
    print(
        f"a mended release is deployed, and {asked} dead letter replayed; {shop.booked()} of {shop.orders} are booked"
    )


def judge(database: Any) -> int:
    """Whether every order is in its customer's account, once."""
    counts: dict[str, int] = {}
    for order in database["orders"].find():
        counts[order["customer"]] = counts.get(order["customer"], 0) + 1
    accounts = {each["_id"]: (each["orders"], each["euros"]) for each in database["accounts"].find()}
    for customer, (orders, euros) in sorted(accounts.items()):
        print(f"{customer}: {orders} orders, {euros} euros")
    right = accounts == {customer: (count, count * PRICE) for customer, count in counts.items()}
    if not right:
        failed("WRONG")
    print("nothing is lost, and nothing is booked twice")
    return 0


def failed(what: str) -> NoReturn:
    """End with status 1, and with what the processes have said."""
    sys.stderr.write(os.pread(LOG.fileno(), LOG_BYTES_MAX, 0).decode(errors="replace"))
    sys.exit(what)


if __name__ == "__main__":
    sys.exit(main())
