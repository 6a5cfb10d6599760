"""An `OutboxCollection` in Django's own transactions; in a process of its own, which has Django's settings."""

from __future__ import annotations

import json
from typing import Any

from pymongo.database import Database

from tests.fixtures.process import Processes

Document = dict[str, Any]

PROGRAM = """
import sys
import django
from django.conf import settings

url, name, broker = sys.argv[1:]
settings.configure(
    DATABASES={
        "default": {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name},
        "files": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    },
    DATABASE_ROUTERS=["django_mongodb_backend.routers.MongoRouter"],
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    INSTALLED_APPS=[],
)
django.setup()
from celery import Celery
from django.db import connection, models
from django_mongodb_backend import transaction
from pymongo import MongoClient
from pymongo.errors import OperationFailure
from mongo_celery import Bridge, OutboxCollection, once, transactional
from mongo_celery.errors import ConfigurationError, TransactionError
from mongo_celery.contrib.django import transactional as with_django
from mongo_celery.locking import current
from mongo_celery.locking.django import django_client, joined
from mongo_celery.testing import BridgeRunner

class Seat(models.Model):
    number = models.IntegerField()
    class Meta:
        app_label = "shop"
        db_table = "seats"

with connection.schema_editor() as editor:
    editor.create_model(Seat)
app = Celery("shop", broker=broker)

@app.task
def ticket(seat): ...

outbox = OutboxCollection(app, lambda: connection.get_collection("outbox"), sweep_every=None, at_once=False)

def book(number, fails=False):
    with outbox.atomic(key=number):
        Seat.objects.create(number=number)
        ticket.delay(number)
        if fails:
            raise KeyError

book(1)
try:
    book(2, fails=True)
except KeyError:
    pass
try:
    with transaction.atomic():
        book(3)
        raise KeyError
except KeyError:
    pass
@once(lambda: connection.get_collection("records"), key=lambda number: number)
def reserve(number):
    Seat.objects.create(number=number)

try:
    with transaction.atomic():
        reserve(50)
        raise KeyError
except KeyError:
    pass
for _ in range(2):
    with transaction.atomic():
        reserve(50)
assert Seat.objects.filter(number=50).count() == 1, "a record that an aborted transaction leaves behind"
Seat.objects.filter(number=50).delete()

with transaction.atomic():
    book(4)
    book(5)
try:
    with outbox.atomic("files"):
        raise SystemExit("a database that is not MongoDB's was accepted")
except ConfigurationError as error:
    assert "SQLite" in str(error), error
assert [seat.number for seat in Seat.objects.order_by("number")] == [1, 4, 5]
assert outbox.status().pending == 3

# Inside a transaction of Django's client it is a part, which fails the whole; a body that is repeated books once.
runs = []

@transactional(django_client)
def sell(number, *, session):
    runs.append(number)
    book(number)
    if len(runs) == 1:
        raise OperationFailure("conflict", 112, {"errorLabels": ["TransientTransactionError"]})

def caught(session):
    try:
        book(7, fails=True)
    except KeyError:
        pass

sell(6)
try:
    transactional(django_client).run(caught)
    raise SystemExit("a part had failed, and the whole was committed")
except TransactionError:
    pass
assert [seat.number for seat in Seat.objects.order_by("number")] == [1, 4, 5, 6]

# In a transactional handler, or in any transaction of another client, all that Django has is refused.
@with_django()
def pay():
    Seat.objects.create(number=8)

@with_django(independent=True)
def apart():
    Seat.objects.create(number=9)

def refused(name):
    for work in (pay, lambda: book(8), lambda: joined().__enter__(), lambda: current(django_client)):
        try:
            work()
        except ConfigurationError as error:
            assert name in str(error), error
        else:
            raise SystemExit("it was not refused")
    apart()

bridge = Bridge(app, url, name="shop")
orders = f"{name}.orders"

@bridge.on_change(orders, transactional=True)
def handle(change):
    refused("bridge.client")

with BridgeRunner(bridge, url=url) as runner, MongoClient(url) as client:
    client[name].orders.insert_one({})
    assert len(runner.deliver().calls) == 1
    transactional(client).run(lambda session: refused("session.client"))
assert [seat.number for seat in Seat.objects.order_by("number")] == [1, 4, 5, 6, 9, 9]
outbox.sweep(older_than=0)
outbox.runtime.close()
"""


def test_what_djangos_transaction_sends_goes_with_its_commit(
    processes: Processes, database: Database[Document], mongo_url: str, redis_url: str, redis_client: Any
) -> None:
    """Committed, rolled back, inside an outer `atomic`, as a part of `transactional`, and refused beside it."""
    booked = processes.python("django", "-c", PROGRAM, mongo_url, database.name, redis_url)
    assert booked.wait() == 0, booked.text

    messages = redis_client.lrange("celery", 0, -1)
    sent = [json.loads(message)["headers"]["argsrepr"] for message in messages]
    assert sorted(sent) == ["(1,)", "(4,)", "(5,)", "(6,)"]
