"""
Customers leave, one who may not is kept, and the process that does it is killed: what was to follow does, and no more.

    python examples/outbox_collection/run.py
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
CREDIT = {"Ann": 10, "Bob": 0, "Eve": 5, "Zoe": 7}


def main() -> int:
    """Fill the shop, have customers leave, and judge."""
    with MongoReplicaSet() as mongo, RedisServer() as redis, MongoClient[dict[str, Any]](mongo.url) as client:
        fill(client["shop"])
        environment = {**os.environ, "MONGO_URL": mongo.url, "REDIS_URL": redis.url, "PYTHONPATH": str(HERE)}
        schedule = ("--schedule", os.devnull, "--scheduler", "celery.beat:Scheduler")
        processes = [start(environment, "worker", "--concurrency", "2"), start(environment, "beat", *schedule)]
        try:
            command = [sys.executable, "-m", "shop.customers", *CREDIT]
            killed = subprocess.run(command, env=environment, check=False).returncode
            print(f"the process that let them leave ended by {signal.Signals(-killed).name}")
            return judge(client["shop"])
        finally:
            end(processes)


def fill(shop: Any) -> None:
    """Customers with wishes, of whom one waits for an order."""
    shop["customers"].insert_many([{"_id": name, "credit": credit} for name, credit in CREDIT.items()])
    shop["wishes"].insert_many([{"customer": name, "article": "lamp"} for name in CREDIT])
    shop["orders"].insert_one({"customer": "Bob", "state": "open"})
    for name in ("goodbyes", "refunds", "done"):
        shop.create_collection(name)


def judge(shop: Any) -> int:
    """Wait for what can still come, then look."""
    gone = sorted(set(CREDIT) - {"Bob"})
    deadline = time.monotonic() + 180
    while not is_done(shop, gone) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [customer["_id"] for customer in shop["customers"].find()]
    wishes = [wish["customer"] for wish in shop["wishes"].find()]
    goodbyes = sorted(each["customer"] for each in shop["goodbyes"].find())
    refunds = {each["customer"]: each["amount"] for each in shop["refunds"].find()}
    print(f"customers {left}, with wishes {wishes}")
    print(f"goodbyes to {goodbyes}")
    print(f"refunds {dict(sorted(refunds.items()))}")
    right = (left, wishes, goodbyes) == (["Bob"], ["Bob"], gone) and refunds == {name: CREDIT[name] for name in gone}
    if not right:
        failed("WRONG")
    print("what was committed was sent, and nothing else")
    return 0


def is_done(shop: Any, gone: list[str]) -> bool:
    """Whether the outbox is empty, and everybody has had what was sent."""
    arrived = shop["goodbyes"].count_documents({}) >= len(gone) and shop["refunds"].count_documents({}) >= len(gone)
    return arrived and shop["leaving"].count_documents({}) == 0


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
