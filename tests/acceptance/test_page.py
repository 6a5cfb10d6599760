"""The listener's page in a browser, with whatever a document, a handler or a server may put into it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mongo_celery.bridge.http.page import POLICY, render_page
from mongo_celery.bridge.http.server import HttpServer, Response
from mongo_celery.bridge.operations.bridge_snapshot import (
    BridgeSnapshot,
    DeadLetterGroup,
    Standby,
    Workers,
    unreadable,
)
from mongo_celery.bridge.operations.judgement import judge
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding
from tests.fixtures.process import wait_for
from tests.unit.test_status import NOON, facts, image, lease, subscription

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TURNED = "abc\u202etxt.exe\u2066\n\u0000"
NARROW = 360


def halted(error: str, key: str) -> dict[str, Any]:
    head = {"resumeToken": {"_data": "82CC"}, "key": key}
    return {"state": "halted", "error": error, "head": head, "retries": 3, "retry": {}}


def snapshot_of(**changes: Any) -> BridgeSnapshot:
    """Shape and judge a snapshot from hand-made documents."""
    return judge(shape(facts(**changes)), CommandLine("shop"))


class Shown:
    def __init__(self, browser: Any) -> None:
        self.snapshots = [snapshot_of()]
        self.browser = browser
        self.renderings = 0
        self.server = HttpServer("0", self._answer).__enter__()

    def _answer(self, path: str) -> Response | None:
        if path != "/":
            return None
        self.renderings += 1
        text = render_page(self.snapshots, host=HOSTILE, pid=42)
        return Response(text.encode(), "text/html; charset=utf-8", policy=POLICY)

    def open(self) -> None:
        self.browser.get(self.server.url)
        self.wait(lambda: self.text("h1"))

    def change(self, *snapshots: BridgeSnapshot) -> None:
        """Change what is rendered, and wait until the page has refreshed itself with it."""
        self.snapshots = list(snapshots)
        renderings = self.renderings
        self.wait(lambda: self.renderings > renderings + 1)

    def wait(self, condition: Callable[[], Any]) -> None:
        wait_for(condition, message=lambda: self.text("body"))

    def run(self, script: str) -> Any:
        return self.browser.execute_script(f"return {script}")

    def text(self, selector: str) -> str:
        found: str = self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)"
        )
        return found

    def table(self, caption: str) -> list[str]:
        """Return the rows of a table, with a tab between two cells."""
        found: list[str] = self.run(
            f"[...document.querySelectorAll('table')]"
            f".filter((each) => each.caption?.textContent.startsWith({json.dumps(caption)}))"
            f".flatMap((each) => [...each.rows])"
            f".map((row) => [...row.cells].map((cell) => cell.textContent.trim()).join('\\t'))"
        )
        return found

    def resize(self, width: int) -> None:
        metrics = {"width": width, "height": 600, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def shown(browser: Any) -> Iterator[Shown]:
    made = Shown(browser)
    yield made
    browser.get("about:blank")
    made.server.__exit__()


def test_a_problem_is_shown_once_with_its_commands(shown: Shown) -> None:
    """P16: a healthy bridge, one with a halted partition, one without a listener, on one page that stays open."""
    shown.open()
    assert (shown.text("h1"), shown.run("document.title")) == ("shop\nhealthy", "healthy: shop")
    assert "process 42" in shown.text("section p")

    broken = snapshot_of(images=[image(0), image(1, **halted("ValueError: no", "shop.orders insert 1"))])
    shown.change(
        replace(broken, standbys=(Standby(host="two", pid=43),), workers=Workers(answered=2, serving=2, slots=8))
    )
    assert (shown.text("h1"), shown.run("document.title")) == ("shop\nfailing", "failing: shop")
    commands = shown.texts(".command code")
    assert tuple(commands) == broken.findings[0].commands
    assert shown.text("body").count("ValueError: no") == 1
    assert "1 halted" in "".join(shown.table("Handlers"))
    assert "two, process 43 " in shown.text("section p")

    gone = lease(live=False, listenerId=None, renewedAt=NOON - timedelta(seconds=300), report=None)
    shown.change(snapshot_of(lease=gone))
    assert "celery -A shop listener" in shown.texts(".command code")
    assert "flowing" not in shown.text("main")

    shown.change(unreadable("shop", "MongoDB gave no answer for 3 s."))
    assert "MongoDB gave no answer" in shown.text("article")


def test_no_value_is_markup_and_none_turns_the_text_around_it(shown: Shown) -> None:
    """Errors, keys, names, sentences and commands of any origin. Nothing that page.html does not have is obeyed."""
    bad = snapshot_of(
        images=[image(index, **halted(HOSTILE + TURNED, TURNED + HOSTILE)) for index in (0, 1)],
        registered=("summarise", HOSTILE),
        subscriptions=[subscription()],
    )
    finding = Finding(HOSTILE, "failing", f"{HOSTILE} `celery {HOSTILE}`", (f"celery {HOSTILE}{TURNED}",))
    group = DeadLetterGroup(handler=HOSTILE, error=TURNED, count=1, newest_at=None, newest_id=HOSTILE)
    shown.snapshots = [replace(bad, findings=(finding, *bad.findings), dead_letter_groups=(group,))]
    shown.open()
    text = shown.text("body")
    assert "<img src=x onerror=" in text
    assert "\\u202e" in text
    assert not set(text) & {"\u202e", "\u2066", "\u0000"}
    assert shown.run("document.querySelectorAll('img, iframe, object, main script, base, form').length") == 0
    assert shown.run("document.title") == "failing: shop"
    assert [each for each in shown.browser.get_log("browser") if "Content Security" in each["message"]] == []
    loaded = shown.run("performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)")
    assert set(loaded) <= {"/"}, "nothing from elsewhere"


def test_a_refresh_keeps_the_place_and_a_listener_that_is_gone_is_named(shown: Shown) -> None:
    """The last answer stays on the page. On a telephone, with names that have no room to break."""
    shown.resize(NARROW)
    shown.open()
    assert shown.run("document.getElementById('silent').hidden")
    shown.run("scrollTo(0, 120)")
    shown.change(snapshot_of(images=[image(0), image(1, **halted("x" * 300, "y" * 300))]))
    assert shown.run("scrollY") == 120
    root = "document.documentElement"
    assert shown.run(f"{root}.scrollWidth") <= shown.run(f"{root}.clientWidth") <= NARROW
    shown.run("getSelection().selectAllChildren(document.querySelector('h1'))")
    shown.wait(lambda: "paused" in shown.text("time"))
    shown.run("getSelection().removeAllRanges()")
    shown.wait(lambda: "updated" in shown.text("time"))
    shown.server.__exit__()
    shown.wait(lambda: "does not answer" in shown.text("#silent"))
    assert "summarise" in "".join(shown.table("Handlers"))
    shown.server = HttpServer("0", lambda _path: None).__enter__()
