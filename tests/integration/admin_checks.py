"""
Checks of the admin pages, and the addresses that they are at: `test_django_admin.py` has them run in a process that
has Django's settings. Blocked partitions and dead letters are those of a real bridge, led in this process.
"""

# ruff: noqa: E402 - Django has to be set up before what needs it is imported
from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from threading import Barrier
from typing import Any
from urllib.parse import quote

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.integration.admin_project")

import django
import pytest
from celery import Celery
from pymongo.errors import ServerSelectionTimeoutError

django.setup()

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.checks import run_checks
from django.core.management import call_command
from django.test import Client
from django.test.utils import override_settings, setup_test_environment
from django.urls import path

from mongo_celery import Bridge
from mongo_celery.bridge.operations.acts import read_history
from mongo_celery.bridge.operations.dead_letter_commands import find
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.wiring import BRIDGES as BRIDGES_OF
from mongo_celery.contrib.django.admin.pages import OperationsAdmin
from mongo_celery.contrib.django.templatetags.mongo_celery import to_line
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.integration import admin_project as project

urlpatterns = [path("admin/", admin.site.urls)]

HOSTILE = "<img src=x onerror=alert(1)>\u202etxt"
CARD = "card-4111"
PAGES = ("changebridge", "changedeadletter")
BRIDGES, LETTERS = (f"/admin/mongo_celery/{name}/" for name in PAGES)
SHOP = f"{BRIDGES}?bridge=shop"
ACTIONS = {
    BRIDGES: {"action": "pause", "bridge": "shop", "handler": "stop"},
    LETTERS: {"action": "discard", "bridge": "shop"},
}
HEAD = {"bridge": "shop", "handler": "stop", "partition": "0"}


Browser = Any  # Django's test client, which has no types


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


def user(name: str, *permissions: str, **options: Any) -> Browser:
    found, _ = User.objects.get_or_create(username=name, defaults={"is_staff": True})
    found.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert found.user_permissions.count() == len(permissions), "each permission is there after migrate"
    client: Browser = Client(**options)
    client.force_login(found)
    return client


def named(verb: str) -> list[str]:
    return [f"{verb}_{page}" for page in PAGES]


def operator(**options: Any) -> Browser:
    return user("operator", *named("change"), **options)


def fail(running: BridgeRunner, collection: str, number: Any = 1, error: str = "no") -> None:
    project.failing[:] = [error]
    project.database[collection].insert_one({"_id": number, "card": CARD})
    running.deliver(raises=False)
    project.failing.clear()


def deliver(running: BridgeRunner, numbers: list[int]) -> None:
    """Until these are handled: a listener learns in a moment what was asked for."""
    wait_for(lambda: running.deliver() and sorted(project.handled) == numbers)


def letters() -> list[str]:
    return [each.document_id for each in find(project.bridge.wiring).letters]


def letter_url(letter: str) -> str:
    return f"{LETTERS}?bridge=shop&letter={quote(letter)}"


def states() -> dict[str, str]:
    handlers = read_snapshot(project.bridge.wiring).handlers
    return {handler.name: each.state for handler in handlers for each in handler.partitions}


def ask(browser: Browser, act_url: str, **fields: Any) -> dict[str, Any]:
    """Post an action; the fields of the form that confirms it."""
    asked = browser.post(act_url, fields)
    assert asked.status_code == 200, asked.headers
    form: dict[str, list[str]] = {}
    for name, value in asked.context["fields"]:
        form.setdefault(name, []).append(value)
    return {**form, "action": fields["action"], "seen": asked.context["seen"], "confirmed": "yes"}


def confirm(browser: Browser, act_url: str, *, reason: str = "", **fields: Any) -> Any:
    """Post an action and confirm it; the page afterwards."""
    return browser.post(act_url, {**ask(browser, act_url, **fields), "reason": reason}, follow=True)


def said(page: Any) -> list[str]:
    return [str(message) for message in page.context["messages"]]


def test_staff_without_a_permission_sees_nothing() -> None:
    nobody = user("nobody")
    assert "mongo_celery" not in nobody.get("/admin/").content.decode()
    for page in (BRIDGES, LETTERS):
        assert nobody.get(page).status_code == 403
        assert Client().get(page).headers["Location"].startswith("/admin/login/")
        assert nobody.post(f"{page}act/", {**ACTIONS[page], "confirmed": "yes"}).status_code == 403
    one = user("one", "view_changedeadletter")
    index = one.get("/admin/").content.decode()
    assert LETTERS in index
    assert BRIDGES not in index
    assert one.get(BRIDGES).status_code == 403


