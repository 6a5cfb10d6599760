"""
Kill the process that takes orders between write and dispatch, and count what was lost: nothing, with the outbox.

    python examples/orders_outbox/run.py

Each round starts a writer that dies right after it has saved an order, and before it could send the order's tasks.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
LOG, LOG_BYTES_MAX = tempfile.TemporaryFile(), 1_000_000  # noqa: SIM115 - until the end
ROUNDS, ORDERS, STOCK = 2, 5, 100


def main() -> int:
    """Run both ways, and compare."""
    with MongoReplicaSet() as mongo, RedisServer() as redis, MongoClient[dict[str, Any]](mongo.url) as client:
        shop = client["shop"]
        for name in ("receipts", "done"):
            shop.create_collection(name)
        shop["stock"].insert_one({"_id": "lamp", "left": STOCK, "reserved": 0})
        environment = {**os.environ, "MONGO_URL": mongo.url, "REDIS_URL": redis.url, "PYTHONPATH": str(HERE)}
        schedule = ("--schedule", os.devnull, "--scheduler", "celery.beat:Scheduler")
        processes = [start(environment, "worker", "--concurrency", "2"), start(environment, "beat", *schedule)]
        try:
            for place, how in enumerate(("naive", "outbox")):
                for number in range(ROUNDS):
                    take_orders(environment, how, 1000 * place + ORDERS * number)
            return judge(shop)
        finally:
            end(processes)


def take_orders(environment: dict[str, str], how: str, first: int) -> None:
    """A writer that is killed at its last order."""
    command = [sys.executable, "-m", "shop.writer", how, str(first), str(ORDERS)]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status != -signal.SIGKILL:
        sys.exit(f"the writer should have been killed, and ended with {status}")


def judge(shop: Any) -> int:
    """Wait for what can still come, then count."""
    deadline = time.monotonic() + 180
    wanted = ROUNDS * ORDERS
    reserved = 2 * wanted - ROUNDS  # the naive writer has lost one in each round
    while (count(shop, "outbox") < wanted or in_stock(shop)["reserved"] < reserved) and time.monotonic() < deadline:
        time.sleep(0.1)
    for how in ("naive", "outbox"):
        print(f"{how}: {shop['orders'].count_documents({'how': how})} orders, {count(shop, how)} receipts")
    stock = in_stock(shop)
    print(f"stock: {stock['reserved']} reserved, {stock['left']} left")
    pending = shop["orders"].count_documents({"pendingEvents.count": {"$gt": 0}})
    right = (
        shop["orders"].count_documents({"how": "outbox"}) == wanted == count(shop, "outbox")
        and count(shop, "naive") == wanted - ROUNDS
        and stock["reserved"] == reserved
        and stock["left"] + stock["reserved"] == STOCK
        and pending == 0
    )
    if not right:
        failed("WRONG")
    print("nothing is lost with the outbox")
    return 0


def in_stock(shop: Any) -> Any:
    """The one article."""
    return shop["stock"].find_one({"_id": "lamp"})


def count(shop: Any, how: str) -> int:
    """Receipts of the orders that were taken this way, each order once."""
    ids = [order["_id"] for order in shop["orders"].find({"how": how}, {"_id": 1})]
    return len(shop["receipts"].distinct("order", {"order": {"$in": ids}}))


def start(environment: dict[str, str], *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log is shown if something does not come."""
    command = [sys.executable, "-m", "celery", "-A", "shop", *arguments, "--loglevel", "WARNING"]
    return subprocess.Popen(command, env=environment, stdout=LOG, stderr=LOG)


def end(processes: "list[subprocess.Popen[bytes]]") -> None:
    """As a supervisor does: whoever does not end within its time is killed."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def failed(what: str) -> NoReturn:
    """End with status 1, and with what the processes have said."""
    sys.stderr.write(os.pread(LOG.fileno(), LOG_BYTES_MAX, 0).decode(errors="replace"))
    sys.exit(what)


if __name__ == "__main__":
    sys.exit(main())
