"""Django's transactions: what is sent, recorded, paid and locked in them."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.django_rig import RunDjango

TRANSACTIONS = """
outbox = outbox_of("outbox", at_once=False)

def book(number, fails=False):
    with outbox.atomic(key=number):
        Seat.objects.create(number=number)
        ticket.delay(number)
        if fails:
            raise KeyError

def fail_after(work):
    with transaction.atomic():
        work()
        raise KeyError

book(1)
refused(KeyError, lambda: book(2, fails=True))
refused(KeyError, lambda: fail_after(lambda: book(2)))

@once(lambda: documents.get_collection("records"), key=lambda number: number)
def reserve(number):
    Seat.objects.create(number=number)

refused(KeyError, lambda: fail_after(lambda: reserve(50)))
for _ in range(2):
    with transaction.atomic():
        reserve(50)
assert seats() == [1, 50], "a record that an aborted transaction leaves behind"
Seat.objects.filter(number=50).delete()

with transaction.atomic():
    refused(KeyError, lambda: book(3, fails=True))  # MongoDB has no savepoints: it has the fate of the outer block
    book(4)
    book(5)
refused(ConfigurationError, lambda: outbox.atomic("files").__enter__())
assert seats() == [1, 3, 4, 5]
assert outbox.status().pending == 4

# Inside a transaction of Django's client it is a part, which fails the whole; a body that is repeated books once.
runs = []

@transactional(django_client)
def sell(number, *, session):
    runs.append(number)
    book(number)
    if len(runs) == 1:
        raise CONFLICT

sell(6)
refused(
    TransactionError,
    lambda: transactional(django_client).run(lambda _: refused(KeyError, lambda: book(7, fails=True))),
)
assert seats() == [1, 3, 4, 5, 6]

# In a transactional handler, or in any transaction of another client, all that Django has is refused.
@contrib.transactional()
def pay():
    Seat.objects.create(number=8)

@contrib.transactional(independent=True)
def apart():
    Seat.objects.create(number=9)

def pay_inside():
    for work in (pay, lambda: book(8), lambda: joined().__enter__(), lambda: current(django_client)):
        refused(ConfigurationError, work)
    apart()

bridge = Bridge(app, url, name="shop")

@bridge.on_change(f"{name}.orders", transactional=True)
def handle(change):
    pay_inside()

with BridgeRunner(bridge, url=url) as runner, MongoClient(url) as client:
    client[name].orders.insert_one({})
    assert len(runner.deliver().calls) == 1
    transactional(client).run(lambda session: pay_inside())
assert seats() == [1, 3, 4, 5, 6, 9, 9]
outbox.sweep(older_than=0)
outbox.runtime.close()
"""

EVERY_TRANSACTION = """
from tests.fixtures.process import wait_for

outbox = outbox_of("outbox", every_transaction=True)
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
wait_for(sent, message="nothing has told the dispatcher of the commit")
assert sent() == 1

def fail():
    with transaction.atomic():
        book("never")
        raise KeyError

refused(KeyError, fail)
runs = []

@contrib.transactional()
def repeat():
    runs.append(1)
    book(f"run {len(runs)}")
    if len(runs) == 1:
        raise CONFLICT

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
outbox.sweep(older_than=0)
wait_for(lambda: outbox.status().pending == 0)  # the dispatcher may have had some
assert sent() == 3  # the relational one was not stored
outbox.runtime.close()
"""

PAYMENTS = """
accounts, more = documents.get_collection("accounts"), documents.get_collection("more")
accounts.insert_many([{"_id": each, "balance": 1000} for each in "AB"])
more.insert_one({"_id": "C", "balance": 0})
bank = TwoPhaseCommit(app, lambda: documents.get_collection("transactions"), recover_every=None)
other = TwoPhaseCommit(app, MongoClient(url)[name]["transactions"], name="other", recover_every=None)

def pay(fails):
    with transaction.atomic():
        Seat.objects.create(number=1)
        bank.transfer("A", "B", 10)
        refused(ConfigurationError, lambda: other.transfer("A", "B", 100))
        if fails:
            raise KeyError

refused(KeyError, lambda: pay(fails=True))
pay(fails=False)
assert [each["state"] for each in bank.transactions.find()] == ["done"]

# The first participant is changed, and no abort reaches the server.
parts = [Participant(accounts, "A", {"$inc": {"balance": -10}}), Participant(more, "C", {"$inc": {"balance": 10}})]
lost = {"failCommands": ["update", "abortTransaction"], "closeConnection": True}
admin = accounts.database.client.admin

def pay_with_a_lost_answer():
    with transaction.atomic():
        Seat.objects.create(number=3)
        admin.command("configureFailPoint", "failCommand", mode={"skip": 1}, data=lost)
        try:
            refused(PyMongoError, lambda: bank.begin(parts, run=True))
        finally:
            admin.command("configureFailPoint", "failCommand", mode="off")

refused(OperationFailure, pay_with_a_lost_answer)
admin.command("killAllSessions", [])  # else what no abort has reached locks the collections for a minute
assert seats() == [1]
assert [each.find_one()["balance"] for each in (accounts, more)] == [990, 0]
"""

LOCKS = """
class Hall(models.Model):
    name = models.CharField(max_length=20)
    class Meta:
        app_label = "shop"

class Place(models.Model):
    row = models.IntegerField()
    customer = models.CharField(max_length=20, null=True)
    hall = models.ForeignKey(Hall, null=True, on_delete=models.CASCADE)
    class Meta:
        app_label = "shop"