def test_view_alone_changes_nothing_and_shows_no_documents(runner: BridgeRunner) -> None:
    """Nor a button. Documents have a permission of their own, of which an operator has no need."""
    fail(runner, "halting")
    fail(runner, "letters")
    (letter,) = letters()
    browser = user("viewer", *named("view"))
    pages = [browser.get(each) for each in (BRIDGES, SHOP, LETTERS, letter_url(letter))]
    for page in pages:
        assert page.status_code == 200
        assert page.headers["X-Frame-Options"] == "DENY"
        text = page.content.decode()
        assert CARD not in text
        assert 'name="action"' not in text
        assert 'type="checkbox"' not in text
    assert "ValueError: no" in pages[1].content.decode()
    for page, fields in ACTIONS.items():
        for more in ({}, {"confirmed": "yes"}):
            assert browser.post(f"{page}act/", {**fields, "letter": letter, **more}).status_code == 403
    assert letters() == [letter]
    assert not LogEntry.objects.exists()

    auditor, both = (user(verb, *named(verb), "see_contents") for verb in ("view", "change"))
    skip = {**HEAD, "action": "skip"}
    assert CARD in auditor.get(letter_url(letter)).content.decode()
    assert CARD in both.post(f"{BRIDGES}act/", skip).content.decode()
    for page in (operator().get(letter_url(letter)), operator().post(f"{BRIDGES}act/", skip)):
        assert page.status_code == 200
        assert CARD not in page.content.decode()


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
    root: Any = Client()
    root.force_login(User.objects.create_superuser("root"))
    for page in PAGES:
        for address in ("1/history/", "1/delete/", "1/change/", "add/"):
            assert root.get(f"/admin/mongo_celery/{page}/{address}").status_code == 404
    assert "mongo_celery/changebridge/add" not in root.get("/admin/").content.decode()
    assert [each for each in run_checks() if (each.id or "").startswith("models.")] == []


def test_nothing_is_done_by_a_get_or_without_the_token(runner: BridgeRunner) -> None:
    """An address that somebody is made to follow, and a form of another site."""
    fail(runner, "letters")
    before = letters()
    strict = operator(enforce_csrf_checks=True)
    for page, fields in ACTIONS.items():
        whole = {**fields, "letter": before[0], "seen": before[0], "confirmed": "yes"}
        assert operator().get(f"{page}act/", whole).status_code == 405
        assert strict.post(f"{page}act/", whole).status_code == 403
    for page in (SHOP, LETTERS, letter_url(before[0])):
        text = strict.get(page).content.decode()
        assert text.count('method="post" action="/admin/mongo_celery') > 0
        assert text.count('name="csrfmiddlewaretoken"') == text.count('method="post"')
    assert letters() == before
    assert states()["stop"] == "flowing"
    assert not LogEntry.objects.exists()


def test_an_action_is_shown_then_run_and_recorded() -> None:
    browser = operator()
    pause = ACTIONS[BRIDGES]
    asked = browser.post(f"{BRIDGES}act/", pause).content.decode()
    assert "csrfmiddlewaretoken" in asked
    assert 'name="reason"' in asked
    assert states()["stop"] == "flowing"
    assert not LogEntry.objects.exists()

    assert said(confirm(browser, f"{BRIDGES}act/", **pause, reason="night <b>"))
    record = read_history(project.bridge.wiring)[-1]
    assert (record["command"], record["reason"]) == ("pause stop", "night <b>")
    assert record["by"] == "operator (Django)"
    assert states() == {"collect": "flowing", "stop": "paused"}
    (entry,) = LogEntry.objects.all()
    assert (entry.user.username, entry.object_repr) == ("operator", "shop")
    assert "night <b>" in entry.get_change_message()

    confirm(browser, f"{BRIDGES}act/", action="resume", **HEAD)
    assert states()["stop"] == "flowing"
    assert said(browser.post(f"{BRIDGES}act/", {"action": "retry", **HEAD}, follow=True)), "nothing waits for it"
    assert LogEntry.objects.count() == 2


def test_a_halted_change_is_retried_or_skipped(runner: BridgeRunner) -> None:
    """The very change that was shown: if the partition halts at another one now, nothing is moved."""
    fail(runner, "halting")
    browser = operator()
    page = browser.get(SHOP).content.decode()
    assert "celery -A tests.integration.admin_project:app changes retry" in page
    old = ask(browser, f"{BRIDGES}act/", action="skip", **HEAD)
    confirm(browser, f"{BRIDGES}act/", action="retry", **HEAD)
    deliver(runner, [1])

    fail(runner, "halting", 2)
    late = browser.post(f"{BRIDGES}act/", old, follow=True)
    assert said(late)
    assert states()["stop"] == "halted"
    assert LogEntry.objects.count() == 1, "nothing was run"
    confirm(browser, f"{BRIDGES}act/", action="skip", **HEAD)
    assert states()["stop"] == "flowing"
    assert len(letters()) == 1


