"""Querysets of real Django models, locked; in a process of its own, which has Django's settings."""

from __future__ import annotations

from typing import Any

from pymongo.database import Database

from tests.fixtures.process import Processes

Document = dict[str, Any]

PROGRAM = """
import sys
import django
from django.conf import settings

url, name = sys.argv[1:]
settings.configure(
    DATABASES={
        alias: {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name + suffix}
        for alias, suffix in (("default", ""), ("other", "_other"))
    },
    DATABASE_ROUTERS=["django_mongodb_backend.routers.MongoRouter"],
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    INSTALLED_APPS=[],
    USE_TZ=True,
)
django.setup()
from django.db import connection, connections, models, router
from django_mongodb_backend import transaction
from pymongo import MongoClient
from pymongo.errors import OperationFailure
from mongo_celery import transactional
from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionRequiredError
from mongo_celery.locking.django import django_client, joined, select_for_update

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

def refused(error, work):
    try:
        work()
    except error as raised:
        return str(raised)
    raise AssertionError(f"{error} was not raised")

# Only inside a transaction, and only what can be locked.
assert "joined()" in refused(TransactionRequiredError, lambda: select_for_update(Seat.objects.all()))
with transaction.atomic():
    refused(ConfigurationError, lambda: select_for_update(Seat.objects.values("row")))
    refused(ConfigurationError, lambda: select_for_update([1]))
    assert "of='row'" in refused(ConfigurationError, lambda: select_for_update(Seat.objects.all(), of=("row",)))
    assert "of='x'" in refused(ConfigurationError, lambda: select_for_update(Seat.objects.all(), of=("x",)))
    assert "of=()" in refused(ConfigurationError, lambda: select_for_update(Seat.objects.all(), of=()))
    assert "of='hall'" in refused(ConfigurationError, lambda: select_for_update(Seat.objects.all(), of="hall"))
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
    assert "'other'" in refused(ConfigurationError, elsewhere)
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
assert "on_commit" in refused(ConfigurationError, driven)

# Somebody else's lock.
other = MongoClient(url)
with other.start_session() as session, session.start_transaction():
    other[name]["seats"].update_one({"row": 1}, {"$set": {"held": 1}}, session=session)
    def nowait():
        with transaction.atomic():
            select_for_update(Seat.objects.filter(row=1), nowait=True)
    assert "seats" in refused(DocumentLockedError, nowait)
    def plain():
        with transaction.atomic():
            select_for_update(Seat.objects.filter(row=1))
    refused(OperationFailure, plain)
    session.abort_transaction()
with transaction.atomic():
    [seat] = select_for_update(Seat.objects.filter(row=1), nowait=True)

# No transaction, another client, one around it, and one of its own inside.
assert "found no transaction" in refused(TransactionRequiredError, lambda: joined().__enter__())
def inside():
    @transactional(django_client, independent=True)
    @joined()
    def apart(*, session):
        pass

    transactional(django_client)(joined()(lambda *, session: apart()))()
assert "independent=True" in refused(ConfigurationError, inside)
def foreign():
    with other.start_session() as session, session.start_transaction(), joined(session):
        pass
assert "django_client" in refused(ConfigurationError, foreign)
def within():
    with transaction.atomic():
        sell("Bob")
assert "another transaction" in refused(ConfigurationError, within)
other.close()
print("as it should be")
"""


def test_querysets_are_locked_and_repeated(processes: Processes, database: Database[Document], mongo_url: str) -> None:
    """Inside `joined` and `atomic`; with relations, callbacks, conflicts and locks of others."""
    done = processes.python("django", "-c", PROGRAM, mongo_url, database.name)
    assert done.wait() == 0, done.text
    assert done.text.splitlines()[-1] == "as it should be"
