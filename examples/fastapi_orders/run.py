"""
The FastAPI app with its listener and worker, a few requests, one in a process that is killed, and what came of them.

    python examples/fastapi_orders/run.py
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
from celery.signals import before_task_publish
from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
LOG, LOG_BYTES_MAX = tempfile.TemporaryFile(), 1_000_000  # noqa: SIM115 - until the end
ORDERS = 3
WANTED = 3 * ORDERS + 1
CELERY = [sys.executable, "-m", "celery", "-A", "shop", "--quiet"]


def main() -> int:
    """Place orders, pay and cancel them, and wait for what follows."""
    with MongoReplicaSet() as mongo, RedisServer() as redis, MongoClient[dict[str, Any]](mongo.url) as client:
        os.environ.update(MONGO_URL=mongo.url, REDIS_URL=redis.url, PYTHONPATH=str(HERE))
        processes = [start([*CELERY, "listener"]), start([*CELERY, "worker", "--concurrency", "2"])]
        try:
            statuses = asyncio.run(use_the_app())
            killed = subprocess.run([sys.executable, __file__, "place-and-die"], check=False).returncode
            print(f"one order more, in a process that ended by {signal.Signals(-killed).name}")
            shop = client["shop"]
            wait("all is confirmed", lambda: shop["confirmations"].count_documents({}) == WANTED)
            wait("nothing is pending", lambda: not shop["orders"].find_one({"pendingEvents": {"$exists": True}}))
            return judge(shop, statuses)
        finally:
            end(processes)


@asynccontextmanager
async def browsing() -> AsyncIterator[httpx.AsyncClient]:
    """The app as its server would run it, and somebody who sends requests to it."""
    from shop.api import api  # after the addresses are known

    transport = httpx.ASGITransport(app=api)
    async with api.router.lifespan_context(api), httpx.AsyncClient(transport=transport, base_url="http://shop") as made:
        yield made


async def use_the_app() -> list[int]:
    """A few requests; what those that cannot be done were answered."""
    async with browsing() as browser:
        for number in range(ORDERS):
            placed = await browser.post("/orders", json={"customer": f"customer-{number}"})
            order = f"/orders/{placed.json()['order']}"
            paid = await asyncio.gather(*(browser.post(f"{order}/pay") for _ in range(2)))
            first, second = sorted(each.status_code for each in paid)
            print(f"placed {placed.status_code}, paid twice at a time: {first} and {second}")
            canceled = await browser.post(f"{order}/cancel")
            line = f"customer-{number}: canceled"
            for _ in range(1800):
                shown = (await browser.get(order)).json().get("text")
                if shown == line:
                    break
                await asyncio.sleep(0.1)
            print(f"canceled {canceled.status_code}, shown as {shown!r}")
        again = await browser.post(f"{order}/cancel")
        return [again.status_code, (await browser.post("/orders", json={})).status_code]


def judge(shop: Any, statuses: list[int]) -> int:
    """What there is in the end."""
    orders = list(shop["orders"].find())
    confirmed = shop["confirmations"].count_documents({})
    given = sum(each["credits"] for each in shop["customers"].find())
    fields = sorted({name for order in orders for name in order})
    print(f"{confirmed} confirmations of {len(orders)} orders, which have {fields}; {given} credits")
    print(f"canceled again, and an order without a customer: {statuses}")
    right = (confirmed, len(orders), given, statuses) == (WANTED, ORDERS + 1, ORDERS, [409, 422])
    if not right or fields != ["_id", "customer", "status"]:
        failed("WRONG")
    return 0


async def place_and_die() -> None:
    """Be killed when the order has been saved, and nothing has been sent for it yet."""
    # The outbox sends in the background, perhaps before the answer is here.
    before_task_publish.connect(die, weak=False)
    async with browsing() as browser:
        await browser.post("/orders", json={"customer": "customer-of-the-killed"})
        die()


def die(**_: object) -> None:
    """As a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log is shown if something does not come."""
    return subprocess.Popen(command, stdout=LOG, stderr=LOG)


def wait(what: str, condition: Any) -> None:
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
    if sys.argv[1:] == ["place-and-die"]:
        asyncio.run(place_and_die())
    sys.exit(main())