def test_dead_letters_are_replayed_and_discarded(runner: BridgeRunner) -> None:
    for number in (1, 2, 3):
        fail(runner, "letters", number)
    first, second, third = letters()
    browser = operator()
    page = browser.get(LETTERS, {"bridge": "shop", "handler": "collect", "key": "2"}).content.decode()
    assert second in page
    assert first not in page

    confirm(browser, f"{LETTERS}act/", action="replay_over_newer", bridge="shop", letter=[first, third])
    assert f"{first}, {third}" in LogEntry.objects.get().change_message
    assert "--over-newer" in read_history(project.bridge.wiring)[-1]["command"]
    deliver(runner, [1, 3])
    assert letters() == [second]
    confirm(browser, f"{LETTERS}act/", action="replay", bridge="shop", letter=[second])
    assert "--over-newer" not in read_history(project.bridge.wiring)[-1]["command"], "nobody asked for it"

    form = ask(browser, f"{LETTERS}act/", action="discard", bridge="shop", letter=[second])
    browser.post(f"{LETTERS}act/", form, follow=True)
    assert letters() == []
    assert read_history(project.bridge.wiring)[-1]["by"] == "operator (Django)"
    assert said(browser.post(f"{LETTERS}act/", form, follow=True)), "there is none any more"


def test_a_form_that_names_nothing_or_something_else_is_refused(runner: BridgeRunner) -> None:
    """Beginnings of ids, other bridges, unknown actions: one sentence, nothing changed."""
    fail(runner, "letters")
    (letter,) = letters()
    browser = operator()
    pause = ACTIONS[BRIDGES]
    wrong: list[tuple[str, dict[str, Any]]] = [
        *((LETTERS, given) for given in ({}, {"seen": letter}, {"letter": letter})),
        *(
            (LETTERS, {"letter": each, "seen": letter})
            for each in (letter[:-2], "shop/collect/", letter.split("/")[-1])
        ),
        *((LETTERS, {"letter": letter, "seen": letter, **each}) for each in ({"bridge": "other"}, {"action": "burn"})),
        *((BRIDGES, {"handler": each}) for each in ("nobody", "")),
        *((BRIDGES, {**pause, "partition": each}) for each in ("-1", "9" * 5000)),
        (BRIDGES, {**pause, "action": "rotate_key"}),
    ]
    for page, fields in wrong:
        answer = browser.post(f"{page}act/", {**ACTIONS[page], **fields, "confirmed": "yes"}, follow=True)
        assert answer.status_code == 200
        assert len(said(answer)) == 1, (fields, said(answer))
    assert letters() == [letter]
    assert states() == {"collect": "flowing", "stop": "flowing"}
    assert not LogEntry.objects.exists()
    gone = letter[:-2] + "00"
    for address in (f"{BRIDGES}?bridge=no", f"{LETTERS}?letter=x", letter_url(gone), f"{LETTERS}?handler=no"):
        assert browser.get(address).context["page"].problem, address
    operators = quote('{"$gt": ""}')
    for address in (f"{LETTERS}?key={operators}", f"{LETTERS}?page=-1", f"{LETTERS}?page=99999999999999999999"):
        assert browser.get(address).status_code == 200


def test_a_list_has_pages_and_an_action_leads_back_to_its_own(
    runner: BridgeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OperationsAdmin, "list_per_page", 2)
    for number in range(5):
        fail(runner, "letters", number)
    browser, every = operator(), letters()
    first = browser.get(LETTERS, {"bridge": "shop", "handler": "collect"})
    assert [each in first.content.decode() for each in every] == [True, True, False, False, False]
    assert "?bridge=shop&amp;handler=collect&amp;page=2" in first.content.decode()
    address = f"{LETTERS}?bridge=shop&handler=collect&page=2"
    second = browser.get(address)
    assert [each in second.content.decode() for each in every] == [False, False, True, True, False]
    last = browser.get(LETTERS, {"page": "9"})
    assert [each in last.content.decode() for each in every] == [False, False, False, False, True]

    act_url = second.context["act_url"]
    assert browser.post(act_url, {"action": "discard", "bridge": "shop"}).headers["Location"] == address
    answer = confirm(browser, act_url, action="discard", bridge="shop", letter=every[2])
    assert answer.redirect_chain[0][0] == address
    row = browser.get(address).context["page"].tables[0].rows[0]
    details = browser.get(LETTERS + row.cells["Id"].url)
    assert details.context["first_url"] == address
    answer = confirm(browser, details.context["act_url"], action="discard", bridge="shop", letter=row.choice)
    assert answer.redirect_chain[0][0] == address
    assert len(letters()) == 3

    answer = confirm(browser, browser.get(SHOP).context["act_url"], action="pause", bridge="shop", handler="stop")
    assert answer.redirect_chain[0][0] == SHOP
    link = f"{LETTERS}?bridge=shop&amp;handler=collect"
    assert link in answer.content.decode()
    assert link not in user("one", "view_changebridge").get(SHOP).content.decode()


