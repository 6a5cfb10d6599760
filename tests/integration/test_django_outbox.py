"""Instances of a real Django model, saved with their tasks; in a process of its own, which has Django's settings."""

from __future__ import annotations

import json
from typing import Any

from pymongo.database import Database

from tests.fixtures.process import Processes

Document = dict[str, Any]

PROGRAM = """
import json, sys
from datetime import timezone
import django
from django.conf import settings

url, name, broker = sys.argv[1:]
settings.configure(
    DATABASES={"default": {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name}},
    DATABASE_ROUTERS=["django_mongodb_backend.routers.MongoRouter"],
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    INSTALLED_APPS=[],
    USE_TZ=True,
)
django.setup()
from celery import Celery
from django.db import IntegrityError, connection, models
from django.db.models.signals import post_save
from django_mongodb_backend import transaction
from mongo_celery import Outbox, OutboxCollection
from mongo_celery.errors import ConfigurationError

class Order(models.Model):
    customer = models.CharField(max_length=20)
    total = models.DecimalField(max_digits=8, decimal_places=2)
    changed = models.DateTimeField(auto_now=True)
    class Meta:
        app_label = "shop"
        db_table = "orders"

class Other(models.Model):
    class Meta:
        app_label = "shop"
        db_table = "others"

with connection.schema_editor() as editor:
    editor.create_model(Order)
    editor.create_model(Other)
app = Celery("shop", broker=broker)

@app.task
def receipt(order): ...

sent = []
post_save.connect(lambda sender, instance, created, **_: sent.append(created), sender=Order, weak=False)
outbox = Outbox(app, lambda: connection.get_collection("orders"), sweep_every=None, at_once="wait")

new = outbox.save(Order(customer="Ann", total="12.50"), tasks=[receipt.s("new")])
assert new.pk is not None and not new._state.adding, new.pk
read = Order.objects.get(pk=new.pk)
assert (read.customer, str(read.total)) == ("Ann", "12.50"), read
first = read.changed
read.customer = "Bob"
outbox.save(read, tasks=[receipt.s("changed")])
again = Order.objects.get(pk=new.pk)
assert again.customer == "Bob" and again.changed > first and Order.objects.count() == 1

class Customer(models.Model):
    email = models.CharField(max_length=50, unique=True)
    class Meta:
        app_label = "shop"
        db_table = "customers"

class Basket(models.Model):
    customer = models.ForeignKey(Customer, on_delete=models.CASCADE)
    count = models.IntegerField(default=0)
    class Meta:
        app_label = "shop"
        db_table = "baskets"

with connection.schema_editor() as editor:
    editor.create_model(Customer)
    editor.create_model(Basket)
baskets = Outbox(app, lambda: connection.get_collection("baskets"), name="baskets", sweep_every=None, at_once="wait")
customers = Outbox(
    app, lambda: connection.get_collection("customers"), name="customers", sweep_every=None, at_once="wait"
)
buyer = Customer(email="a@b.c")
basket = Basket(customer=buyer)
try:
    baskets.save(basket, tasks=[receipt.s("too early")])
    raise SystemExit("a relation that is not saved was accepted")
except ValueError:
    pass
buyer.save()
baskets.save(basket, tasks=[receipt.s("basket")])
assert Basket.objects.get(pk=basket.pk).customer_id == buyer.pk
basket.count = models.F("count") + 1
try:
    baskets.save(basket, tasks=[receipt.s("expression")])
    raise SystemExit("an expression was accepted")
except ConfigurationError:
    pass
try:
    customers.save(Customer(email="a@b.c"), tasks=[receipt.s("twice")])
    raise SystemExit("a second customer of one address was accepted")
except IntegrityError:
    pass
named = customers.save(Customer(pk=buyer.pk, email="new@b.c"), tasks=[receipt.s("renamed")])
assert [each.email for each in Customer.objects.all()] == ["new@b.c"]

try:
    with transaction.atomic():
        outbox.save(Order(customer="Eve", total=1), tasks=[receipt.s("rolled back")])
        raise KeyError
except KeyError:
    pass
assert Order.objects.count() == 1
with transaction.atomic():
    kept = outbox.save(Order(customer="Eve", total=1), tasks=[receipt.s("committed")])
outbox.backing.deliver_now(kept.pk)
assert outbox.status().pending == 0

moving = OutboxCollection(app, lambda: connection.get_collection("moving"), sweep_every=None, at_once=False)
for ends in (False, True):
    try:
        with transaction.atomic():
            try:
                with moving.atomic():
                    Other().save()
                    receipt.delay("inner")
                    raise KeyError
            except KeyError:
                if ends:
                    raise
    except KeyError:
        pass
    assert Other.objects.count() == moving.status().pending == 1, moving.status()
moving.backing.close()

class Page(models.Model):
    title = models.CharField(max_length=20)
    slug = models.CharField(max_length=20, default="")
    views = models.IntegerField(default=0)
    class Meta:
        app_label = "shop"
        db_table = "pages"
    def save(self, *args, **options):
        if self.title == "draft":
            return
        if self.title == "Itself":
            return pages.save(self)
        if self.title == "Taken":
            try:
                self.pk = Page.objects.first().pk
                return super().save(force_insert=True)
            except IntegrityError:
                self.pk = None
        self.slug = self.title.lower()
        if "update_fields" in options:
            options["update_fields"] = [*options["update_fields"], "slug"]
        super().save(*args, **options)
        if self.title == "Twice":
            Page(title="Beside").save()
            self.views += 1
            super().save(update_fields=["views"])

with connection.schema_editor() as editor:
    editor.create_model(Page)
pages = Outbox(app, lambda: connection.get_collection("pages"), name="pages", sweep_every=None, at_once="wait")
desk = pages.save(Page(title="Desk"), tasks=[receipt.s("slug")])
assert Page.objects.get(pk=desk.pk).slug == "desk"
Page.objects.update(views=7)
desk.title, desk.views = "Table", 0
pages.save(desk, tasks=[receipt.s("fields")], update_fields=["title"])
again = Page.objects.get(pk=desk.pk)
assert (again.title, again.slug, again.views) == ("Table", "table", 7), again.__dict__
twice = pages.save(Page(title="Twice"), tasks=[receipt.s("once")])
assert Page.objects.get(pk=twice.pk).views == 1 and Page.objects.count() == 3
assert pages.status().pending == 0
pages.save(Page(title="Taken"), tasks=[receipt.s("again")])
from django.db import DatabaseError
from mongo_celery.errors import OutboxRefusedError
for instance, options, error in (
    (Page(title="draft"), {}, OutboxRefusedError),
    (Page(title="Itself"), {}, ConfigurationError),
    (Page(pk=kept.pk, title="gone"), {"force_update": True}, DatabaseError),
    (Page(title="gone"), {"update_fields": ["title"]}, ValueError),
    (Page(pk=desk.pk, title="twice"), {"force_insert": True}, IntegrityError),
):
    try:
        pages.save(instance, tasks=[receipt.s("never")], **options)
        raise SystemExit(f"{instance.title} was saved")
    except error:
        pass
desk.save()
pages.backing.close()

for wrong in (Other(), object()):
    try:
        outbox.save(wrong, tasks=[receipt.s("wrong")])
    except ConfigurationError as error:
        continue
    raise AssertionError(wrong)
outbox.backing.close()
print(json.dumps({"signals": sent, "orders": Order.objects.count()}))
"""


def test_instances_of_a_django_model_are_saved_with_their_tasks(
    processes: Processes, database: Database[Document], mongo_url: str, redis_url: str, redis_client: Any
) -> None:
    """New, changed, rolled back and committed; by the model's own save, with its options, values, key and signals."""
    saved = processes.python("django", "-c", PROGRAM, mongo_url, database.name, redis_url)
    assert saved.wait() == 0, saved.text

    assert json.loads(saved.text.splitlines()[-1]) == {"signals": [True, False, True, True], "orders": 2}
    messages = redis_client.lrange("celery", 0, -1)
    sent = [json.loads(message)["headers"]["argsrepr"] for message in reversed(messages)]
    assert sent == [
        f"('{each}',)"
        for each in ("new", "changed", "basket", "renamed", "committed", "slug", "fields", "once", "again")
    ]
