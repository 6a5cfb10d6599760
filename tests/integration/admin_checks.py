"""
Checks of the admin pages, and the addresses that they are at: `test_django_admin.py` has them run in a process that
has Django's settings. What stands and what was set aside is a real bridge's, led in this process.
"""

# ruff: noqa: E402 - Django has to be set up before what needs it is imported
from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import count
from threading import Barrier
from typing import Any, Protocol
from urllib.parse import quote

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.integration.admin_project")

import django
import pytest
from bson import Code, Int64, ObjectId, json_util
from celery import Celery
from pymongo import MongoClient
from pymongo.errors import ServerSelectionTimeoutError

django.setup()

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.checks import run_checks
from django.core.management import call_command
from django.template import Context, Template
from django.test import Client
from django.test.utils import override_settings, setup_test_environment
from django.urls import path

from mongo_celery import Bridge, Outbox, Participant
from mongo_celery.bridge.operations.acts import read_history
from mongo_celery.bridge.operations.bridge_snapshot import HandlerStatus, PartitionStatus
from mongo_celery.bridge.operations.letter_commands import find
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.wiring import BRIDGES as BRIDGES_OF
from mongo_celery.contrib.django.admin.bridge_pages import _partition
from mongo_celery.contrib.django.admin.operations_admin import OperationsAdmin, listed
from mongo_celery.contrib.django.admin.words import document, shown
from mongo_celery.errors import CommandRefusedError
from mongo_celery.outbox import health
from mongo_celery.outbox import replay as outbox_commands
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.registry import OUTBOXES as OUTBOXES_OF
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.testing import BridgeRunner
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS
from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.integration import admin_project as project

urlpatterns = [path("admin/", admin.site.urls)]

HALTED = PartitionStatus(
    index=1024, queue="shop.1024", state="halted", committed=0, token=None, term=1, fencing_token=1
)
HOSTILE = "<img src=x onerror=alert(1)>\u202etxt"
CARD = "card-4111"
NO_IDS = ("99999999999999999999", '"\\ud800"', '{"a\\u0000": 1}', '{"$numberDecimal": "x"}', "[" * 3000)
"""JSON, or near to it, that BSON cannot hold."""
PAGES = ("changebridge", "changedeadletter", "taskoutbox", "twophasetransaction")
BRIDGES, LETTERS, OUTBOXES, TRANSACTIONS = (f"/admin/mongo_celery/{name}/" for name in PAGES)
ACTIONS = {
    BRIDGES: {"action": "pause", "bridge": "shop", "handler": "stop"},
    LETTERS: {"action": "discard", "bridge": "shop"},
    OUTBOXES: {"action": "sweep", "outbox": "orders"},
    TRANSACTIONS: {"action": "cancel", "name": "transfers"},
}


class Browser(Protocol):
    """Django's test client, as far as it is used here."""

    def get(self, address: str, data: dict[str, str] = ...) -> Any: ...
    def post(self, address: str, data: dict[str, Any] = ..., *, follow: bool = ...) -> Any: ...


@pytest.fixture(scope="session", autouse=True)
def _site() -> None:
    setup_test_environment()
    call_command("migrate", verbosity=0)


@pytest.fixture(autouse=True)
def runner() -> Iterator[BridgeRunner]:
    """A led bridge, and empty collections."""
    project.failing.clear()
    project.handled.clear()
    LogEntry.objects.all().delete()
    with BridgeRunner(project.bridge, url=project.URL) as running:
        yield running
    for name in project.database.list_collection_names():
        project.database[name].delete_many({})
    for stored in project.outbox.dead_letters.find():
        project.outbox.dead_letters.remove(str(stored["_id"]).rpartition("/")[2])


def user(name: str, *permissions: str, **options: Any) -> Browser:
    """A client that is logged in as staff with these permissions."""
    found, _ = User.objects.get_or_create(username=name, defaults={"is_staff": True})
    found.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert found.user_permissions.count() == len(permissions), "each permission is there after migrate"
    client: Any = Client(**options)
    client.force_login(found)
    browser: Browser = client
    return browser


def named(verb: str) -> list[str]:
    return [f"{verb}_{page}" for page in PAGES]


def viewer() -> Browser:
    return user("viewer", *named("view"))


def operator(**options: Any) -> Browser:
    return user("operator", *named("view"), *named("act_on"), **options)


def auditor() -> Browser:
    return user("auditor", *named("view"), *named("see_contents_of"))


def fail(running: BridgeRunner, collection: str, number: Any = 1, error: str = "no") -> None:
    """Have the handler of a collection fail."""
    project.failing[:] = [error]
    project.database[collection].insert_one({"_id": number, "card": CARD})
    running.deliver(raises=False)
    project.failing.clear()


def deliver(running: BridgeRunner, numbers: list[int]) -> None:
    """Until these are handled: a listener learns in a moment what was asked for."""
    wait_for(lambda: running.deliver() and sorted(project.handled) == numbers)


def letters() -> list[str]:
    """The dead letters that are there."""
    return [each.document_id for each in find(project.bridge.wiring, Selection(), 0).letters]


def states() -> dict[str, str]:
    """How partitions stand, by handler."""
    handlers = read_snapshot(project.bridge.wiring).handlers
    return {handler.name: each.state for handler in handlers for each in handler.partitions}


