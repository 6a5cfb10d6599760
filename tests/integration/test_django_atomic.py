"""Django's transactions with an `OutboxCollection`, with records and with locks. Programs have Django's settings."""

from __future__ import annotations

import json
from typing import Any

from pymongo.database import Database

from tests.fixtures.process import Processes

Document = dict[str, Any]

SETTINGS = """
import sys
import threading
import django
from django.conf import settings

url, name, broker = sys.argv[1:]
settings.configure(
    DATABASES={
        "default": {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name},
        "other": {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name + "_other"},
        "files": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    },
    DATABASE_ROUTERS=["django_mongodb_backend.routers.MongoRouter"],
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    INSTALLED_APPS=[],
    USE_TZ=True,
)
django.setup()
from celery import Celery
from django.db import connection, connections, models, router
from django_mongodb_backend import transaction
from pymongo import MongoClient
from pymongo.errors import OperationFailure
from mongo_celery import Bridge, OutboxCollection, once, transactional
from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionError, TransactionRequiredError
from mongo_celery.contrib.django import transactional as with_django
from mongo_celery.locking import current
from mongo_celery.locking.django import django_client, joined, select_for_update
from mongo_celery.testing import BridgeRunner

def refused(error, work):
    try:
        work()
    except error as raised:
        return raised
    raise SystemExit(f"{error} was not raised")
"""

TRANSACTIONS = """
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
refused(KeyError, lambda: book(2, fails=True))
def fail_after(work):
    with transaction.atomic():
        work()
        raise KeyError

refused(KeyError, lambda: fail_after(lambda: book(2)))

@once(lambda: connection.get_collection("records"), key=lambda number: number)
def reserve(number):
    Seat.objects.create(number=number)

refused(KeyError, lambda: fail_after(lambda: reserve(50)))
for _ in range(2):
    with transaction.atomic():
        reserve(50)
assert Seat.objects.filter(number=50).count() == 1, "a record that an aborted transaction leaves behind"
Seat.objects.filter(number=50).delete()

with transaction.atomic():
    refused(KeyError, lambda: book(3, fails=True))  # MongoDB has no savepoints: it has the fate of the outer block
    book(4)
    book(5)
refused(ConfigurationError, lambda: outbox.atomic("files").__enter__())
assert [seat.number for seat in Seat.objects.order_by("number")] == [1, 3, 4, 5]
assert outbox.status().pending == 4

# Inside a transaction of Django's client it is a part, which fails the whole; a body that is repeated books once.
runs = []

@transactional(django_client)
def sell(number, *, session):
    runs.append(number)
    book(number)
    if len(runs) == 1:
        raise OperationFailure("conflict", 112, {"errorLabels": ["TransientTransactionError"]})

def caught(session):
    refused(KeyError, lambda: book(7, fails=True))

sell(6)
refused(TransactionError, lambda: transactional(django_client).run(caught))
assert [seat.number for seat in Seat.objects.order_by("number")] == [1, 3, 4, 5, 6]

# In a transactional handler, or in any transaction of another client, all that Django has is refused.
@with_django()
def pay():
    Seat.objects.create(number=8)

@with_django(independent=True)
def apart():
    Seat.objects.create(number=9)

def pay_inside():
    for work in (pay, lambda: book(8), lambda: joined().__enter__(), lambda: current(django_client)):
        refused(ConfigurationError, work)
    apart()

bridge = Bridge(app, url, name="shop")
orders = f"{name}.orders"

@bridge.on_change(orders, transactional=True)
def handle(change):
    pay_inside()

with BridgeRunner(bridge, url=url) as runner, MongoClient(url) as client:
    client[name].orders.insert_one({})
    assert len(runner.deliver().calls) == 1
    transactional(client).run(lambda session: pay_inside())
assert [seat.number for seat in Seat.objects.order_by("number")] == [1, 3, 4, 5, 6, 9, 9]
outbox.sweep(older_than=0)
outbox.runtime.close()
"""