def test_no_value_is_markup_and_none_turns_what_is_around_it(runner: BridgeRunner) -> None:
    fail(runner, "halting", HOSTILE, HOSTILE)
    fail(runner, "letters", HOSTILE, HOSTILE)
    (letter,) = letters()
    both = user("both", *named("change"), "see_contents")
    wrong = {"action": "pause", "bridge": HOSTILE, "handler": HOSTILE, "confirmed": "yes"}
    pages = [
        both.get(SHOP),
        both.post(f"{BRIDGES}act/", {**HEAD, "action": "skip"}),
        both.get(letter_url(letter)),
        both.post(f"{LETTERS}act/", {"action": "discard", "bridge": "shop", "letter": letter}),
        both.post(f"{BRIDGES}act/", wrong, follow=True),
        both.get(BRIDGES, {"bridge": HOSTILE}),
        both.get(LETTERS, {"key": HOSTILE, "bridge": "shop"}),
    ]
    confirm(both, f"{BRIDGES}act/", **HEAD, action="skip", reason=HOSTILE)
    pages.append(both.get("/admin/"))
    for page in pages:
        text = page.content.decode()
        assert page.status_code == 200
        assert "<img" not in text
        assert "&lt;img" in text or page is pages[-1]
    for page in pages[:6]:
        assert "\u202e" not in page.content.decode(), page.request["PATH_INFO"]
    assert "\u202e" not in LogEntry.objects.get().change_message


@pytest.mark.parametrize("text", ["x", "a://", "a@"])
def test_what_an_address_names_is_cut_before_it_is_quoted(runner: BridgeRunner, text: str) -> None:
    """P12: a GET of somebody who may only look costs no minutes, and no expression of theirs runs in MongoDB."""
    fail(runner, "letters")
    long = text * (100_000 // len(text))
    for name in ("handler", "bridge", "key"):
        page = user("viewer", *named("view")).get(LETTERS, {"bridge": "shop", name: long})
        assert page.status_code == 200
        assert len(to_line(page.context["page"].problem)) < 1100
    every = {"bridge": "shop", "key": '{"$regularExpression": {"pattern": ".*", "options": ""}}'}
    assert user("viewer", *named("view")).get(LETTERS, every).context["page"].problem


def test_mongodb_that_does_not_answer_or_an_app_that_is_not_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P9: also where it ends in the middle of an action."""

    def end() -> PlanResult:
        raise ServerSelectionTimeoutError("no primary")

    monkeypatch.setattr(Operations, "retry", lambda *_, **__: Plan(command="retry", lines=[], act=end))
    page = confirm(operator(), f"{BRIDGES}act/", action="retry", bridge="shop", handler="stop")
    assert said(page)[0] in LogEntry.objects.get().change_message

    def gone(*_: object, **__: object) -> None:
        raise CommandRefusedError("MongoDB does not answer at mongodb://root:hunter2@db.")

    monkeypatch.setattr(Operations, "read_status", gone)
    for address in (BRIDGES, SHOP):
        text = operator().get(address).content.decode()
        assert "does not answer" in text, "as this test has raised it"
        assert "hunter2" not in text
    with override_settings(MONGO_CELERY_APP="nowhere:app"):
        for address in (BRIDGES, LETTERS):
            assert operator().get(address).context["page"].problem
    monkeypatch.setattr(type(BRIDGES_OF), "of", lambda *_: [])
    for address in (BRIDGES, LETTERS):
        assert operator().get(address).status_code == 200


def test_those_that_do_not_answer_are_waited_for_together_and_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several bridges: who waits for one after the other never meets at the barrier."""
    all_wait = Barrier(3)
    sound = project.bridge.wiring
    app = Celery("other", broker="memory://", set_as_current=False)
    dead = [Bridge(app, project.URL, name=f"dead-{each}", autodiscover=False).wiring for each in (1, 2)]
    read_status = Operations.read_status

    def read_one(operations: Operations, **options: Any) -> Any:
        all_wait.wait(PATIENCE_SECONDS)
        if operations._wiring in dead:
            raise ServerSelectionTimeoutError("no primary")
        return read_status(operations, **options)

    monkeypatch.setattr(Operations, "read_status", read_one)
    monkeypatch.setattr(type(BRIDGES_OF), "of", lambda *_: [dead[0], sound, dead[1]])
    rows = operator().get(BRIDGES).context["page"].tables[0].rows
    assert [row.cells["State"] for row in rows] == ["unknown", "leading", "unknown"]
    assert rows[0].cells["Problem"]