def outbox_letter(identity: str = "o-1", error: str = "no") -> str:
    """A real entry that could not be published; what it was to send lies in its dead letter alone."""
    orders = project.database["orders"]
    task = project.confirm.s(identity, CARD)
    orders.insert_one(project.outbox.with_tasks({"_id": identity}, [task]))
    (entry,) = orders.find_one({"_id": identity})["pendingEvents"]["events"]  # type: ignore[index]
    project.outbox.dead_letters.add(identity, Entry.from_document(entry), ValueError(error))
    orders.update_one({"_id": identity}, {"$unset": {"pendingEvents": 1}})
    return str(entry["id"])


def transaction(identity: Any = "t-1", **options: Any) -> Any:
    """One that was stored, and not begun; or that has run."""
    accounts = project.database["accounts"]
    for account in ("A", "B"):
        accounts.update_one({"_id": account}, {"$setOnInsert": {"balance": 100}}, upsert=True)
    parts = [
        Participant(accounts, "A", apply={"$inc": {"balance": -7}}),
        Participant(accounts, "B", apply={"$inc": {"balance": 7}}),
    ]
    return project.transfers.begin(parts, id=identity, **options)


def confirmed(browser: Browser, page: str, **fields: Any) -> Any:
    """Post an action, and confirm it; the page behind it."""
    return done_from(browser, f"{page}act/", **fields)


def done_from(browser: Browser, act_url: str, **fields: Any) -> Any:
    """The same, where the form of a page posts to."""
    asked = browser.post(act_url, fields)
    assert asked.status_code == 200, asked.headers
    kept = dict(asked.context["fields"]) if len(asked.context["fields"]) else {}
    many = {name: value for name, value in fields.items() if isinstance(value, list)}
    return browser.post(asked.context["act_url"], {**fields, **kept, **many, "confirmed": "yes"}, follow=True)


def stored_transaction(identity: str, state: str, day: int = 1, **fields: Any) -> str:
    """One that somebody else has written, with its last step on some day."""
    at = datetime(2026, 1, day, tzinfo=UTC)
    project.database["transactions"].insert_one({"_id": identity, "state": state, "lastModified": at, **fields})
    return identity


def said(page: Any) -> list[str]:
    return [str(message) for message in page.context["messages"]]


# -- who may see, and who may act --------------------------------------------------------------------


def test_staff_without_a_permission_sees_nothing_of_it() -> None:
    """Neither in the index, nor by an address; whoever is not logged in is asked to."""
    nobody = user("nobody")
    assert "mongo_celery" not in nobody.get("/admin/").content.decode()
    for page in (BRIDGES, LETTERS, OUTBOXES, TRANSACTIONS):
        for address in (page, f"{page}show/"):
            assert nobody.get(address).status_code == 403
            assert Client().get(address).headers["Location"].startswith("/admin/login/")
        assert nobody.post(f"{page}act/", {**ACTIONS[page], "confirmed": "yes"}).status_code == 403
    one = user("one", "view_taskoutbox")
    index = one.get("/admin/").content.decode()
    assert OUTBOXES in index
    assert BRIDGES not in index
    assert one.get(BRIDGES).status_code == 403


def test_a_permission_to_act_without_one_to_view_is_none() -> None:
    """What was never shown cannot be confirmed."""
    blind = user("blind", *named("act_on"))
    for page, fields in ACTIONS.items():
        assert blind.post(f"{page}act/", {**fields, "confirmed": "yes"}).status_code == 403
    assert states() == {"collect": "flowing", "stop": "flowing"}


def test_who_may_only_view_changes_nothing_and_sees_no_contents(runner: BridgeRunner) -> None:
    """Neither documents nor arguments nor amounts, and no button."""
    fail(runner, "halting")
    fail(runner, "letters")
    entry, identity = outbox_letter(), transaction()
    (letter,) = letters()
    browser = viewer()
    shown = [
        browser.get(BRIDGES),
        browser.get(f"{BRIDGES}show/", {"bridge": "shop"}),
        browser.get(LETTERS),
        browser.get(f"{LETTERS}show/", {"bridge": "shop", "letter": letter}),
        browser.get(OUTBOXES),
        browser.get(f"{OUTBOXES}show/", {"outbox": "orders"}),
        browser.get(f"{OUTBOXES}show/", {"outbox": "orders", "letter": entry}),
        browser.get(TRANSACTIONS),
        browser.get(f"{TRANSACTIONS}show/", {"name": "transfers", "id": f'"{identity}"'}),
    ]
    for page in shown:
        assert page.status_code == 200
        assert page.headers["X-Frame-Options"] == "DENY"
        text = page.content.decode()
        assert CARD not in text
        assert "$inc" not in text
        assert 'name="action"' not in text
    assert "ValueError: no" in shown[1].content.decode()
    for address, fields in ACTIONS.items():
        for more in ({}, {"confirmed": "yes"}):
            assert browser.post(f"{address}act/", {**fields, "letter": letter, **more}).status_code == 403
    assert letters() == [letter]
    assert not LogEntry.objects.exists()


