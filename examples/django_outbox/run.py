"""
A Django project that sells more than it has, and a process that is killed behind a commit: what was sold is confirmed.

    python examples/django_outbox/run.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mongo_celery.embedded import MongoReplicaSet, RedisServer

HERE = Path(__file__).parent
LAMPS, CUSTOMERS = 4, 5
CELERY = [sys.executable, "-m", "celery", "-A", "shop", "--quiet"]
BEAT = ["beat", "--schedule", os.devnull, "--scheduler", "celery.beat:Scheduler"]


def main() -> int:
    """Make the collections, place orders, and wait for their confirmations."""
    with MongoReplicaSet() as mongo, RedisServer() as redis:
        os.environ.update(
            MONGO_URL=mongo.url, REDIS_URL=redis.url, PYTHONPATH=str(HERE), DJANGO_SETTINGS_MODULE="shop.settings"
        )
        prepare()
        processes = [start([*CELERY, "worker", "--concurrency", "2"]), start([*CELERY, *BEAT])]
        try:
            killed = subprocess.run([sys.executable, __file__, "place-and-die"], check=False).returncode
            print(f"one order, in a process that ended by {signal.Signals(-killed).name}")
            place_orders()
            return judge()
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def prepare() -> None:
    """Django with this folder's project, its collections, and some lamps."""
    import django

    sys.path.insert(0, str(HERE))
    django.setup()
    from django.core.management import call_command
    from shop.models import Article

    call_command("migrate", run_syncdb=True, verbosity=0)
    Article.objects.create(name="lamp", left=LAMPS)


def place_orders() -> None:
    """One more than there are lamps left."""
    from shop.orders import SoldOutError, place

    for number in range(1, CUSTOMERS):
        try:
            place(f"customer-{number}", "lamp")
            print(f"customer-{number} has a lamp")
        except SoldOutError:
            print(f"customer-{number} comes too late")


def judge() -> int:
    """Wait for what can still come, then look."""
    from django.db import connection
    from shop.models import Article, Confirmation, Order

    deadline = time.monotonic() + 60
    outbox = connection.get_collection("shop_outbox")
    while time.monotonic() < deadline and (Confirmation.objects.count() < LAMPS or outbox.count_documents({})):
        time.sleep(0.1)
    sold, left = Order.objects.count(), Article.objects.get(name="lamp").left
    confirmed = sorted(each.order for each in Confirmation.objects.all())
    print(f"{sold} sold, {left} left, {len(confirmed)} confirmed")
    right = (sold, left) == (LAMPS, 0) and confirmed == sorted(str(order.pk) for order in Order.objects.all())
    print("what was sold is confirmed, and nothing else" if right else "WRONG")
    return 0 if right else 1


def place_and_die() -> None:
    """Be killed when the transaction has been committed, and nothing of it has been sent yet."""
    import django

    django.setup()
    from celery.signals import before_task_publish
    from shop.models import Order
    from shop.orders import place

    def die(**_: object) -> None:
        if Order.objects.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    before_task_publish.connect(die, weak=False)
    place("customer-0", "lamp")
    signal.pause()  # the outbox sends in the background, and meets its end there


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a process of the shop; its log goes nowhere."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:] == ["place-and-die"]:
        place_and_die()
    sys.exit(main())
