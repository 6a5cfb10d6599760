"""Programs of Django projects, which need a process for their settings: how they begin and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo.database import Database

from tests.fixtures.process import Processes

RunDjango = Callable[..., None]

BEGINNING = """
import datetime, decimal, sys, types, uuid
import django
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.conf import settings

default, url, name, broker = sys.argv[1:]
mongo = {"ENGINE": "django_mongodb_backend", "HOST": url, "NAME": name}
files = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
is_relational = default == "relational"
project = sys.modules["project"] = types.ModuleType("project")
app = project.app = Celery("shop", broker=broker, task_cls=DjangoTask)

class Router:
    def db_for_write(self, model, **_):
        return "documents" if is_relational and model._meta.app_label == "shop" else "default"
    db_for_read = db_for_write

project.Router = Router
settings.configure(
    INSTALLED_APPS=["mongo_celery.contrib.django"],
    DATABASES={"default": files, "documents": mongo} if is_relational else {"default": mongo, "files": files},
    DATABASE_ROUTERS=["project.Router", "django_mongodb_backend.routers.MongoRouter"],
    DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
    MONGO_CELERY_APP="project:app",
    USE_TZ=True,
)
django.setup()
from django.db import connections, models
from django.db import transaction as relational
from django_mongodb_backend import transaction
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError
from mongo_celery import Bridge, Change, Outbox, OutboxCollection, Participant, TwoPhaseCommit, once, transactional
from mongo_celery.contrib import django as contrib
from mongo_celery.errors import (
    ConfigurationError, DocumentLockedError, HandlerUsageError, TransactionError, TransactionRequiredError
)
from mongo_celery.locking import current
from mongo_celery.locking.django import django_client, joined, select_for_update
from mongo_celery.testing import BridgeRunner

documents = connections["documents" if is_relational else "default"]

def create(*made):
    with documents.schema_editor() as editor:
        for each in made:
            editor.create_model(each)

class Seat(models.Model):
    number = models.IntegerField()
    customer = models.CharField(max_length=20, null=True)
    class Meta:
        app_label = "shop"
        db_table = "seats"

create(Seat)

@app.task
def ticket(seat): ...

CONFLICT = OperationFailure("a conflict", 112, {"errorLabels": ["TransientTransactionError"]})

def seats():
    return [seat.number for seat in Seat.objects.order_by("number")]

def outbox_of(name, **options):
    return OutboxCollection(app, lambda: documents.get_collection(name), name=name, sweep_every=None, **options)

def refused(error, work):
    try:
        work()
    except error as raised:
        return str(raised)
    raise SystemExit(f"{error} was not raised")
"""


@pytest.fixture
def run_django(processes: Processes, database: Database[Any], mongo_url: str, redis_url: str) -> RunDjango:
    """Give a function that runs a program whose default database is "mongodb" or "relational"."""

    def run(program: str, default: str = "mongodb") -> None:
        ran = processes.python("django", "-c", BEGINNING + program, default, mongo_url, database.name, redis_url)
        assert ran.wait() == 0, ran.text

    return run