def test_contents_are_shown_to_who_may_see_them(runner: BridgeRunner) -> None:
    """The change, the entry, and the transaction as it is stored; not to who may only act."""
    fail(runner, "halting")
    fail(runner, "letters")
    entry, identity = outbox_letter(), transaction()
    (letter,) = letters()
    addresses = {
        f"{LETTERS}show/?bridge=shop&letter={quote(letter)}": CARD,
        f"{OUTBOXES}show/?outbox=orders&letter={entry}": CARD,
        f"{TRANSACTIONS}show/?name=transfers&id=%22{identity}%22": "$inc",
    }
    for address, secret in addresses.items():
        assert secret in auditor().get(address).content.decode()
        assert secret not in operator().get(address).content.decode()
    head = {"action": "skip", "bridge": "shop", "handler": "stop", "partition": "0"}
    assert CARD not in operator().post(f"{BRIDGES}act/", head).content.decode()
    both = user("both", *named("view"), *named("act_on"), *named("see_contents_of"))
    assert CARD in both.post(f"{BRIDGES}act/", head).content.decode()


def test_nothing_of_djangos_own_asks_for_the_rows_of_the_pages_models() -> None:
    """They have no tables: for the admin's link to an object they have none, and `dumpdata` goes past them."""
    types = ContentType.objects.filter(app_label="mongo_celery")
    assert sorted(each.model for each in types) == sorted(PAGES)
    for each in types:
        assert user("nobody").get(f"/admin/r/{each.pk}/1/").status_code == 404
        assert each.get_all_objects_for_this_type().count() == 0
    dumped = io.StringIO()
    call_command("dumpdata", "auth", "mongo_celery", stdout=dumped)
    assert {each["model"] for each in json.loads(dumped.getvalue())} >= {"auth.permission"}
    for page in PAGES:
        for address in ("1/history/", "1/delete/", "1/change/", "add/"):
            assert user("root", *named("view")).get(f"/admin/mongo_celery/{page}/{address}").status_code == 404
    assert [each for each in run_checks() if (each.id or "").startswith("models.")] == []


# -- how something is done ---------------------------------------------------------------------------


def test_nothing_is_done_by_a_get_or_without_the_token(runner: BridgeRunner) -> None:
    """An address that somebody is made to follow, and a form of another site."""
    fail(runner, "letters")
    before = letters()
    strict = operator(enforce_csrf_checks=True)
    for page, fields in ACTIONS.items():
        whole = {**fields, "letter": before[0], "confirmed": "yes"}
        assert operator().get(f"{page}act/", whole).status_code == 405
        assert strict.post(f"{page}act/", whole).status_code == 403
        form = strict.get(page).content.decode()
        assert "csrfmiddlewaretoken" in form or "<form" not in form or 'method="post"' not in form
    assert letters() == before
    assert states()["stop"] == "flowing"
    assert not LogEntry.objects.exists()


def test_an_action_is_asked_about_then_done_and_logged() -> None:
    """Pause and resume, of a handler and of a partition; the log has who, what and how it ended."""
    browser = operator()
    pause = {"action": "pause", "bridge": "shop", "handler": "stop"}
    asked = browser.post(f"{BRIDGES}act/", pause)
    assert "Pause?" in asked.content.decode()
    assert "csrfmiddlewaretoken" in asked.content.decode()
    assert states()["stop"] == "flowing"
    assert not LogEntry.objects.exists()

    assert said(confirmed(browser, BRIDGES, **pause, reason="night <b>"))[0].startswith("stop: paused 0")
    record = read_history(project.bridge.wiring)[-1]
    assert (record["command"], record["reason"]) == ("pause stop", "night <b>")
    assert record["by"] == "operator (Django)"
    assert states() == {"collect": "flowing", "stop": "paused"}
    (entry,) = LogEntry.objects.all()
    assert (entry.user.username, entry.object_repr) == ("operator", "shop: stop")
    assert entry.get_change_message().startswith("pause: stop: paused 0")
    assert entry.get_change_message().endswith(" Reason: night <b>")

    confirmed(browser, BRIDGES, action="resume", bridge="shop", handler="stop", partition="0")
    assert states()["stop"] == "flowing"
    retry = {"action": "retry", "bridge": "shop", "handler": "stop", "partition": "0", "confirmed": "yes"}
    assert said(browser.post(f"{BRIDGES}act/", retry, follow=True)) != []
    assert "nothing to retry" in LogEntry.objects.latest("pk").change_message


def test_a_halted_change_is_retried_or_skipped(runner: BridgeRunner) -> None:
    """The very change that the confirmation has shown: where another one stands there now, nothing is moved."""
    fail(runner, "halting")
    browser = operator()
    page = browser.get(f"{BRIDGES}show/", {"bridge": "shop"}).content.decode()
    assert "celery -A tests.integration.admin_project:app changes retry" in page
    with override_settings(USE_THOUSAND_SEPARATOR=True):
        text = Template("{{ each.index }}").render(
            Context({"each": _partition(HandlerStatus(name="stop", state="halted"), HALTED)})
        )
    assert text == "1024", "what a form names is no number of the user's language"
    place = {"bridge": "shop", "handler": "stop", "partition": "0"}
    old = browser.post(f"{BRIDGES}act/", {"action": "skip", **place}).context["fields"]
    confirmed(browser, BRIDGES, action="retry", **place)
    deliver(runner, [1])

    fail(runner, "halting", 2)
    late = browser.post(f"{BRIDGES}act/", {**dict(old), "action": "skip", "confirmed": "yes"}, follow=True)
    assert len(said(late)) == 1
    assert states()["stop"] == "halted"
    confirmed(browser, BRIDGES, action="skip", **place)
    assert states()["stop"] == "flowing"
    assert len(letters()) == 1
    assert "ended with an error" in LogEntry.objects.order_by("-pk")[1].change_message


