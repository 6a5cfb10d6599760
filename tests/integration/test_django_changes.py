"""Handlers of a Django project with a relational default database; in a process of its own, which has its settings."""

from __future__ import annotations

from typing import Any

from pymongo.database import Database

from tests.fixtures.process import Processes

Document = dict[str, Any]

SETTINGS = """
import sys, types, uuid, datetime, decimal
from django.conf import settings

url, name, broker = sys.argv[1:]
settings.configure(
    INSTALLED_APPS=["mongo_celery.contrib.django"],
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        "documents": {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name},
    },
    DATABASE_ROUTERS=["project.Router", "django_mongodb_backend.routers.MongoRouter"],
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    MONGO_CELERY_APP="project:app",
    USE_TZ=True,
)
project = sys.modules["project"] = types.ModuleType("project")

class Router:
    def db_for_write(self, model, **_):
        return "documents" if model._meta.app_label == "shop" else "default"
    db_for_read = db_for_write

project.Router = Router
import django
django.setup()
from celery import Celery
from django.db import connections, models
from mongo_celery import Bridge, Change, Outbox, OutboxCollection
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from mongo_celery.contrib.django import celery_app, instance, transactional
from mongo_celery.testing import BridgeRunner

app = project.app = Celery("shop", broker=broker)
documents = connections["documents"]

def refused(error, work):
    try:
        work()
    except error as raised:
        return str(raised)
    raise SystemExit(f"{error} was not raised")
"""

INSTANCES = (
    SETTINGS
    + """
from django_mongodb_backend.fields import ArrayField, EmbeddedModelField
from django_mongodb_backend.models import EmbeddedModel

class Address(EmbeddedModel):
    town = models.CharField(max_length=20)
    since = models.DateField()
    class Meta:
        app_label = "shop"

class Customer(models.Model):
    name = models.CharField(max_length=20)
    class Meta:
        app_label = "shop"

class Order(models.Model):
    customer = models.ForeignKey(Customer, on_delete=models.CASCADE)
    total = models.DecimalField(max_digits=8, decimal_places=2)
    placed = models.DateTimeField()
    due = models.DateField()
    hour = models.TimeField()
    takes = models.DurationField()
    number = models.UUIDField(default=uuid.uuid4)
    paid = models.BooleanField(db_column="isPaid")
    count = models.BigIntegerField()
    notes = models.JSONField()
    seal = models.BinaryField()
    sizes = ArrayField(models.DecimalField(max_digits=4, decimal_places=1))
    address = EmbeddedModelField(Address)
    comment = models.CharField(max_length=20, null=True)
    class Meta:
        app_label = "shop"
        db_table = "orders"

class Urgent(Order):
    class Meta:
        app_label = "shop"
        proxy = True

class Gift(Order):
    ribbon = models.CharField(max_length=20)
    class Meta:
        app_label = "shop"

class Row(models.Model):
    class Meta:
        app_label = "books"

with documents.schema_editor() as editor:
    editor.create_model(Customer)
    editor.create_model(Order)
bridge = Bridge(app, url, name="shop")
seen, found = [], {}

@bridge.on_change(Order)
def handle(change):
    seen.append((change.operation_type, instance(change, Order), instance(change, Urgent), change))

from celery import signals
around = []                     # as Celery's fixup for Django listens, which closes connections there
signals.task_prerun.connect(lambda sender, **_: around.append(("before", sender.name)), weak=False)
signals.task_postrun.connect(lambda sender, **_: around.append(("behind", sender.name)), weak=False)

assert celery_app() is app
values = ("Ann", "12.50", datetime.datetime(2026, 3, 1, 12, 30, tzinfo=datetime.timezone.utc))
with BridgeRunner(bridge, url=url) as runner:
    ann = Customer.objects.create(name="Ann")
    made = Order.objects.create(
        customer=ann, total="12.50", placed=values[2], due=values[2].date(), hour=values[2].time(),
        takes=datetime.timedelta(minutes=90), paid=True, count=2**40, notes={"a": [1, None]}, seal=bytes([0, 255]),
        sizes=["1.5", "2.0"], address=Address(town="Ulm", since=values[2].date()),
    )
    runner.deliver()
    read = Order.objects.get(pk=made.pk)
    assert seen[-1][0] == "insert"
    for got in seen[-1][1:3]:
        for field in Order._meta.concrete_fields:
            if field.name == "address":
                assert (got.address.town, got.address.since) == ("Ulm", values[2].date())
                continue
            mine, its = getattr(got, field.attname), getattr(read, field.attname)
            assert (type(mine), mine) == (type(its), its), (field, mine, its)
        assert (got._state.db, got._state.adding) == ("documents", False)
    assert seen[-1][1] == read and type(seen[-1][2]) is Urgent
    assert seen[-1][1].customer.name == "Ann"

    documents.get_collection("orders").update_one({"_id": made.pk}, {"$set": {"unknown": 1}, "$unset": {"comment": 1}})
    runner.deliver()
    assert (seen[-1][0], seen[-1][1].comment, seen[-1][1].total) == ("update", None, decimal.Decimal("12.50"))
    assert instance(seen[-1][3], Order, before=True) is None
    whole = seen[-1][3]

    Order.objects.all().delete()
    runner.deliver()
    assert seen[-1][:3] == ("delete", None, None)
    task = bridge.handlers[0].task_name
    assert [when for when, name in around if name == task] == ["before", "behind"] * len(seen), around

refused(ConfigurationError, lambda: instance(whole, Row))
refused(ConfigurationError, lambda: instance(whole, Gift))
refused(ConfigurationError, lambda: instance(whole, int))
refused(HandlerUsageError, lambda: instance(whole, Customer))
text = Change.build("insert", ns=f"{name}.orders", full_document={"_id": 1, "total": "secret"})
shown = refused(HandlerUsageError, lambda: instance(text, Order))
assert "Order.total" in shown and "secret" not in shown
"""
)

