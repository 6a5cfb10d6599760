"""
Kill workers between what a handler writes and what it sends, and count what was lost: nothing, with the outbox.

    python examples/fenced_outbox/run.py

One order of each kind has an accident: its worker is killed right after it has packed the parcel.
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
KINDS = ("naive", "outbox")
ORDERS = 5


def main() -> int:
    """Place orders of both kinds, wait for their parcels, and compare."""
    with MongoReplicaSet() as mongo, RedisServer() as redis, MongoClient[dict[str, Any]](mongo.url) as client:
        environment = {**os.environ, "MONGO_URL": mongo.url, "REDIS_URL": redis.url, "PYTHONPATH": str(HERE)}
        processes = [start(environment, "listener"), start(environment, "worker", "--concurrency", "2")]
        try:
            place_orders(client["shop"])
            return judge(client["shop"], client["mongo_celery"])
        finally:
            end(processes)


def place_orders(shop: Any) -> None:
    """As many of each kind, with a parcel that waits."""
    for how in KINDS:
        for number in range(ORDERS):
            order = f"{how}-{number}"
            shop["parcels"].insert_one({"_id": order, "state": "waiting"})
            shop["orders"].insert_one({"_id": order, "how": how, **({"accident": True} if number == 1 else {})})


def judge(shop: Any, state: Any) -> int:
    """Wait until every change is handled and nothing is pending, then count."""
    deadline = time.monotonic() + 180
    while not is_quiet(shop, state) and time.monotonic() < deadline:
        time.sleep(0.1)
    counts = {}
    for how in KINDS:
        packed = shop["parcels"].count_documents({"_id": {"$regex": f"^{how}"}, "state": "packed"})
        sent = len(shop["sent"].distinct("order", {"order": {"$regex": f"^{how}"}}))
        counts[how] = (packed, sent)
        print(f"{how}: {packed} parcels packed, {sent} sent")
    right = counts == {"naive": (ORDERS, ORDERS - 1), "outbox": (ORDERS, ORDERS)}
    if not right:
        failed("WRONG")
    print("nothing is lost with the outbox")
    return 0


def is_quiet(shop: Any, state: Any) -> bool:
    """Whether all accidents have happened, no execution is under way, and what was sent has arrived."""
    return bool(
        shop["parcels"].count_documents({"state": "packed"}) == len(KINDS) * ORDERS
        and shop["orders"].count_documents({"accident": True}) == 0
        and shop["parcels"].count_documents({"pendingEvents": {"$exists": True}}) == 0
        and state["partitions"].count_documents({"$or": [{"claim": {"$ne": None}}, {"handled": {"$ne": None}}]}) == 0
        and shop["sent"].count_documents({}) >= len(KINDS) * ORDERS - 1
    )


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