def test_dead_letters_are_replayed_and_discarded(runner: BridgeRunner) -> None:
    """Those that were chosen, and no other."""
    for number in (1, 2, 3):
        fail(runner, "letters", number)
    first, second, third = letters()
    browser = operator()
    page = browser.get(LETTERS, {"bridge": "shop", "handler": "collect", "key": "2"}).content.decode()
    assert second in page
    assert first not in page

    told = said(confirmed(browser, LETTERS, action="replay", bridge="shop", letter=[first, third]))
    assert "2 of 2 dead letters are to be replayed" in told[0]
    assert f"Asked for: {first}, {third}." in LogEntry.objects.get().change_message
    deliver(runner, [1, 3])
    assert letters() == [second]

    confirmed(browser, LETTERS, action="discard", bridge="shop", letter=[second])
    assert letters() == []
    assert second in LogEntry.objects.latest("pk").object_id
    late = browser.post(
        f"{LETTERS}act/", {"action": "discard", "bridge": "shop", "letter": second, "confirmed": "yes"}, follow=True
    )
    assert "not there any more" in said(late)[0]


def test_a_form_that_names_nothing_or_too_much_is_refused(runner: BridgeRunner) -> None:
    """Beginnings of ids, other bridges, operators of queries, unknown actions: one sentence, nothing changed."""
    fail(runner, "letters")
    (letter,) = letters()
    identity = transaction()
    browser = operator()
    wrong: list[tuple[str, dict[str, Any]]] = [
        (LETTERS, {"action": "discard", "bridge": "shop"}),
        (LETTERS, {"action": "discard", "bridge": "shop", "letter": letter[:-2]}),
        (LETTERS, {"action": "discard", "bridge": "shop", "letter": "shop/collect/"}),
        (LETTERS, {"action": "discard", "bridge": "other", "letter": letter}),
        (LETTERS, {"action": "discard", "bridge": "shop", "letter": ["x"] * 101 + [letter]}),
        (LETTERS, {"action": "burn", "bridge": "shop", "letter": letter}),
        (BRIDGES, {"action": "pause", "bridge": "shop", "handler": "nobody"}),
        (BRIDGES, {"action": "pause", "bridge": "shop", "handler": "stop", "partition": "-1"}),
        (OUTBOXES, {"action": "discard", "outbox": "orders", "letter": "none"}),
        (TRANSACTIONS, {"action": "cancel", "name": "transfers", "id": '{"$gt": ""}'}),
        (TRANSACTIONS, {"action": "cancel", "name": "transfers", "id": "not json"}),
        *((TRANSACTIONS, {"action": "cancel", "name": "transfers", "id": text}) for text in NO_IDS),
        (TRANSACTIONS, {"action": "compensate", "name": "transfers", "id": f'"{identity}"'}),
    ]
    for page, fields in wrong:
        answer = browser.post(f"{page}act/", {**fields, "confirmed": "yes"}, follow=True)
        assert answer.status_code == 200
        assert len(said(answer)) == 1, (fields, said(answer))
    assert letters() == [letter]
    assert states() == {"collect": "flowing", "stop": "flowing"}
    assert project.transfers.read(identity).state == "initial"
    for address in (f"{BRIDGES}show/", f"{LETTERS}show/?bridge=shop", f"{OUTBOXES}show/", f"{TRANSACTIONS}show/?id=1"):
        assert browser.get(address).context["sentence"], address
    twice = f"{LETTERS}show/?bridge=shop&letter={quote(letter)}&letter={quote(letter)}"
    assert browser.get(twice).status_code == 200
    operators = quote('{"$gt": ""}')
    for text in NO_IDS:
        assert browser.get(LETTERS, {"key": text}).status_code == 200
        assert browser.get(f"{TRANSACTIONS}show/", {"name": "transfers", "id": text}).context["sentence"]
        assert browser.get(TRANSACTIONS, {"name": "transfers", "id": text}).status_code == 200
    for address in (
        f"{LETTERS}?key={operators}",
        f"{LETTERS}?handler=no",
        f"{LETTERS}?page=-1",
        f"{OUTBOXES}show/?outbox=orders&page=999999999999",
        f"{TRANSACTIONS}?state=no",
    ):
        assert browser.get(address).status_code == 200


def test_a_letter_that_somebody_else_has_written_does_not_hide_the_others() -> None:
    """Shown as far as it goes, and discarded."""
    entry = outbox_letter()
    kept = project.outbox.dead_letters
    (sound,) = kept.find()
    database, _, name = kept.full_name.partition(".")
    strange: list[dict[str, Any]] = [
        {"at": "yesterday"},
        {"entry": [1]},
        {"entry": {"attempts": "x", "bind": 3}},
    ]
    for number, wrong in enumerate(strange):
        identity = str(sound["_id"]).replace(entry, str(number))
        project.client[database][name].insert_one({"_id": identity, "outbox": sound["outbox"], **wrong})
    browser = operator()
    page = browser.get(f"{OUTBOXES}show/", {"outbox": "orders"}).content.decode()
    assert entry in page
    names = ["0", "1", "2"]
    for name in names:
        assert browser.get(f"{OUTBOXES}show/", {"outbox": "orders", "letter": name}).status_code == 200
    assert len(said(confirmed(browser, OUTBOXES, action="replay", outbox="orders", letter=names))) == 4
    confirmed(browser, OUTBOXES, action="discard", outbox="orders", letter=names)
    assert kept.count() == 1