create(Hall, Place)
hall = Hall.objects.create(name="small")
for row in range(4):
    Place.objects.create(row=row, hall=hall if row else None)
places, halls = documents.database["shop_place"], documents.database["shop_hall"]

# Only inside a transaction, and only what can be locked.
refused(TransactionRequiredError, lambda: select_for_update(Place.objects.all()))
with transaction.atomic():
    refused(ConfigurationError, lambda: select_for_update(Place.objects.values("row")))
    refused(ConfigurationError, lambda: select_for_update([1]))
    for of in (("row",), ("x",), (), "hall"):
        refused(ConfigurationError, lambda: select_for_update(Place.objects.all(), of=of))
assert places.count_documents({"_lock": {"$exists": True}}) == 0

# What refers to nothing has nothing to lock by it.
gone = Hall.objects.create(name="gone")
Place.objects.create(row=9, hall=gone)
halls.delete_one({"_id": gone.pk})
with transaction.atomic():
    assert [place.row for place in select_for_update(Place.objects.filter(row=9), of=("self", "hall"))] == [9]
assert "_lock" in places.find_one({"row": 9})
places.delete_one({"row": 9})

# A slice in its order; the relation too; what Django writes afterwards leaves the lock alone.
attempts, done = [], []

@transactional(django_client)
def sell(customer, *, session):
    attempts.append(customer)
    with joined():
        transaction.on_commit(lambda: done.append(customer))
        queryset = Place.objects.filter(customer=None).select_related("hall").order_by("-row")[:2]
        found = select_for_update(queryset, of=("self", "hall"))
        for place in found:
            place.customer = customer
            place.save()
    return [place.row for place in found]

assert sell("Ann") == [3, 2]
assert (attempts, done) == (["Ann"], ["Ann"])
assert {each["row"] for each in places.find({"customer": "Ann", "_lock.id": {"$exists": True}})} == {2, 3}
assert "id" in halls.find_one()["_lock"]
assert Place.objects.get(row=3).customer == "Ann" and documents.session is None

# A conflict that Django would hide is repeated, and callbacks of the attempt that failed are forgotten.
runs = []

@transactional(django_client)
def conflict(*, session):
    runs.append(1)
    with joined(session):
        transaction.on_commit(lambda: done.append(len(runs)))
        place = Place.objects.get(row=0)
        if len(runs) == 1:
            MongoClient(url)[name]["shop_place"].update_one({"row": 0}, {"$set": {"customer": "Eve"}})
        place.row = 10
        try:
            save(place)
        except OperationFailure:  # what the inner part says is what the outer one is repeated for
            pass

@transactional(django_client)
@joined()
def save(place, *, session):
    with transaction.atomic():
        place.save()

conflict()
assert (len(runs), done) == (2, ["Ann", 2])

# What the body has caught is committed, and so are the callbacks of it.
@joined()
def caught(*, session):
    transaction.on_commit(lambda: done.append("caught"))
    Place.objects.filter(row=3).update(customer="Cyd")
    raise KeyError

transactional(django_client).run(lambda session: refused(KeyError, lambda: caught(session=session)))
assert Place.objects.get(row=3).customer == "Cyd" and done[-1] == "caught"

# A transaction of the driver's: nobody would call what waits for its commit.
def driven():
    with django_client().start_session() as session, session.start_transaction(), joined(session):
        transaction.on_commit(lambda: done.append("never"))
refused(ConfigurationError, driven)

# Somebody else's lock.
def lock(**options):
    with transaction.atomic():
        return select_for_update(Place.objects.filter(row=1), **options)

other = MongoClient(url)
with other.start_session() as session, session.start_transaction():
    other[name]["shop_place"].update_one({"row": 1}, {"$set": {"held": 1}}, session=session)
    refused(DocumentLockedError, lambda: lock(nowait=True))
    refused(OperationFailure, lock)
    session.abort_transaction()
assert len(lock(nowait=True)) == 1

# No transaction, another client, one around it, and one of its own inside.
refused(TransactionRequiredError, lambda: joined().__enter__())
apart = transactional(django_client, independent=True)(joined()(lambda *, session: None))
inside = transactional(django_client)(joined()(lambda *, session: apart()))
def foreign():
    with other.start_session() as session, session.start_transaction(), joined(session):
        pass
def within():
    with transaction.atomic():
        sell("Bob")
for work in (inside, foreign, within):
    refused(ConfigurationError, work)
other.close()
"""


def sent(redis_client: Any) -> list[str]:
    return sorted(json.loads(each)["headers"]["argsrepr"] for each in redis_client.lrange("celery", 0, -1))


def test_what_djangos_transaction_sends_goes_with_its_commit(run_django: RunDjango, redis_client: Any) -> None:
    run_django(TRANSACTIONS)
    assert sent(redis_client) == ["(1,)", "(3,)", "(4,)", "(5,)", "(6,)"]


def test_every_transaction_of_django_stores_what_is_sent(run_django: RunDjango, redis_client: Any) -> None:
    """By plain `atomic`, committed or not, and by `transactional`, the inner one; other databases send as before."""
    run_django(EVERY_TRANSACTION)
    texts = [f"{text}{end}" for text in ("committed", "run 2") for end in ("", ", nested", ", later")]
    assert sent(redis_client) == sorted(f"('{text}',)" for text in [*texts, "inner", "relational"])


def test_djangos_transactions_have_payments_in_them(run_django: RunDjango) -> None:
    """P18: an `atomic` whose payment has failed cannot be committed. Another client is refused."""
    run_django(PAYMENTS)


def test_querysets_are_locked_and_repeated(run_django: RunDjango) -> None:
    run_django(LOCKS)
