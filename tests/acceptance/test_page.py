"""The listener's page in a browser, with whatever a document, a handler or a server may put into it."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from mongo_celery.bridge.http.address import HttpAddress
from mongo_celery.bridge.operations.overview import overview
from mongo_celery.bridge.operations.status import shape
from mongo_celery.bridge.operations.verdict import judge

from mongo_celery.bridge.http.server import HttpListener, Response
from mongo_celery.bridge.http.service import page
from mongo_celery.command_line import CommandLine
from tests.fixtures.process import wait_for
from tests.unit.test_status import NOON, facts, image, lease, subscription

Document = dict[str, Any]

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TURNED = "abc\u202etxt.exe\u2066\n\u0000"
NARROW, WIDE = 360, 1280


def halted(error: str, key: str) -> Document:
    head = {"resumeToken": {"_data": "82CC"}, "key": key}
    return {"state": "halted", "error": error, "head": head, "retries": 3, "retry": {}}


def told(*, letters: tuple[Document, ...] = (), snapshots: tuple[Document, ...] = (), **changes: Any) -> Document:
    """What `/status` says of a bridge, from hand-made documents."""
    status = shape(facts(**changes))
    status["snapshots"] = snapshots
    bridge = {"bridge": "shop", "alive": True, "leads": True, "status": overview(status, letters)}
    return {
        "process": {"host": HOSTILE, "pid": 42},
        "bridges": [{**bridge, **judge(status, line=CommandLine("shop")).plain()}],
        "outboxes": [{"name": "invoices", "error": HOSTILE}],
        "transactions": [{"name": "transfers", "error": None, "unfinished": {"pending": 2}, "oldest_seconds": 7.0}],
    }


class Shown:
    """The page in a browser, and what it is told."""

    def __init__(self, browser: Any) -> None:
        self.told: Document = told()
        self.status = 200
        self.browser = browser
        self._listener = HttpListener(HttpAddress("127.0.0.1", 0), self._answer)
        self._listener.start()
        self.looks = 0

    def _answer(self, path: str, _accept: str) -> Response | None:
        if path == "/":
            return page()
        if path != "/status":
            return None
        self.looks += 1
        return Response(json.dumps(self.told).encode(), "application/json")

    def open(self) -> None:
        self.browser.get(f"http://{self._listener.address}/")
        self.wait(lambda: self.text("#when"))

    def tell(self, new: Document) -> None:
        """Tell something else, and wait until the page has asked for it and shown it."""
        self.told = new
        looks = self.looks
        self.wait(lambda: self.looks > looks + 1)

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

    def stop(self) -> None:
        self.browser.get("about:blank")
        self._listener.stop()


@pytest.fixture
def shown(browser: Any) -> Iterator[Shown]:
    """Give the page, which is yet to be opened."""
    made = Shown(browser)
    yield made
    made.stop()


def resized(shown: Shown, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    shown.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def test_what_stands_is_shown_with_the_command_that_cures_it(shown: Shown) -> None:
    """A healthy bridge, one whose partition has halted, one that nobody leads; one page goes from one to the next."""
    shown.told = told(lease=lease())
    shown.open()
    assert shown.text(".top h1") == "shop"
    assert shown.text(".top .pill") == "healthy"
    assert shown.run("document.title") == "healthy: shop"
    assert "This process leads" in shown.text(".top p")
    assert [each.partition("\n")[0] for each in shown.texts(".handlers .row:not(.head)")] == ["summarise"]

    shown.tell(told(images=[image(0), image(1, **halted("ValueError: no", "shop.orders insert 1"))]))
    assert shown.text(".top .pill") == "failing"
    assert shown.texts(".command code") == ["celery -A shop changes retry summarise 1"]
    assert "ValueError: no" in shown.text(".stands")
    assert "1 halted" in shown.text(".handlers")
    assert shown.run("document.title") == "failing: shop"

    gone = lease(live=False, listenerId=None, renewedAt=NOON - timedelta(seconds=300), report=None)
    nobody = told(lease=gone)
    nobody["bridges"][0]["leads"] = False
    shown.tell(nobody)
    assert "Nobody leads" in shown.text(".top p")
    assert "celery -A shop listener" in shown.texts(".command code")
    assert "flowing" not in shown.text(".handlers")


def test_no_value_is_markup_and_none_turns_what_is_around_it(shown: Shown) -> None:
    """Errors, keys, names, sentences and commands of anybody; nothing that was not in the page is obeyed."""
    bad = image(1, **halted(HOSTILE + TURNED, TURNED + HOSTILE))
    letter = {"id": "82AA", "subscription": HOSTILE, "key": HOSTILE, "cause": TURNED, "error": TURNED, "at": None}
    letter |= {"replay": "waiting", "replay_error": HOSTILE + TURNED}
    spoiled = told(images=[bad], letters=(letter,), registered=("summarise", HOSTILE), subscriptions=[subscription()])
    spoiled["bridges"][0]["reasons"].append(
        {"code": HOSTILE, "severity": "failing", "sentence": HOSTILE, "command": f"celery {HOSTILE}{TURNED}"}
    )
    shown.told = spoiled
    shown.open()
    text = shown.text("body")
    assert "<img src=x onerror=" in text
    assert "\\u202e" in text
    assert "replay waiting" in text
    assert not set(text) & {"\u202e", "\u2066", "\u0000"}
    assert shown.run("document.querySelectorAll('img, iframe, object, main script, base, form').length") == 0
    assert shown.run("document.title") == "failing: shop"
    assert [each for each in shown.browser.get_log("browser") if "Content Security" in each["message"]] == []


def test_nothing_of_it_is_wider_than_the_window_or_comes_from_elsewhere(shown: Shown) -> None:
    """On a telephone too, with names that have no room to break; and all that is loaded is the page and its status."""
    long = "x" * 300
    bad = image(1, **halted(long, long))
    snapshot = {"handler": long, "source": long, "state": "running", "done": 5, "estimated": 10, "rate": 2.0}
    running = ({**snapshot, "remaining_seconds": 3},)
    shown.told = told(images=[image(0), bad], snapshots=running, registered=("summarise", long))
    for width in (NARROW, WIDE):
        resized(shown, width)
        shown.open()
        root = "document.documentElement"
        assert shown.run(f"{root}.scrollWidth") <= shown.run(f"{root}.clientWidth") <= width
        assert "5 of about 10, 50 %" in shown.text(".progress")
    loaded = shown.run("performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)")
    assert set(loaded) <= {"/status"}


def test_a_listener_that_is_gone_is_told_and_what_was_shown_stays(shown: Shown) -> None:
    """Also what was last known of a bridge whose MongoDB does not answer."""
    shown.open()
    away = copy.deepcopy(shown.told)
    away["bridges"][0].update(status=None, verdict="failing")
    away["bridges"][0]["reasons"] = [
        {
            "code": "state_unreadable",
            "severity": "failing",
            "sentence": "MongoDB gave no answer for 3 s.",
            "command": None,
        }
    ]
    shown.tell(away)
    assert "MongoDB gave no answer" in shown.text(".reasons")
    assert "summarise" in shown.text(".stale .handlers")

    ended = threading.Thread(target=shown._listener.stop)
    ended.start()
    ended.join()
    shown.wait(lambda: "This listener does not answer" in shown.text("#silent"))
    assert "summarise" in shown.text(".handlers")
