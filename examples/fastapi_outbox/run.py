"""
The FastAPI app with its worker and beat, a few requests, one in a process that is killed, and what came of them.

    python examples/fastapi_outbox/run.py
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from celery.signals import before_task_publish
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
            statuses = asyncio.run(use_the_app())
            killed = subprocess.run([sys.executable, __file__, "place-and-die"], check=False).returncode
            print(f"one order more, in a process that ended by {signal.Signals(-killed).name}")
            wanted = 2 * ORDERS + 1
            wait_for_confirmations(client["shop"], wanted)
            return judge(client["shop"], wanted, statuses)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


@asynccontextmanager
async def browsing() -> AsyncIterator[httpx.AsyncClient]:
    """The app as its server would run it, and somebody who sends requests to it."""
    from app import api  # after the addresses are known

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
        return [(await browser.post("/orders", json={})).status_code]


def judge(shop: Any, wanted: int, statuses: list[int]) -> int:
    """What there is in the end."""
    orders = list(shop["orders"].find())
    confirmed = shop["confirmations"].count_documents({})
    fields = sorted({name for order in orders for name in order})
    print(f"{confirmed} confirmations of {len(orders)} orders, which have {fields}")
    print(f"an order without a customer: {statuses}")
    right = (confirmed, len(orders), statuses) == (wanted, ORDERS + 1, [422])
    return 0 if right and fields == ["_id", "customer", "status"] else 1


async def place_and_die() -> None:
    """Be killed when the order has been saved, and nothing has been sent for it yet."""
    before_task_publish.connect(lambda **_: os.kill(os.getpid(), signal.SIGKILL), weak=False)
    async with browsing() as browser:
        await browser.post("/orders", json={"customer": "customer-of-the-killed"})
        await asyncio.Event().wait()  # the outbox sends in the background, and meets its end there


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log goes nowhere."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_confirmations(shop: Any, wanted: int) -> None:
    """Until all have come and nothing is pending, or none can come any more."""
    deadline = time.monotonic() + 60
    pending = {"pendingEvents": {"$exists": True}}
    while time.monotonic() < deadline and (
        shop["confirmations"].count_documents({}) < wanted or shop["orders"].count_documents(pending)
    ):
        time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1:] == ["place-and-die"]:
        asyncio.run(place_and_die())
    sys.exit(main())
