"""
The Flask app with its worker and beat, a few requests, and what came of them.

    python examples/flask_mongoengine/run.py
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
ORDERS = 3


def main() -> int:
    """Place orders, pay them, and wait for their confirmations."""
    with MongoReplicaSet() as mongo, RedisServer() as redis, MongoClient[dict[str, Any]](mongo.url) as client:
        os.environ.update(MONGO_URL=mongo.url, REDIS_URL=redis.url, PYTHONPATH=str(HERE))
        command = [sys.executable, "-m", "celery", "-A", "app.celery", "worker", "--loglevel", "WARNING"]
        worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            sys.path.insert(0, str(HERE))
            from app import app  # after the addresses are known

            with app.test_client() as browser:
                for number in range(ORDERS):
                    placed = browser.post("/orders", data={"customer": f"customer-{number}"})
                    paid = browser.post(f"/orders/{placed.get_json()['order']}/pay")
                    print(f"placed {placed.status_code}, {paid.get_json()['status']}")
                refused = browser.post("/orders").status_code
            confirmed = wait_for_confirmations(client["shop"])
        finally:
            worker.terminate()
            worker.wait()
    print(f"{confirmed} confirmations of {ORDERS} orders, an order without a customer: {refused}")
    return 0 if (confirmed, refused) == (2 * ORDERS, 400) else 1


def wait_for_confirmations(shop: Any) -> int:
    """How many have come."""
    deadline = time.monotonic() + 40
    while shop["confirmations"].count_documents({}) < 2 * ORDERS and time.monotonic() < deadline:
        time.sleep(0.1)
    return int(shop["confirmations"].count_documents({}))


if __name__ == "__main__":
    sys.exit(main())