TRANSACTIONS = (
    SETTINGS
    + """
from django.db import transaction as relational
from django_mongodb_backend import transaction
from pymongo.errors import OperationFailure
from mongo_celery.locking import django as locking

class Seat(models.Model):
    number = models.IntegerField()
    class Meta:
        app_label = "shop"

class Note(models.Model):
    id = models.AutoField(primary_key=True)
    text = models.CharField(max_length=20)
    class Meta:
        app_label = "books"

with documents.schema_editor() as editor:
    editor.create_model(Seat)
with connections["default"].schema_editor() as editor:
    editor.create_model(Note)

@app.task
def ticket(seat): ...

outbox = OutboxCollection(
    app, lambda: documents.get_collection("outbox"), name="outbox", sweep_every=None, at_once=False
)
attempts, told = [], []

@transactional(outbox=outbox)
def sell(number, *, fails=0):
    attempts.append(number)
    Seat.objects.create(number=number)
    with transaction.atomic("documents"):
        [locked] = locking.select_for_update(Seat.objects.filter(number=number))
        locked.save()
    ticket.delay(number)
    transaction.on_commit(lambda: told.append(number), using="documents")
    if len(attempts) <= fails:
        raise OperationFailure("a conflict", 112, {"errorLabels": ["TransientTransactionError"]})
    return locked.pk

@transactional("documents")
def sell_two(numbers):
    for each in numbers:
        sell(each)
    raise KeyError

assert Seat.objects.get(pk=sell(1, fails=1)).number == 1
assert (attempts, told) == ([1, 1], [1])
refused(KeyError, lambda: sell_two([2, 3]))
assert outbox.status().pending == 1, "what was sent in an attempt that failed was stored"

with outbox.atomic():                                  # of the only database that is MongoDB's
    Seat.objects.create(number=4)
    ticket.delay(4)
def fail(number, *, inside):
    with relational.atomic():
        Note.objects.create(text="relational")
        with outbox.atomic():
            Seat.objects.create(number=number)
            ticket.delay(number)
            if inside:
                raise KeyError
        raise KeyError                                 # too late for what MongoDB has committed, as the page says

refused(KeyError, lambda: fail(5, inside=True))
refused(KeyError, lambda: fail(6, inside=False))
assert sorted(seat.number for seat in Seat.objects.all()) == [1, 4, 6] and not Note.objects.exists()
assert outbox.status().pending == 3

def later():
    yield Seat.objects.create(number=9)                # when the transaction has ended

async def elsewhere(): ...

for wrong in (later, elsewhere, ticket, Seat):
    refused(ConfigurationError, lambda: transactional(wrong))

seats = Outbox(
    app, lambda: documents.get_collection("shop_seat"), name="seats", sweep_every=None, at_once=False
)

@transactional()
def reserve(number, *, fails=False):
    seats.insert_one({"number": number}, tasks=[ticket.s(number)], session=documents.session)
    if fails:
        raise KeyError

reserve(7)
refused(KeyError, lambda: reserve(8, fails=True))
assert sorted(seat.number for seat in Seat.objects.all()) == [1, 4, 6, 7]
assert seats.status().pending == 1

assert outbox.status().pending == 3
outbox.runtime.close()
seats.runtime.close()
"""
)


def test_a_document_is_an_instance_as_a_query_would_read_it(
    processes: Processes, database: Database[Document], mongo_url: str, redis_url: str
) -> None:
    """Every kind of field, of real changes: an insert, an update, a delete; what cannot be held is refused."""
    ran = processes.python("instances", "-c", INSTANCES, mongo_url, database.name, redis_url)
    assert ran.wait() == 0, ran.text


def test_transactions_with_a_relational_default_database(
    processes: Processes, database: Database[Document], mongo_url: str, redis_url: str
) -> None:
    """`transactional` is repeated with Django's queries and what was sent; `atomic` finds the database of MongoDB's."""
    ran = processes.python("transactions", "-c", TRANSACTIONS, mongo_url, database.name, redis_url)
    assert ran.wait() == 0, ran.text
