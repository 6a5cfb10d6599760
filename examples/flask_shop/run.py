"""
The Flask shop with its listener and worker, a few requests, one of them in a process that is killed, and what followed.

    python examples/flask_shop/run.py
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
LOG, LOG_BYTES_MAX = tempfile.TemporaryFile(), 1_000_000  # noqa: SIM115 - until the end
ORDERS, LAMPS = 3, 10
WANTED = 3 * ORDERS + 1
CELERY = [sys.executable, "-m", "celery", "-A", "shop.make_celery", "--quiet"]


def main() -> int:
    """Place, pay and ship orders, and wait for what follows."""
    with MongoReplicaSet() as mongo, RedisServer() as redis, MongoClient[dict[str, Any]](mongo.url) as client:
        url = mongo.url.replace("/?", "/shop?")
        os.environ.update(MONGO_URL=url, REDIS_URL=redis.url, PYTHONPATH=str(HERE))
        shop = client["shop"]
        shop["stock"].insert_one({"_id": "lamp", "left": LAMPS})
        processes = [start("listener"), start("worker", "--concurrency", "2")]
        try:
            statuses = use_the_app()
            killed = subprocess.run([sys.executable, __file__, "place-and-die"], check=False).returncode
            print(f"one order more, in a process that ended by {signal.Signals(-killed).name}")
            wait("all is confirmed", lambda: shop["confirmations"].count_documents({}) == WANTED)
            wait("nothing is pending", lambda: not shop["orders"].find_one({"pendingEvents": {"$exists": True}}))
            wait("every page is there", lambda: shop["pages"].count_documents({}) == ORDERS + 1)
            return judge(shop, statuses)
        finally:
            end(processes)


def use_the_app() -> list[int]:
    """A few requests; what those that cannot be done were answered."""
    from shop import create_app  # after the addresses are known

    with create_app().test_client() as browser:
        for number in range(ORDERS):
            placed = browser.post("/orders", data={"customer": f"customer-{number}"})
            order = f"/orders/{placed.get_json()['order']}"
            paid = browser.post(f"{order}/pay").get_json()["status"]
            shipped = browser.post(f"{order}/ship").get_json()["shipped"]
            wait("the page is up to date", lambda: browser.get(order).text.endswith("shipped"))  # noqa: B023 - at once
            print(f"placed {placed.status_code}, {paid}, shipped {shipped}, shown as {browser.get(order).text!r}")
        return [browser.post("/orders").status_code, browser.get(f"/orders/{'0' * 24}").status_code]


def judge(shop: Any, statuses: list[int]) -> int:
    """What there is in the end."""
    orders = list(shop["orders"].find())
    confirmed = shop["confirmations"].count_documents({})
    fields = sorted({name for order in orders for name in order})
    wait("more lamps are asked for", lambda: shop["refills"].find_one({"left": LAMPS - ORDERS}) is not None)
    refills = list(shop["refills"].find({}, {"_id": 1, "left": 1}))
    print(f"{confirmed} confirmations of {len(orders)} orders, which have {fields}")
    print(f"to be refilled: {[(each['_id'], each['left']) for each in refills]}")
    print(f"an order without a customer, and one that is not there: {statuses}")
    right = (confirmed, len(orders), statuses) == (WANTED, ORDERS + 1, [400, 404])
    if not right or fields != ["_id", "customer", "status"]:
        failed("WRONG")
    return 0


def place_and_die() -> None:
    """Be killed when the order has been saved, and nothing has been sent for it yet."""
    from celery.signals import before_task_publish
    from shop import create_app

    # The outbox sends in the background, perhaps before the answer is here.
    before_task_publish.connect(die, weak=False)
    with create_app().test_client() as browser:
        browser.post("/orders", data={"customer": "customer-of-the-killed"})
        die()


def die(**_: object) -> None:
    """As a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log is shown if something does not come."""
    return subprocess.Popen([*CELERY, *arguments], stdout=LOG, stderr=LOG)


def wait(what: str, condition: Callable[[], bool]) -> None:
    """Until it is so; the example ends where it does not come."""
    deadline = time.monotonic() + 180
    while not condition():
        if time.monotonic() > deadline:
            failed(f"did not come: {what}")
        time.sleep(0.1)


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
    sys.exit(place_and_die() if "place-and-die" in sys.argv else main())