EVERY_TRANSACTION = """
from celery.contrib.django.task import DjangoTask
from django.db import transaction as relational

class Seat(models.Model):
    number = models.IntegerField()
    class Meta:
        app_label = "shop"
        db_table = "seats"

with connection.schema_editor() as editor:
    editor.create_model(Seat)
app = Celery("shop", broker=broker, task_cls=DjangoTask)

@app.task
def ticket(text): ...

outbox = OutboxCollection(app, lambda: connection.get_collection("outbox"), sweep_every=None, every_transaction=True)
outbox.prepare()
sent = lambda: outbox.status().dispatched

def book(text):
    Seat.objects.create(number=len(text))
    ticket.delay(text)
    with transaction.atomic():
        ticket.delay_on_commit(text + ", nested")
    transaction.on_commit(lambda: ticket.delay(text + ", later"))

with transaction.atomic():
    book("committed")
    assert (outbox.status().pending, sent()) == (0, 0)
deadline = threading.Event()
for _ in range(300):
    if sent():
        break
    deadline.wait(0.1)
assert sent() == 1, "nothing has told the dispatcher of the commit"

def fail():
    with transaction.atomic():
        book("never")
        raise KeyError

refused(KeyError, fail)
runs = []

@with_django()
def repeat():
    runs.append(1)
    book(f"run {len(runs)}")
    if len(runs) == 1:
        raise OperationFailure("conflict", 112, {"errorLabels": ["TransientTransactionError"]})

repeat()
def fail_around():
    with transactional(MongoClient(url)):
        refused(KeyError, fail)
        with transaction.atomic():
            ticket.delay("inner")
        ticket.delay("never")
        raise ValueError

refused(ValueError, fail_around)
with relational.atomic(using="files"):
    ticket.delay("relational")
    assert sent() + outbox.status().pending <= 3  # in this order no entry is counted twice
outbox.sweep(older_than=0)
outbox.runtime.close()
"""

LOCKS = """
class Hall(models.Model):
    name = models.CharField(max_length=20)
    class Meta:
        app_label = "theater"
        db_table = "halls"

class Seat(models.Model):
    row = models.IntegerField()
    customer = models.CharField(max_length=20, null=True)
    hall = models.ForeignKey(Hall, null=True, on_delete=models.CASCADE)
    class Meta:
        app_label = "theater"
        db_table = "seats"

with connection.schema_editor() as editor:
    editor.create_model(Hall)
    editor.create_model(Seat)
hall = Hall.objects.create(name="small")
for row in range(4):
    Seat.objects.create(row=row, hall=hall if row else None)
seats, halls = connection.database["seats"], connection.database["halls"]

# Only inside a transaction, and only what can be locked.
refused(TransactionRequiredError, lambda: select_for_update(Seat.objects.all()))
with transaction.atomic():
    refused(ConfigurationError, lambda: select_for_update(Seat.objects.values("row")))
    refused(ConfigurationError, lambda: select_for_update([1]))
    for of in (("row",), ("x",), (), "hall"):
        refused(ConfigurationError, lambda: select_for_update(Seat.objects.all(), of=of))
assert seats.count_documents({"_lock": {"$exists": True}}) == 0

# What refers to nothing has nothing to lock by it; what is in another database is not of this transaction.
gone = Hall.objects.create(name="gone")
Seat.objects.create(row=9, hall=gone)
halls.delete_one({"_id": gone.pk})
with transaction.atomic():
    assert [seat.row for seat in select_for_update(Seat.objects.filter(row=9), of=("self", "hall"))] == [9]
assert "_lock" in seats.find_one({"row": 9})
seats.delete_one({"row": 9})

class HallsElsewhere:
    def db_for_read(self, model, **hints):
        return "other" if model is Hall else None

usual, router.routers = router.routers, [HallsElsewhere()]
Hall.objects.using("other").create(pk=hall.pk, name="small")
with transaction.atomic():
    elsewhere = lambda: select_for_update(Seat.objects.filter(row=1), of=("hall",), nowait=True)
    refused(ConfigurationError, elsewhere)
router.routers = usual
connections["other"].database.client.drop_database(name + "_other")

# A slice in its order; the relation too; what Django writes afterwards leaves the lock alone.
attempts, done = [], []

@transactional(django_client)
def sell(customer, *, session):
    attempts.append(customer)
    with joined():
        transaction.on_commit(lambda: done.append(customer))
        queryset = Seat.objects.filter(customer=None).select_related("hall").order_by("-row")[:2]
        found = select_for_update(queryset, of=("self", "hall"))
        for seat in found:
            seat.customer = customer
            seat.save()
    return [seat.row for seat in found]

assert sell("Ann") == [3, 2]
assert (attempts, done) == (["Ann"], ["Ann"])
assert {each["row"] for each in seats.find({"customer": "Ann", "_lock.id": {"$exists": True}})} == {2, 3}
assert "id" in halls.find_one()["_lock"]
assert Seat.objects.get(row=3).customer == "Ann" and connection.session is None

# A conflict that Django would hide is repeated, and callbacks of the attempt that failed are forgotten.
runs = []

@transactional(django_client)
def conflict(*, session):
    runs.append(1)
    with joined(session):
        transaction.on_commit(lambda: done.append(len(runs)))
        seat = Seat.objects.get(row=0)
        if len(runs) == 1:
            MongoClient(url)[name]["seats"].update_one({"row": 0}, {"$set": {"customer": "Eve"}})
        seat.row = 10
        try:
            save(seat)
        except OperationFailure:  # what the inner part says is what the outer one is repeated for
            pass

@transactional(django_client)
@joined()
def save(seat, *, session):
    with transaction.atomic():
        seat.save()

conflict()
assert (len(runs), done) == (2, ["Ann", 2])

# What the body has caught is committed, and so are the callbacks of it.
@transactional(django_client)
def caught(*, session):
    try:
        with joined(session):
            transaction.on_commit(lambda: done.append("caught"))
            Seat.objects.filter(row=3).update(customer="Cyd")
            raise KeyError
    except KeyError:
        pass

caught()
assert Seat.objects.get(row=3).customer == "Cyd" and done[-1] == "caught"

# A transaction of the driver's: nobody would call what waits for its commit.
def driven():
    with django_client().start_session() as session, session.start_transaction(), joined(session):
        transaction.on_commit(lambda: done.append("never"))
refused(ConfigurationError, driven)

# Somebody else's lock.
other = MongoClient(url)
with other.start_session() as session, session.start_transaction():
    other[name]["seats"].update_one({"row": 1}, {"$set": {"held": 1}}, session=session)
    def nowait():
        with transaction.atomic():
            select_for_update(Seat.objects.filter(row=1), nowait=True)
    refused(DocumentLockedError, nowait)
    def plain():
        with transaction.atomic():
            select_for_update(Seat.objects.filter(row=1))
    refused(OperationFailure, plain)
    session.abort_transaction()
with transaction.atomic():
    [seat] = select_for_update(Seat.objects.filter(row=1), nowait=True)

# No transaction, another client, one around it, and one of its own inside.
refused(TransactionRequiredError, lambda: joined().__enter__())
def inside():
    @transactional(django_client, independent=True)
    @joined()
    def apart(*, session):
        pass

    transactional(django_client)(joined()(lambda *, session: apart()))()
refused(ConfigurationError, inside)
def foreign():
    with other.start_session() as session, session.start_transaction(), joined(session):
        pass
refused(ConfigurationError, foreign)
def within():
    with transaction.atomic():
        sell("Bob")
refused(ConfigurationError, within)
other.close()
"""


