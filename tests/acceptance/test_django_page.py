"""The project of docs/django.md runs as it stands there, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery.mongo.opening import DEFAULT_DATABASE
from tests.acceptance.documentation.pages import ROOT, addressed, blocks
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, wait_for
from tests.rig.project import QUIET

PAGE = ROOT / "docs/django.md"

TESTED = """
from shop.settings import *
INSTALLED_APPS += ["audit"]
DATABASES["default"]["NAME"] = {database!r}
DATABASES["books"] = {{"ENGINE": "django.db.backends.sqlite3", "NAME": {books!r}}}
CELERY_MONGO_CELERY_DATABASE = {state!r}
CELERY_MONGO_CELERY_LEASE_TTL = 2
"""
"""The page's settings, with databases of the test's own, and one that is relational."""

AUDIT = """
from django.db import connection, connections
from shop.celery import bridge
from shop.models import Order

@bridge.on_change(Order)
def audit(change):
    books = connections["books"]
    connection.database["audit"].insert_one({"was_open": books.connection is not None})
    books.ensure_connection()
"""
"""Another application's handler, which looks whether Celery has closed what the one before it has opened."""

SELL = """
import django, sys
django.setup()
from shop.celery import outbox
from shop.models import Seat
from shop.orders import sell
from tests.fixtures.process import wait_for

for number in (1, 2):
    Seat.objects.create(number=number)
    print(sell(number, "Ann").pk)
wait_for(lambda: outbox.status().pending == 0)
"""
"""A process that lives until its outbox has sent what it has stored: no beat runs, which would see to the rest."""


def write_project(directory: Path, *urls: str) -> None:
    code = "".join(addressed(block.code, *urls) for block in blocks(PAGE, "python"))
    parts = re.split(r"^# (\S+\.py)\n", code, flags=re.MULTILINE)
    for path, text in zip(parts[1::2], parts[2::2], strict=True):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)


@pytest.mark.slow
def test_the_project_of_the_page_runs(
    processes: Processes,
    database: Database[Any],
    state_database: str,
    mongo_url: str,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """
    Listener, worker, checks that miss beat; a sale, its task and its summary, by handlers of two applications.

    In short, without processes: tests/integration/test_django_changes.py, and tests/unit/test_autodiscovery.py.
    """
    project = tmp_path / "project"
    write_project(project, mongo_url, redis_url)
    names = {"database": database.name, "state": state_database, "books": str(tmp_path / "books.sqlite3")}
    (project / "shop/tested.py").write_text(TESTED.format(**names))
    (project / "audit").mkdir()
    (project / "audit/__init__.py").touch()
    (project / "audit/changes.py").write_text(AUDIT)

    def run(name: str, *words: str) -> Any:
        environment = {"DJANGO_SETTINGS_MODULE": "shop.tested"}
        return processes.python(name, *words, environment=environment, directory=project)

    checked = run("check", "-m", "django", "check", "--deploy", "--tag", "mongo_celery")
    relational = processes.python(
        "relational",
        *("-m", "django", "check", "--database", "default", "--database", "mongodb"),
        environment={"DJANGO_SETTINGS_MODULE": "shop.relational"},
        directory=project,
    )
    assert relational.wait() == 0, relational.text
    assert "no issues" in relational.text
    assert checked.wait() == 1, checked.text
    assert not re.search(r"mongo_celery\.[EW]0", checked.text), "the page's settings and code are sound"
    assert "outbox outbox: (mongo_celery.E103) sweep: " in checked.text

    listener = run("listener", "-m", "celery", "-A", "shop", "listener")
    worker = run("worker", "-m", "celery", "-A", "shop", "worker", *QUIET, "-c", "1")
    sold = run("sell", "-c", SELL)
    assert sold.wait() == 0, sold.text

    orders = sold.text.split()
    audited = database["audit"]

    def are_done() -> bool:
        assert listener.running, "the listener has ended"
        assert worker.running, "the worker has ended"
        confirmed = database["shop_order"].count_documents({"confirmed": True})
        titles = [each["title"] for each in database["shop_summary"].find()]
        is_audited = audited.count_documents({}) >= len(orders)
        return is_audited and (confirmed, titles) == (2, ["Ann: 12.50 EUR (confirmed)"] * 2)

    wait_for(are_done, message=lambda: f"{[*database['shop_summary'].find()]}, {[*audited.find()]}")
    assert {str(each["_id"]) for each in database["shop_summary"].find()} == set(orders)
    assert {each["was_open"] for each in audited.find()} == {False}
    assert [seat["customer"] for seat in database["shop_seat"].find()] == ["Ann", "Ann"]
    swept, ours = (
        database.client[DEFAULT_DATABASE]["outbox_sweeps"],
        {"_id": f"{database.name}.shop_outbox/pendingEvents"},
    )
    wait_for(lambda: swept.count_documents(ours) == 1, message="without a beat, the listener asks for sweeps")


VIEW = """
import re, sys
from types import ModuleType
from celery import Celery
from django.conf import settings
from django.test import RequestFactory
from mongo_celery import Bridge
from tests.acceptance.documentation.pages import blocks
from tests.acceptance.test_django_page import PAGE
from tests.fixtures.process import wait_for

url, broker = sys.argv[1:]
settings.configure()
app = Celery("shop", broker=broker)
bridge = Bridge(app, url, database="mongo_celery_view")
shop, tasks = ModuleType("shop.celery"), ModuleType("shop.tasks")
shop.bridge, shop.orders = bridge, bridge.outbox("shop.orders", name="orders")

@app.task(name="confirm")
def confirm(order): ...

tasks.confirm = confirm
sys.modules |= {"shop.celery": shop, "shop.tasks": tasks}
(code,) = (block.code for block in blocks(PAGE, "python") if block.code.startswith("# shop/views.py"))
names = {}
exec(code, names)
answer = names["place"](RequestFactory().post("/orders", {"customer": "Ann"}))
assert answer.status_code == 201, answer.content
wait_for(lambda: shop.orders.status().pending == 0)
assert bridge.client.shop.orders.find_one({}, {"_id": 0}) == {"customer": "Ann", "status": "new"}
"""
"""The page's view for projects without models, and what has come of a request."""


def test_the_view_of_the_page_sends_its_task(
    mongo_client: MongoClient[Any], mongo_url: str, redis_url: str, redis_client: Any, processes: Processes
) -> None:
    """It answers with the id, and the dispatcher is told of it."""
    done = processes.python("view", "-c", VIEW, mongo_url, redis_url)
    assert done.wait() == 0, done.text
    assert redis_client.llen("celery") == 1
    for name in ("shop", "mongo_celery_view"):
        empty(mongo_client, name)


def test_the_commands_of_the_page_are_those_of_django() -> None:
    """Every word after `manage.py` is a command of Django."""
    typed = set(re.findall(r"manage\.py (\w+)", PAGE.read_text()))
    assert typed <= {"check", "createsuperuser", "makemigrations", "migrate", "shell", "test"}
