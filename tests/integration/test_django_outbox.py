"""An outbox collection and Django's transactions, in a process of its own, which has Django's settings."""

from __future__ import annotations

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
    DATABASES={"default": {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name}},
    DATABASE_ROUTERS=["django_mongodb_backend.routers.MongoRouter"],
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    INSTALLED_APPS=[],
    USE_TZ=True,
)
django.setup()
from celery import Celery
from django.db import connection, models
from django_mongodb_backend import transaction
from mongo_celery import OutboxCollection

class Other(models.Model):
    class Meta:
        app_label = "shop"
        db_table = "others"

with connection.schema_editor() as editor:
    editor.create_model(Other)
app = Celery("shop", broker=broker)

@app.task
def receipt(order): ...

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
moving.runtime.close()

"""


def test_a_transaction_of_django_takes_what_is_sent_inside(
    processes: Processes, database: Database[Document], mongo_url: str, redis_url: str
) -> None:
    """Also where an inner block fails: what it has written and sent has the fate of the outermost one."""
    done = processes.python("django", "-c", PROGRAM, mongo_url, database.name, redis_url)
    assert done.wait() == 0, done.text
