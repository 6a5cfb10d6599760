"""
The whole example in one command: servers, listener, worker, a few orders, and the summaries.

    python examples/first_bridge/run.py

In your own project the servers are already there, and these are separate processes::

    celery -A shop listener
    celery -A shop worker
"""

import os
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
ORDERS = 12


def main() -> None:
    """Run it, and print what the handlers have made of the orders."""
    with MongoReplicaSet() as mongo, RedisServer() as redis:
        environment = {**os.environ, "MONGO_URL": mongo.url, "REDIS_URL": redis.url, "PYTHONPATH": str(HERE)}
        processes = [start(environment, "listener"), start(environment, "worker", "--concurrency", "2")]
        try:
            subprocess.run([sys.executable, "-m", "shop.writer", str(ORDERS)], env=environment, check=True)
            with MongoClient(mongo.url) as client:
                show(client["shop"])
            sys.stdout.flush()  # the command writes to the same output
            subprocess.run(celery("changes", "status"), env=environment, check=False)
        finally:
            end(processes)


def celery(*arguments: str) -> list[str]:
    """A command line of Celery's."""
    return [sys.executable, "-m", "celery", "-A", "shop", *arguments]


def start(environment: dict[str, str], *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log is shown if something does not come."""
    command = celery(*arguments, "--loglevel", "WARNING")
    return subprocess.Popen(command, env=environment, stdout=LOG, stderr=LOG)


def show(shop: Any) -> None:
    """Wait until every order has its summary, then print them."""
    summaries = shop["order_summaries"]
    deadline = time.monotonic() + 180
    while summaries.count_documents({"status": "paid"}) < ORDERS // 2 or summaries.count_documents({}) < ORDERS:
        if time.monotonic() > deadline:
            failed("the summaries did not come")
        time.sleep(0.1)
    print(f"{ORDERS} orders, {summaries.count_documents({})} summaries")
    for row in summaries.aggregate(
        [
            {"$group": {"_id": "$customer", "orders": {"$sum": 1}, "total": {"$sum": "$total"}}},
            {"$sort": {"_id": 1}},
        ],
    ):
        print(f"{row['_id']}: {row['orders']} orders, {row['total']} in total")


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
    main()
