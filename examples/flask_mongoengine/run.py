"""
The Flask app with its worker and beat, a few requests, one of them in a process that is killed, and what came of them.

    python examples/flask_mongoengine/run.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
ORDERS = 3
CELERY = [sys.executable, "-m", "celery", "-A", "app.celery", "--quiet"]
BEAT = ["beat", "--schedule", os.devnull, "--scheduler", "celery.beat:Scheduler"]


def main() -> int:
    """Place orders, pay them, and wait for their confirmations."""
    with MongoReplicaSet() as mongo, RedisServer() as redis, MongoClient[dict[str, Any]](mongo.url) as client:
        os.environ.update(MONGO_URL=mongo.url, REDIS_URL=redis.url, PYTHONPATH=str(HERE))
        processes = [start([*CELERY, "worker"]), start([*CELERY, *BEAT])]
        try:
            statuses = use_the_app()
            killed = subprocess.run([sys.executable, __file__, "place-and-die"], check=False).returncode
            print(f"one order more, in a process that ended by {signal.Signals(-killed).name}")
            wanted = 3 * ORDERS + 1
            wait_for_confirmations(client["shop"], wanted)
            return judge(client["shop"], wanted, statuses)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def use_the_app() -> set[int]:
    """A few requests; what those that cannot be done were answered."""
    from app import app  # after the addresses are known

    with app.test_client() as browser:
        for number in range(ORDERS):
            placed = browser.post("/orders", data={"customer": f"customer-{number}"})
            order = f"/orders/{placed.get_json()['order']}"
            paid = browser.post(f"{order}/pay").get_json()["status"]
            shipped = browser.post(f"{order}/ship").get_json()["shipped"]
            shown = sorted(browser.get(order).get_json())
            print(f"placed {placed.status_code}, {paid}, shipped {shipped}, shown with {shown}")
        return {browser.post("/orders").status_code}


def judge(shop: Any, wanted: int, statuses: set[int]) -> int:
    """What there is in the end."""
    orders = list(shop["orders"].find())
    confirmed = shop["confirmations"].count_documents({})
    print(f"{confirmed} confirmations of {len(orders)} orders, an order without a customer: {statuses}")
    return 0 if (confirmed, len(orders), statuses) == (wanted, ORDERS + 1, {400}) else 1


def place_and_die() -> None:
    """Be killed when the order has been saved, and nothing has been sent for it yet."""
    from app import app
    from celery.signals import before_task_publish

    before_task_publish.connect(lambda **_: os.kill(os.getpid(), signal.SIGKILL), weak=False)
    with app.test_client() as browser:
        browser.post("/orders", data={"customer": "customer-of-the-killed"})
    signal.pause()  # the outbox sends in the background, and meets its end there


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log goes nowhere."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_confirmations(shop: Any, wanted: int) -> None:
    """Until all have come, or none can come any more."""
    deadline = time.monotonic() + 60
    while shop["confirmations"].count_documents({}) < wanted and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(place_and_die() if "place-and-die" in sys.argv else main())
