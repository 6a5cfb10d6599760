"""Handlers of a Django project with a relational default database; in a process of its own, which has its settings."""

from __future__ import annotations

from tests.integration.django_rig import RunDjango

INSTANCES = """
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

create(Customer, Order)
bridge = Bridge(app, url, name="shop")
seen, found = [], {}

@bridge.on_change(Order)
def handle(change):
    seen.append((change.operation_type, contrib.instance(change, Order), contrib.instance(change, Urgent), change))

from celery import signals
around = []                     # as Celery's fixup for Django listens, which closes connections there
signals.task_prerun.connect(lambda sender, **_: around.append(("before", sender.name)), weak=False)
signals.task_postrun.connect(lambda sender, **_: around.append(("behind", sender.name)), weak=False)

assert contrib.celery_app() is app
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
    assert contrib.instance(seen[-1][3], Order, before=True) is None
    whole = seen[-1][3]

    Order.objects.all().delete()
    runner.deliver()
    assert seen[-1][:3] == ("delete", None, None)
    task = bridge.handlers[0].task_name
    assert [when for when, name in around if name == task] == ["before", "behind"] * len(seen), around

refused(ConfigurationError, lambda: contrib.instance(whole, Row))
refused(ConfigurationError, lambda: contrib.instance(whole, Gift))
refused(ConfigurationError, lambda: contrib.instance(whole, int))
refused(HandlerUsageError, lambda: contrib.instance(whole, Customer))
text = Change.build("insert", ns=f"{name}.orders", full_document={"_id": 1, "total": "secret"})
shown = refused(HandlerUsageError, lambda: contrib.instance(text, Order))
assert "Order.total" in shown and "secret" not in shown
"""

TRANSACTIONS = """
class Note(models.Model):
    id = models.AutoField(primary_key=True)
    text = models.CharField(max_length=20)
    class Meta:
        app_label = "books"

with connections["default"].schema_editor() as editor:
    editor.create_model(Note)

outbox = outbox_of("outbox", at_once=False)
attempts, told = [], []

@contrib.transactional(outbox=outbox)
def sell(number, *, fails=0):
    attempts.append(number)
    Seat.objects.create(number=number)
    with transaction.atomic("documents"):
        [locked] = select_for_update(Seat.objects.filter(number=number))
        locked.save()
    ticket.delay(number)
    transaction.on_commit(lambda: told.append(number), using="documents")
    if len(attempts) <= fails:
        raise CONFLICT
    return locked.pk

@contrib.transactional("documents")
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
assert seats() == [1, 4, 6] and not Note.objects.exists()
assert outbox.status().pending == 3

def later():
    yield Seat.objects.create(number=9)                # when the transaction has ended

async def elsewhere(): ...

for wrong in (later, elsewhere, ticket, Seat):
    refused(ConfigurationError, lambda: contrib.transactional(wrong))

in_seats = Outbox(app, lambda: documents.get_collection("seats"), name="seats", sweep_every=None, at_once=False)

@contrib.transactional()
def reserve(number, *, fails=False):
    in_seats.insert_one({"number": number}, tasks=[ticket.s(number)], session=documents.session)
    if fails:
        raise KeyError

reserve(7)
refused(KeyError, lambda: reserve(8, fails=True))
assert seats() == [1, 4, 6, 7]
assert in_seats.status().pending == 1

assert outbox.status().pending == 3
outbox.runtime.close()
in_seats.runtime.close()
"""


def test_a_document_is_an_instance_as_a_query_would_read_it(run_django: RunDjango) -> None:
    """Every kind of field, of real changes: an insert, an update, a delete; what cannot be held is refused."""
    run_django(INSTANCES, "relational")


def test_transactions_with_a_relational_default_database(run_django: RunDjango) -> None:
    """`transactional` is repeated with Django's queries and what was sent; `atomic` finds the database of MongoDB's."""
    run_django(TRANSACTIONS, "relational")
