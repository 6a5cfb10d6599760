"""The plugin beside those of other people: pytest-django, pytest-flask and pytest-xdist, in one project."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.acceptance.documentation.pages import ROOT, blocks
from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes

_SECONDS_MAX = 600.0

_CONFIGURATION = """
[tool.pytest.ini_options]
DJANGO_SETTINGS_MODULE = "settings"
mongo_celery_bridge = "stock.changes:bridge"
"""

_SETTINGS = """
SECRET_KEY = "-"
INSTALLED_APPS = ["stock"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    "mongodb": {"ENGINE": "django_mongodb_backend", "HOST": "mongodb://localhost:1", "NAME": "shop"},
}
"""

_MODELS = """
from django.db import models

class Seen(models.Model):
    key = models.IntegerField()

class Sale(models.Model):
    amount = models.IntegerField()
"""

_CHANGES = """
from celery import Celery
from mongo_celery import Bridge

app = Celery("stock", broker="redis://localhost:1/0")
bridge = Bridge(app, "mongodb://localhost:1/shop", name="stock", autodiscover=False)

@bridge.on_change("orders")
def note(change):
    from stock.models import Seen

    Seen.objects.create(key=change.document_key["_id"])

@bridge.on_change("*", operations={"insert"})
def count(change):
    from stock.models import Sale, Seen

    if change.ns["coll"] == Sale._meta.db_table:
        Seen.objects.create(key=change.full_document["amount"])
"""

_DJANGO_TESTS = """
import pytest
from stock.models import Seen

@pytest.mark.django_db
@pytest.mark.parametrize("key", [1, 2, 3])
def test_a_handler_writes_in_the_tests_own_transaction(key, mongo_celery_client, bridge_runner):
    mongo_celery_client.shop.orders.replace_one({"_id": key}, {"n": 1}, upsert=True)
    bridge_runner.deliver()
    assert [seen.key for seen in Seen.objects.all()] == [key]
"""

_STORED_TESTS = """
import pytest
from stock.models import Sale, Seen

@pytest.mark.django_db(transaction=True, databases=["default", "mongodb"])
@pytest.mark.parametrize("amount", [5, 6])
def test_a_model_in_mongodb_has_changes(amount, bridge_runner):
    Sale.objects.using("mongodb").create(amount=amount)
    bridge_runner.deliver()
    assert [seen.key for seen in Seen.objects.all()] == [amount]
"""

_FLASK_TESTS = """
import pytest
from celery import Celery, Task
from flask import Flask, current_app
from mongo_celery import Bridge

def create_app(url):
    flask = Flask("shop")
    flask.config["SEEN"] = []

    class ContextTask(Task):
        def __call__(self, *args, **kwargs):
            with flask.app_context():
                return super().__call__(*args, **kwargs)

    celery = Celery("shop", broker="redis://localhost:1/0", task_cls=ContextTask, set_as_current=False)
    bridge = Bridge(celery, url, name="shop", autodiscover=False)

    @bridge.on_change("shop.carts")
    def note(change):
        current_app.config["SEEN"].append(change.document_key["_id"])

    @flask.post("/carts/<int:key>")
    def add(key):
        bridge.collection("shop.carts").insert_one({"_id": key})
        return "", 204

    flask.extensions["bridge"] = bridge
    return flask

@pytest.fixture
def app(mongo_celery_emptied, mongo_celery_mongodb_url):
    return create_app(mongo_celery_mongodb_url)

@pytest.fixture
def mongo_celery_bridges(app):
    return [app.extensions["bridge"]]

@pytest.mark.parametrize("key", [1, 2, 3])
def test_a_handler_has_the_apps_context(key, app, bridge_runner):
    assert app.test_client().post(f"/carts/{key}").status_code == 204
    bridge_runner.deliver()
    assert app.config["SEEN"] == [key]
"""

(_CONFTEST,) = (
    each.code for each in blocks(ROOT / "docs/testing.md", "text") if each.code.startswith("# tests/conftest.py")
)

FILES = {
    "pyproject.toml": _CONFIGURATION,
    "settings.py": _SETTINGS,
    "stock/__init__.py": "",
    "stock/models.py": _MODELS,
    "stock/changes.py": _CHANGES,
    "tests/conftest.py": _CONFTEST,
    "tests/test_with_django.py": _DJANGO_TESTS,
    "tests/test_with_a_model_in_mongodb.py": _STORED_TESTS,
    "tests/test_with_flask.py": _FLASK_TESTS,
}


@pytest.mark.slow  # a whole suite with two processes and their servers
@pytest.mark.parametrize("processes_of_xdist", ["0", "2"])
def test_it_works_beside_other_plugins(processes: Processes, tmp_path: Path, processes_of_xdist: str) -> None:
    """Django's test database, Flask's context for each app that a factory makes, and servers for each process."""
    for plugin in ("pytest_django", "pytest_flask", "xdist", "django_mongodb_backend"):
        pytest.importorskip(plugin)
    require_server("mongod")
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    arguments = ("-n", processes_of_xdist, "-p", "no:cacheprovider", "-q", "--junitxml=found.xml", "-W", "error")

    done = processes.python("pytest", "-m", "pytest", "tests", *arguments, directory=tmp_path)

    assert done.wait(_SECONDS_MAX) == 0, done.text
    assert len([*ET.parse(tmp_path / "found.xml").iter("testcase")]) == 8