def test_a_list_has_pages(runner: BridgeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, each can be had; the list of an outbox leaves the payloads where they are."""
    monkeypatch.setattr(OperationsAdmin, "list_per_page", 2)
    for number in (1, 2, 3):
        fail(runner, "letters", number)
        outbox_letter(f"o-{number}")
    entries = [str(each["_id"]).rpartition("/")[2] for each in project.outbox.dead_letters.find()]
    assert [set(each["entry"]) & {"payload"} for each in project.outbox.dead_letters.find()] == [set()] * 3
    assert "payload" in project.outbox.dead_letters.get(entries[0])["entry"]  # type: ignore[index]
    several = [
        stored_transaction(f"tx-{number}", state, number)
        for number, state in ((1, "initial"), (2, "pending"), (3, "initial"))
    ]
    final = [transaction(f"tx-done-{number}") for number in (1, 2, 3)]
    for identity in final:
        project.transfers.run(identity)
    browser = operator()
    lists: list[tuple[str, dict[str, str], list[str]]] = [
        (LETTERS, {"bridge": "shop", "handler": "collect"}, letters()),
        (f"{OUTBOXES}show/", {"outbox": "orders"}, entries),
        (TRANSACTIONS, {"name": "transfers"}, several),
        (TRANSACTIONS, {"name": "transfers", "state": "done"}, final),
    ]
    for address, asked, (*first, last) in lists:
        page = browser.get(address, asked)
        assert [each in page.content.decode() for each in (*first, last)] == [True, True, False]
        assert "1 to 2" in page.content.decode()
        assert page.context["before_url"] == ""
        page = browser.get(page.context["after_url"])
        assert [each in page.content.decode() for each in (*first, last)] == [False, False, True]
        assert "3 to 3" in page.content.decode()
        assert page.context["after_url"] == ""
        before = browser.get(page.context["before_url"])
        assert [each in before.content.decode() for each in (*first, last)] == [True, True, False]
        assert browser.get(address, {**asked, "page": "9"}).context["before_url"]
    for address, asked, _ in lists[:2]:
        assert 'data-all="letter"' in browser.get(address, asked).content.decode()
        assert browser.get(browser.get(address, {**asked, "page": "9"}).context["before_url"]).context["letters"]


def test_lists_and_counts_read_no_more_dead_letters_than_they_show(
    runner: BridgeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be of megabytes, and there may be many: all else is known from indexes, and nothing is sorted."""
    monkeypatch.setattr(OperationsAdmin, "list_per_page", 2)
    for number in range(5):
        fail(runner, "letters", number)
        outbox_letter(f"o-{number}")
    browser = operator()
    databases = [project.client[project.bridge.options.database], project.client["mongo_celery"]]
    for address in (
        BRIDGES, f"{BRIDGES}show/?bridge=shop", f"{LETTERS}?page=1", f"{LETTERS}?handler=collect",
        OUTBOXES, f"{OUTBOXES}show/?outbox=orders&page=1",
    ):  # fmt: skip
        for database in databases:
            database.command({"profile": 2})
        assert browser.get(address).context.get("sentence", "") == ""
        read: list[Any] = []
        for database in databases:
            database.command({"profile": 0})
            read += database["system.profile"].find({"ns": {"$regex": "dead_letters$"}, "docsExamined": {"$exists": 1}})
            database.drop_collection("system.profile")
        assert read
        assert max(each["docsExamined"] for each in read) <= 2, address
        assert not any(each.get("hasSortStage") for each in read), address


def test_an_action_leads_back_to_the_list_on_which_it_was_chosen(
    runner: BridgeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what was asked for there, and to its page, also from the page of a single one; done, refused or left."""
    monkeypatch.setattr(OperationsAdmin, "list_per_page", 1)
    for number in (1, 2, 3, 4):
        fail(runner, "letters", number)
        outbox_letter(f"o-{number}")
        transaction(f"t-{number}")
    browser = operator()
    letters_ = {"action": "discard", "bridge": "shop"}
    entries = {"action": "discard", "outbox": "orders"}
    lists: list[tuple[str, str, dict[str, Any]]] = [
        (f"{LETTERS}?bridge=shop&handler=collect&page=1", "document_id", letters_),
        (f"{OUTBOXES}show/?outbox=orders&page=1", "id", entries),
        (f"{TRANSACTIONS}?name=transfers&state=initial&page=1", "", {"action": "cancel", "name": "transfers"}),
    ]
    for address, key, fields in lists:
        page = browser.get(address)
        (row,) = page.context["letters" if key else "transactions"]
        if key:
            asked = browser.post(page.context["act_url"], {**fields, "letter": row[key]})
            assert asked.context["place_url"] == address
            assert browser.post(page.context["act_url"], fields).headers["Location"] == address, "nothing was chosen"
            answer = done_from(browser, page.context["act_url"], **fields, letter=row[key])
            assert answer.redirect_chain[0][0] == address
            (row,) = browser.get(address).context["letters"]
        details = browser.get(row["url"])
        named = {"letter": row[key]} if key else {"id": details.context["id"]}
        answer = done_from(browser, details.context["act_url"], **fields, **named)
        assert answer.redirect_chain[0][0] == address
    for given, address in (({}, TRANSACTIONS), ({"id": "t-1"}, f"{TRANSACTIONS}?id=t-1")):
        (row,) = browser.get(TRANSACTIONS, given).context["transactions"]
        details = browser.get(row["url"])
        answer = browser.post(details.context["act_url"], {"action": "burn"})
        assert answer.headers["Location"] == address, "a list that was asked for nothing is found as it was, too"
    act_url = browser.get(OUTBOXES).context["act_url"]
    assert done_from(browser, act_url, action="sweep", outbox="orders").redirect_chain[0][0] == OUTBOXES
    act_url = browser.get(f"{BRIDGES}show/?bridge=shop").context["act_url"]
    answer = done_from(browser, act_url, action="pause", bridge="shop", handler="stop")
    assert answer.redirect_chain[0][0] == f"{BRIDGES}show/?bridge=shop"
    link = f"{LETTERS}?bridge=shop&amp;handler=collect"
    assert link in answer.content.decode()
    assert link not in user("one", "view_changebridge").get(f"{BRIDGES}show/?bridge=shop").content.decode()


def test_a_page_says_what_is_kept_and_that_the_project_has_none_of_its_kind(
    runner: BridgeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wrong with a project that has bridges, and no transactions."""
    fail(runner, "letters")
    (letter,) = letters()
    page = operator().get(f"{LETTERS}show/", {"bridge": "shop", "letter": letter})
    assert "<td>event, " in page.content.decode()
    assert len(page.context["title"]) < len("Dead letter ") + 20
    asked: list[object] = []
    monkeypatch.setattr("mongo_celery.contrib.django.admin.outbox_pages.ask_broker", asked.append)
    other = Celery("other", broker="memory://", set_as_current=False)
    second = Outbox(other, lambda: project.database["parcels"], name="second", at_once=False, sweep_every=None)
    monkeypatch.setattr(type(OUTBOXES_OF), "of", lambda *_: [project.outbox, second])
    assert len(operator().get(OUTBOXES).context["outboxes"]) == 2
    assert len(asked) == 1, "a broker that is away is waited for once"
    for registry, address in ((TWO_PHASE_COMMITS, TRANSACTIONS), (OUTBOXES_OF, OUTBOXES)):
        monkeypatch.setattr(type(registry), "of", lambda *_: [])
        page = operator().get(address)
        assert f"has no {registry.kind}." in page.content.decode()
        assert page.context["sentence"] == ""


# -- outboxes and transactions -----------------------------------------------------------------------


def test_entries_of_an_outbox_are_put_back_swept_and_discarded() -> None:
    """By the outbox's own commands; one whose document is gone stays, unless it is to be published all the same."""
    first, second, third = (outbox_letter(f"o-{number}") for number in (1, 2, 3))
    project.database["orders"].delete_one({"_id": "o-2"})
    browser = operator()
    told = said(confirmed(browser, OUTBOXES, action="replay", outbox="orders", letter=[first, second]))
    assert told[0] == f"Pending again: {first}."
    assert "is gone" in told[1]
    assert project.outbox.status().pending == 1
    assert said(confirmed(browser, OUTBOXES, action="sweep", outbox="orders"))[0].endswith(
        "of orders, 0 became dead letters."
    )
    confirmed(browser, OUTBOXES, action="discard", outbox="orders", letter=[second])
    assert [each["_id"].rpartition("/")[2] for each in project.outbox.dead_letters.find()] == [third]
    assert [each.change_message.partition(":")[0] for each in LogEntry.objects.order_by("pk")] == [
        "replay",
        "sweep",
        "discard",
    ]


def test_a_transaction_is_run_taken_back_and_canceled() -> None:
    """By its coordinator; who did it is kept with the transaction."""
    browser = operator()
    done, left = transaction("t-1"), transaction({"n": 2})
    assert said(confirmed(browser, TRANSACTIONS, action="run", name="transfers", id=f'"{done}"')) == ['"t-1": done.']
    confirmed(browser, TRANSACTIONS, action="compensate", name="transfers", id=f'"{done}"')
    for given, found in ((done, True), (f'"{done}"', True), ("t-9", False)):
        assert (f"&quot;{done}&quot;" in browser.get(TRANSACTIONS, {"id": given}).content.decode()) is found
    number = ObjectId()
    part = {"cluster": "east", "collection": "shop.carts", "id": number}
    project.database["transactions"].insert_one({"_id": number, "state": "odd", "participants": [part]})
    page = browser.get(TRANSACTIONS, {"id": str(number)}).content.decode()  # as the command line lists it
    assert "east:shop.carts" in page
    page = browser.get(TRANSACTIONS).content.decode()
    assert "{&quot;n&quot;: {&quot;$numberInt&quot;: &quot;2&quot;}}" in page
    confirmed(browser, TRANSACTIONS, action="cancel", name="transfers", id='{"n": {"$numberInt": "2"}}')
    after = project.transfers.read(left)
    assert after.state == "canceled"
    assert "in the admin by user" in str(after.reason)
    assert [each["balance"] for each in project.database["accounts"].find()] == [100, 100]
    late = browser.post(
        f"{TRANSACTIONS}act/",
        {"action": "cancel", "name": "transfers", "id": f'"{done}"', "confirmed": "yes"},
        follow=True,
    )
    assert "done" in said(late)[0]
    assert "ended with an error" in LogEntry.objects.latest("pk").change_message


# -- what may be written anywhere --------------------------------------------------------------------


def test_no_value_is_markup_and_none_turns_what_is_around_it(runner: BridgeRunner) -> None:
    """Errors, keys, ids and reasons of anybody, on every page, in messages and in the log."""
    fail(runner, "halting", HOSTILE, HOSTILE)
    fail(runner, "letters", HOSTILE, HOSTILE)
    entry = outbox_letter(HOSTILE, HOSTILE)
    transaction(HOSTILE)
    stored_transaction(f"{HOSTILE}2", "pending", reason=HOSTILE)
    (letter,) = letters()
    both = user("both", *named("view"), *named("act_on"), *named("see_contents_of"))
    shown = [
        both.get(BRIDGES),
        both.get(f"{BRIDGES}show/", {"bridge": "shop"}),
        both.post(f"{BRIDGES}act/", {"action": "skip", "bridge": "shop", "handler": "stop", "partition": "0"}),
        both.get(LETTERS, {"key": HOSTILE, "bridge": "shop"}),
        both.get(f"{LETTERS}show/", {"bridge": "shop", "letter": letter}),
        both.post(f"{LETTERS}act/", {"action": "discard", "bridge": "shop", "letter": letter}),
        both.get(f"{OUTBOXES}show/", {"outbox": "orders"}),
        both.get(f"{OUTBOXES}show/", {"outbox": "orders", "letter": entry}),
        both.post(f"{OUTBOXES}act/", {"action": "discard", "outbox": "orders", "letter": entry}),
        both.get(TRANSACTIONS),
        both.post(f"{TRANSACTIONS}act/", {"action": "burn", "name": HOSTILE, "id": HOSTILE}, follow=True),
        both.post(f"{BRIDGES}act/", {"action": "pause", "bridge": HOSTILE, "confirmed": "yes"}, follow=True),
        both.get("/admin/"),
    ]
    for page in shown:
        text = page.content.decode()
        assert page.status_code == 200
        assert "<img" not in text
        assert "&lt;img" in text or page.request["PATH_INFO"] in {BRIDGES, TRANSACTIONS}
    for page in (*shown[:3], *shown[4:10]):
        assert "\u202e" not in page.content.decode(), page.request["PATH_INFO"]


@pytest.mark.parametrize("text", ["x", "a://", "a@"])
def test_what_an_address_names_is_cut_before_it_is_quoted(runner: BridgeRunner, text: str) -> None:
    """P12: a GET of somebody who may only look costs no minutes, and no expression of theirs runs in MongoDB."""
    fail(runner, "letters")
    long = text * (100_000 // len(text))
    for field in ("handler", "bridge", "key"):
        page = viewer().get(LETTERS, {"bridge": "shop", field: long})
        assert page.status_code == 200
        assert len(page.content) < 50_000 + len(long) * (field == "key")
    every = {"bridge": "shop", "key": '{"$regularExpression": {"pattern": ".*", "options": ""}}'}
    assert "regular expression" in viewer().get(LETTERS, every).content.decode()


def test_the_log_has_all_that_was_done_however_long_it_is_and_the_pages_say_what_they_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Targets, outcomes and refusals: Django keeps them as texts without a bound."""
    identity = "x" * 2000
    transaction(identity)
    done = confirmed(operator(), TRANSACTIONS, action="cancel", name="transfers", id=f'"{identity}"')
    assert said(done) == [shown(f'"{identity}": canceled.')]
    assert said(done)[0].endswith("... and 1013 characters more")
    entry = LogEntry.objects.get()
    assert entry.object_id == f'transfers: "{identity}"'
    assert entry.change_message == f'cancel: "{identity}": canceled.'
    assert len(entry.object_repr) <= 200
    assert entry.object_repr.endswith("... and 1853 characters more")

    refused = [f"{index} {'y' * 2000}" for index in range(300)]
    plan = Plan(command="retry", lines=[], act=lambda: PlanResult(refused=refused))
    monkeypatch.setattr(Operations, "retry", lambda *_, **__: plan)
    confirmed(operator(), BRIDGES, action="retry", bridge="shop", handler="stop")
    message = LogEntry.objects.latest("pk").change_message
    assert message.endswith(" ".join(refused))

    names = [f"{number}{'z' * 2000}" for number in range(100)]
    operator().post(f"{OUTBOXES}act/", {"action": "discard", "outbox": "orders", "letter": names, "confirmed": "yes"})
    assert LogEntry.objects.latest("pk").change_message.endswith(f"Asked for: {', '.join(names)}.")


def test_a_sentence_on_many_names_some_of_them() -> None:
    """The log has them all."""
    assert shown("a") == "a"
    assert shown("a\nb" * 3, 4) == "a ba... and 5 characters more"
    assert shown("ab", 1) == "a... and 1 character more"
    assert listed([]) == ""
    assert listed(list("abcde")) == "a, b, c, d, e"
    assert listed(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_no_more_of_a_document_is_written_than_is_shown() -> None:
    """One of sixteen megabytes takes no longer than one of a hundred kilobytes."""

    class Endless(dict[str, int]):
        def items(self) -> Any:
            return ((str(number), number) for number in count())

    assert document(Endless(a=1)).endswith("\n...")
    values = {"at": datetime(2026, 1, 2, tzinfo=UTC), "n": Int64(3), "of": [{"b": b"x"}], "is": float("inf")}
    assert json_util.loads(document(values), json_options=json_util.JSONOptions(tz_aware=True)) == values
    assert document("x\ny") == '"x\\ny"'
    code: dict[str, Any] = {"code": Code("f()", {"a": float("-inf")}), "not": [float("nan"), 1.5, True, None, {}, []]}
    assert json.loads(document(code)) == json.loads(json_util.dumps(code, json_options=json_util.RELAXED_JSON_OPTIONS))


def test_what_was_done_before_an_error_is_not_called_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two letters the first is gone for good when MongoDB is away for the second."""
    first, second = outbox_letter("o-1"), outbox_letter("o-2")
    discard = outbox_commands.discard

    def discard_one(outbox: Any, identity: str) -> bool:
        if identity == second:
            raise ServerSelectionTimeoutError("no primary")
        return discard(outbox, identity)

    monkeypatch.setattr(outbox_commands, "discard", discard_one)
    confirmed(operator(), OUTBOXES, action="discard", outbox="orders", letter=[first, second])
    assert project.outbox.dead_letters.count() == 1
    message = LogEntry.objects.get().change_message
    assert message.startswith("discard ended with an error: ")
    assert message.endswith(f"Asked for: {first}, {second}.")


def test_what_ended_unforeseen_is_in_the_log_though_requests_are_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATOMIC_REQUESTS takes back what a failed request has written; what was done in MongoDB stays, and so its log."""
    monkeypatch.setattr(Operations, "pause", lambda *_, **__: 1 / 0)
    browser: Any = operator(raise_request_exception=False)
    fields = {**ACTIONS[BRIDGES], "confirmed": "yes"}
    assert browser.post(f"{BRIDGES}act/", fields).status_code == 500
    assert LogEntry.objects.get().change_message.startswith("pause ended by ZeroDivisionError")


def test_mongodb_that_does_not_answer_or_an_app_that_is_not_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No page fails, and no password is shown."""

    def gone(*_: object, **__: object) -> None:
        raise CommandRefusedError("MongoDB does not answer at mongodb://root:hunter2@db.")

    monkeypatch.setattr("mongo_celery.contrib.django.admin.bridge_pages.read_snapshot", gone)
    for address in (BRIDGES, f"{BRIDGES}show/?bridge=shop"):
        browser: Any = operator()
        text = browser.get(address, follow=True).content.decode()
        assert "does not answer" in text
        assert "hunter2" not in text
    with override_settings(MONGO_CELERY_APP="nowhere:app"):
        for address in (BRIDGES, LETTERS, OUTBOXES, TRANSACTIONS):
            assert "no Celery app can be had" in operator().get(address).content.decode()


def test_those_that_do_not_answer_are_waited_for_together_and_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several bridges, and of several outboxes: who waits for one after the other never meets at the barrier."""
    all_wait = Barrier(3)
    sound, (url, name) = project.bridge.wiring, (project.URL, project.NAME)
    app = Celery("other", broker="memory://", set_as_current=False)
    dead = [Bridge(app, url, name=f"dead-{each}", autodiscover=False).wiring for each in (1, 2)]

    def met(is_dead: bool) -> None:
        all_wait.wait(PATIENCE_SECONDS)
        if is_dead:
            raise ServerSelectionTimeoutError("no primary")

    def read_one(wiring: Any, *_: Any) -> Any:
        met(wiring in dead)
        return read_snapshot(wiring)

    monkeypatch.setattr("mongo_celery.contrib.django.admin.bridge_pages.read_snapshot", read_one)
    monkeypatch.setattr(type(BRIDGES_OF), "of", lambda *_: [dead[0], sound, dead[1]])
    rows = operator().get(BRIDGES).context["bridges"]
    assert [row["state"] for row in rows] == ["unknown", "leading", "unknown"]
    assert "gave no answer" in rows[0]["sentence"]

    away: Any = [MongoClient(url, connect=False) for _ in dead]
    monkeypatch.setattr(health, "ping", lambda client: met(any(client is each for each in away)))
    outboxes = [
        Outbox(app, partial(client[name].get_collection, "orders"), name=f"away-{number}", sweep_every=None)
        for number, client in enumerate(away)
    ]
    monkeypatch.setattr(type(OUTBOXES_OF), "of", lambda *_: [outboxes[0], project.outbox, outboxes[1]])
    rows = operator().get(OUTBOXES).context["outboxes"]
    assert ["pending" in row for row in rows] == [False, True, False]
    assert "gave no answer" in rows[0]["advice"][0]