def test_what_djangos_transaction_sends_goes_with_its_commit(
    processes: Processes, database: Database[Document], mongo_url: str, redis_url: str, redis_client: Any
) -> None:
    """Committed, rolled back, inside an outer `atomic`, as a part of `transactional`, and refused beside it."""
    booked = processes.python("django", "-c", SETTINGS + TRANSACTIONS, mongo_url, database.name, redis_url)
    assert booked.wait() == 0, booked.text

    messages = redis_client.lrange("celery", 0, -1)
    sent = [json.loads(message)["headers"]["argsrepr"] for message in messages]
    assert sorted(sent) == ["(1,)", "(3,)", "(4,)", "(5,)", "(6,)"]


def test_every_transaction_of_django_stores_what_is_sent(
    processes: Processes, database: Database[Document], mongo_url: str, redis_url: str, redis_client: Any
) -> None:
    """By plain `atomic`, committed or not, and by `transactional`, the inner one; other databases send as before."""
    booked = processes.python("django", "-c", SETTINGS + EVERY_TRANSACTION, mongo_url, database.name, redis_url)
    assert booked.wait() == 0, booked.text

    sent = [json.loads(message)["headers"]["argsrepr"] for message in redis_client.lrange("celery", 0, -1)]
    texts = [f"{text}{end}" for text in ("committed", "run 2") for end in ("", ", nested", ", later")]
    assert sorted(sent) == sorted(f"('{text}',)" for text in [*texts, "inner", "relational"])


def test_querysets_are_locked_and_repeated(processes: Processes, database: Database[Document], mongo_url: str) -> None:
    """Inside `joined` and `atomic`; with relations, callbacks, conflicts and locks of others."""
    done = processes.python("django", "-c", SETTINGS + LOCKS, mongo_url, database.name, "memory://")
    assert done.wait() == 0, done.text
