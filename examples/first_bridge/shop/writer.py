"""Somebody who orders: `python -m shop.writer [ORDERS]` writes so many orders and pays every second one."""

import os
import sys
import time
from typing import Any

from pymongo import MongoClient


def main() -> None:
    """Write orders; without a number, one a second for ever."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else None
    client: MongoClient[dict[str, Any]] = MongoClient(
        os.environ.get("MONGO_URL", "mongodb://localhost:27017/?replicaSet=rs0")
    )
    orders = client["shop"]["orders"]
    number = 0
    while count is None or number < count:
        number += 1
        lines = [{"article": f"A{number}", "price": 5, "quantity": 1 + number % 3}]
        order = orders.insert_one({"customer": f"customer-{number % 4}", "lines": lines, "status": "open"})
        if number % 2 == 0:
            orders.update_one({"_id": order.inserted_id}, {"$set": {"status": "paid"}})
        if count is None:
            time.sleep(1.0)


if __name__ == "__main__":
    main()
