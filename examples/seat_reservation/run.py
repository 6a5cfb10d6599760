"""
Customers who want the same seats at the same time, and the sums afterwards.

    python examples/seat_reservation/run.py

It starts a MongoDB replica set, a Redis and a worker of its own. The exit status is 1 if a seat was sold twice, if
money was lost or made, or if a request was not answered.
"""

import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from celery.exceptions import TimeoutError as NoAnswerError
from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
LOG, LOG_BYTES_MAX = tempfile.TemporaryFile(), 1_000_000  # noqa: SIM115 - until the end
ROWS, SEATS_IN_A_ROW = 5, 8
CUSTOMERS, MONEY = 6, 50
REQUESTS = 90
ANSWER_SECONDS_MAX = 120


def main() -> None:
    """Sell, check, and end with 1 if something is wrong."""
    with MongoReplicaSet() as mongo, RedisServer() as redis:
        os.environ |= {"MONGO_URL": mongo.url, "REDIS_URL": redis.url, "PYTHONPATH": str(HERE)}
        command = [sys.executable, "-m", "celery", "-A", "box_office", "worker", "--concurrency", "4"]
        worker = subprocess.Popen(command, cwd=HERE, stdout=LOG, stderr=LOG)
        try:
            with MongoClient[dict[str, Any]](mongo.url) as client:
                open_theater(client["theater"])
                answers = ask_for_seats()
                problems = check(client["theater"], answers)
        except NoAnswerError:
            failed("did not come: an answer to each request")
        finally:
            worker.terminate()
            worker.wait()
    if problems:
        failed("\n".join(problems))
    print("each seat was sold at most once, and all the money is there")


def open_theater(theater: Any) -> None:
    """All seats are free, and all customers have the same money."""
    seats = [f"{chr(ord('A') + row)}{number}" for row in range(ROWS) for number in range(1, SEATS_IN_A_ROW + 1)]
    theater["seats"].insert_many([{"_id": seat, "customer": None} for seat in seats])
    theater["customers"].insert_many([{"_id": f"customer-{number}", "money": MONEY} for number in range(CUSTOMERS)])
    theater.create_collection("bookings")


def ask_for_seats() -> "Counter[str]":
    """Send all requests at once; what was answered, and how often."""
    sys.path.insert(0, str(HERE))
    from box_office import app, book

    choose = random.Random(7)  # noqa: S311 - the same requests in every run
    sent = []
    for number in range(REQUESTS):
        row, first = choose.choice("ABCDE"), choose.randint(1, SEATS_IN_A_ROW - 1)
        seats = [f"{row}{seat}" for seat in range(first, min(first + choose.randint(1, 3), SEATS_IN_A_ROW + 1))]
        choose.shuffle(seats)  # the order in which they are asked for does not matter
        sent.append(book.delay(f"request-{number}", f"customer-{number % CUSTOMERS}", seats))
    answers = Counter(each.get(timeout=ANSWER_SECONDS_MAX) for each in sent)
    app.close()
    return answers


def check(theater: Any, answers: "Counter[str]") -> list[str]:
    """Print the sums, and say what is wrong with them."""
    bookings = list(theater["bookings"].find())
    sold = Counter((seat, booking["customer"]) for booking in bookings for seat in booking["seats"])
    owned = Counter((seat["_id"], seat["customer"]) for seat in theater["seats"].find({"customer": {"$ne": None}}))
    money = {customer["_id"]: customer["money"] for customer in theater["customers"].find()}
    taken = sum(booking["price"] for booking in bookings)

    outcome = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
    print(f"{answers.total()} requests: {outcome}")
    print(f"{sold.total()} of {ROWS * SEATS_IN_A_ROW} seats sold for {taken}")
    print(f"money before: {CUSTOMERS * MONEY}; after: {sum(money.values())} + {taken} in the till")

    problems = {
        "a seat does not belong to the one who booked it, or was sold twice": sold != owned,
        "money was lost or made": sum(money.values()) + taken != CUSTOMERS * MONEY,
        "a customer owes money": min(money.values()) < 0,
        "bookings and answers differ": len(bookings) != answers["booked"],
        "a request was not answered": answers.total() != REQUESTS,
        "nothing was fought for: the example shows nothing": not {"booked", "taken"} <= set(answers),
    }
    return [problem for problem, is_there in problems.items() if is_there]


def failed(what: str) -> NoReturn:
    """End with status 1, and with what the worker has said."""
    sys.stderr.write(os.pread(LOG.fileno(), LOG_BYTES_MAX, 0).decode(errors="replace"))
    sys.exit(what)


if __name__ == "__main__":
    main()
