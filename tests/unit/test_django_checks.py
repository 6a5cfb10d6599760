"""What `manage.py check` says of projects that are wrong in one way each; in a process that has Django's settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/django.md"
CHECKS = ROOT / "mongo_celery/contrib/django/checks.py"

PROGRAM = """
import json, sys, types
from django.conf import settings

SQL = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
MONGO = {"ENGINE": "django_mongodb_backend", "HOST": "mongodb://db1,db2/?replicaSet=rs0", "NAME": "shop"}
settings.configure(
    INSTALLED_APPS=["mongo_celery.contrib.django"],
    DATABASES={"default": SQL, "mongo": MONGO, "ports": {**MONGO, "HOST": "db8,db1:27018", "PORT": "27019"}},
    DATABASE_ROUTERS=["project.Router"],
    MONGO_CELERY_APP="project:sound",
    USE_TZ=True,
)
project = sys.modules["project"] = types.ModuleType("project")

class Router:
    def db_for_write(self, model, **_):
        return {"Order": "mongo", "Parcel": "ports"}.get(model.__name__, "default")
    db_for_read = db_for_write

project.Router = Router
import django
django.setup()
assert "mongo_celery.bridge" not in sys.modules, "Django's start is to stay quick"

from celery import Celery
from django.core.checks import run_checks
from django.db import models
from django.test import override_settings
from mongo_celery import Bridge, Outbox, OutboxCollection, TwoPhaseCommit

def model(name):
    meta = type("Meta", (), {"app_label": "shop"})
    return type(name, (models.Model,), {"Meta": meta, "__module__": "project"})

Order, Invoice, Parcel = model("Order"), model("Invoice"), model("Parcel")

class Fixup:
    def __init__(self, app): ...
    def autodiscover_tasks(self): return []

project.Fixup = Fixup
REDIS = "redis://localhost/0"
URL = "mongodb://DB2:27017/shop?replicaSet=rs0"

def app_of(name, url=URL, source=Order, fixups=("project:Fixup",), conf={}, bridge=True, **options):
    app = Celery("shop", broker=REDIS, fixups=set(fixups), set_as_current=False)
    app.conf.update(conf)
    setattr(project, name, app)
    if bridge:
        made = Bridge(app, url, **options)
        if source is not None:
            @made.on_change(source, name=f"of_{name}")
            def handler(change): ...
    return app

app_of("sound")
app_of("without_django", fixups=())
app_of("empty", bridge=False)
app_of("eager", conf={"task_always_eager": True})
Outbox(app_of("unswept", bridge=False), lambda: 1 / 0, name="orders", sweep_every=None)
Outbox(app_of("swept", bridge=False), lambda: 1 / 0, name="orders")
TwoPhaseCommit(app_of("unrecovered", bridge=False), lambda: 1 / 0, recover_every=None)
TwoPhaseCommit(app_of("recovered_by_a_listener"), lambda: 1 / 0, recover_every=None)
app_of("wrong_setting", conf={"mongo_celery_claim_tl": 3})
app_of("nowhere", url=None, source="orders")
app_of("bad_url", url="mongodb://user:pass:word@h", source="shop.orders")
app_of("idle", source=None)
app_of("relational", source=Invoice)
app_of("another_cluster", url="mongodb://db9/shop?replicaSet=rs0")
app_of("host_with_port", url="mongodb://db1:27018/shop", source=Parcel)
app_of("port_beside_hosts", url="mongodb://db8:27019/shop", source=Parcel)
app_of("another_port", url="mongodb://db8,db1/shop", source=Parcel)
app_of("several", url="mongodb+srv://db.example.org/shop", source="shop.*")
project.no_app = 7

def said(**settings_of):
    with override_settings(**settings_of):
        return [[each.id, str(each.obj), f"{each.msg} | {each.hint}"] for each in run_checks(tags=["mongo_celery"])]

found = {name: said(MONGO_CELERY_APP=f"project:{name}") for name in sys.argv[1].split()}
found["no_text"] = said(MONGO_CELERY_APP=["project:sound"])
found["not_said"] = said(MONGO_CELERY_APP=None)
found["broken_module"] = said(MONGO_CELERY_APP="absent.celery:app")
import pathlib, tempfile
with tempfile.TemporaryDirectory() as directory:
    pathlib.Path(directory, "handlers.py").write_text(
        "from project import sound\\nfrom mongo_celery import Bridge\\n\\n"
        "@Bridge(name='late').on_change('shop.orders', on_error='halt')\\ndef handler(change): ...\\n"
    )
    sys.path.insert(0, directory)
    found["wrong_handler"] = said(MONGO_CELERY_APP="handlers:sound")
run_checks(tags=["mongo_celery"], include_deployment_checks=False)
from django.db import connections
assert connections["mongo"].connection is None, "a check without --deploy has connected"
print(json.dumps(found))
"""

FINDINGS = {
    "E001": "no_text not_said",
    "E002": "no_app absent broken_module wrong_handler",
    "E003": "without_django",
    "W004": "empty",
    "W005": "eager",
    "W009": "unswept",
    "W010": "unrecovered",
    "E012": "wrong_setting",
    "E013": "nowhere bad_url",
    "W014": "idle",
    "E015": "relational",
    "W016": "another_cluster another_port",
}
SOUND = "sound swept recovered_by_a_listener host_with_port port_beside_hosts several"
EXPECTED = {name: [f"mongo_celery.{each}"] for each, names in FINDINGS.items() for name in names.split()}
EXPECTED |= {name: [] for name in SOUND.split()}
OF_SETTINGS = {"no_text", "not_said", "broken_module", "wrong_handler"}


def test_a_check_says_what_is_wrong_and_what_to_do() -> None:
    """Each id by a project that is wrong in this one way; a sound one is told nothing, and no password is shown."""
    names = " ".join(name for name in EXPECTED if name not in OF_SETTINGS)
    done = subprocess.run([sys.executable, "-c", PROGRAM, names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: [each[0] for each in found[name]] for name in EXPECTED} == EXPECTED
    assert "word@" not in done.stdout


def test_the_page_lists_every_id_and_no_other() -> None:
    """A message leads to its row."""
    made = set(re.findall(r'"(?:mongo_celery\.)?([EW]\d{3})"', CHECKS.read_text()))
    listed = set(re.findall(r"^\| `mongo_celery\.([EW]\d{3})`", PAGE.read_text(), re.MULTILINE))
    assert made == listed
    assert FINDINGS.keys() == {each for each in made if each[1] == "0"}
